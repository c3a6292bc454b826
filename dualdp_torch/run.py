# SPDX-License-Identifier: Apache-2.0
"""What is known of a run: its plan, its releases, what they have spent."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

from dualdp import AccountingError, _validate, run_registry
from dualdp.ledger import Ledger
from dualdp.plan import PrivacyPlan
from dualdp.run_arguments import NO_RUN, SECOND_RUN
from dualdp.twin import Twin

from .arguments import Settings
from .distributed import Group
from .own_loop import OwnLoopLoader


class Lent:
    """Attributes of other people's objects that are other ones for as long as a run lasts."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], Any]] = []

    def set(self, owner: Any, **values: Any) -> None:
        """Set attributes of one object until `give_back`."""
        own = vars(owner)
        for name, value in values.items():
            undo = partial(own.update, {name: own[name]}) if name in own else partial(own.pop, name)
            self._undo.append(undo)
            own[name] = value

    def give_back(self) -> None:
        """Everything as it was."""
        while self._undo:
            self._undo.pop()()


def new_ledger(
    plan: PrivacyPlan,
    path: str | os.PathLike[str] | None,
    recorder: str = "PrivacyEngine.make_private",
    source: str = run_registry.OWN_STEP,
) -> Ledger:
    """The ledger of a run that begins, which takes the plan's key."""
    ledger = Ledger(plan, path=path)
    try:
        plan.claim(ledger, recorder=recorder, source=source)
    except BaseException:
        ledger.discard()
        raise
    return ledger


def following_ledger(plan: PrivacyPlan) -> Ledger:
    """The ledger of a process that follows rank 0 in a run that begins."""
    twin = Twin(plan)
    plan.claim(twin, recorder="PrivacyEngine.make_private", follows=True)
    return twin


def claim_loaded(ledger: Ledger) -> None:
    """Take the key for a run that goes on from a checkpoint; its file is given back on refusal."""
    try:
        ledger.plan.claim(
            ledger,
            recorder="load_checkpoint",
            source="",
            resumed=True,
            follows=isinstance(ledger, Twin),
        )
    except BaseException:
        ledger.close()
        raise


class Run:
    """A plan and its ledger, once there are some."""

    def __init__(self) -> None:
        self._settings = Settings("mean", "auto")
        self._ledger: Ledger | None = None
        self._group: Group | None = None
        self._own_loop: OwnLoopLoader | None = None

    @property
    def group(self) -> Group | None:
        """The processes that train together; None for one alone."""
        return self._group

    @property
    def _is_first(self) -> bool:
        """Whether this process keeps the record and decides."""
        return self._group is None or self._group.is_first

    def _refuse_second(self) -> None:
        """Refuse a run after another one.

        Raises:
            AccountingError: there was one.
        """
        if self._ledger is not None:
            raise AccountingError(SECOND_RUN)

    def _span(self, per_pass: int, until: int) -> tuple[int, int]:
        """Steps (start, stop) of the coming pass; `until` ends one that was interrupted."""
        start, plan = self.ledger.position, self.plan
        stop = until if until > start else start + per_pass
        if plan.num_steps is not None and self._settings.whole:
            stop = plan.num_steps
        ends = [plan.num_steps, self.ledger.end if plan.on_budget == "stop" else None]
        return start, min([stop, *(end for end in ends if end is not None)])

    @property
    def plan(self) -> PrivacyPlan:
        """The run, written down.

        Raises:
            AccountingError: there is none.
        """
        return self.ledger.plan

    @property
    def ledger(self) -> Ledger:
        """Every release so far.

        Raises:
            AccountingError: there is none.
        """
        if self._ledger is None:
            raise AccountingError(NO_RUN)
        return self._ledger

    @property
    def accountant(self) -> Any:
        """The accountant of what was released so far."""
        return self.ledger.accountant

    def record(self, num_steps: int = 1) -> range:
        """Record the next releases of a loop of your own, before they are made.

        Returns:
            The indices of the steps that may be released now.

        Raises:
            AccountingError: one of them is past the plan; then none is recorded. Or several
                processes train together, whose steps `make_private` records.
        """
        ledger = self.ledger
        if self._group is not None:
            raise AccountingError(
                "record() came in a run of several processes, whose loops would not be one run. "
                "Expected the loader and optimizer of make_private, which account them together."
            )
        steps = ledger.steps_ahead(_validate.integer("num_steps", num_steps))
        for step in steps:
            ledger.record(step)
            ledger.seal(step, None)
        return steps

    def get_epsilon(self, delta: float | None = None, *, accept_unverified: bool = False) -> float:
        """Epsilon spent so far, an upper bound.

        Args:
            delta: in (0, 1); may be left out when a plan or target named it.
            accept_unverified: a run in which a spot check failed has an answer, too.

        Raises:
            AccountingError: there is no run; or steps of it were taken that are not on record, or a
                spot check failed.
            ValueError: no delta.
        """
        ledger = self.ledger
        if delta is None and not self._settings.has_target:
            raise ValueError("delta is missing. Expected a number in (0, 1), e.g. delta=1e-5.")
        if self._own_loop is not None:
            self._own_loop.handed_out.require_recorded(ledger.position)
        return ledger.get_epsilon(delta, accept_unverified=accept_unverified)
