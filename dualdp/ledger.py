# SPDX-License-Identifier: Apache-2.0
"""The append-only record of what a run has released; the accountant reads nothing else."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from dualdp import accountants
from dualdp._validate import AccountingError

if TYPE_CHECKING:
    from dualdp.plan import PrivacyPlan


class Ledger:
    """Records each release of a plan before it happens, and accounts it.

    Args:
        plan: the run; only its hash of the key enters the record.
        accountant: name of the accountant, or None for the plan's.

    Guarantees:
        A step is recorded once and in order, so no noise key is used for two releases.
            [test_a_step_is_recorded_once]
        A refused step leaves the record as it was.  [test_refused_step_changes_nothing]
    """

    def __init__(self, plan: PrivacyPlan, accountant: str | None = None) -> None:
        self.plan = plan
        self.entries: list[dict[str, Any]] = []
        self.accountant = accountants.create(
            accountant or plan.accountant, neighboring_relation=plan.neighboring_relation
        )

    def __len__(self) -> int:
        return len(self.entries)

    def record(self, step: int) -> dict[str, Any]:
        """Account one release and append it.

        Args:
            step: must be the number of releases so far.

        Returns:
            The entry: step, max_grad_norm, and what the accountant was told.

        Raises:
            AccountingError: the step is out of order or past the plan.
        """
        if step != len(self.entries):
            raise AccountingError(
                f"step={step} came after {len(self.entries)} recorded releases. Expected "
                f"step={len(self.entries)}; a step is released once, in order."
            )
        if self.plan.num_steps is not None and step >= self.plan.num_steps:
            raise AccountingError(
                f"step={step} is past the plan's num_steps={self.plan.num_steps}. Plan more steps, "
                "or num_steps=None for an open-ended run."
            )
        release = self.plan.release(
            self.plan.noise_multiplier_at(step), self.plan.expected_batch_size_at(step)
        )
        entry = {"step": step, "max_grad_norm": self.plan.max_grad_norm_at(step), **release}
        self.accountant.step(**release)
        self.entries.append(entry)
        return entry

    def get_epsilon(self, delta: float | None = None) -> float:
        """Epsilon spent so far, at `delta` or the plan's."""
        return float(self.accountant.get_epsilon(delta=self.plan.delta if delta is None else delta))

    def to_json(self) -> str:
        """The plan and every release, as text."""
        return json.dumps({"plan": json.loads(self.plan.to_json()), "releases": self.entries})
