# SPDX-License-Identifier: Apache-2.0
"""Releases, cost, end and spot checks that the records of a ledger amount to."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dualdp._validate import AccountingError
from dualdp.ledger.hash_chain import Record
from dualdp.plan import accounting, participation
from dualdp.plan.plan import PrivacyPlan


class Contents:
    """Releases, cost and spot checks of a chain of records; `accountant` has all releases."""

    def __init__(self, plan: PrivacyPlan, accountant: str, records: Iterable[Record]) -> None:
        self._plan = plan
        self.entries: list[Record] = []  # releases, in order
        self.of_step: dict[int, list[Record]] = {}  # step -> its releases
        self.seals: dict[tuple[int, int], Record] = {}  # (step, branch) -> seal
        self.last_check: int | None = None  # step of the last spot check that passed
        self.failed_check: Record | None = None
        self.impossible: set[str] = set()  # reasons why some numbers can't be checked
        self.check_rate: float | None = None  # share of steps that are checked, as noted last
        self.users: str | None = None  # keyed digest of the rows of each user, as noted
        self.stack: str | None = None  # generator of correlated noise, as sealed last
        self._name, self._is_patterned = accountant, participation.is_patterned(plan)
        self._spent: Any = None  # None until asked for, where steps are accounted together
        for record in records:
            self.add(record)
        if not self._is_patterned:
            self._spent = accounting.spent_by(plan, self.entries, accountant)
        if len(self.entries) == len(self.of_step):  # the end is then the plan's, whatever has run
            self._find_end(accounting.account(plan, [], accountant), 0)
        else:
            self._find_end(self.accountant, len(self.of_step), self.entries)

    @property
    def accountant(self) -> Any:
        """Accountant of all releases."""
        if self._spent is None:
            self._spent = accounting.spent_by(self._plan, self.entries, self._name)
        return self._spent

    def add(self, record: Record, spent: Any = None) -> None:
        """Add one record; `spent`, from `spent_with`, is the accountant with its release."""
        entry = {name: value for name, value in record.items() if name != "kind"}
        kind = record.get("kind")
        if kind == "release":
            releases = self.of_step.setdefault(int(entry["step"]), [])
            self.entries.append(entry)
            releases.append(entry)
            if self._is_patterned:
                self._spent = None
            if spent is not None:
                self._spent = spent
                if len(releases) > 1:
                    self._find_end(spent, len(self.of_step), self.entries)
        elif kind == "seal":
            self.seals[int(entry["step"]), int(entry["branch"])] = entry
            self.stack = entry.get("stack", self.stack)
        elif kind == "note":
            check = entry.get("check")
            if isinstance(check, dict) and check.get("passed"):
                self.last_check = int(check["step"])
            elif isinstance(check, dict):
                self.failed_check = check
            if "checks" in entry:
                self.check_rate = float(entry["checks"])
            if "users" in entry:
                self.users = str(entry["users"])
            if "check_impossible" in entry:
                self.impossible.add(str(entry["check_impossible"]))

    def spent_with(self, entry: Record) -> Any:
        """Return an accountant with one more release; for a new step, `self.accountant` itself.

        None for the new step of a plan whose steps are accounted together.
        """
        plan, step = self._plan, int(entry["step"])
        if step not in self.of_step:
            if self._is_patterned:
                return None
            own = ("kind", "step", "branch", "max_grad_norm")
            self.accountant.step(**{key: entry[key] for key in entry if key not in own})
            return self.accountant
        spent = accounting.spent_by(plan, [*self.entries, entry], self._name)
        target = plan.target_epsilon
        if target is not None and spent.get_epsilon(delta=plan.delta) > target:
            raise AccountingError(self.over_budget(f"Running step={step} a second time"))
        return spent

    def _find_end(self, spent: Any, position: int, made: Iterable[Record] = ()) -> None:
        """Find the first step that may not run, and the step at which to search again."""
        steps = [int(entry["step"]) for entry in made]
        self._end, self._horizon = accounting.last_affordable(self._plan, spent, position, steps)

    def end_from(self, step: int) -> int | None:
        """Return the first step that may not run; None if there is none before the horizon."""
        if step >= self._horizon:
            # The accountant holds every release on file; a resumed run repeats the last of them.
            self._find_end(self.accountant, max(step, 1 + max(self.of_step, default=-1)))
        return self._end

    def over_budget(self, operation: str) -> str:
        """Return the error message about an operation that would exceed the target."""
        delta = self._plan.delta
        return (
            f"{operation} would exceed target_epsilon={self._plan.target_epsilon}: "
            f"{len(self.entries)} releases have spent "
            f"{float(self.accountant.get_epsilon(delta=delta)):.6g} at delta={delta}. "
            "The run ends here; a larger target needs a new decision about the data."
        )
