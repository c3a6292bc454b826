# SPDX-License-Identifier: Apache-2.0
"""The verdicts of a test, and how they read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Check:
    """One verdict.

    Attributes:
        name: of the check.
        passed: None if it could not be run.
        statistic: a p-value if `is_p_value`, else a measured number.
        threshold: p-values below it fail, measured numbers above it.
        is_p_value: how to read the two.
        detail: one sentence of what was seen.
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
        numbers = "" if self.passed is None else f"{kind}={self.statistic:.3g}"
        limit = "" if self.passed is None else f"limit {self.threshold:.3g}"
        return f"{verdict:8s}{self.name:40s}{numbers:17s}{limit:16s}{self.detail}".rstrip()


@dataclass(frozen=True)
class Report:
    """All verdicts about one implementation.

    Attributes:
        checks: in the order they were made.
        false_alarm: probability that a correct implementation fails any of them.
        seconds: how long it took.
    """

    checks: Sequence[Check]
    false_alarm: float
    seconds: float = field(default=math.nan, compare=False)

    @property
    def passed(self) -> bool:
        """Whether no check failed."""
        return not self.failures

    @property
    def failures(self) -> tuple[str, ...]:
        """Names of the checks that failed."""
        return tuple(check.name for check in self.checks if check.passed is False)

    def __str__(self) -> str:
        head = "All checks passed" if self.passed else f"{len(self.failures)} checks FAILED"
        lines = [f"{head} (false alarms: {self.false_alarm:g}; {self.seconds:.1f} s)"]
        return "\n".join([*lines, *map(str, self.checks)])


def p_value(name: str, p: float, threshold: float, detail: str = "") -> Check:
    """The verdict of a statistical check."""
    return Check(name, p >= threshold, p, threshold, is_p_value=True, detail=detail)


def at_most(name: str, value: float, threshold: float, detail: str = "") -> Check:
    """The verdict of an exact check; nan is a failure."""
    return Check(name, bool(value <= threshold), value, threshold, detail=detail)


def not_run(name: str, why: str) -> Check:
    """A check that the implementation does not allow."""
    return Check(name, None, detail=why)
