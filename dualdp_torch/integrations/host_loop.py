# SPDX-License-Identifier: Apache-2.0
"""Private run inside a training loop that another package owns, such as Lightning's."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from dualdp import checkpoint
from dualdp._validate import AccountingError
from dualdp_torch.training.arguments import RunSettings
from dualdp_torch.training.engine import PrivacyEngine
from dualdp_torch.training.loader import Draw, PlannedLoader, check_loader
from dualdp_torch.training.run_ledger import resume_ledger

_KEPT = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "prefetch_factor")


def with_larger_batches(loader: DataLoader[Any], times: int) -> DataLoader[Any]:
    """Return the same loader with a batch size `times` as large, to replace accumulation."""
    check_loader(loader)
    size = times * loader.batch_sampler.batch_size  # type: ignore[union-attr]
    options = {name: getattr(loader, name) for name in _KEPT}
    return DataLoader(loader.dataset, batch_size=size, **options)


class HostedRun:
    """Run that a callback starts, saves and resumes inside a host's loop.

    Args:
        folder: path of the folder for the run's key and ledger; None for the host's own.
        key: key of a resumed run, or the path of its file; None for the one in `folder`.
        accountant: accountant of `PrivacyEngine`.
        secure_mode: bool of `PrivacyEngine`.
        **arguments: arguments of `make_private`, or of `make_private_with_epsilon` if
            `target_epsilon` comes without a noise multiplier.

    Attributes:
        engine: `PrivacyEngine` of the run.
        is_running: bool, True while the engine is attached.
        pass_start: first step of the current pass.
    """

    def __init__(
        self,
        *,
        folder: str | os.PathLike[str] | None = None,
        key: Any = None,
        accountant: str | None = None,
        secure_mode: bool = False,
        **arguments: Any,
    ) -> None:
        self._folder, self._key, self.arguments = folder, key, arguments
        self._new_engine = partial(PrivacyEngine, accountant, secure_mode)
        self.engine = self._new_engine()
        self.is_running, self.pass_start, self._name = False, 0, ""

    def start(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        loader: DataLoader[Any],
        *,
        folder: str | os.PathLike[str],
        num_steps: int | None,
        physical: int | None,
        saved: Mapping[str, Any] | None,
    ) -> HostedLoader:
        """Attach an engine for a new run, or for the saved one.

        Args:
            module: module to be recorded.
            optimizer: the host's optimizer.
            loader: `DataLoader` with the batch size of logical batches.
            folder: the host's folder, used unless the run has one of its own.
            num_steps: number of steps that the host will take; None if there is no limit.
            physical: physical batch size, if the host sets one; else None.
            saved: result of `state`; None for a new run.

        Raises:
            TypeError, ValueError: as `make_private`; the saved run is not one.
        """
        folder = Path(self._folder if self._folder is not None else folder)
        folder.mkdir(parents=True, exist_ok=True)
        if saved is None:
            given = {"module": module, "optimizer": optimizer, "data_loader": loader}
            planned = self._begin(given | self.arguments, num_steps, physical)
            self._name = f"dualdp-{self.engine.plan.root.sha256[:12]}"
        else:
            planned = self._resume(module, optimizer, loader, saved, folder)
        self._base = folder / self._name
        checkpoint.pack_run(self.engine.ledger, self._base)
        self._trained, self.is_running = (module, optimizer), True
        return HostedLoader(self, planned, resumed=saved is not None)

    def _begin(
        self, given: dict[str, Any], num_steps: int | None, physical: int | None
    ) -> PlannedLoader:
        if self._name and (releases := len(self.engine.ledger)):
            raise AccountingError(
                f"This callback has trained a run of {releases} releases already, and a new one "
                "would not be in its account. Go on from the host's checkpoint, or make "
                "another callback; a model that was trained twice has spent both."
            )
        self.engine = self._new_engine()
        if physical is not None and "plan" not in given:
            given.setdefault("max_physical_batch_size", physical)
        if "target_epsilon" in given and "noise_multiplier" not in given and "plan" not in given:
            if num_steps is None:
                raise ValueError(
                    "target_epsilon came with a loop that has no end. Expected a number of epochs "
                    "or steps there, or noise_multiplier too."
                )
            return self.engine.make_private_with_epsilon(num_steps=num_steps, **given)[2]
        return self.engine.make_private(**given)[2]

    def _resume(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        loader: DataLoader[Any],
        saved: Mapping[str, Any],
        folder: Path,
    ) -> PlannedLoader:
        """Resume the saved run at the step where it was saved."""
        try:
            self._name, settings = saved["name"], RunSettings.from_saved(saved["settings"])
            self.pass_start = int(saved["pass_start"])
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"The checkpoint says nothing of a private run ({error}). Expected one that was "
                "saved while this callback was there."
            ) from error
        base, key = folder / self._name, self._key
        ledger = resume_ledger(None, {}, lambda: checkpoint.unpack_run(saved, base, key))
        self.engine = PrivacyEngine.loaded(ledger, settings, module, optimizer, lambda: None)
        try:
            return self.engine.resume(data_loader=loader)[2]
        except BaseException:
            ledger.close()
            raise

    def state(self) -> dict[str, Any]:
        """Return the run's part of the host's checkpoint: plain data, without the key.

        Raises:
            RuntimeError: a logical batch is half done.
        """
        return {
            "name": self._name,
            "settings": asdict(self.engine.settings_to_save(*self._trained)),
            "pass_start": self.pass_start,
            **checkpoint.pack_run(self.engine.ledger, self._base),
        }

    def end_pass(self, loader: HostedLoader | None) -> bool:
        """End a pass of the host; True if the budget is spent, so that training must stop."""
        if loader is not None:
            loader.end_pass()
        ledger = self.engine.ledger
        return ledger.end is not None and ledger.position >= ledger.end

    def finish(self) -> None:
        """Detach the engine; plan, ledger and epsilon stay readable."""
        if self.is_running:
            self.is_running = False
            self.engine.detach()


class HostedLoader:
    """Planned loader with the length of the whole pass, even if a resumed run begins inside it.

    Attributes:
        is_last: bool, True if the last batch yielded completes a logical batch.
    """

    def __init__(self, run: HostedRun, planned: PlannedLoader, resumed: bool) -> None:
        self._run, self._planned = run, planned
        self._is_whole = not resumed or run.engine.ledger.position >= run.engine.pass_end
        self._is_inside = not self._is_whole
        self.dataset, self.is_last = planned.dataset, True
        self._batches: Generator[tuple[Draw, Any]] | None = None

    def __len__(self) -> int:
        if self._is_inside:
            return self._planned.num_batches(self._run.pass_start, self._run.engine.pass_end)
        return len(self._planned)

    def __iter__(self) -> Iterator[Any]:
        if self._is_whole:
            self._run.pass_start = self._run.engine.ledger.position
        self._batches = self._planned.with_draws()
        for draw, batch in self._batches:
            self._is_inside = self._is_whole = True
            self.is_last = draw.is_last
            yield batch
        self.end_pass()

    def end_pass(self) -> None:
        """End the pass; hosts that count to `len` never ask for a batch after the last."""
        if self._batches is not None:
            self._batches.close()
        self._batches, self._is_inside = None, False

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the pass; the callback saves the rest."""
        return {"position": self._run.engine.ledger.position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Do nothing: the position comes from the ledger."""


def refuse_findings(findings: Mapping[str, Any]) -> None:
    """Refuse a host whose options cannot be made private; `findings` maps a reason to its truth."""
    for text, applies in findings.items():
        if applies:
            raise ValueError(f"This can't be made private: {text}.")
