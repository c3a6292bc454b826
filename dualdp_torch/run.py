# SPDX-License-Identifier: Apache-2.0
"""What is known of a run: its plan, its releases, what they have spent."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

from dualdp import AccountingError
from dualdp.ledger import Ledger
from dualdp.plan import PrivacyPlan

from .arguments import Settings
from .distributed import Group


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


def new_ledger(plan: PrivacyPlan, path: str | os.PathLike[str] | None) -> Ledger:
    """The ledger of a run that begins, which takes the plan's key."""
    ledger = Ledger(plan, path=path)
    try:
        plan.claim()
    except BaseException:
        ledger.discard()
        raise
    return ledger


class Run:
    """A plan and its ledger, once there are some."""

    def __init__(self) -> None:
        self._settings = Settings("mean", "auto")
        self._ledger: Ledger | None = None
        self._group: Group | None = None

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
            AccountingError: there was one, with releases.
        """
        if self._ledger is not None and len(self._ledger):
            raise AccountingError(
                f"This engine has a run of {len(self._ledger)} releases already, and a second one "
                "would not be in its account. Make another engine; a model that was trained twice "
                "has spent both."
            )

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
            RuntimeError: nothing was set up.
        """
        if self._ledger is None:
            raise RuntimeError("There is no plan yet. Call make_private first.")
        return self._ledger.plan

    @property
    def ledger(self) -> Ledger:
        """Every release so far.

        Raises:
            RuntimeError: nothing was set up.
        """
        if self._ledger is None:
            raise RuntimeError("There is no ledger yet. Call make_private first.")
        return self._ledger

    @property
    def accountant(self) -> Any:
        """The accountant of what was released so far."""
        return self.ledger.accountant

    def get_epsilon(self, delta: float | None = None, *, accept_unverified: bool = False) -> float:
        """Epsilon spent so far.

        Args:
            delta: in (0, 1); may be left out when a plan or target named it.
            accept_unverified: a run in which a spot check failed has an answer, too.

        Raises:
            AccountingError: a spot check failed in this run.
            ValueError: no delta.
        """
        ledger = self.ledger
        if delta is None and not self._settings.has_target:
            raise ValueError("delta is missing. Expected a number in (0, 1), e.g. delta=1e-5.")
        return ledger.get_epsilon(
            ledger.plan.delta if delta is None else delta, accept_unverified=accept_unverified
        )
