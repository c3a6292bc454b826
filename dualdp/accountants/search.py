# SPDX-License-Identifier: Apache-2.0
"""Root finding: every search keeps a bracket and returns an end that was evaluated and is safe."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from dualdp import _validate
from dualdp._validate import AccountingError

Array = npt.NDArray[Any]

_WIDTH = 1e-10


def smallest_epsilon(log_delta: Callable[[float], float], target: float) -> float:
    """Return the smallest epsilon >= 0 with log_delta(epsilon) <= target, rounded up, or inf.

    Bisection on a decreasing function. The upper end, at which the inequality was evaluated and
    holds, is returned.
    """
    if log_delta(0.0) <= target:
        return 0.0
    low, high = 0.0, 1.0
    while log_delta(high) > target:
        low, high = high, 2 * high
        if high > 1e300:
            return math.inf
    for _ in range(200):
        middle = 0.5 * (low + high)
        if not low < middle < high or high - low <= 1e-15 * high:
            break
        if log_delta(middle) <= target:
            high = middle
        else:
            low = middle
    return high


def bisect_arrays(
    increasing: Callable[[Array], Array], target: Array, low: Array, high: Array
) -> Array:
    """Return the (points,) upper ends of 80 bisections of `increasing(x) >= target`."""
    for _ in range(80):
        middle = 0.5 * (low + high)
        is_below = increasing(middle) < target
        low, high = np.where(is_below, middle, low), np.where(is_below, high, middle)
    return high


def check_target(target_epsilon: float, target_delta: float) -> tuple[float, float]:
    """Return the validated target; delta = 0 is refused (Gaussian noise cannot reach it)."""
    epsilon = _validate.positive("target_epsilon", target_epsilon)
    delta = _validate.probability("target_delta", target_delta)
    if not 0 < delta < 1:
        raise ValueError(
            f"target_delta={target_delta!r} has no calibrated answer. Expected a number strictly "
            "between 0 and 1, such as 1e-5."
        )
    return epsilon, delta


def unreachable(epsilon: float, delta: float, what: str) -> str:
    """Return the error message for a target that no setting reaches."""
    return (
        f"target_epsilon={epsilon} at target_delta={delta} is out of reach: {what} decides it. "
        "Change the target or the other settings."
    )


def smallest_scale(spent: Callable[[float], float], epsilon: float, delta: float) -> float:
    """Return the smallest noise found, >= 0, at which `spent` is at most `epsilon`.

    `spent` maps a noise multiplier, or a factor of one, to epsilon, and was evaluated at the value
    that is returned; `delta` is for the error message.

    Raises:
        AccountingError: no value up to 1e9 is within the target.
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
    return last_within(good, bad, spent, epsilon)


def last_within(
    good: float,
    bad: float,
    spent: Callable[[float], float],
    target: float,
    *,
    whole: bool = False,
) -> float:
    """Return the last value within the target, between `good` (within) and `bad` (not within).

    Regula falsi (Illinois) on log epsilon against log value, which is nearly linear; bisection
    after 25 steps. Stops at relative width `_WIDTH`, with `whole` at neighboring integers.
    """

    def height(value: float) -> float:
        """log(epsilon / target), clamped to [-50, 50] for the secant."""
        epsilon = spent(value)
        return min(50.0, max(-50.0, math.log(epsilon / target))) if epsilon > 0 else -50.0

    at_good, at_bad = height(good) if good else -50.0, height(bad)
    side = 0
    for count in range(80):
        if abs(good - bad) <= (1 if whole else _WIDTH * abs(good)):
            break
        middle = 0.5 * (good + bad)
        if count <= 24 and good:
            # zero of the chord through both ends, kept inside the bracket
            share = at_bad / (at_bad - at_good) if at_bad > at_good else 0.5
            share = min(max(share, 1e-3), 1 - 1e-3)
            low, high = math.log(bad), math.log(good)
            chord = math.exp(low + share * (high - low))
            if min(good, bad) < chord < max(good, bad):
                middle = chord
        if whole:
            middle = min(max(round(middle), min(good, bad) + 1), max(good, bad) - 1)
        at_middle = height(middle)
        if at_middle <= 0:
            good, at_good = middle, at_middle
            at_bad = at_bad / 2 if side == 1 else at_bad
            side = 1
        else:
            bad, at_bad = middle, at_middle
            at_good = at_good / 2 if side == -1 else at_good
            side = -1
    return good
