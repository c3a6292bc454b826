# SPDX-License-Identifier: Apache-2.0
"""Private run inside a training loop that another package owns, such as Lightning's."""

from __future__ import annotations

import os
import secrets
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from dualdp._validate import AccountingError
from dualdp.checkpoint import RunDocument
from dualdp.plan.arguments import FIELDS, SYNONYMS
from dualdp.plan.plan import PrivacyPlan
from dualdp_torch.checkpoint.single_file import describe_run, open_ledger, settings_in
from dualdp_torch.parallel.process_group import QUIET, Group, group_of
from dualdp_torch.training.engine import PrivacyEngine
from dualdp_torch.training.loader import Draw, PlannedLoader
from dualdp_torch.training.step import set_temporarily

_KEPT = ("num_workers", "collate_fn", "timeout", "worker_init_fn", "prefetch_factor", "drop_last")


class HostedRun:
    """Run that a callback starts, saves and resumes inside a host's loop.

    Its ledger lies in `folder`, None for the host's own; `recalibrate` is that of `engine.resume`.
    The `arguments` are those of `make_private`, or of `make_private_with_epsilon` if
    `target_epsilon` comes without a noise multiplier.

    Attributes:
        engine: `PrivacyEngine` of the run.
        loader: `HostedLoader` in place of the host's own, from `take_loader` to `finish`.
        saved: result of `state` from a checkpoint, which `start` resumes; None for a new run.
        is_running: bool, True while the engine is attached.
        undo: stack of what `finish` undoes.
    """

    def __init__(
        self,
        *,
        folder: str | os.PathLike[str] | None = None,
        recalibrate: bool = False,
        accountant: str | None = None,
        secure_mode: bool = False,
        **arguments: Any,
    ) -> None:
        plan = arguments.get("plan")
        unit = plan.unit if isinstance(plan, PrivacyPlan) else arguments.get("unit", "example")
        if unit != "example" or not {"views", "augment", "users"}.isdisjoint(arguments):
            raise ValueError(
                "views=, augment=, users= or unit='user' came to a trainer of another package, "
                "whose batches hold one item of each example. Expected them in make_private, for a "
                "loop of your own."
            )
        self._folder, self._recalibrates, self.arguments = folder, recalibrate, arguments
        self._new_engine = partial(PrivacyEngine, accountant, secure_mode)
        self.engine = self._new_engine()
        self.loader: HostedLoader | None = None
        self.saved: Mapping[str, Any] | None = None
        self.is_running, self._name, self.undo = False, "", ExitStack()

    def replace(self, owner: Any, **values: Any) -> None:
        """Set attributes of one of the host's objects until `finish`."""
        set_temporarily(self.undo, owner, **values)

    def take_loader(self, loader: DataLoader[Any], times: int, processes: int) -> HostedLoader:
        """Return a loader in place of the host's, with the plan's batches once the run has begun.

        Its length is that of an epoch: of `plan=` if the run has one, else of the host's batches in
        one process, of which it would accumulate `times` for a step.
        """
        size = loader.batch_sampler.batch_size  # type: ignore[union-attr]
        options = {name: getattr(loader, name) for name in _KEPT}
        plan, logical = self.arguments.get("plan"), size * times * processes
        if isinstance(plan, PrivacyPlan):
            logical = max(1, round(plan.expected_batch_size_at(0)))
        source = DataLoader(
            loader.dataset,
            batch_size=min(logical, len(loader.dataset)),  # type: ignore[arg-type]
            pin_memory=loader.pin_memory and torch.cuda.is_available(),
            **options,
        )
        self._physical = size if times > 1 else None
        self.loader = HostedLoader(self, source, times)
        return self.loader

    def start(
        self,
        trained: tuple[nn.Module, torch.optim.Optimizer],
        wrapper: nn.Module,
        folder: str | os.PathLike[str],
        num_steps: int | None,
    ) -> None:
        """Attach an engine for a new run, or for the saved one, to the loader that was taken.

        The host calls `wrapper`, such as `DistributedDataParallel`, or the `trained` module itself,
        and will take `num_steps` steps, None for no limit. Its folder is used unless the run has
        its own.
        """
        assert self.loader is not None
        group, saved, self._trained = group_of(wrapper), self.saved, trained
        folder = Path(self._folder if self._folder is not None else folder)
        folder.mkdir(parents=True, exist_ok=True)
        if saved is None:
            planned = self._begin(self.loader.source, num_steps)
            self._name = group.word("the name", lambda: f"dualdp-{secrets.token_hex(6)}")
        else:
            planned = self._resume(self.loader.source, saved, folder, group)
        self._base, self.is_running = folder / self._name, True
        if isinstance(wrapper, DistributedDataParallel):
            self.replace(wrapper, **QUIET)
        self._described()
        self.loader.begin(planned, 0 if saved is None else int(saved["pass_batches"]))

    def _begin(self, source: DataLoader[Any], num_steps: int | None) -> PlannedLoader:
        module, optimizer = self._trained
        given = {"module": module, "optimizer": optimizer, "data_loader": source, **self.arguments}
        if self._name and (releases := len(self.engine.ledger)):
            raise AccountingError(
                f"This callback has trained a run of {releases} releases already, and a new one "
                "would not be in its account. Go on from the host's checkpoint, or make "
                "another callback; a model that was trained twice has spent both."
            )
        self.engine = self._new_engine()
        if self._physical is not None and "plan" not in given:
            given.setdefault("max_physical_batch_size", self._physical)
        if "target_epsilon" not in given or given.keys() & {"noise_multiplier", "plan"}:
            return self.engine.make_private(**given)[2]
        if num_steps is None:
            raise ValueError(
                "target_epsilon came with a loop that has no end. Expected a number of epochs or "
                "steps there, or noise_multiplier too."
            )
        return self.engine.make_private_with_epsilon(num_steps=num_steps, **given)[2]

    def _resume(
        self, source: DataLoader[Any], saved: Mapping[str, Any], folder: Path, group: Group
    ) -> PlannedLoader:
        try:
            self._name, document, _ = saved["name"], saved["run"], saved["pass_batches"]
            settings = settings_in(document)
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"The checkpoint says nothing of a private run ({error}). Expected one that was "
                "saved while this callback was there."
            ) from error
        ledger = open_ledger(group, document, folder / self._name)
        engine = PrivacyEngine.loaded(*self._trained, settings, ledger, lambda: None)
        self.engine = engine
        try:
            self._refuse_other_arguments(engine.plan)
            return engine.resume(data_loader=source, recalibrate=self._recalibrates)[2]
        except BaseException:
            engine.ledger.close()
            raise

    def _refuse_other_arguments(self, saved: PrivacyPlan) -> None:
        """Refuse arguments that are not those of the saved run, which goes on by its own plan."""
        given, plan = self.arguments, self.arguments.get("plan")
        if isinstance(plan, PrivacyPlan):
            given = {name: getattr(plan, name) for name in FIELDS}
        pairs = {
            name: (value, getattr(saved, SYNONYMS.get(name, name)))
            for name, value in given.items()
            if SYNONYMS.get(name, name) in FIELDS and isinstance(value, int | float | str)
        }
        other = [
            f"{name}={value!r} (saved: {theirs!r})"
            for name, (value, theirs) in pairs.items()
            if isinstance(theirs, int | float | str | None) and value != theirs
        ]
        if other:
            raise ValueError(
                f"The callback came with {', '.join(other)} to a run from a checkpoint, which goes "
                "on by its own plan. Expected the arguments of its beginning, or none of them."
            )

    def _described(self) -> RunDocument:
        """Bring the ledger to a file on rank 0, and return the document of the run on all ranks."""
        engine, trained = self.engine, self._trained
        point = f"the checkpoint after {engine.ledger.position} steps"
        return engine.group.word(point, lambda: describe_run(engine, *trained, self._base))

    def state(self) -> dict[str, Any]:
        """Return the run's part of the host's checkpoint: plain data.

        Of several processes, all call this, between two steps.
        """
        assert self.loader is not None
        run = self._described()
        return {"name": self._name, "pass_batches": self.loader.num_done(), "run": run}

    def epsilon(self) -> float:
        """Return the epsilon spent so far, at the plan's delta."""
        return self.engine.get_epsilon(self.engine.plan.delta)

    def end_pass(self) -> bool:
        """End a pass of the host; True if the budget is spent, so that training must stop."""
        if self.loader is not None:
            self.loader.end_pass()
        ledger = self.engine.ledger
        return ledger.end is not None and ledger.position >= ledger.end

    def finish(self, logged: Iterable[str] = ()) -> None:
        """Restore the host and detach the engine; plan, ledger and epsilon stay readable.

        The ledger notes the names of values that the host `logged` without protection.
        """
        self.undo.close()
        if self.is_running:
            self.is_running = False
            if names := sorted(set(logged) - {"epsilon"}):
                self.engine.ledger.note(unprotected=names)
            self.engine.detach()
        self.loader = self.saved = None


class HostedLoader:
    """Loader in place of a host's, with the length of the whole pass even if a run resumes in it.

    Before the run begins it has the host's length and no batches.

    Attributes:
        source: `DataLoader` with the batch size of logical batches.
        is_last: bool, True if the last batch yielded completes a logical batch.
    """

    def __init__(self, run: HostedRun, source: DataLoader[Any], times: int) -> None:
        self._run, self.source, self._times = run, source, times
        self.dataset, self.is_last = source.dataset, True
        self._start = self._before = 0  # first step here of this pass; its batches before that
        self._planned: PlannedLoader | None = None
        self._batches: Generator[tuple[Draw, Any]] | None = None

    def begin(self, planned: PlannedLoader, done: int) -> None:
        """Yield the batches of `planned` from now on, after the `done` ones of a resumed pass.

        A run without a seed draws the rest of that pass anew, so the batches that were done are a
        number in the checkpoint.
        """
        engine = self._run.engine
        self._planned, self._start = planned, engine.ledger.position
        self._before = done if self._start < engine.pass_end else 0

    def num_done(self) -> int:
        """Return the number of physical batches of this pass that are on record."""
        assert self._planned is not None
        position = self._run.engine.ledger.position
        return self._before + self._planned.num_batches(self._start, position)

    def __len__(self) -> int:
        if self._planned is None:
            return len(self.source) * self._times
        return self._before + len(self._planned)

    def __iter__(self) -> Iterator[Any]:
        if self._planned is None:
            raise RuntimeError(
                "Data were asked for before the private run began. Expected no batches before "
                "training, such as those of a search for a batch size or learning rate."
            )
        self.end_pass()  # of one that was abandoned
        self._batches = self._planned.with_draws()
        for draw, batch in self._batches:
            self.is_last = draw.is_last
            yield batch
        self.end_pass()

    def end_pass(self) -> None:
        """End the pass; hosts that count to `len` never ask for a batch after the last."""
        if self._batches is not None:
            self._batches.close()
            self._start, self._before = self._run.engine.ledger.position, 0
        self._batches = None

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
