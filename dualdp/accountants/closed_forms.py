# SPDX-License-Identifier: Apache-2.0
"""Closed forms: Gaussians, one Poisson-subsampled step, and the central limit of many."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import erfcx, log_ndtr

from dualdp import _validate
from dualdp.accountants.search import smallest_epsilon

Array = NDArray[np.float64]

#: Relative margin added to every epsilon of a closed form.
MARGIN = 1e-12
_U = 2.0**-53
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(8)
_FAR = 15.0  # above: ten terms of the asymptotic series of Mills' ratio are exact to rounding


def gaussian_log_delta(mu: float, epsilon: float) -> float:
    """Return log delta of N(mu, 1) against N(0, 1), rounded up.

    delta = Phi(mu/2 - epsilon/mu) - e^epsilon Phi(-mu/2 - epsilon/mu). With s = epsilon/mu - mu/2,
    the density phi and Mills' ratio R(x) = Phi(-x) / phi(x), delta = phi(s) [R(s) - R(s + mu)].
    Where mu is small (noise multiplier 1e8) both differences cancel completely; the second one is
    then computed as the integral of -R'(x) = 1 - x R(x) over [s, s + mu].

    Guarantees:
        Never below the truth, for noise multipliers from 1e-2 to 1e12.
            [test_closed_forms_are_never_below_the_truth]

    Source: Balle & Wang 2018, Theorem 8.
    """
    if mu == 0:
        return -math.inf
    quotient = epsilon / mu
    s = quotient - mu / 2
    if math.isinf(quotient):
        return -math.inf
    # One rounding error in epsilon, mu or s changes log delta by |s| (epsilon/mu + mu + |s|) ulps.
    doubt = 1e-14 + 16 * _U * (1 + abs(s)) * (quotient + mu + abs(s))
    if s < -5:  # so mu > 10, and the second term is no more than e^-50 of the first
        first, second = float(log_ndtr(-s)), epsilon + float(log_ndtr(-s - mu))
        return first + math.log(-math.expm1(second - first)) + doubt
    if mu < 0.5:
        x = s + 0.5 * mu * (1 + _NODES)
        difference = 0.5 * mu * float(_WEIGHTS @ mills_slope(x))
    else:
        difference = float(_mills(s) - _mills(s + mu))
    log_density = -0.5 * s * s - 0.5 * math.log(2 * math.pi)
    return log_density + math.log(difference) + doubt


def _mills(x: Any) -> Any:
    """Mills' ratio Phi(-x) / phi(x), x >= -6."""
    return math.sqrt(0.5 * math.pi) * erfcx(x * math.sqrt(0.5))


def mills_slope(x: Array) -> Array:
    """-R'(x) = 1 - x R(x) > 0, minus the derivative of Mills' ratio."""
    series, term = np.zeros_like(x), 1 / np.maximum(x, _FAR) ** 2
    for k in range(1, 11):  # 1/x^2 - 3/x^4 + 15/x^6 - ...
        series += term
        term = -term * (2 * k + 1) / np.maximum(x, _FAR) ** 2
    return np.where(x < _FAR, 1 - x * _mills(np.minimum(x, _FAR)), series)


def log_mixture(rate: Any, exponent: Any) -> Any:
    """log(1 - q + q e^exponent), elementwise: accurate near 0 and without overflow."""
    growth = rate * np.expm1(np.minimum(exponent, 30.0))
    is_small = (exponent < 30.0) & (growth > -0.99)  # below, 1 + growth cancels
    with np.errstate(divide="ignore"):
        large = np.logaddexp(np.log1p(-rate), np.log(rate) + exponent)
    return np.where(is_small, np.log1p(np.maximum(growth, -0.99)), large)


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Return epsilon of N(mu, 1) against N(0, 1) at delta > 0: to 1e-13, never below the truth.

    mu = sqrt(sum of 1 / noise_multiplier^2) for a composition of full-batch Gaussians.

    >>> round(gaussian_epsilon(1.0, 1e-5), 12)
    4.377178095681
    """
    if mu == 0 or mu == math.inf or delta == 0:
        return 0.0 if mu == 0 else math.inf
    return smallest_epsilon(lambda epsilon: gaussian_log_delta(mu, epsilon), math.log(delta))


def gaussian_mu(noise_multipliers: np.ndarray, counts: np.ndarray) -> float:
    """Return mu = sqrt(sum counts / noise_multiplier^2) of a composition, rounded up.

    Source: Dong, Roth & Su 2022, Corollary 3.3 (Gaussian mechanisms compose exactly).
    """
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.where(counts > 0, 1.0 / np.asarray(noise_multipliers, dtype=float), 0.0)
        return float(np.sqrt(np.sum(counts * inverse * inverse))) * (1 + 1e-15)


def single_step_log_delta(sigma: float, rate: float, epsilon: float) -> tuple[float, float]:
    """Return log delta (remove, add) of one Poisson-subsampled Gaussian step, 0 < rate < 1.

    The mixture (1-q) N(0) + q N(1) exceeds e^epsilon N(0) where the likelihood ratio of N(1) to
    N(0) exceeds a = 1 + (e^epsilon - 1)/q. N(0) exceeds e^epsilon times the mixture where that
    ratio is below b = 1 + (e^-epsilon - 1)/q. Both follow from the plain Gaussian's delta:
        remove: q delta(log a);    add: q e^epsilon b delta(-log b).

    Source: Balle, Barthe & Gaboardi 2018, Theorem 2 (advanced joint convexity), with equality.
    """
    log_rate = math.log(rate)
    # log a without overflow
    log_a = (
        math.log1p(math.expm1(epsilon) / rate)
        if epsilon < 30
        else epsilon - log_rate + math.log1p(-(1 - rate) * math.exp(-epsilon))
    )
    remove = log_rate + gaussian_log_delta(1 / sigma, log_a)
    less = math.expm1(-epsilon) / rate  # b - 1
    if less <= -1:
        return remove, -math.inf
    log_b = math.log1p(less)
    return remove, log_rate + epsilon + log_b + gaussian_log_delta(1 / sigma, -log_b)


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
