# SPDX-License-Identifier: Apache-2.0
"""Privacy of equal steps: its epsilon, and the noise, steps or sampling rate for a target.

Every search returns a value whose epsilon was computed and is within the target, by the bound that
`get_epsilon` reports; rounding can only cost utility.
"""

from __future__ import annotations

import math
from typing import Any, Unpack

from dualdp import _validate
from dualdp.accountants.base import (
    Accountant,
    bracket,
    check_target,
    create,
    height_above,
    largest_count,
    last_within,
    smallest_scale,
    unreachable,
)
from dualdp.accountants.pld import gaussian_epsilon
from dualdp.mechanisms import Sampling


class Setting(Sampling, total=False):
    """How batches are drawn (see `Sampling`) and who is protected, in all functions here.

    Keys:
        accountant: one of `accountants.names()`, `pld` if it is left out.
        neighboring_relation: `add_or_remove` (if left out), `zero_out` or `replace`.
        group_size: examples of one user, 1 if it is left out.
    """

    accountant: str
    neighboring_relation: str
    group_size: int


def _account(
    noise_multiplier: float, sample_rate: float, num_steps: int, setting: Setting
) -> Accountant:
    """Return an accountant with equal steps; raise on an argument that `Setting` lacks."""
    if unknown := sorted(set(setting) - set(Setting.__annotations__)):
        raise TypeError(
            f"There is no argument {', '.join(map(repr, unknown))}. Expected those of the "
            f"function's signature, or {', '.join(Setting.__annotations__)}."
        )
    own: dict[str, Any] = dict(setting)
    about = {key: own.pop(key) for key in ("neighboring_relation", "group_size") if key in own}
    account = create(own.pop("accountant", "pld"), **about)
    account.step(
        noise_multiplier=noise_multiplier, sample_rate=sample_rate, num_steps=num_steps, **own
    )
    return account


def get_epsilon(
    *,
    noise_multiplier: float,
    sample_rate: float,
    num_steps: int,
    delta: float,
    **setting: Unpack[Setting],
) -> float:
    """Return an upper bound on epsilon of `num_steps` equal steps.

    Args:
        noise_multiplier: noise standard deviation / max_grad_norm, >= 0; 0 gives inf.
        sample_rate: expected batch size / number of examples, in [0, 1].
        num_steps: number of noise releases; 0 gives epsilon 0.
        delta: float in [0, 1].
        **setting: see `Setting`.

    Guarantees:
        The value is at least every certified lower bound.  [test_upper_is_above_every_lower_bound]

    >>> get_epsilon(noise_multiplier=1.0, sample_rate=0.01, num_steps=1000, delta=1e-5) < 1.84
    True
    """
    account = _account(noise_multiplier, sample_rate, num_steps, setting)
    return account.get_epsilon(delta=delta)


def get_noise_multiplier(
    *,
    target_epsilon: float,
    target_delta: float,
    sample_rate: float,
    num_steps: int,
    **setting: Unpack[Setting],
) -> float:
    """Return the smallest noise multiplier found whose epsilon is within the target.

    Args:
        target_epsilon: float > 0.
        target_delta: float in (0, 1).
        sample_rate: expected batch size / number of examples.
        num_steps: number of noise releases.
        **setting: see `Setting`.

    Raises:
        AccountingError: no noise multiplier up to 1e9 reaches the target.

    Guarantees:
        The epsilon of the returned value was computed and is within the target.
            [test_calibrated_noise_meets_the_target]
    """
    epsilon, delta = check_target(target_epsilon, target_delta)

    def spent(noise: float) -> float:
        return _account(noise, sample_rate, num_steps, setting).get_epsilon(delta=delta)

    return smallest_scale(spent, epsilon, delta)


def get_num_steps(
    *,
    target_epsilon: float,
    target_delta: float,
    noise_multiplier: float,
    sample_rate: float,
    **setting: Unpack[Setting],
) -> int:
    """Return the largest number of steps found whose epsilon is within the target, >= 0.

    Raises:
        AccountingError: a billion steps stay within the target.
    """
    epsilon, delta = check_target(target_epsilon, target_delta)

    def spent(count: float) -> float:
        account = _account(noise_multiplier, sample_rate, int(count), setting)
        return account.get_epsilon(delta=delta)

    steps = largest_count(spent, epsilon, 1e9)
    if steps is None:
        raise unreachable(epsilon, delta, "not even a billion steps")
    return steps


def get_sample_rate(
    *,
    target_epsilon: float,
    target_delta: float,
    noise_multiplier: float,
    num_steps: int,
    **setting: Unpack[Setting],
) -> float:
    """Return the largest sampling rate found whose epsilon is within the target, in [0, 1].

    Of `balls_in_bins` and `shuffle` it is 1 / an integer.

    Raises:
        AccountingError: not even a rate of 1e-9 stays within the target.
    """
    epsilon, delta = check_target(target_epsilon, target_delta)

    def spent(period: float) -> float:
        account = _account(noise_multiplier, 1 / period, num_steps, setting)
        return account.get_epsilon(delta=delta)

    height = height_above(spent, epsilon)
    if height(1.0) <= 0:
        return 1.0
    bad, good = bracket(lambda period: height(period) <= 0, 1.0, 2.0, 4.0, 1e9)
    if good > 1e9:
        raise unreachable(epsilon, delta, "no sampling rate above 1e-9")
    whole = setting.get("sampler") in ("balls_in_bins", "shuffle")
    return 1 / last_within(good, bad, height, whole=whole)


def gdp_epsilon(
    *, noise_multiplier: float, sample_rate: float, num_steps: int, delta: float
) -> float:
    """Return epsilon by the central limit theorem, for tables of papers that print it.

    It bounds nothing: it can lie far BELOW the truth (75 times), so no run is accounted by it.

    Args:
        noise_multiplier: noise standard deviation / max_grad_norm, >= 0; 0 gives inf.
        sample_rate: probability with which an example joins a batch, in [0, 1].
        num_steps: number of noise releases.
        delta: float in [0, 1].

    Source: Dong, Roth & Su 2022; Bu, Dong, Long & Su 2020, equation (6); for full batches the exact
    mu = sqrt(num_steps) / noise_multiplier.

    >>> round(gdp_epsilon(noise_multiplier=1.0, sample_rate=0.01, num_steps=1000, delta=1e-5), 3)
    1.618
    """
    sigma = _validate.non_negative("noise_multiplier", noise_multiplier)
    rate = _validate.probability("sample_rate", sample_rate)
    steps = _validate.integer("num_steps", num_steps)
    target = _validate.probability("delta", delta)
    if sigma == 0 and rate * steps > 0:
        return math.inf
    precision = sigma**-2 if rate * steps > 0 else 0.0
    growth = precision if rate == 1 else rate**2 * math.expm1(min(precision, 700.0))
    return gaussian_epsilon(math.sqrt(steps * growth), target)
