# SPDX-License-Identifier: Apache-2.0
"""What is known of a run: its plan, its releases, what they have spent."""

from __future__ import annotations

from typing import Any

from dualdp.ledger import Ledger
from dualdp.plan import PrivacyPlan

from .arguments import Settings


class Run:
    """A plan and its ledger, once there are some."""

    def __init__(self) -> None:
        self._settings = Settings("mean", "auto")
        self._ledger: Ledger | None = None

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

    def get_epsilon(self, delta: float | None = None) -> float:
        """Epsilon spent so far.

        Args:
            delta: in (0, 1); may be left out when a plan or target named it.

        Raises:
            ValueError: no delta.
        """
        ledger = self.ledger
        if delta is None and not self._settings.has_target:
            raise ValueError("delta is missing. Expected a number in (0, 1), e.g. delta=1e-5.")
        return ledger.get_epsilon(ledger.plan.delta if delta is None else delta)
