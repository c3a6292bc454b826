# SPDX-License-Identifier: Apache-2.0
"""A private run inside a loop that another project owns, such as Lightning's or Trainer's."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from dualdp import AccountingError, checkpoint
from dualdp.batches import num_physical_batches

from .arguments import Settings
from .data import PlannedLoader, check_loader
from .engine import PrivacyEngine
from .run import claim_loaded

_KEPT = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "prefetch_factor")


def wider(loader: DataLoader[Any], times: int) -> DataLoader[Any]:
    """The same loader with batches of `times` as many examples: what the host accumulates."""
    check_loader(loader)
    size = times * loader.batch_sampler.batch_size  # type: ignore[union-attr]
    options = {name: getattr(loader, name) for name in _KEPT}
    return DataLoader(loader.dataset, batch_size=size, **options)


class Hosted:
    """Starts, saves and resumes one engine for a host that keeps the loop.

    Args:
        folder: where key and ledger of the run are kept; None for the host's own folder.
        key: of a run that goes on, or its file; None for the one in `folder`.
        accountant: of `PrivacyEngine`.
        secure_mode: of `PrivacyEngine`.
        **arguments: of `make_private`, or of `make_private_with_epsilon` where `target_epsilon`
            comes without a noise multiplier.
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
        self._folder, self._key = folder, key
        self._engine_arguments: dict[str, Any] = {
            "accountant": accountant,
            "secure_mode": secure_mode,
        }
        self.arguments = arguments
        self.engine = PrivacyEngine(**self._engine_arguments)
        self.is_running = False
        self.pass_start = 0  # step where the running pass began
        self._name = ""

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
        """Attach an engine: a new run, or the one of which `saved` tells.

        Args:
            module: to be recorded.
            optimizer: the host's.
            loader: of logical batches.
            folder: the host's, for what the run keeps on the disk.
            num_steps: how long the host will train; None for as long as it likes.
            physical: examples worked on at once, where the host says so.
            saved: what `state` gave; None for a new run.

        Raises:
            TypeError, ValueError: as `make_private`; the saved run is not one.
        """
        folder = Path(self._folder if self._folder is not None else folder)
        folder.mkdir(parents=True, exist_ok=True)
        if saved is None:
            loader_ = self._begin(module, optimizer, loader, num_steps, physical)
            self._name = f"dualdp-{self.engine.plan.root.sha256[:12]}"
        else:
            loader_ = self._go_on(module, optimizer, loader, saved, folder)
        self._base = folder / self._name
        checkpoint.pack_run(self.engine.ledger, self._base)
        self._attached, self.is_running = (module, optimizer), True
        return HostedLoader(self, loader_, resumed=saved is not None)

    def _begin(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        loader: DataLoader[Any],
        num_steps: int | None,
        physical: int | None,
    ) -> PlannedLoader:
        """A new run."""
        if self._name and (releases := len(self.engine.ledger)):
            raise AccountingError(
                f"This callback has trained a run of {releases} releases already, and a new one "
                "would not be in its account. Go on from the host's checkpoint, or make "
                "another callback; a model that was trained twice has spent both."
            )
        self.engine = PrivacyEngine(**self._engine_arguments)
        given: dict[str, Any] = {"module": module, "optimizer": optimizer, "data_loader": loader}
        given |= self.arguments
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

    def _go_on(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        loader: DataLoader[Any],
        saved: Mapping[str, Any],
        folder: Path,
    ) -> PlannedLoader:
        """The run of which `saved` tells, at the step where it was saved."""
        try:
            self._name, settings = saved["name"], Settings(**saved["settings"])
            self.pass_start = int(saved["pass_start"])
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"The checkpoint says nothing of a private run ({error}). Expected one that was "
                "saved while this callback was there."
            ) from error
        ledger = checkpoint.unpack_run(saved, folder / self._name, self._key)
        claim_loaded(ledger)
        try:
            self.engine = PrivacyEngine.loaded(ledger, settings, module, optimizer, lambda: None)
            planned = self.engine.resume(data_loader=loader)[2]
        except BaseException:
            ledger.close()
            raise
        return planned

    def state(self) -> dict[str, Any]:
        """What the host's checkpoint says of the run: plain data, without the key.

        Raises:
            RuntimeError: a logical batch is half done.
        """
        return {
            "name": self._name,
            "settings": asdict(self.engine.standing(*self._attached)),
            "pass_start": self.pass_start,
            **checkpoint.pack_run(self.engine.ledger, self._base),
        }

    @property
    def pass_end(self) -> int:
        """Step where the running pass ends."""
        return self.engine._settings.pass_end

    def parts_of(self, step: int) -> int:
        """Physical batches of one step."""
        plan = self.engine.plan
        if plan.physical_batch_size is None:
            return 1
        return num_physical_batches(len(plan.batch_indices(step)), plan.physical_batch_size)

    def finish(self) -> None:
        """Take the engine off; plan, ledger and epsilon stay readable."""
        if self.is_running:
            self.is_running = False
            self.engine.detach()


class HostedLoader:
    """A planned loader whose length is that of the whole pass, also where a resumed one goes on.

    Args:
        run: whose batches these are.
        planned: of the engine.
        resumed: the first pass may be the rest of one.

    Attributes:
        is_last: whether the batch that was handed out completes a logical batch.
    """

    def __init__(self, run: Hosted, planned: PlannedLoader, resumed: bool) -> None:
        self._run, self._planned = run, planned
        self._is_whole = not resumed or run.engine.ledger.position >= run.pass_end
        self._is_inside = not self._is_whole
        self.dataset, self.is_last = planned.dataset, True
        self._iterator: Iterator[Any] | None = None

    def __len__(self) -> int:
        if self._is_inside:
            return sum(map(self._run.parts_of, range(self._run.pass_start, self._run.pass_end)))
        return len(self._planned)

    def __iter__(self) -> Iterator[Any]:
        run, left = self._run, 0
        if self._is_whole:
            run.pass_start = run.engine.ledger.position
        self._iterator = iter(self._planned)
        for batch in self._iterator:
            self._is_inside = self._is_whole = True
            left = (left or run.parts_of(run.engine.ledger.position)) - 1
            self.is_last = not left
            yield batch
        self.end_pass()

    def end_pass(self) -> None:
        """The pass is over; hosts that count to `len` never ask for the batch after the last."""
        if self._iterator is not None:
            self._iterator.close()  # type: ignore[attr-defined]
        self._iterator, self._is_inside = None, False

    def state_dict(self) -> dict[str, Any]:
        """Where the pass stands; the callback keeps the rest."""
        return {"position": self._run.engine.ledger.position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing to do: the ledger knows where the pass stands."""
