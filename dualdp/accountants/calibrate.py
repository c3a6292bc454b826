# SPDX-License-Identifier: Apache-2.0
"""Questions about a run of equal steps: its epsilon, and the noise, steps or rate for a budget.

Every search keeps a bracket whose safe end was evaluated and found within the target, and returns
that end: rounding can only cost utility. The target is compared with the same upper bound that
`get_epsilon` reports, so a calibrated run never exceeds its budget by a tolerance.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dualdp import _validate
from dualdp._validate import AccountingError
from dualdp.accountants.question import question as ask
from dualdp.accountants.question import search, smallest_scale, target, unreachable


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
    question = ask(
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
    question = ask(
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
    question = ask(
        sampler=sampler,
        accountant=accountant,
        neighboring_relation=neighboring_relation,
        **options,
    )
    epsilon, delta = target(target_epsilon, target_delta)
    for i, step in enumerate(steps):
        if not isinstance(step, tuple | list) or len(step) != 3:
            raise ValueError(
                f"steps[{i}]={step!r} is no stretch of a schedule. Expected triples "
                "(noise_multiplier, sample_rate, num_steps)."
            )

    def spent(factor: float) -> float:
        return question.epsilon([(s * factor, q, n) for s, q, n in steps], delta)

    return smallest_scale(spent, epsilon, delta)


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
    question = ask(
        sampler=sampler,
        accountant=accountant,
        neighboring_relation=neighboring_relation,
        **options,
    )
    epsilon, delta = target(target_epsilon, target_delta)

    def spent(count: float) -> float:
        return question.epsilon([(noise_multiplier, sample_rate, int(count))], delta)

    good, bad = 0, 1
    while spent(bad) <= epsilon:
        good, bad = bad, bad * 4
        if bad > 10**9:
            raise AccountingError(unreachable(epsilon, delta, "not even a billion steps"))
    return int(search(float(good), float(bad), spent, epsilon, whole=True))


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
    question = ask(
        sampler=sampler,
        accountant=accountant,
        neighboring_relation=neighboring_relation,
        **options,
    )
    epsilon, delta = target(target_epsilon, target_delta)
    whole = sampler in ("balls_in_bins", "shuffle")

    def spent(period: float) -> float:
        return question.epsilon([(noise_multiplier, 1 / period, num_steps)], delta)

    if spent(1.0) <= epsilon:
        return 1.0
    bad, good = 1.0, 2.0
    while spent(good) > epsilon:
        bad, good = good, good * 4
        if good > 1e9:
            raise AccountingError(unreachable(epsilon, delta, "no sampling rate above 1e-9"))
    return 1 / search(good, bad, spent, epsilon, whole=whole)
