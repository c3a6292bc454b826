# SPDX-License-Identifier: Apache-2.0
"""Closed forms: the Gaussian mechanism and one step of the Poisson-subsampled Gaussian."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from scipy.special import log_ndtr

# SciPy's log_ndtr is good to about 1e-14 relative; every closed form is widened by this much.
MARGIN = 1e-12


def gaussian_log_delta(mu: float, epsilon: float) -> float:
    """Log delta of N(mu, 1) against N(0, 1), exactly.

    delta = Phi(mu/2 - epsilon/mu) - e^epsilon Phi(-mu/2 - epsilon/mu), from logarithms.

    Source: Balle & Wang 2018, Theorem 8.
    """
    if mu == 0:
        return -math.inf
    first = float(log_ndtr(mu / 2 - epsilon / mu))
    second = epsilon + float(log_ndtr(-mu / 2 - epsilon / mu))
    if second >= first:  # rounding: the difference is below the last digit of `first`
        return first + math.log(4e-16)
    return first + math.log(-math.expm1(second - first))


def smallest_epsilon(log_delta: Callable[[float], float], target: float) -> float:
    """Smallest epsilon >= 0 with log_delta(epsilon) <= target, rounded up; inf if there is none.

    Bisection on a function that falls in epsilon: the upper end is returned, where the inequality
    was seen to hold.
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


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Epsilon of N(mu, 1) against N(0, 1) at delta > 0, to about 1e-13, never below the truth.

    mu = sqrt(sum of 1 / noise_multiplier^2) for a composition of full-batch Gaussians.

    >>> round(gaussian_epsilon(1.0, 1e-5), 12)
    4.377178095681
    """
    if mu == math.inf:
        return math.inf
    target = math.log(delta) if delta > 0 else -math.inf
    if target == -math.inf:
        return 0.0 if mu == 0 else math.inf
    return smallest_epsilon(lambda epsilon: gaussian_log_delta(mu, epsilon), target)


def gaussian_mu(noise_multipliers: np.ndarray, counts: np.ndarray) -> float:
    """The mu of a composition: sqrt(sum counts / noise_multiplier^2); inf without noise.

    Source: Dong, Roth & Su 2022, Corollary 3.3 (Gaussian mechanisms compose exactly).
    """
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.where(counts > 0, 1.0 / np.asarray(noise_multipliers, dtype=float), 0.0)
        return float(np.sqrt(np.sum(counts * inverse * inverse)))


def _log_difference(first: float, second: float) -> float:
    """log(e^first - e^second), -inf where rounding leaves nothing."""
    return first + math.log(-math.expm1(second - first)) if second < first else -math.inf


def single_step_log_delta(sigma: float, rate: float, epsilon: float) -> tuple[float, float]:
    """(remove, add): log delta of ONE Poisson-subsampled Gaussian, 0 < rate < 1, epsilon >= 0.

    With a = 1 + (e^epsilon - 1)/rate the mixture (1-q) N(0) + q N(1) exceeds e^epsilon N(0) where
    the likelihood ratio of N(1) to N(0) exceeds a, hence
        remove: q [P1(ratio > a) - a P0(ratio > a)];
        add, with b = 1 + (e^-epsilon - 1)/q:  q e^epsilon [b P0(ratio < b) - P1(ratio < b)].
    Neither form subtracts numbers of size 1 - q.

    Source: Balle, Barthe & Gaboardi 2018, Theorem 2 (advanced joint convexity), with equality.
    """
    log_rate = math.log(rate)
    # log a without overflow
    log_a = (
        math.log1p(math.expm1(epsilon) / rate)
        if epsilon < 30
        else epsilon - log_rate + math.log1p(-(1 - rate) * math.exp(-epsilon))
    )
    cut = sigma * log_a + 0.5 / sigma
    remove = log_rate + _log_difference(
        float(log_ndtr(1 / sigma - cut)), log_a + float(log_ndtr(-cut))
    )
    b = 1 + math.expm1(-epsilon) / rate
    if b <= 0:
        return remove, -math.inf
    cut = sigma * math.log(b) + 0.5 / sigma
    add = (
        log_rate
        + epsilon
        + _log_difference(math.log(b) + float(log_ndtr(cut)), float(log_ndtr(cut - 1 / sigma)))
    )
    return remove, add
