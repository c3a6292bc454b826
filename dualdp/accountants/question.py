# SPDX-License-Identifier: Apache-2.0
"""What a question about a run fixes, and the search for what it leaves open."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from dualdp import _validate, accountants, mechanisms
from dualdp._validate import AccountingError
from dualdp.accountants import gdp

_WIDTH = 1e-10


@dataclasses.dataclass(frozen=True)
class Question:
    """Everything but the quantity that is asked for."""

    sampler: str
    accountant: str
    neighboring_relation: str
    group_size: int
    approximate: bool
    num_examples: int | None
    max_batch_size: int | None

    def account(self, steps: Sequence[tuple[float, float, int]]) -> Any:
        """An accountant that has seen (noise_multiplier, sample_rate, num_steps)."""
        account = accountants.create(
            self.accountant,
            neighboring_relation=self.neighboring_relation,
            group_size=self.group_size,
        )
        for noise_multiplier, sample_rate, num_steps in steps:
            account.step(
                noise_multiplier=noise_multiplier,
                sample_rate=sample_rate,
                num_steps=num_steps,
                sampler=self.sampler,
                num_examples=self.num_examples,
                max_batch_size=self.max_batch_size,
            )
        return account

    def epsilon(self, steps: Sequence[tuple[float, float, int]], delta: float) -> float:
        """Upper bound (or, if asked for, approximation) of the epsilon of these steps."""
        more = {"approximate": True} if self.approximate else {}
        return float(self.account(steps).get_epsilon(delta=delta, **more))


def question(
    *,
    sampler: str,
    accountant: str,
    neighboring_relation: str,
    group_size: int = 1,
    approximate: bool = False,
    num_examples: int | None = None,
    max_batch_size: int | None = None,
) -> Question:
    """The checked question; the keywords are those of `get_epsilon`."""
    _validate.choice("sampler", sampler, mechanisms.SAMPLERS)
    _validate.choice("accountant", accountant, accountants.names())
    _validate.choice("neighboring_relation", neighboring_relation, mechanisms.RELATIONS)
    if accountant == "gdp" and not approximate:
        raise AccountingError(gdp.REFUSAL)
    return Question(
        sampler,
        accountant,
        neighboring_relation,
        _validate.integer("group_size", group_size, minimum=1),
        approximate and accountant == "gdp",
        num_examples,
        max_batch_size,
    )


def target(target_epsilon: float, target_delta: float) -> tuple[float, float]:
    """The checked target; delta = 0 has no answer for Gaussian noise."""
    epsilon = _validate.positive("target_epsilon", target_epsilon)
    delta = _validate.probability("target_delta", target_delta)
    if not 0 < delta < 1:
        raise ValueError(
            f"target_delta={target_delta!r} has no calibrated answer. Expected a number strictly "
            "between 0 and 1, such as 1e-5."
        )
    return epsilon, delta


def unreachable(epsilon: float, delta: float, what: str) -> str:
    """What is said when no setting reaches the target."""
    return (
        f"target_epsilon={epsilon} at target_delta={delta} is out of reach: {what} decides it. "
        "Change the target or the other settings."
    )


def smallest_scale(spent: Callable[[float], float], epsilon: float, delta: float) -> float:
    """Smallest noise found that spends at most epsilon.

    Args:
        spent: noise, or a factor of it, -> epsilon.
        epsilon: the target.
        delta: of the target, for the error.

    Returns:
        A value >= 0 that `spent` was asked for and found within the target.

    Raises:
        AccountingError: no value up to 1e9 is.
    """
    if spent(0.0) <= epsilon:  # nothing is released
        return 0.0
    good = bad = 1.0
    while spent(good) > epsilon:
        bad, good = good, good * 2
        if good > 1e9:
            raise AccountingError(unreachable(epsilon, delta, "no noise multiplier up to 1e9"))
    while bad == good or spent(bad) <= epsilon:
        good, bad = bad, bad / 2
        if bad < 1e-9:
            return good
    return search(good, bad, spent, epsilon)


def search(
    good: float,
    bad: float,
    spent: Callable[[float], float],
    target: float,
    *,
    whole: bool = False,
) -> float:
    """The last value found within the target, between one that is (`good`) and one that is not.

    Illinois' regula falsi on log epsilon against log value (nearly a straight line), with
    bisection as its floor; stops at relative width `_WIDTH`.
    """
    at_good, at_bad = _height(spent(good) if good else 0.0, target), _height(spent(bad), target)
    side = 0
    for count in range(80):
        if whole and abs(good - bad) <= 1:
            break
        if not whole and abs(good - bad) <= _WIDTH * abs(good):
            break
        middle = _between(good, bad, at_good, at_bad, bisect=count > 24 or not good)
        if whole:
            middle = min(max(round(middle), min(good, bad) + 1), max(good, bad) - 1)
        height = _height(spent(middle), target)
        if height <= 0:
            good, at_good = middle, height
            at_bad = at_bad / 2 if side == 1 else at_bad
            side = 1
        else:
            bad, at_bad = middle, height
            at_good = at_good / 2 if side == -1 else at_good
            side = -1
    return good


def _height(epsilon: float, target: float) -> float:
    """log(epsilon / target), kept finite so that a secant can use it."""
    if epsilon <= 0:
        return -50.0
    return min(50.0, max(-50.0, math.log(epsilon / target)))


def _between(good: float, bad: float, at_good: float, at_bad: float, *, bisect: bool) -> float:
    """Where the chord through both ends meets zero, kept inside the bracket."""
    if bisect:
        return 0.5 * (good + bad)
    share = at_bad / (at_bad - at_good) if at_bad > at_good else 0.5
    share = min(max(share, 1e-3), 1 - 1e-3)
    low, high = math.log(bad), math.log(good)
    middle = math.exp(low + share * (high - low))
    inside = min(good, bad) < middle < max(good, bad)
    return middle if inside else 0.5 * (good + bad)
