# SPDX-License-Identifier: Apache-2.0
"""Privacy of equal steps: its epsilon, and the noise, steps or sampling rate for a target.

Every search keeps a bracket whose safe end was evaluated and found within the target, and returns
that end: rounding can only cost utility. The target is compared with the upper bound that
`get_epsilon` reports, so a calibrated run does not exceed its target by a tolerance.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from dualdp import _validate, accountants
from dualdp._validate import AccountingError
from dualdp.accountants import gdp
from dualdp.accountants.search import check_target, last_within, smallest_scale, unreachable

Steps = Sequence[tuple[float, float, int]]  # (noise_multiplier, sample_rate, num_steps)


@dataclasses.dataclass(frozen=True)
class _Query:
    """Settings of a query, without the quantity that is solved for; accountants validate them."""

    sampler: str
    accountant: str
    neighboring_relation: str
    group_size: int = 1
    approximate: bool = False
    num_examples: int | None = None
    max_batch_size: int | None = None

    def __post_init__(self) -> None:
        if self.accountant == "gdp" and not self.approximate:
            raise AccountingError(gdp.REFUSAL)

    def account(self, steps: Steps) -> tuple[Any, dict[str, bool]]:
        """Return an accountant with the steps, and the options of its questions."""
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
        return account, {"approximate": True} if self.accountant == "gdp" else {}

    def epsilon(self, steps: Steps, delta: float) -> float:
        """Return the upper bound (or the requested approximation) of epsilon of these steps."""
        account, options = self.account(steps)
        return float(account.get_epsilon(delta=delta, **options))


_OPTIONS = [item.name for item in dataclasses.fields(_Query)][3:]


def _query(sampler: str, accountant: str, relation: str, options: Mapping[str, Any]) -> _Query:
    """Query with the caller's further options, of which an unknown one is refused."""
    if unknown := sorted(set(options) - set(_OPTIONS)):
        raise TypeError(
            f"There is no argument {', '.join(map(repr, unknown))}. Expected those of the "
            f"function's signature, or {', '.join(_OPTIONS)}."
        )
    return _Query(sampler, accountant, relation, **options)


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
    """Return an upper bound on epsilon of `num_steps` equal steps.

    Args:
        noise_multiplier: noise standard deviation / max_grad_norm, >= 0; 0 gives inf.
        sample_rate: expected batch size / number of examples, in [0, 1].
        num_steps: number of noise releases; 0 gives epsilon 0.
        delta: float in [0, 1].
        sampler: name of the sampler that formed the batches, one of `mechanisms.SAMPLERS`.
        accountant: one of `accountants.names()`.
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
    query = _query(sampler, accountant, neighboring_relation, options)
    steps = [(noise_multiplier, sample_rate, _validate.integer("num_steps", num_steps))]
    return query.epsilon(steps, _validate.probability("delta", delta))


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
    """Return an upper bound on delta, in [0, 1], of `num_steps` equal steps at `epsilon` >= 0.

    The other arguments are those of `get_epsilon`.
    """
    query = _query(sampler, accountant, neighboring_relation, options)
    steps = [(noise_multiplier, sample_rate, _validate.integer("num_steps", num_steps))]
    target = _validate.non_negative("epsilon", epsilon)
    account, approximate = query.account(steps)
    return float(account.get_delta(epsilon=target, **approximate))


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
    """Return the smallest noise multiplier found whose epsilon is within the target.

    Args:
        target_epsilon: float > 0.
        target_delta: float in (0, 1).
        sample_rate: expected batch size / number of examples.
        num_steps: number of noise releases.
        sampler: name of the sampler that will form the batches, one of `mechanisms.SAMPLERS`.
        accountant: one of `accountants.names()`.
        neighboring_relation: `add_or_remove`, `zero_out` or `replace`.
        **options: see `get_epsilon`.

    Returns:
        noise_multiplier >= 0 with `get_epsilon(...) <= target_epsilon`.

    Guarantees:
        The epsilon of the returned value was computed and is within the target.
            [test_calibrated_noise_meets_the_target]

    Raises:
        AccountingError: no noise multiplier up to 1e9 reaches the target.
    """
    rate, number = _validate.sample_rate(sample_rate), _validate.integer("num_steps", num_steps)
    return get_schedule_scale(
        target_epsilon=target_epsilon,
        target_delta=target_delta,
        steps=[(1.0, rate, number)],
        sampler=sampler,
        accountant=accountant,
        neighboring_relation=neighboring_relation,
        **options,
    )


def get_schedule_scale(
    *,
    target_epsilon: float,
    target_delta: float,
    steps: Steps,
    sampler: str = "poisson",
    accountant: str = "pld",
    neighboring_relation: str = "add_or_remove",
    **options: Any,
) -> float:
    """Return the smallest factor found, >= 0, for all noise multipliers of a schedule.

    With it the steps spend at most the target. `steps` has (noise_multiplier, sample_rate,
    num_steps) of each constant phase; the other arguments are those of `get_noise_multiplier`.
    """
    query = _query(sampler, accountant, neighboring_relation, options)
    epsilon, delta = check_target(target_epsilon, target_delta)
    for i, step in enumerate(steps):
        if not isinstance(step, tuple | list) or len(step) != 3:
            raise ValueError(
                f"steps[{i}]={step!r} is no stretch of a schedule. Expected triples "
                "(noise_multiplier, sample_rate, num_steps)."
            )

    def spent(factor: float) -> float:
        return query.epsilon([(s * factor, q, n) for s, q, n in steps], delta)

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
    """Return the largest number of steps found whose epsilon is within the target.

    Args:
        target_epsilon: float > 0.
        target_delta: float in (0, 1).
        noise_multiplier: noise standard deviation / max_grad_norm.
        sample_rate: expected batch size / number of examples.
        sampler: name of the sampler that will form the batches, one of `mechanisms.SAMPLERS`.
        accountant: one of `accountants.names()`.
        neighboring_relation: `add_or_remove`, `zero_out` or `replace`.
        **options: see `get_epsilon`.

    Returns:
        Number of steps >= 0, whose epsilon was computed and is within the target.

    Raises:
        AccountingError: a billion steps stay within the target.
    """
    query = _query(sampler, accountant, neighboring_relation, options)
    epsilon, delta = check_target(target_epsilon, target_delta)

    def spent(count: float) -> float:
        return query.epsilon([(noise_multiplier, sample_rate, int(count))], delta)

    good, bad = 0, 1
    while spent(bad) <= epsilon:
        good, bad = bad, bad * 4
        if bad > 10**9:
            raise AccountingError(unreachable(epsilon, delta, "not even a billion steps"))
    return int(last_within(float(good), float(bad), spent, epsilon, whole=True))


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
    """Return the largest sampling rate found whose epsilon is within the target.

    Args:
        target_epsilon: float > 0.
        target_delta: float in (0, 1).
        noise_multiplier: noise standard deviation / max_grad_norm.
        num_steps: number of noise releases.
        sampler: name of the sampler; `balls_in_bins` and `shuffle` give 1 / an integer.
        accountant: one of `accountants.names()`.
        neighboring_relation: `add_or_remove`, `zero_out` or `replace`.
        **options: see `get_epsilon`.

    Returns:
        Rate in [0, 1], whose epsilon was computed and is within the target.

    Raises:
        AccountingError: not even a rate of 1e-9 stays within the target.
    """
    query = _query(sampler, accountant, neighboring_relation, options)
    epsilon, delta = check_target(target_epsilon, target_delta)
    whole = sampler in ("balls_in_bins", "shuffle")

    def spent(period: float) -> float:
        return query.epsilon([(noise_multiplier, 1 / period, num_steps)], delta)

    if spent(1.0) <= epsilon:
        return 1.0
    bad, good = 1.0, 2.0
    while spent(good) > epsilon:
        bad, good = good, good * 4
        if good > 1e9:
            raise AccountingError(unreachable(epsilon, delta, "no sampling rate above 1e-9"))
    return 1 / last_within(good, bad, spent, epsilon, whole=whole)
