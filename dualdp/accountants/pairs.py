# SPDX-License-Identifier: Apache-2.0
"""The dominating pairs of each mechanism: which (P, Q) an accountant has to compose.

For vectors of norm at most 1 and Gaussian noise, likelihood ratios are sums of exponentials of
jointly Gaussian variables, sum_i w_i exp(Y_i - Var Y_i / 2) with Cov(Y_i, Y_j) = v_i.v_j / s^2. By
Kahane's convexity inequality (1985) the expectation of a convex function of such a sum grows with
every covariance; so among all vectors with |v_i| <= r_i the collinear ones of full length are the
worst, for both hockey-stick divergences E(X - e^eps)_+ and E(1 - e^eps X)_+ at once:
    group of k under Poisson sampling    X = sum_i Binom(k, q)(i) e^{(2ix - i^2)/2s^2}, Q = N(0);
    one example replaced                 N_1 against l N_-1 + (1-l) N_0, the worst case behind
                                         (1-q) N_0 + q N_1 against (1-q) N_0 + q N_-1.
The same is Lemma 4.5 of Choquette-Choo et al. 2024 (arXiv 2310.15526), found another way.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import ndtr

from dualdp.accountants.cells import NDTR_ERROR, Cells, Index, Subsampled, U, flip, quantile
from dualdp.accountants.families import Atoms, Monotone

Array = npt.NDArray[Any]


def laplace(scale: float) -> Atoms | Monotone:
    """Laplace noise of scale b: losses -1/b and 1/b hold atoms, between them a density.

    With x uniform in loss between: P(L >= g) = 1 - e^{(g - 1/b)/2} / 2 inside (-1/b, 1/b).
    """
    top = 1 / scale

    def p_tails(g: Array) -> tuple[Array, Array]:
        # below(g) = P(L < g): 0 up to -top, e^{(g-top)/2}/2 inside, 1 above top
        inside = 0.5 * np.exp((np.clip(g, -top, top) - top) / 2)
        below = np.where(g <= -top, 0.0, np.where(g > top, 1.0, inside))
        return below, 1 - below

    def q_tails(g: Array) -> tuple[Array, Array]:
        above = np.where(
            g <= -top, 1.0, np.where(g > top, 0.0, 0.5 * np.exp((-np.clip(g, -top, top) - top) / 2))
        )
        return 1 - above, above

    return Monotone(
        cut=lambda g: g,
        p_tails=p_tails,
        q_tails=q_tails,
        ends=lambda tail: (-top, top),
        size=min(top * top, 2 * top),
    )


def mixture(sigma: float, rate: float, group: int) -> Monotone:
    """sum_i Binom(k, q)(i) N(i, s^2) against N(0, s^2): a group of k joins or leaves.

    Source: module docstring; Ganesh 2024 (arXiv 2401.10294), Theorem 3.1.
    """
    sizes = np.arange(group + 1, dtype=float)
    log_rest = math.log1p(-rate) if rate < 1 else -math.inf
    weights = np.array(
        [
            math.comb(group, i) * rate**i * (math.exp((group - i) * log_rest) if i < group else 1.0)
            for i in range(group + 1)
        ]
    )
    scale = 1 / sigma**2

    def loss(x: Array) -> Array:
        with np.errstate(divide="ignore"):
            terms = np.log(weights) + np.multiply.outer(x, sizes * scale) - 0.5 * sizes**2 * scale
        return np.asarray(np.logaddexp.reduce(terms, axis=-1))

    def cut(g: Array) -> Array:
        low = np.full_like(g, -45 * sigma - 1)
        high = np.full_like(g, group + 45 * sigma + 1)
        outside, beyond = loss(low) >= g, loss(high) < g
        for _ in range(80):
            middle = 0.5 * (low + high)
            up = loss(middle) < g
            low, high = np.where(up, middle, low), np.where(up, high, middle)
        return np.where(outside, -np.inf, np.where(beyond, np.inf, high))

    def p_tails(x: Array) -> tuple[Array, Array]:
        z = (x[:, None] - sizes) / sigma
        return ndtr(z) @ weights, ndtr(-z) @ weights

    def ends(tail: float) -> tuple[float, float]:
        reach = quantile(tail) * sigma
        low, high = loss(np.array([-reach, group + reach]))
        return float(low), float(high)

    steep = 1 + group * scale * (group + 45 * sigma + 1)
    return Monotone(
        cut=cut,
        p_tails=p_tails,
        q_tails=lambda x: (ndtr(x / sigma), ndtr(-x / sigma)),
        ends=ends,
        size=_binomial_variance(sigma, rate, group),
        slack=64 * U * steep + 4 * group * U,
    )


def _binomial_variance(sigma: float, rate: float, group: int) -> float:
    """Size of the loss' variance for a group; only a guide for the grid."""
    inverse = (group / sigma) ** 2
    chi = rate**2 * math.expm1(min(inverse, 50.0))
    return float(max(min(chi, inverse + 0.25 * inverse**2), 1e-280))


def substitution(sigma: float, rate: float) -> Monotone:
    """(1-q) N(0) + q N(1) against (1-q) N(0) + q N(-1): one example replaced, Poisson sampling.

    The loss grows with x and is g where sinh(x/s^2 - g/2) = sinh(g/2) (1-q) e^{1/2s^2} / q.
    It is its own reverse (x -> -x). Source: module docstring, with the advanced joint convexity of
    Balle, Barthe & Gaboardi 2018: q H(N_1 || l N_-1 + (1-l) N_0) for both orders of the pair.
    """
    weight = (1 - rate) / rate * math.exp(min(0.5 / sigma**2, 600.0))

    def cut(g: Array) -> Array:
        half = g / 2
        return np.asarray(sigma**2 * (half + np.arcsinh(weight * np.sinh(half))))

    def tails(x: Array, center: float) -> tuple[Array, Array]:
        z0, z1 = x / sigma, (x - center) / sigma
        below = (1 - rate) * ndtr(z0) + rate * ndtr(z1)
        return below, (1 - rate) * ndtr(-z0) + rate * ndtr(-z1)

    def ends(tail: float) -> tuple[float, float]:
        x = 1 + quantile(tail) * sigma
        scale = 2 * sigma**2
        rest = math.log1p(-rate)
        top = np.logaddexp(rest, math.log(rate) + (2 * x - 1) / scale)
        top -= np.logaddexp(rest, math.log(rate) + (-2 * x - 1) / scale)
        return -float(top), float(top)

    inverse = sigma**-2.0
    chi = 2 * rate**2 * math.expm1(min(inverse, 50.0))
    return Monotone(
        cut=cut,
        p_tails=lambda x: tails(x, 1.0),
        q_tails=lambda x: tails(x, -1.0),
        ends=ends,
        size=min(chi, 4 * inverse + 4 * inverse**2),
        slack=64 * U * (1 + inverse),
    )


@dataclasses.dataclass(frozen=True)
class FixedSize:
    """Sampling without replacement, one example replaced: the curve with both orders' worst halves.

    With s' = s/2 and delta_r, delta_a those of (1-q) N(0) + q N(1) against N(0) and its reverse,
    delta_r holds for epsilon >= 0 and delta_a for epsilon < 0. Joined at 0, where they agree (total
    variation), they form a convex curve, hence a pair: the remove pair's cells above 0, the add
    pair's cells below 0, and what is missing, (1-q)(Phi(1/2s') - Phi(-1/2s')), as an atom at 0.

    Source: Zhu, Dong & Wang 2022 (arXiv 2106.08567), Proposition 30 and Theorem 11 (subsampling
    under replacement); Balle, Barthe & Gaboardi 2018, Theorem 11.
    """

    sigma: Array  # already halved
    rate: Array

    @property
    def rows(self) -> int:
        """How many mechanisms."""
        return self.sigma.size

    def span(self, tail: float) -> tuple[Array, Array]:
        """Symmetric around 0."""
        _, high = Subsampled(self.sigma, self.rate).span(tail)
        return -high, high

    def variance(self) -> Array:
        """About twice that of one order."""
        return 2 * Subsampled(self.sigma, self.rate).variance()

    def cells(self, rows: Index, index: Index, spacing: float) -> Cells:
        """The mass table, put together at loss 0."""
        one = Subsampled(self.sigma, self.rate)
        above = one.cells(rows, index[index >= 0], spacing)
        below = flip(one.cells(rows, -index[index <= 0][::-1], spacing))
        s, q = self.sigma[rows], self.rate[rows]
        atom = ((1 - q) * (ndtr(0.5 / s) - ndtr(-0.5 / s)))[:, None]
        first = np.zeros(above.p.shape[1])
        first[0] = 1.0
        width = -math.expm1(-float(above.edges[1]))

        def join(left: Array, right: Array, added: Array | float = 0.0) -> Array:
            return np.concatenate([left, right + added * first], axis=1)

        error = atom * 4 * NDTR_ERROR
        zero = np.zeros(rows.size)
        return Cells(
            index=index,
            spacing=spacing,
            p=join(below.p, above.p, atom),
            q=join(below.q, above.q, atom),
            surplus=join(below.surplus, above.surplus),
            deficit=join(below.deficit, above.deficit, atom * width),
            p_error=join(below.p_error, above.p_error, error),
            q_error=join(below.q_error, above.q_error, error),
            surplus_error=join(below.surplus_error, above.surplus_error, error),
            deficit_error=join(below.deficit_error, above.deficit_error, error),
            p_bottom=below.p_bottom,
            q_bottom=below.q_bottom,
            p_top=above.p_top,
            q_top=above.q_top,
            never=zero,
            always=zero,
            slack=np.maximum(below.slack, above.slack),
        )


def discrete_gaussian(sigma: float, shift: int) -> Atoms:
    """Discrete Gaussians on the integers around `shift` and 0; far outcomes count as infinite loss.

    Source: Canonne, Kamath & Steinke 2020, definition 1.
    """
    reach = math.ceil(40 * sigma) + shift + 2
    x = np.arange(-reach, reach + shift + 1, dtype=float)
    p, q = np.exp(-0.5 * ((x - shift) / sigma) ** 2), np.exp(-0.5 * (x / sigma) ** 2)
    # the tails beyond 40 sigma hold less than e^-790: nothing that a double can tell
    return Atoms(p / p.sum(), q / q.sum(), error=1e-12)


def randomized_response(noise: float, buckets: int) -> Atoms:
    """k-ary randomised response of two different truths."""
    lie = noise / buckets
    truth = 1 - noise + lie
    rest = (buckets - 2) * lie
    return Atoms(np.array([truth, lie, rest]), np.array([lie, truth, rest]))


def black_box(epsilon: float, delta: float) -> Atoms:
    """(epsilon, delta)-DP: delta at infinity, the rest randomised response.

    Source: Kairouz, Oh & Viswanath 2015, Theorem 3.4 (it dominates every such mechanism).
    """
    high = (1 - delta) / (1 + math.exp(-epsilon))
    low = high * math.exp(-epsilon)
    return Atoms(np.array([delta, high, low, 0.0]), np.array([0.0, low, high, delta]))


def table(p: tuple[float, ...], q: tuple[float, ...]) -> Atoms:
    """The user's masses, normalised."""
    first, second = np.array(p), np.array(q)
    return Atoms(first / first.sum(), second / second.sum(), error=4 * U * (len(p) + 4))
