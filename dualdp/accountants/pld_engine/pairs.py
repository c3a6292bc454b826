# SPDX-License-Identifier: Apache-2.0
"""Dominating pair (P, Q) of each mechanism, as masses in cells of the privacy loss.

A table (`Cells`) is all that the engine knows of a mechanism: masses of P in cells of the privacy
loss L = log(P/Q), or those of Q. Edges g_0 < g_1 < ... are multiples of one lattice spacing h; with
a = g_j, b = g_{j+1} a cell [a, b) holds

    p_j = P(a <= L < b),  q_j = Q(same),  surplus_j = p_j - e^a q_j,  deficit_j = q_j - e^-b p_j,

the last two >= 0 and, for subsampled mechanisms, computed without the cancellation of their
definition. Each number has an error bound, so that later results can be rounded in the safe
direction. Swapping P and Q negates the loss, and makes the deficit of Q the surplus.

A `PairFamily` holds the pairs of several mechanisms of one kind, one per row: `span(tail)` are the
(rows,) losses below and above which P and Q hold at most about `tail`, `variance()` the (rows,)
approximate variances of the loss, for the choice of the grid, and `cells(rows, g, of_q)` the table
of P of some rows on the edges `g`, or that of Q.

Why these pairs dominate: docs/accounting.md, section 2.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

Array = NDArray[np.floating[Any]]
Index = NDArray[np.int64]

U = 2.0**-53
# Relative error of scipy.special.ndtr for |z| < 38 [test_ndtr_is_as_accurate_as_assumed].
NDTR_ERROR = 4e-13


@dataclasses.dataclass(frozen=True)
class Cells:
    """Masses of P (or of Q) of several mechanisms (rows) in the same cells of the loss.

    `excess` is the surplus of P, or the deficit of Q. `below` and `above` are the masses outside
    the edges, infinite losses included. `slack` bounds |loss - edge| at the edges.
    """

    mass: Array  # (rows, cells)
    excess: Array
    mass_error: Array
    excess_error: Array
    below: Array  # (rows,)
    above: Array
    slack: Array

    def reversed(self) -> Cells:
        """Return the same masses, the loss negated."""
        tables = (self.mass, self.excess, self.mass_error, self.excess_error)
        mass, excess, error, doubt = [table[:, ::-1] for table in tables]
        return Cells(mass, excess, error, doubt, self.above, self.below, self.slack)


#: (rows, cells) masses and their errors, (rows,) masses below and above the edges.
Masses = tuple[Array, Array, Array, Array]


def _between_cuts(below: Array, above: Array) -> Masses:
    """(..., edges) masses below and above -> masses between, by the smaller tails.

    Each mass is a difference on the side of the smaller tail: its error is at most the relative
    error of `ndtr` times the tails involved, and a few ulps of a mass across the median.
    """
    small = np.minimum(below, above)
    low, high, over, under = below[..., :-1], below[..., 1:], above[..., :-1], above[..., 1:]
    mass = np.where(
        low <= over, np.where(under <= high, (1.0 - low) - under, high - low), over - under
    )
    error = NDTR_ERROR * (small[..., :-1] + small[..., 1:]) + 4 * U * mass
    return np.maximum(mass, 0.0), error, below[..., 0], above[..., -1]


@dataclasses.dataclass(frozen=True)
class Subsampled:
    """P = (1-q) N(0, s^2) + q N(1, s^2) against Q = N(0, s^2): Poisson sampling, example removed.

    With u_g = 1 + (e^g - 1)/q the loss exceeds g where (2x - 1)/(2 s^2) > log u_g, and
        surplus = q (m1 - u_a m0),   deficit = q e^-b (u_b m0 - m1),
    with m0, m1 the masses of N(0) and N(1): the large terms (1-q) m0 cancel algebraically.
    """

    sigma: Array
    rate: Array

    def span(self, tail: float) -> tuple[Array, Array]:
        """Return the loss at the lower `tail` quantile of N(0) and at the upper one of N(1)."""
        z, scale = quantile(tail) * self.sigma, 2 * self.sigma * self.sigma
        exponent = np.stack([2 * -z - 1, 2 * (1 + z) - 1]) / scale
        low, high = log_mixture(self.rate, exponent)
        return low, high

    def variance(self) -> Array:
        """Return the smaller of the chi-square divergence and the Gaussian's variance."""
        inverse = self.sigma**-2.0
        chi = self.rate**2 * np.expm1(np.minimum(inverse, 50.0))
        return np.asarray(np.minimum(chi, inverse + 0.25 * inverse**2))

    def cells(self, rows: Index, g: Array, of_q: bool) -> Cells:
        """Return the table of some rows."""
        s, q = self.sigma[rows, None], self.rate[rows, None]
        # u_g, negative where no x has so small a loss. By expm1 near g = 0, by e^g - (1-q) far
        # below: the error of q u_g is a few ulps of e^g in both cases, hence a few of the loss.
        far = (np.exp(np.minimum(g, 0.0)) - (1 - q)) / q
        ratio = np.where(g < -0.5, far, 1 + np.expm1(g) / q)
        with np.errstate(divide="ignore"):
            z = s * np.log(np.maximum(ratio, 0.0)) + 0.5 / s
        z = np.stack([z, z - 1 / s])
        tail, right = ndtr(-np.abs(z)), z > 0
        cuts = np.where(right, 1 - tail, tail), np.where(right, tail, 1 - tail)
        (m0, m1), (e0, e1), (below, below1), (above, above1) = _between_cuts(*cuts)
        slack = 16 * U * (2 + self.sigma[rows] ** -2.0 + max(abs(g[0]), abs(g[-1])))
        if of_q:
            upper, shrunk = np.maximum(ratio[:, 1:], 0.0), q * np.exp(-g[1:])
            excess, doubt = shrunk * (upper * m0 - m1), shrunk * (upper * e0 + e1)
            mass, error = m0, e0
        else:
            lower, rates = ratio[:, :-1], self.rate[rows]
            excess, doubt = q * (m1 - lower * m0), q * (e1 + np.abs(lower) * e0)
            mass, error = (1 - q) * m0 + q * m1, (1 - q) * e0 + q * e1
            below = (1 - rates) * below + rates * below1
            above = (1 - rates) * above + rates * above1
        doubt = doubt + slack[:, None] * mass
        return Cells(mass, np.maximum(excess, 0.0), error, doubt, below, above, slack)


def quantile(tail: float) -> float:
    """Return z with P(N(0,1) > z) <= tail, from the bound e^{-z^2/2} / 2."""
    return math.sqrt(-2 * math.log(2 * min(tail, 0.1)))


def log_mixture(rate: Any, exponent: Any) -> Any:
    """log(1 - q + q e^exponent), elementwise: accurate near 0 and without overflow."""
    growth = rate * np.expm1(np.minimum(exponent, 30.0))
    is_small = (exponent < 30.0) & (growth > -0.99)  # below, 1 + growth cancels
    with np.errstate(divide="ignore"):
        large = np.logaddexp(np.log1p(-rate), np.log(rate) + exponent)
    return np.where(is_small, np.log1p(np.maximum(growth, -0.99)), large)


def bisect_arrays(
    increasing: Callable[[Array], Array], target: Array, low: Array, high: Array
) -> Array:
    """Return the (points,) upper ends of 80 bisections of `increasing(x) >= target`."""
    for _ in range(80):
        middle = 0.5 * (low + high)
        is_below = increasing(middle) < target
        low, high = np.where(is_below, middle, low), np.where(is_below, high, middle)
    return high


@dataclasses.dataclass(frozen=True)
class Monotone:
    """One mechanism on the real line whose loss grows with x, given by its distribution functions.

    `tails(g)` is (mass of a loss below g, mass above) of P and of Q, each with relative error
    NDTR_ERROR, for edges that are off by up to `slack` in the loss; `ends(tail)` is what `span`
    returns, and `size` the variance.
    """

    tails: Callable[[Array], tuple[tuple[Array, Array], tuple[Array, Array]]]
    ends: Callable[[float], tuple[float, float]]
    size: float
    slack: float = 64 * U

    def span(self, tail: float) -> tuple[Array, Array]:
        """Return the losses outside which about `tail` is left."""
        low, high = self.ends(tail)
        return np.array([low]), np.array([high])

    def variance(self) -> Array:
        """Return the variance passed as `size`."""
        return np.array([self.size])

    def cells(self, rows: Index, g: Array, of_q: bool) -> Cells:
        """Return the table."""
        p, q = (_between_cuts(below[None], above[None]) for below, above in self.tails(g))
        slack = self.slack * (2 + max(abs(g[0]), abs(g[-1])))
        return _by_difference(g, p, q, slack, of_q)


def _by_difference(g: Array, p: Masses, q: Masses, slack: float, of_q: bool) -> Cells:
    """Table whose surplus or deficit is computed by subtraction, with the error of doing so."""
    own, other, ratio = (q, p, np.exp(-g[1:])) if of_q else (p, q, np.exp(g[:-1]))
    (mass, error, below, above), (theirs, their_error, *_) = own, other
    excess = np.maximum(mass - ratio * theirs, 0.0)
    doubt = error + ratio * their_error + (8 * U + slack) * (mass + ratio * theirs)
    return Cells(mass, excess, error, doubt, below, above, np.array([slack]))


@dataclasses.dataclass(frozen=True)
class Atoms:
    """One mechanism with finitely many outcomes: the P- and Q-mass and the loss of each.

    The loss is +inf where q = 0 and -inf where p = 0; unresolved mass is put there too. `error`
    bounds the relative, `p_error` and `q_error` the absolute error of the masses of an outcome;
    `spread` is mass that may be in any cell.
    """

    p: Array
    q: Array
    loss: Array
    error: float
    p_error: Array | float = 0.0
    q_error: Array | float = 0.0
    spread: float = 0.0

    def span(self, tail: float) -> tuple[Array, Array]:
        """Return the losses of all finite outcomes but tails of mass less than `tail`."""
        order = np.argsort(self.loss, kind="stable")
        order = order[np.isfinite(self.loss[order])]
        if order.size == 0:
            return np.zeros(1), np.zeros(1)
        last, loss = order.size - 1, self.loss[order]
        low = min(int(np.searchsorted(np.cumsum(self.q[order]), tail)), last)
        high = max(last - int(np.searchsorted(np.cumsum(self.p[order[::-1]]), tail)), 0)
        return np.minimum(loss[[low]], 0.0), np.maximum(loss[[high]], 0.0)

    def variance(self) -> Array:
        """Return the second moment of the finite losses under P."""
        keep = np.isfinite(self.loss)
        return np.array([max(float(np.sum(self.p[keep] * self.loss[keep] ** 2)), 1e-280)])

    def cells(self, rows: Index, g: Array, of_q: bool) -> Cells:
        """Return the table."""
        finite = np.isfinite(self.loss)
        cell = np.searchsorted(g, self.loss[finite], side="right")

        def summed(mass: Array, absolute: Array | float, end: int) -> Masses:
            added = np.broadcast_to(absolute, mass.shape)[finite]
            total = 1.0 * np.bincount(cell, weights=mass[finite], minlength=g.size + 1)
            error = (self.error + 2 * U * mass.size) * total + self.spread
            error += np.bincount(cell, weights=added, minlength=g.size + 1)
            outside = total + error
            outside[end] += mass[~finite].sum()
            return total[None, 1:-1], error[None, 1:-1], outside[:1], outside[-1:]

        slack = self.error + 8 * U * (2 + max(abs(g[0]), abs(g[-1])))
        p, q = summed(self.p, self.p_error, -1), summed(self.q, self.q_error, 0)
        return _by_difference(g, p, q, slack, of_q)


def laplace(scale: float) -> Monotone:
    """Return the pair of Laplace noise of scale b: atoms at -1/b and 1/b, a density between.

    P(L >= g) = 1 - e^{(g - 1/b)/2} / 2 for g in (-1/b, 1/b).
    """
    top = 1 / scale

    def tails(g: Array) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
        is_low, is_high, x = g <= -top, g > top, np.clip(g, -top, top)
        p = np.where(is_low, 0.0, np.where(is_high, 1.0, 0.5 * np.exp((x - top) / 2)))
        q = np.where(is_low, 1.0, np.where(is_high, 0.0, 0.5 * np.exp((-x - top) / 2)))
        return (p, 1 - p), (1 - q, q)  # p is below g, q above

    return Monotone(tails, lambda tail: (-top, top), size=min(top * top, 2 * top))


def mixture(sigma: float, rate: float, group: int) -> Monotone:
    """Return the pair of a group of k: sum_i Binom(k, q)(i) N(i, s^2) against N(0, s^2).

    Source: module docstring; Ganesh 2024 (arXiv 2401.10294), Theorem 3.1.
    """
    sizes = np.arange(group + 1, dtype=float)
    weights = np.array(
        [math.comb(group, i) * rate**i * (1 - rate) ** (group - i) for i in range(group + 1)]
    )
    scale = 1 / sigma**2

    def loss(x: Array) -> Array:
        with np.errstate(divide="ignore"):
            terms = np.log(weights) + np.multiply.outer(x, sizes * scale) - 0.5 * sizes**2 * scale
        return np.asarray(np.logaddexp.reduce(terms, axis=-1))

    def p_tails(x: Array) -> tuple[Array, Array]:
        z = (x[:, None] - sizes) / sigma
        return ndtr(z) @ weights, ndtr(-z) @ weights

    def tails(g: Array) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
        low = np.full_like(g, -45 * sigma - 1)
        high = np.full_like(g, group + 45 * sigma + 1)
        x = bisect_arrays(loss, g, low, high)
        x = np.where(loss(low) >= g, -np.inf, np.where(loss(high) < g, np.inf, x))
        return p_tails(x), (ndtr(x / sigma), ndtr(-x / sigma))

    def ends(tail: float) -> tuple[float, float]:
        # of the upper tail: a group of 16 seldom has all 16 in one batch
        reach = np.array([quantile(tail) * sigma])
        x = bisect_arrays(lambda x: -p_tails(x)[1], np.array([-tail]), -reach, group + reach)
        low, high = loss(np.concatenate([-reach, x]))
        return float(low), float(high)

    # twice the Kullback-Leibler divergence E_P(L - 1 + e^-L), by 16 Gauss-Hermite nodes for
    # each number of hits that occurs
    often = weights > 1e-12
    nodes, shares = np.polynomial.hermite_e.hermegauss(16)
    at = loss(np.add.outer(sizes[often], sigma * nodes))
    with np.errstate(over="ignore"):
        twice_kl = 2 * weights[often] @ (at + np.expm1(-at)) @ shares / math.sqrt(2 * math.pi)
    steep = 1 + group * scale * (group + 45 * sigma + 1)
    return Monotone(tails, ends, max(float(twice_kl), 1e-280), 64 * U * steep + 4 * group * U)


def substitution(sigma: float, rate: float) -> Monotone:
    """Return the pair of one replaced example: (1-q) N(0) + q N(1) against (1-q) N(0) + q N(-1).

    The loss grows with x and is g where sinh(x/s^2 - g/2) = sinh(g/2) (1-q) e^{1/2s^2} / q.
    The pair is its own reverse (x -> -x).
    Source: module docstring, with the advanced joint convexity of
    Balle, Barthe & Gaboardi 2018: q H(N_1 || l N_-1 + (1-l) N_0) for both orders of the pair.
    """
    weight = (1 - rate) / rate * math.exp(min(0.5 / sigma**2, 600.0))

    def tails(g: Array) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
        x = sigma**2 * (g / 2 + np.arcsinh(weight * np.sinh(g / 2)))

        def below(z: Array, center: float) -> Array:
            return np.asarray((1 - rate) * ndtr(z / sigma) + rate * ndtr((z - center) / sigma))

        return (below(x, 1), below(-x, -1)), (below(x, -1), below(-x, 1))

    def ends(tail: float) -> tuple[float, float]:
        x = 1 + quantile(tail) * sigma
        above, below = log_mixture(rate, np.array([2 * x - 1, -2 * x - 1]) / (2 * sigma**2))
        return float(below - above), float(above - below)

    inverse = sigma**-2.0
    size = min(2 * rate**2 * math.expm1(min(inverse, 50.0)), 4 * inverse + 4 * inverse**2)
    return Monotone(tails, ends, size, slack=64 * U * (1 + inverse))


@dataclasses.dataclass(frozen=True)
class FixedSize:
    """Sampling without replacement, one example replaced: the larger curve of both directions.

    With s' = s/2 and delta_r, delta_a those of (1-q) N(0) + q N(1) against N(0) and its reverse,
    delta_r holds for epsilon >= 0 and delta_a for epsilon < 0. Joined at 0, where they agree (total
    variation), they form a convex curve, hence a pair: the remove pair's cells above 0, the add
    pair's cells below 0, and the missing mass, (1-q)(Phi(1/2s') - Phi(-1/2s')), as an atom at 0.
    It is its own reverse.

    Source: Zhu, Dong & Wang 2022 (arXiv 2106.08567), Proposition 30 and Theorem 11 (subsampling
    under replacement); Balle, Barthe & Gaboardi 2018, Theorem 11.
    """

    one: Subsampled  # the noise multipliers already halved

    def span(self, tail: float) -> tuple[Array, Array]:
        """Return an interval of losses symmetric around 0."""
        _, high = self.one.span(tail)
        return -high, high

    def variance(self) -> Array:
        """Return about twice the variance of one direction."""
        return 2 * self.one.variance()

    def cells(self, rows: Index, g: Array, of_q: bool) -> Cells:
        """Return the table on edges symmetric around 0, joined there."""
        low = self.one.cells(rows, g[g >= 0], of_q=True).reversed()
        high = self.one.cells(rows, g[g >= 0], of_q=False)
        s, q = self.one.sigma[rows], self.one.rate[rows]
        atom = (1 - q) * (ndtr(0.5 / s) - ndtr(-0.5 / s))
        high.mass[:, 0] += atom
        for error in (high.mass_error, high.excess_error):
            error[:, 0] += atom * 4 * NDTR_ERROR

        def joined(name: str) -> Array:
            return np.concatenate([getattr(low, name), getattr(high, name)], axis=1)

        tables = ("mass", "excess", "mass_error", "excess_error")
        mass, excess, error, doubt = map(joined, tables)
        slack = np.maximum(low.slack, high.slack)
        cells = Cells(mass, excess, error, doubt, low.below, high.above, slack)
        return cells.reversed() if of_q else cells


PairFamily = Subsampled | Monotone | Atoms | FixedSize


@dataclasses.dataclass(frozen=True)
class Term:
    """Term of a sum of losses: (rows,) pairs and how often each; `flipped` swaps P and Q."""

    pairs: PairFamily
    counts: Array
    flipped: bool = False


def _atoms(p: Array, q: Array, error: float = 4 * U) -> Atoms:
    """Outcomes of the loss log(p/q)."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return Atoms(p, q, np.log(p) - np.log(q), error)


def discrete_gaussian(sigma: float, shift: int) -> Atoms:
    """Return the pair of integer Gaussians around `shift` and 0; far outcomes have infinite loss.

    Source: Canonne, Kamath & Steinke 2020, definition 1.
    """
    reach = math.ceil(40 * sigma) + shift + 2
    x = np.arange(-reach, reach + shift + 1, dtype=float)
    p, q = np.exp(-0.5 * ((x - shift) / sigma) ** 2), np.exp(-0.5 * (x / sigma) ** 2)
    # the tails beyond 40 sigma hold less than e^-790, which underflows a double
    return _atoms(p / p.sum(), q / q.sum(), error=1e-12)


def randomized_response(noise: float, buckets: int) -> Atoms:
    """Return the pair of k-ary randomised response of two different true values."""
    lie = noise / buckets
    truth = 1 - noise + lie
    rest = (buckets - 2) * lie
    return _atoms(np.array([truth, lie, rest]), np.array([lie, truth, rest]))


def black_box(epsilon: float, delta: float) -> Atoms:
    """Return the pair of (epsilon, delta)-DP: delta at infinity, the rest randomised response.

    Source: Kairouz, Oh & Viswanath 2015, Theorem 3.4 (it dominates every such mechanism).
    """
    high = (1 - delta) / (1 + math.exp(-epsilon))
    low = high * math.exp(-epsilon)
    return _atoms(np.array([delta, high, low, 0.0]), np.array([0.0, low, high, delta]))


def table(p: tuple[float, ...], q: tuple[float, ...]) -> Atoms:
    """Return the pair of the user's masses, normalised."""
    first, second = np.array(p), np.array(q)
    return _atoms(first / first.sum(), second / second.sum(), error=4 * U * (len(p) + 4))
