# SPDX-License-Identifier: Apache-2.0
"""Renyi accountant: fast, and 5 to 25 % looser than `pld` for DP-SGD.

Divergences are computed as `K(a) = log E_Q[(P/Q)^a] = (a - 1) R_a`. With X = P/Q and E_Q[X] = 1,

    e^K(a) - 1 = E_Q[X^a - 1 - a (X - 1)],
whose integrand is never negative: nothing cancels, however small the divergence is.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from scipy.special import gammaln

from dualdp import _validate, mechanisms
from dualdp._validate import AccountingError
from dualdp.accountants.base import Accountant, as_gaussian, num_epochs
from dualdp.accountants.pld_engine.pairs import log_mixture
from dualdp.mechanisms import Mechanism

Array = npt.NDArray[Any]

_KNOWN = (
    mechanisms.PoissonSubsampledGaussian,
    mechanisms.Laplace,
    mechanisms.DiscreteGaussian,
    mechanisms.RandomizedResponse,
)
ORDERS: Array = np.array(
    [
        *(1 + x / 10 for x in range(1, 100)),
        *range(11, 64),
        *(64, 72, 80, 96, 112, 128, 160, 192, 256, 384, 512, 768, 1024, 1536, 2048, 4096),
    ]
)
# Relative margins that make every curve an upper bound in floating point. The sums have positive
# terms only: 1e-12 covers the errors of gammaln and exp; the quadrature is exact to 1e-13 (tests
# compare both with 40-digit arithmetic).
_SUM_MARGIN, _QUADRATURE_MARGIN = 1e-12, 1e-11
_MIN_QUADRATURE_SIGMA = 0.1
_MAX_QUADRATURE_ORDER = 64.5
_ROWS = 64


def rdp_to_epsilon(orders: Array, rdp: Array, delta: float) -> float:
    """Return epsilon at delta.

    epsilon = min over orders a of R_a + log1p(-1/a) - log(delta a)/(a - 1). It is 0 if some R_a,
    which is at least the Kullback-Leibler divergence, gives delta >= sqrt(1 - e^-R).

    Source: Canonne, Kamath & Steinke 2020, Proposition 12; Bretagnolle & Huber 1979.
    """
    if np.any(rdp <= 0) or np.any(delta * delta > -np.expm1(-rdp)) or delta == 1:
        return 0.0
    if delta == 0:
        return math.inf
    with np.errstate(over="ignore", invalid="ignore"):
        values = rdp + np.log1p(-1 / orders) - (math.log(delta) + np.log(orders)) / (orders - 1)
    return max(0.0, float(np.nanmin(values, initial=np.inf)))


def rdp_to_delta(orders: Array, rdp: Array, epsilon: float) -> float:
    """Return the smallest delta over the orders: `rdp_to_epsilon` solved for delta."""
    if np.any(rdp <= 0):
        return 0.0
    exponents = (orders - 1) * (rdp - epsilon + np.log1p(-1 / orders)) - np.log(orders)
    least = 0.5 * math.log(-math.expm1(-float(np.min(rdp))))
    return math.exp(float(np.nanmin(exponents, initial=min(0.0, least))))


class RDPAccountant(Accountant):
    """Accountant by Renyi divergences at orders up to 4,096.

    Its bounds are (0, e, e): a Renyi curve gives no lower bound.

    Args:
        neighboring_relation: str, see `Accountant`.
        group_size: int, see `Accountant`; must be 1 for all but plain Gaussians.

    Source: Mironov 2017; Mironov, Talwar & Zhang 2019; Zhu & Wang 2019.
    """

    name: ClassVar[str] = "rdp"

    def __init__(self, *, neighboring_relation: str = "add_or_remove", group_size: int = 1) -> None:
        super().__init__(neighboring_relation=neighboring_relation, group_size=group_size)
        self._cache: dict[Mechanism, Array] = {}

    def rdp(self) -> Array:
        """Return the (orders,) Renyi divergences of the whole history."""
        self._fill_cache()
        counts = [(event, num_epochs(event, count)) for event, count in self._counts.items()]
        return sum((n * self._cache[event] for event, n in counts if n), np.zeros_like(ORDERS))

    def _epsilon(self, delta: float, rtol: float) -> float:
        return rdp_to_epsilon(ORDERS, self.rdp(), delta)

    def get_delta(self, *, epsilon: float) -> float:
        """Return an upper bound on delta at `epsilon`."""
        return rdp_to_delta(ORDERS, self.rdp(), _validate.non_negative("epsilon", epsilon))

    def _check(self, event: Mechanism) -> None:
        if as_gaussian(event) is not None:
            return
        kind = type(event)  # a subclass may mean another mechanism
        if self.group_size > 1 or kind not in _KNOWN:
            raise AccountingError(
                f"{kind.__name__} with group_size={self.group_size} has no Renyi bound here. "
                "Use accountant='pld', or group_size=1."
            )

    def _fill_cache(self) -> None:
        """Compute the Renyi curves of new events, all subsampled ones in one batch."""
        sensitivity = self._sensitivity()
        sampled: list[Any] = []
        for event in [event for event in self._counts if event not in self._cache]:
            sigma = as_gaussian(event)
            match event:
                case _ if sigma is not None:
                    curve = gaussian(sigma / sensitivity, ORDERS)
                case mechanisms.DiscreteGaussian(noise):  # Canonne, Kamath & Steinke 2020, Thm 7
                    curve = gaussian(noise / sensitivity, ORDERS)
                case mechanisms.Laplace(scale):
                    curve = laplace(scale / sensitivity, ORDERS)
                case mechanisms.RandomizedResponse(noise, buckets):
                    curve = randomized_response(noise, buckets, ORDERS)
                case _:
                    sampled.append(event)
                    continue
            self._cache[event] = curve
        if sampled:
            sigmas = np.array([event.noise_multiplier for event in sampled])
            rates = np.array([event.sample_rate for event in sampled])
            curves = subsampled_gaussian(
                sigmas, rates, ORDERS, substitute=self.neighboring_relation == "replace"
            )
            self._cache.update(zip(sampled, curves, strict=True))


def gaussian(sigma: float, orders: Array) -> Array:
    """Return (orders,) R_a = a / (2 sigma^2). Source: Mironov 2017, Proposition 7."""
    with np.errstate(divide="ignore", over="ignore"):
        return np.asarray(orders / (2 * np.float64(sigma) ** 2))


def laplace(scale: float, orders: Array) -> Array:
    """Return the (orders,) curve for Laplace scale b. Source: Mironov 2017, Proposition 6."""
    if scale == 0:
        return np.full_like(orders, np.inf)
    a = orders
    first = np.log(a / (2 * a - 1)) + (a - 1) / scale
    second = np.log((a - 1) / (2 * a - 1)) - a / scale
    return np.asarray(np.logaddexp(first, second) / (a - 1) * (1 + _SUM_MARGIN))


def randomized_response(noise: float, buckets: int, orders: Array) -> Array:
    """Return the (orders,) curve of k-ary response. Source: Mironov 2017, Proposition 5."""
    lie = noise / buckets
    if lie == 0:
        return np.full_like(orders, np.inf)
    p = np.log(np.maximum([1 - noise + lie, lie, (buckets - 2) * lie], 1e-300))
    total = np.logaddexp.reduce(np.outer(orders, p) + np.outer(1 - orders, p[[1, 0, 2]]), axis=1)
    return np.asarray(np.maximum(total, 0) / (orders - 1) * (1 + _SUM_MARGIN) + 1e-15)


def subsampled_gaussian(
    sigma: Array, rate: Array, orders: Array, *, substitute: bool = False
) -> Array:
    """Return (rows, orders) upper bounds on R_a of Poisson-subsampled Gaussians, inf for sigma = 0.

    Args:
        sigma: (rows,) noise multipliers, >= 0.
        rate: (rows,) sampling rates in [0, 1].
        orders: (orders,) each > 1.
        substitute: bool, True for the relation `replace`: sensitivity 2, and at least the exact
            pair of one replaced example, (1-q) N(0) + q N(1) against (1-q) N(0) + q N(-1).

    Source: Mironov, Talwar & Zhang 2019, section 3.3; the direction "remove" dominates (Theorem 5).
    """
    out = np.zeros((sigma.size, orders.size))
    out[(rate > 0) & (sigma == 0)] = np.inf
    sigma = np.minimum(sigma, 1e100)  # no overflow; less noise is safe
    active = np.flatnonzero((rate > 0) & (sigma > 0))
    for start in range(0, active.size, _ROWS):
        rows = active[start : start + _ROWS]
        s, q = sigma[rows], rate[rows]
        moments = _log_moments(s / 2 if substitute else s, q, orders)
        if substitute:
            moments = np.maximum(moments, _substitution(s, q, orders))
        out[rows] = moments / (orders - 1)
    return out


def _log_moments(sigma: Array, rate: Array, orders: Array) -> Array:
    """(rows, orders) K(a) of (1-q) N(0) + q N(1) against N(0)."""
    whole = orders == np.floor(orders)
    exact = {1: np.zeros_like(sigma)}
    for a in set(np.concatenate([np.floor(orders), np.ceil(orders)])) - {1}:
        exact[a] = _integer_moment(sigma, rate, int(a))
    out = np.empty((sigma.size, orders.size))
    smooth = sigma >= _MIN_QUADRATURE_SIGMA
    for k, a in enumerate(orders):
        low, high, t = exact[math.floor(a)], exact[math.ceil(a)], a % 1
        # K is convex in a: the chord between integers is an upper bound
        out[:, k] = (1 - t) * low + t * high if t else low
    narrow = np.flatnonzero(~whole & (orders < _MAX_QUADRATURE_ORDER))
    if narrow.size and np.any(smooth):
        s, q = sigma[smooth], rate[smooth]
        x, log_weight = _nodes(s, 0.0, float(orders[narrow].max()))
        log_ratio = log_mixture(q[:, None], (2 * x - 1) / (2 * s * s)[:, None])
        values = _quadrature(log_ratio, log_weight, orders[narrow])
        block = np.ix_(smooth, narrow)
        out[block] = np.minimum(out[block], values)
    return out


def _integer_moment(sigma: Array, rate: Array, order: int) -> Array:
    """(rows,) log(1 + sum_{i>=2} C(a,i) q^i (1-q)^(a-i) (e^{(i^2-i)/2s^2} - 1)), integer a."""
    i = np.arange(2, order + 1, dtype=float)
    binomial = gammaln(order + 1) - gammaln(i + 1) - gammaln(order - i + 1)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        exponent = (i * i - i) / (2 * sigma * sigma)[:, None]
        rest = np.where(i < order, (order - i) * np.log1p(-rate)[:, None], 0.0)
        terms = binomial + i * np.log(rate)[:, None] + rest + exponent
        terms += np.log(-np.expm1(-exponent))
        total = _log_sum_exp(terms)
    # rounding of the exponents costs |exponent| ulps, hence a margin relative to the total
    total = total + _SUM_MARGIN * (1 + np.abs(total))
    return np.asarray(np.where(np.isfinite(total), np.logaddexp(0.0, total), np.inf))


def _log_sum_exp(logs: Array) -> Array:
    """(rows, n) -> (rows,)."""
    largest = logs.max(axis=1, keepdims=True)
    return np.asarray(np.log(np.exp(logs - largest).sum(axis=1)) + largest[:, 0])


def _nodes(sigma: Array, left: float, right: float) -> tuple[Array, Array]:
    """(rows, nodes) trapezoid nodes from -left - 9.5 sigma to right + 9.5 sigma, and log weights.

    The integrand is analytic up to |Im x| = pi sigma^2, so the error is exp(-2 pi^2 sigma^2 / dx).
    """
    least = float(sigma.min())
    step = min(1 / 8, 0.5 * least)
    t = np.arange(-9.5 - left / least, 9.5 + right / least + step, step)
    log_weight = -0.5 * t * t + math.log(step / math.sqrt(2 * math.pi))
    return sigma[:, None] * t, np.broadcast_to(log_weight, (sigma.size, t.size))


def _quadrature(log_ratio: Array, log_weight: Array, orders: Array) -> Array:
    """(rows, orders) log(1 + weighted sum of X^a - 1 - a (X - 1)), with X = e^log_ratio."""
    out = np.empty((log_ratio.shape[0], orders.size))
    for k, a in enumerate(orders):
        logs = _log_excess(log_ratio, float(a)) + log_weight
        out[:, k] = np.logaddexp(0.0, _log_sum_exp(logs) + _QUADRATURE_MARGIN)
    return out


def _log_excess(loss: Array, order: float) -> Array:
    """log(e^{aL} - 1 - a (e^L - 1)) >= -inf, by a series where L is small."""
    a, z = order, order * loss
    c2, c3 = a * (a - 1) / 2, a * (a * a - 1) / 6
    c4, c5 = a * (a**3 - 1) / 24, a * (a**4 - 1) / 120
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        series = np.log(loss * loss * (c2 + loss * (c3 + loss * (c4 + loss * c5))))
        plain = np.log(np.expm1(np.minimum(z, 30)) - a * np.expm1(np.minimum(loss, 30 / a)))
        correction = (1 - a + a * np.exp(np.minimum(loss, 700))) * np.exp(-np.minimum(z, 700))
        large = z + np.log1p(-np.minimum(correction, 0.5))
    out = np.where(np.abs(z) < 3e-3, series, np.where(z < 30, plain, large))
    return np.asarray(np.where(np.isnan(out), -np.inf, out))


def _substitution(sigma: Array, rate: Array, orders: Array) -> Array:
    """(rows, orders) K(a) of (1-q) N(0) + q N(1) against (1-q) N(0) + q N(-1), or inf.

    Orders above the quadrature's range and tiny sigma give inf: the conversion to epsilon then
    does not use that order.
    """
    out = np.full((sigma.size, orders.size), np.inf)
    narrow = np.flatnonzero(orders < _MAX_QUADRATURE_ORDER)
    rows = np.flatnonzero(sigma >= _MIN_QUADRATURE_SIGMA)
    if not narrow.size or not rows.size:
        return out
    s, q = sigma[rows], rate[rows][:, None]
    x, log_weight = _nodes(s, 1.0, float(orders[narrow].max()))
    scale = (2 * s * s)[:, None]
    above = log_mixture(q, (2 * x - 1) / scale)
    below = log_mixture(q, (-2 * x - 1) / scale)
    # E_Q is the weights of N(0) times Q / N(0)
    out[np.ix_(rows, narrow)] = _quadrature(above - below, log_weight + below, orders[narrow])
    return out
