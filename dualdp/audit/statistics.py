# SPDX-License-Identifier: Apache-2.0
"""p-values: probability that a correct implementation gives a result as extreme as observed.

Each function takes numbers that should be standard normal, or draws that should be binomial, and
is two-sided; of numbers that are not finite it is nan or 0. If a statistic is a maximum over k, its
p-value is multiplied by k (Bonferroni).
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
    found = [*p_values]
    return float(np.minimum(1.0, max(1, len(found)) * np.min(found, initial=1.0)))


def chi_square(z: Array) -> float:
    """Return the p-value of variance 1 for standard normal numbers."""
    return _two_sided(stats.chi2(z.size), float((z**2).sum()))


def normality(z: Array) -> float:
    """Return the Kolmogorov-Smirnov p-value against the standard normal distribution."""
    return float(stats.kstest(np.ravel(z), ndtr, method="asymp").pvalue)


def repetition(z: Array) -> float:
    """Return the p-value of no correlation between any two rows of (steps, numbers)."""
    with np.errstate(all="ignore"):
        unit = np.nan_to_num(z / np.linalg.norm(z, axis=1, keepdims=True))
    return largest((unit @ unit.T)[np.triu_indices(len(z), 1)] * np.sqrt(z.shape[1]))


def autocorrelation(z: Array) -> float:
    """Return the p-value of no correlation between columns of (steps, numbers) at any lag.

    The columns are coordinates of all parameters, so noise shared between two is detected too.
    """
    steps, count = z.shape
    spectrum = np.zeros(count + 1)
    for row in z:  # all lags at once
        spectrum += np.abs(np.fft.rfft(row, 2 * count)) ** 2
    sums = np.fft.irfft(spectrum)[1 : max(1, count - 1000 // steps)]  # a normal sum each
    return largest(sums / np.sqrt(steps * (count - np.arange(1, len(sums) + 1))))


def dispersion(counts: Array, trials: int, rate: float) -> float:
    """Return the p-value of counts that are independent Binomial(trials, rate).

    The sum of squares about the claimed mean has about the gamma distribution of its two moments.
    """
    variance = trials * rate * (1 - rate)
    # Fourth moment of a binomial: 3 v^2 + v (1 - 6 rate (1 - rate)).
    scale = 2 + (1 - 6 * rate * (1 - rate)) / variance
    squares = (np.asarray(counts, dtype=np.float64) - trials * rate) ** 2 / variance
    return _two_sided(stats.gamma(len(squares) / scale, scale=scale), float(squares.sum()))


def total(count: float, trials: int, rate: float) -> float:
    """Return the p-value of one Binomial(trials, rate) count."""
    return _two_sided(stats.binom(trials, rate), count, atom=1)


def shared_members(taken: NDArray[np.bool_], rate: float) -> float:
    """Return the p-value of independent batches (steps, examples), by their shared members."""
    z = (taken - rate) / np.sqrt(rate * (1 - rate))
    scores = (z @ z.T)[np.triu_indices(len(z), 1)] / np.sqrt(z.shape[1])
    # Sum of squares of uncorrelated scores, each with excess kurtosis of products of Bernoullis.
    scale = 2 + (1 / (rate * (1 - rate)) - 3) ** 2 / z.shape[1]
    return _two_sided(stats.gamma(len(scores) / scale, scale=scale), float((scores**2).sum()))


def neighbours(taken: NDArray[np.bool_], rate: float) -> float:
    """Return the p-value of independence of adjacent examples and of consecutive steps."""
    z = (taken - rate) / np.sqrt(rate * (1 - rate))
    pairs = (z[:, 1:] * z[:, :-1], z[1:] * z[:-1], z[1:, 1:] * z[:-1, :-1])
    return smallest(largest(np.array([p.sum() / np.sqrt(p.size)])) for p in pairs if p.size)


def log_likelihood_ratio(x: Array, rate: float, sigma: float) -> Array:
    """Return the log density ratio with over without the example, summed over axis 0 (steps).

    Source: Abadi et al. 2016, section 3.2: the privacy loss of the subsampled Gaussian.
    """
    exponent = np.minimum((2 * x - 1) / (2 * sigma**2), 700.0)
    return np.asarray(log1p(rate * np.expm1(exponent)).sum(0))


def largest(scores: Array) -> float:
    """Return the p-value of the largest of standard normal scores, dependent or not."""
    one = 2 * stats.norm.sf(np.abs(scores).max(initial=0.0))
    return float(np.minimum(1.0, max(1, len(scores)) * one))


def _two_sided(distribution: Any, value: float, *, atom: float = 0) -> float:
    """Twice the smaller tail; both tails include the value, which is one of those `atom` apart."""
    tails = distribution.cdf(value), distribution.sf(value - atom)
    return float(np.minimum(1.0, 2 * np.min(tails)))
