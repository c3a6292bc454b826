# SPDX-License-Identifier: Apache-2.0
"""p-values: probability that a correct implementation gives a result as extreme as observed.

Each function takes numbers that should be standard normal, or draws that should be binomial, and
is two-sided. If a statistic is a maximum over k, its p-value is multiplied by k (Bonferroni).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats
from scipy.special import log1p, ndtr

Array = NDArray[np.float64]


def smallest(p_values: Iterable[float]) -> float:
    """Return one p-value for several: the smallest, times their number."""
    found = list(p_values)
    return min(1.0, len(found) * min(found)) if found else 1.0


def chi_square(z: Array) -> float:
    """Return the p-value of variance 1 for standard normal numbers."""
    z = np.asarray(z)
    total, count = float((z.astype(np.float64) ** 2).sum()), z.size
    return _two_sided(stats.chi2(count), total)


def normality(z: Array) -> float:
    """Return the Kolmogorov-Smirnov p-value against the standard normal distribution."""
    if not np.isfinite(z).all():
        return 0.0
    return float(stats.kstest(np.ravel(z).astype(np.float64), ndtr, method="asymp").pvalue)


def normality_of_one(z: float) -> float:
    """Return the p-value of one standard normal number."""
    return float(2 * stats.norm.sf(abs(z))) if np.isfinite(z) else 0.0


def repetition(z: Array) -> float:
    """Return the p-value of no correlation between any two rows of (steps, numbers)."""
    norms = np.linalg.norm(z, axis=1, keepdims=True)
    with np.errstate(all="ignore"):
        unit = np.nan_to_num(z / norms)
    scores = (unit @ unit.T)[np.triu_indices(len(z), 1)] * np.sqrt(z.shape[1])
    return _largest(scores)


def autocorrelation(z: Array) -> float:
    """Return the p-value of no correlation between columns of (steps, numbers) at any lag.

    The columns are coordinates of all parameters, so noise shared between two is detected too.
    """
    steps, count = z.shape
    spectrum = np.zeros(count + 1)
    for row in z:  # all lags at once
        spectrum += np.abs(np.fft.rfft(row, 2 * count)) ** 2
    sums = np.fft.irfft(spectrum)[1 : max(1, count - 1000 // steps)]  # a normal sum each
    terms = steps * (count - np.arange(1, len(sums) + 1))
    return _largest(sums / np.sqrt(terms))


def dispersion(counts: Array, trials: int, rate: float) -> float:
    """Return the p-value of counts that are independent Binomial(trials, rate).

    The sum of squares about the claimed mean has about the gamma distribution of its two moments.
    """
    counts = np.asarray(counts, dtype=np.float64)
    variance = trials * rate * (1 - rate)
    total = float(((counts - trials * rate) ** 2).sum() / variance)
    # Fourth moment of a binomial: 3 v^2 + v (1 - 6 rate (1 - rate)).
    spread = len(counts) * (2 + (1 - 6 * rate * (1 - rate)) / variance)
    scale = spread / len(counts)
    return _two_sided(stats.gamma(len(counts) / scale, scale=scale), total)


def total(count: float, trials: int, rate: float) -> float:
    """Return the p-value of one Binomial(trials, rate) count."""
    return _two_sided(stats.binom(trials, rate), count, discrete=True)


def shared_members(taken: NDArray[np.bool_], rate: float) -> float:
    """Return the p-value of independent batches (steps, examples), by their shared members."""
    z = (taken - rate) / np.sqrt(rate * (1 - rate))
    scores = (z @ z.T)[np.triu_indices(len(z), 1)] / np.sqrt(z.shape[1])
    # Sum of squares of uncorrelated scores, each with excess kurtosis of products of Bernoullis.
    excess = (1 / (rate * (1 - rate)) - 3) ** 2 / z.shape[1]
    scale = 2 + excess
    return _two_sided(stats.gamma(len(scores) / scale, scale=scale), float((scores**2).sum()))


def neighbours(taken: NDArray[np.bool_], rate: float) -> float:
    """Return the p-value of independence of adjacent examples and of consecutive steps."""
    z = (taken - rate) / np.sqrt(rate * (1 - rate))
    pairs = (z[:, 1:] * z[:, :-1], z[1:] * z[:-1], z[1:, 1:] * z[:-1, :-1])
    return smallest(_largest(np.array([p.sum() / np.sqrt(p.size)])) for p in pairs if p.size)


def two_samples(found: Array, expected: Array) -> float:
    """Return the Kolmogorov-Smirnov p-value of two samples."""
    if not np.isfinite(found).all():
        return 0.0
    return float(stats.ks_2samp(found, expected, method="asymp").pvalue)


def log_likelihood_ratio(x: Array, rate: float, sigma: float) -> Array:
    """Return the log density ratio with over without the example, summed over axis 0 (steps).

    Source: Abadi et al. 2016, section 3.2: the privacy loss of the subsampled Gaussian.
    """
    exponent = np.minimum((2 * x - 1) / (2 * sigma**2), 700.0)
    return np.asarray(log1p(rate * np.expm1(exponent)).sum(0))


def _largest(scores: Array) -> float:
    """p-value of the largest of scores that should be standard normal, dependent or not."""
    if not len(scores):
        return 1.0
    if not np.isfinite(scores).all():
        return 0.0
    return min(1.0, 2 * len(scores) * float(stats.norm.sf(np.abs(scores).max())))


def _two_sided(distribution: Any, value: float, *, discrete: bool = False) -> float:
    """Twice the smaller tail; both tails include the value."""
    if not np.isfinite(value):
        return 0.0
    above = distribution.sf(value - 1) if discrete else distribution.sf(value)
    return float(min(1.0, 2 * min(distribution.cdf(value), above)))
