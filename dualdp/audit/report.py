# SPDX-License-Identifier: Apache-2.0
"""Results of the checks of a private step, and their text form."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Check:
    """Result of one check.

    Attributes:
        name: str, name of the check.
        passed: bool, or None if the check could not be run.
        statistic: float, a p-value if `is_p_value`, else a measured number.
        threshold: float; smaller p-values and larger measured numbers fail.
        is_p_value: bool, kind of the statistic.
        detail: str, one sentence about the observation.
    """

    name: str
    passed: bool | None
    statistic: float = math.nan
    threshold: float = math.nan
    is_p_value: bool = False
    detail: str = ""

    def __str__(self) -> str:
        verdict = {True: "pass", False: "FAIL", None: "not run"}[self.passed]
        kind = "p" if self.is_p_value else "value"
        numbers = f"{kind}={self.statistic:.3g}" if self.passed is not None else ""
        limit = f"limit {self.threshold:.3g}" if self.passed is not None else ""
        return f"{verdict:8s}{self.name:40s}{numbers:17s}{limit:16s}{self.detail}".rstrip()


@dataclass(frozen=True)
class Report:
    """Results of all checks of one implementation.

    Attributes:
        checks: sequence of `Check`, in order.
        false_alarm: probability that a correct implementation fails any of them.
        seconds: run time of the checks.
    """

    checks: Sequence[Check]
    false_alarm: float
    seconds: float = field(default=math.nan, compare=False)

    @property
    def passed(self) -> bool:
        """True if no check failed."""
        return not self.failures

    @property
    def failures(self) -> tuple[str, ...]:
        """Names of the checks that failed."""
        return tuple(check.name for check in self.checks if check.passed is False)

    def __str__(self) -> str:
        head = "All checks passed" if self.passed else f"{len(self.failures)} checks FAILED"
        words = [
            "p: probability that a correct step gives such odd numbers; fails below its limit.",
            "value: what was measured; fails above its limit.",
            f"At most one correct step in {1 / self.false_alarm:,.0f} fails any of the checks.",
        ]
        return "\n".join([f"{head} ({self.seconds:.1f} s)", *map(str, self.checks), *words])


def p_value(name: str, p: float, threshold: float, detail: str = "") -> Check:
    """Return the result of a statistical check."""
    return Check(name, p >= threshold, p, threshold, is_p_value=True, detail=detail)


def at_most(name: str, value: float, threshold: float, detail: str = "") -> Check:
    """Return the result of an exact check; nan fails."""
    return Check(name, bool(value <= threshold), value, threshold, detail=detail)
