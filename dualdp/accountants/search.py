# SPDX-License-Identifier: Apache-2.0
"""Root finding: one search serves all inverses, and returns an end that was evaluated and is safe.

A quantity is within its target where its `height` is at most 0. `bracket` finds two values between
which the height changes its sign, and `last_within` narrows the bracket.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dualdp import _validate
from dualdp._validate import AccountingError

Array = NDArray[np.floating[Any]]
Height = Callable[[float], float]

_EXACT = 1e-15  # relative width of a closed form's bracket
_FEW = 25  # chords, before bisections


def height_above(spent: Callable[[float], float], epsilon: float) -> Height:
    """Return the height log(spent(value) / epsilon), limited to +-50 so that chords are finite.

    `spent` is slow, so it is evaluated once for each value.
    """

    @functools.cache
    def height(value: float) -> float:
        found = spent(value)
        return min(50.0, max(-50.0, math.log(found / epsilon))) if found > 0 else -50.0

    return height


def bracket(
    holds: Callable[[float], bool], before: float, value: float, factor: float, end: float
) -> tuple[float, float]:
    """Return the first of `value`, `value * factor`, ... that `holds`, and the one before it.

    Args:
        holds: function of a value, True past the place that is searched.
        before: returned first if `value` itself holds; it does not hold there.
        value: first value to be tried.
        factor: float > 1 for growing values, < 1 for falling ones.
        end: last value to be tried.

    Returns:
        `(before, value)`: the last value that does not hold, and the first that does, which is
        beyond `end` if none does.
    """
    # (value - end) * (factor - 1) <= 0 while the end is not passed, in either direction.
    while (value - end) * (factor - 1) <= 0 and not holds(value):
        before, value = value, value * factor
    return before, value


def last_within(
    good: float, bad: float, height: Height, *, width: float = 1e-10, whole: bool = False
) -> float:
    """Return the last value within the target, between `good` (within) and `bad` (not within).

    Regula falsi (Illinois) on the height against the logarithm of the value, which is nearly
    linear, then bisection. Stops at a relative width, with `whole` at neighboring integers.
    """
    at_good, at_bad = height(good) if good else -50.0, height(bad) if bad else 50.0
    side = 0
    for count in range(200):
        low, high = min(good, bad), max(good, bad)
        middle = 0.5 * (low + high)
        if high - low <= (1 if whole else width * abs(good)) or not low < middle < high:
            break
        if count < _FEW and low > 0:
            # zero of the chord through both ends, kept inside the bracket
            share = at_bad / (at_bad - at_good) if at_bad > at_good else 0.5
            share = min(max(share, 1e-3), 1 - 1e-3)
            start, end = math.log(bad), math.log(good)
            chord = math.exp(start + share * (end - start))
            middle = chord if low < chord < high else middle
        if whole:
            middle = min(max(round(middle), low + 1), high - 1)
        at_middle = height(middle)
        # Illinois: an end that stays twice in a row has its height halved, or the chord would creep
        # towards the root from one side.
        if at_middle <= 0:
            good, at_good = middle, at_middle
            at_bad = at_bad / 2 if side == 1 else at_bad
            side = 1
        else:
            bad, at_bad = middle, at_middle
            at_good = at_good / 2 if side == -1 else at_good
            side = -1
    return good


def smallest_epsilon(log_delta: Callable[[float], float], target: float) -> float:
    """Return the smallest epsilon >= 0 with log_delta(epsilon) <= target, rounded up, or inf."""

    def height(epsilon: float) -> float:
        return max(log_delta(epsilon) - target, -1e300)

    if height(0.0) <= 0:
        return 0.0
    bad, good = bracket(lambda epsilon: height(epsilon) <= 0, 0.0, 1.0, 2.0, 1e300)
    return last_within(good, bad, height, width=_EXACT) if good <= 1e300 else math.inf


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
    return epsilon, _validate.open_probability("target_delta", target_delta)


def unreachable(epsilon: float, delta: float, what: str) -> AccountingError:
    """Return the error for a target that no setting reaches."""
    return AccountingError(
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
    height = height_above(spent, epsilon)
    if height(0.0) <= 0:  # nothing is released
        return 0.0
    if height(1.0) > 0:
        bad, good = bracket(lambda noise: height(noise) <= 0, 1.0, 2.0, 2.0, 1e9)
        if good > 1e9:
            raise unreachable(epsilon, delta, "no noise multiplier up to 1e9")
    else:
        good, bad = bracket(lambda noise: height(noise) > 0, 1.0, 0.5, 0.5, 1e-9)
        if bad < 1e-9:
            return good
    return last_within(good, bad, height)
