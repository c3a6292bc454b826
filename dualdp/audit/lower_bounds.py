# SPDX-License-Identifier: Apache-2.0
"""Lower bounds on epsilon from guesses about canaries, or from scores of repeated runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, stats
from scipy.special import ndtr, ndtri

from dualdp.accountants.closed_forms import gaussian_log_delta

Array = NDArray[np.float64]

_LARGEST = 100.0  # largest epsilon of the search
_THRESHOLDS = 65  # number of candidate thresholds for Clopper-Pearson


@dataclass(frozen=True)
class Guesses:
    """Guesses of an attacker about some of the canaries, which were included by fair coins."""

    num_canaries: int
    num_guesses: int
    num_correct: int


def guesses_at(scores: Array, included: NDArray[np.bool_], num_guesses: int) -> Guesses:
    """Return guesses "in" for the highest scores and "out" for as many of the lowest."""
    order = np.argsort(scores, kind="stable")
    half = num_guesses // 2
    lowest, highest = order[:half], order[len(order) - half :]
    correct = int((~included[lowest]).sum() + included[highest].sum())
    return Guesses(len(scores), 2 * half, correct)


def one_run_p_value(guesses: Guesses, epsilon: float, delta: float) -> float:
    """Return P(at least this many correct guesses) if one run is (epsilon, delta)-DP.

    Source: Steinke et al. 2023, "Privacy Auditing with One (1) Training Run", theorem 5.2.
    """
    r, v = guesses.num_guesses, guesses.num_correct
    if v == 0:
        return 1.0
    rate = 1 / (1 + math.exp(-epsilon))
    beta = float(stats.binom.sf(v - 1, r, rate))
    below = np.cumsum(stats.binom.pmf(np.arange(v - 1, -1, -1), r, rate))  # P[v > W >= v - i]
    alpha = 2 * float((below / np.arange(1, v + 1)).max())
    return min(1.0, beta + alpha * delta * guesses.num_canaries)


def f_dp_p_value(guesses: Guesses, inverse: Callable[[float], float]) -> float:
    """Return P(at least this many correct guesses) for a claimed trade-off function f.

    If v or more are correct with probability t, a chain of inequalities from v down to 0 gives a
    lower bound on the total probability; the p-value is the largest t that keeps it <= 1. `inverse`
    is the function y -> least x with 1 - f(x) >= y.

    Source: Mahloujifar et al. 2024, "Auditing f-Differential Privacy in One Run", theorem 3.2 and
        its algorithm, for fair coins.
    """
    if 2 * guesses.num_correct <= guesses.num_guesses:
        return 1.0

    def excess(log_t: float) -> float:
        return _total_probability(guesses, math.exp(log_t), inverse) - 1.0

    lowest = math.log(1e-12)
    if excess(lowest) > 0:
        return 1e-12
    if excess(0.0) <= 0:
        return 1.0
    return min(1.0, math.exp(optimize.bisect(excess, lowest, 0.0, xtol=1e-3) + 1e-3))


def _total_probability(guesses: Guesses, t: float, inverse: Callable[[float], float]) -> float:
    """Lower bound on the probability of all outcomes if v or more have probability t."""
    m, r, v = guesses.num_canaries, guesses.num_guesses, guesses.num_correct
    right, wrong = t * v / m, t * (r - v) / m  # sums of i p_i / m and (r - i) p_i / m over i >= v
    for i in range(v - 1, -1, -1):
        needed = max(wrong, inverse(right))
        right += i / (r - i) * (needed - wrong)
        wrong = needed
        if right + wrong > r / m:
            break
    return (right + wrong) * m / r


def gaussian_inverse(mu: float) -> Callable[[float], float]:
    """Return the inverse trade-off function of N(0, 1) against N(mu, 1)."""
    return lambda y: float(ndtr(ndtri(y) - mu)) if 0 < y < 1 else float(y >= 1)


def curve_inverse(epsilons: Array, deltas: Array) -> Callable[[float], float]:
    """Return the inverse trade-off function of (epsilon, delta) pairs that hold."""
    grown = np.exp(epsilons)

    def inverse(y: float) -> float:
        return max(
            0.0, float(max(((y - deltas) / grown).max(), (1 - deltas - grown * (1 - y)).max()))
        )

    return inverse


def clopper_pearson(inside: Array, outside: Array, delta: float, alpha: float) -> float:
    """Return a lower bound on epsilon from scores of independent runs with and without the canary.

    The threshold is chosen on one half of the runs and evaluated on the other half.

    Source: Nasr et al. 2021, "Adversary Instantiation", section 3; Clopper & Pearson 1934.
    """
    choose, judge = (inside[::2], outside[::2]), (inside[1::2], outside[1::2])
    thresholds = np.quantile(np.concatenate(choose), np.linspace(0, 1, _THRESHOLDS))
    rules = [(float(threshold), above) for threshold in thresholds for above in (True, False)]
    best = max(rules, key=lambda rule: _ratio(*choose, rule, delta, alpha))
    return max(0.0, _ratio(*judge, best, delta, alpha))


def _ratio(
    inside: Array, outside: Array, rule: tuple[float, bool], delta: float, alpha: float
) -> float:
    """log((least true-positive rate - delta) / largest false-positive rate)."""
    threshold, above = rule
    hits = (inside >= threshold) if above else (outside < threshold)
    alarms = (outside >= threshold) if above else (inside < threshold)
    if not len(hits) or not len(alarms):
        return 0.0
    least = float(stats.beta.ppf(alpha / 2, hits.sum(), len(hits) - hits.sum() + 1))
    most = float(stats.beta.ppf(1 - alpha / 2, alarms.sum() + 1, len(alarms) - alarms.sum()))
    least, most = (0.0 if hits.sum() == 0 else least), (1.0 if alarms.all() else most)
    return math.log((least - delta) / most) if least > delta else 0.0


def largest_refuted(
    guesses: Guesses, p_at: Callable[[Guesses, float], float], level: float
) -> float:
    """Return the largest epsilon refuted at a level; p-values grow with epsilon."""
    low, high = 0.0, _LARGEST
    if p_at(guesses, 1e-6) >= level:
        return 0.0
    while high - low > 1e-3:
        middle = (low + high) / 2
        low, high = (middle, high) if p_at(guesses, middle) < level else (low, middle)
    return low


def mu_of(epsilon: float, delta: float) -> float:
    """Return mu of the Gaussian mechanism with epsilon at delta."""

    def excess(mu: float) -> float:
        return math.exp(gaussian_log_delta(mu, epsilon)) - delta

    return float(optimize.brentq(excess, 1e-9, 60.0))
