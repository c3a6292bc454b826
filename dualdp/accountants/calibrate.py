# SPDX-License-Identifier: Apache-2.0
"""Questions about a run of equal steps: its epsilon, and the noise, steps or rate for a budget.

Every search keeps a bracket whose safe end was evaluated and found within the target, and returns
that end: rounding can only cost utility. The target is compared with the same upper bound that
`get_epsilon` reports, so a calibrated run never exceeds its budget by a tolerance.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from dualdp import _validate, accountants, mechanisms
from dualdp._validate import AccountingError
from dualdp.accountants import gdp


@dataclasses.dataclass(frozen=True)
class _Question:
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


def _question(
    *,
    sampler: str,
    accountant: str,
    neighboring_relation: str,
    group_size: int = 1,
    approximate: bool = False,
    num_examples: int | None = None,
    max_batch_size: int | None = None,
) -> _Question:
    _validate.choice("sampler", sampler, mechanisms.SAMPLERS)
    _validate.choice("accountant", accountant, accountants.names())
    _validate.choice("neighboring_relation", neighboring_relation, mechanisms.RELATIONS)
    if accountant == "gdp" and not approximate:
        raise AccountingError(gdp.REFUSAL)
    return _Question(
        sampler,
        accountant,
        neighboring_relation,
        _validate.integer("group_size", group_size, minimum=1),
        approximate and accountant == "gdp",
        num_examples,
        max_batch_size,
    )


def get_epsilon(
    *,
    noise_multiplier: float,
    sample_rate: float,
    num_steps: int,
    delta: float,
    sampler: str = "poisson",
    accountant: str = "pld",
    neighboring_relation: str = "add_or_remove",
    **options: Any,
) -> float:
    """Upper bound on epsilon of `num_steps` equal steps.

    Args:
        noise_multiplier: noise standard deviation / max_grad_norm, >= 0; 0 gives inf.
        sample_rate: expected batch size / number of examples, in [0, 1].
        num_steps: number of noise releases; none gives 0.
        delta: in [0, 1].
        sampler: which batches were formed, one of `mechanisms.SAMPLERS`.
        accountant: a name of `accountants.names()`.
        neighboring_relation: `add_or_remove`, `zero_out` or `replace`.
        **options: `group_size=` (examples of one user), `approximate=` (allows `gdp`),
            `num_examples=` and `max_batch_size=` (truncated Poisson).

    Returns:
        epsilon >= 0, never below the truth unless `approximate`.

    Guarantees:
        The value is at least every certified lower bound.  [test_upper_is_above_every_lower_bound]

    >>> get_epsilon(noise_multiplier=1.0, sample_rate=0.01, num_steps=1000, delta=1e-5) < 1.84
    True
    """
    question = _question(
        sampler=sampler,
        accountant=accountant,
        neighboring_relation=neighboring_relation,
        **options,
    )
    steps = [(noise_multiplier, sample_rate, _validate.integer("num_steps", num_steps))]
    return question.epsilon(steps, _validate.probability("delta", delta))


def get_delta(
    *,
    noise_multiplier: float,
    sample_rate: float,
    num_steps: int,
    epsilon: float,
    sampler: str = "poisson",
    accountant: str = "pld",
    neighboring_relation: str = "add_or_remove",
    **options: Any,
) -> float:
    """Upper bound on delta of `num_steps` equal steps; arguments as `get_epsilon`.

    Args:
        noise_multiplier: noise standard deviation / max_grad_norm.
        sample_rate: expected batch size / number of examples.
        num_steps: number of noise releases.
        epsilon: >= 0.
        sampler: which batches were formed.
        accountant: a name of `accountants.names()`.
        neighboring_relation: `add_or_remove`, `zero_out` or `replace`.
        **options: as in `get_epsilon`.

    Returns:
        delta in [0, 1].
    """
    question = _question(
        sampler=sampler,
        accountant=accountant,
        neighboring_relation=neighboring_relation,
        **options,
    )
    steps = [(noise_multiplier, sample_rate, _validate.integer("num_steps", num_steps))]
    more = {"approximate": True} if question.approximate else {}
    target = _validate.non_negative("epsilon", epsilon)
    return float(question.account(steps).get_delta(epsilon=target, **more))


def get_noise_multiplier(
    *,
    target_epsilon: float,
    target_delta: float,
    sample_rate: float,
    num_steps: int,
    sampler: str = "poisson",
    accountant: str = "pld",
    neighboring_relation: str = "add_or_remove",
    **options: Any,
) -> float:
    """Smallest noise multiplier found whose epsilon does not exceed the target.

    Args:
        target_epsilon: > 0.
        target_delta: in (0, 1).
        sample_rate: expected batch size / number of examples.
        num_steps: number of noise releases.
        sampler: which batches will be formed.
        accountant: a name of `accountants.names()`.
        neighboring_relation: `add_or_remove`, `zero_out` or `replace`.
        **options: as in `get_epsilon`.

    Returns:
        noise_multiplier >= 0 with `get_epsilon(...) <= target_epsilon`.

    Guarantees:
        The epsilon of the returned value was computed and is within the target.
            [test_calibrated_noise_meets_the_target]

    Raises:
        AccountingError: no noise multiplier up to 1e9 reaches the target.
    """
    rate, number = _validate.sample_rate(sample_rate), _validate.integer("num_steps", num_steps)
    scale = get_schedule_scale(
        target_epsilon=target_epsilon,
        target_delta=target_delta,
        steps=[(1.0, rate, number)],
        sampler=sampler,
        accountant=accountant,
        neighboring_relation=neighboring_relation,
        **options,
    )
    return scale


def get_schedule_scale(
    *,
    target_epsilon: float,
    target_delta: float,
    steps: Sequence[tuple[float, float, int]],
    sampler: str = "poisson",
    accountant: str = "pld",
    neighboring_relation: str = "add_or_remove",
    **options: Any,
) -> float:
    """Smallest factor found for the noise multipliers of a whole schedule.

    Args:
        target_epsilon: > 0.
        target_delta: in (0, 1).
        steps: (noise_multiplier, sample_rate, num_steps), one for each stretch of the schedule.
        sampler: which batches will be formed.
        accountant: a name of `accountants.names()`.
        neighboring_relation: `add_or_remove`, `zero_out` or `replace`.
        **options: as in `get_epsilon`.

    Returns:
        Factor >= 0: with every noise multiplier times it, epsilon is within the target.
    """
    question = _question(
        sampler=sampler,
        accountant=accountant,
        neighboring_relation=neighboring_relation,
        **options,
    )
    epsilon, delta = _target(target_epsilon, target_delta)

    def spent(factor: float) -> float:
        return question.epsilon([(s * factor, q, n) for s, q, n in steps], delta)

    if spent(0.0) <= epsilon:  # nothing is released
        return 0.0
    good = bad = 1.0
    while spent(good) > epsilon:
        bad, good = good, good * 2
        if good > 1e9:
            raise AccountingError(_unreachable(epsilon, delta, "no noise multiplier up to 1e9"))
    while bad == good or spent(bad) <= epsilon:
        good, bad = bad, bad / 2
        if bad < 1e-9:
            return good
    return _search(good, bad, spent, epsilon)


def get_num_steps(
    *,
    target_epsilon: float,
    target_delta: float,
    noise_multiplier: float,
    sample_rate: float,
    sampler: str = "poisson",
    accountant: str = "pld",
    neighboring_relation: str = "add_or_remove",
    **options: Any,
) -> int:
    """Largest number of steps found whose epsilon does not exceed the target.

    Args:
        target_epsilon: > 0.
        target_delta: in (0, 1).
        noise_multiplier: noise standard deviation / max_grad_norm.
        sample_rate: expected batch size / number of examples.
        sampler: which batches will be formed.
        accountant: a name of `accountants.names()`.
        neighboring_relation: `add_or_remove`, `zero_out` or `replace`.
        **options: as in `get_epsilon`.

    Returns:
        Number of steps >= 0, of which the epsilon was computed and is within the target.

    Raises:
        AccountingError: a billion steps stay within the target.
    """
    question = _question(
        sampler=sampler,
        accountant=accountant,
        neighboring_relation=neighboring_relation,
        **options,
    )
    epsilon, delta = _target(target_epsilon, target_delta)

    def spent(count: float) -> float:
        return question.epsilon([(noise_multiplier, sample_rate, int(count))], delta)

    good, bad = 0, 1
    while spent(bad) <= epsilon:
        good, bad = bad, bad * 4
        if bad > 10**9:
            raise AccountingError(_unreachable(epsilon, delta, "not even a billion steps"))
    return int(_search(float(good), float(bad), spent, epsilon, whole=True))


def get_sample_rate(
    *,
    target_epsilon: float,
    target_delta: float,
    noise_multiplier: float,
    num_steps: int,
    sampler: str = "poisson",
    accountant: str = "pld",
    neighboring_relation: str = "add_or_remove",
    **options: Any,
) -> float:
    """Largest sampling rate found whose epsilon does not exceed the target.

    Args:
        target_epsilon: > 0.
        target_delta: in (0, 1).
        noise_multiplier: noise standard deviation / max_grad_norm.
        num_steps: number of noise releases.
        sampler: which batches will be formed; `balls_in_bins` gives 1 / a whole number.
        accountant: a name of `accountants.names()`.
        neighboring_relation: `add_or_remove`, `zero_out` or `replace`.
        **options: as in `get_epsilon`.

    Returns:
        Rate in [0, 1], of which the epsilon was computed and is within the target.

    Raises:
        AccountingError: not even a rate of 1e-9 stays within the target.
    """
    question = _question(
        sampler=sampler,
        accountant=accountant,
        neighboring_relation=neighboring_relation,
        **options,
    )
    epsilon, delta = _target(target_epsilon, target_delta)
    whole = sampler in ("balls_in_bins", "shuffle")

    def spent(period: float) -> float:
        return question.epsilon([(noise_multiplier, 1 / period, num_steps)], delta)

    if spent(1.0) <= epsilon:
        return 1.0
    bad, good = 1.0, 2.0
    while spent(good) > epsilon:
        bad, good = good, good * 4
        if good > 1e9:
            raise AccountingError(_unreachable(epsilon, delta, "no sampling rate above 1e-9"))
    return 1 / _search(good, bad, spent, epsilon, whole=whole)


def _target(target_epsilon: float, target_delta: float) -> tuple[float, float]:
    """The checked target; delta = 0 has no answer for Gaussian noise."""
    epsilon = _validate.positive("target_epsilon", target_epsilon)
    delta = _validate.probability("target_delta", target_delta)
    if not 0 < delta < 1:
        raise ValueError(
            f"target_delta={target_delta!r} has no calibrated answer. Expected a number strictly "
            "between 0 and 1, such as 1e-5."
        )
    return epsilon, delta


def _unreachable(epsilon: float, delta: float, what: str) -> str:
    return (
        f"target_epsilon={epsilon} at target_delta={delta} is out of reach: {what} decides it. "
        "Change the target or the other settings."
    )


def _search(
    good: float,
    bad: float,
    spent: Callable[[float], float],
    target: float,
    *,
    whole: bool = False,
) -> float:
    """The last value found within the target, between one that is (`good`) and one that is not.

    Illinois' regula falsi on log epsilon against log value (nearly a straight line), with
    bisection as its floor; stops at relative width 1e-11, or 1e-6 after a dozen evaluations.
    """
    at_good, at_bad = _height(spent(good) if good else 0.0, target), _height(spent(bad), target)
    side = 0
    for count in range(80):
        if whole and abs(good - bad) <= 1:
            break
        if not whole and abs(good - bad) <= (1e-11 if count < 12 else 1e-6) * abs(good):
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
