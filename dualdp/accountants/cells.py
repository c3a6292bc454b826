# SPDX-License-Identifier: Apache-2.0
"""Mass tables: how much of P and Q lies where the privacy loss log(P/Q) is in given cells.

This is all that the PLD engine knows of a mechanism. Edges g_0 < g_1 < ... are multiples of one
lattice spacing h; with a = g_j, b = g_{j+1} a cell [a, b) holds
    p_j = P(a <= L < b),  q_j = Q(same),  surplus_j = p_j - e^a q_j,  deficit_j = q_j - e^-b p_j,
the last two >= 0 and, for subsampled mechanisms, computed without the cancellation of their
definition. Each number comes with a bound on its error, so that what is built on it can be rounded
in the direction that is safe.

Swapping P and Q negates the loss and swaps surplus with deficit: `flip`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from scipy.special import ndtr

Array = npt.NDArray[Any]
Index = npt.NDArray[np.int64]

U = 2.0**-53
# Relative error of scipy.special.ndtr for |z| < 38 [test_ndtr_is_as_accurate_as_assumed].
NDTR_ERROR = 4e-13
# Losses beyond this are not resolved: e^loss must not overflow.
MAX_LOSS = 600.0


@dataclasses.dataclass(frozen=True)
class Cells:
    """Masses of several mechanisms (rows) in the same cells; see the module's docstring.

    `bottom`/`top` are the finite losses outside the edges, `never`/`always` the infinite ones:
    Q-mass where P has none and P-mass where Q has none. `slack` (rows,) bounds |loss - edge| at
    edges.
    """

    index: Index  # (edges,) multiples of the spacing
    spacing: float
    p: Array  # (rows, cells)
    q: Array
    surplus: Array
    deficit: Array
    p_error: Array
    q_error: Array
    surplus_error: Array
    deficit_error: Array
    p_bottom: Array  # (rows,)
    q_bottom: Array
    p_top: Array
    q_top: Array
    never: Array
    always: Array
    slack: Array

    @property
    def edges(self) -> Array:
        """(edges,) losses."""
        return self.index * self.spacing


def flip(cells: Cells) -> Cells:
    """The same table for the other direction: P and Q swapped, the loss negated."""
    return Cells(
        index=-cells.index[::-1],
        spacing=cells.spacing,
        p=cells.q[:, ::-1],
        q=cells.p[:, ::-1],
        surplus=cells.deficit[:, ::-1],
        deficit=cells.surplus[:, ::-1],
        p_error=cells.q_error[:, ::-1],
        q_error=cells.p_error[:, ::-1],
        surplus_error=cells.deficit_error[:, ::-1],
        deficit_error=cells.surplus_error[:, ::-1],
        p_bottom=cells.q_top,
        q_bottom=cells.p_top,
        p_top=cells.q_bottom,
        q_top=cells.p_bottom,
        never=cells.always,
        always=cells.never,
        slack=cells.slack,
    )


class Family(Protocol):
    """Several mechanisms of one kind, one per row."""

    @property
    def rows(self) -> int:
        """How many mechanisms."""
        ...

    def span(self, tail: float) -> tuple[Array, Array]:
        """(rows,) losses below and above which P and Q hold at most about `tail`."""
        ...

    def variance(self) -> Array:
        """(rows,) size of the variance of the loss; a guide for the grid, no bound."""
        ...

    def cells(self, rows: Index, index: Index, spacing: float) -> Cells:
        """The mass table of some rows on the edges `index * spacing`."""
        ...


def _normal_masses(z: Array) -> tuple[Array, Array, Array, Array]:
    """(rows, edges) increasing z -> masses between edges, their error, below, above.

    Each mass is a difference on the side where the tail is small: its error is at most the relative
    error of `ndtr` times the tails involved.
    """
    tail, right = ndtr(-np.abs(z)), z > 0
    left_tail, right_tail = tail[:, :-1], tail[:, 1:]
    inside = np.where(
        right[:, :-1],
        left_tail - right_tail,
        np.where(right[:, 1:], (1.0 - left_tail) - right_tail, right_tail - left_tail),
    )
    # a cell across 0 subtracts from 1: a few ulps of 1 more
    error = NDTR_ERROR * (left_tail + right_tail)
    below = np.where(right[:, 0], 1 - tail[:, 0], tail[:, 0])
    above = np.where(right[:, -1], tail[:, -1], 1 - tail[:, -1])
    return np.maximum(inside, 0.0), error, below, above


@dataclasses.dataclass(frozen=True)
class Subsampled:
    """P = (1-q) N(0, s^2) + q N(1, s^2) against Q = N(0, s^2): Poisson sampling, example removed.

    With u_g = 1 + (e^g - 1)/q the loss exceeds g where (2x - 1)/(2 s^2) > log u_g, and
        surplus = q (m1 - u_a m0),   deficit = q e^-b (u_b m0 - m1),
    m0, m1 the masses of N(0) and N(1): the large parts (1-q) m0 are gone before anything is
    subtracted.
    """

    sigma: Array
    rate: Array

    @property
    def rows(self) -> int:
        """How many mechanisms."""
        return self.sigma.size

    def span(self, tail: float) -> tuple[Array, Array]:
        """Loss at the lower `tail` quantile of N(0) and the upper one of N(1)."""
        z = quantile(tail)
        low = _mixture_loss(-z * self.sigma, self.sigma, self.rate)
        return low, _mixture_loss(1 + z * self.sigma, self.sigma, self.rate)

    def variance(self) -> Array:
        """The smaller of chi-square and Gaussian size."""
        inverse = self.sigma**-2.0
        chi = self.rate**2 * np.expm1(np.minimum(inverse, 50.0))
        return np.asarray(np.minimum(chi, inverse + 0.25 * inverse**2))

    def cells(self, rows: Index, index: Index, spacing: float) -> Cells:
        """The mass table of some rows."""
        s, q = self.sigma[rows, None], self.rate[rows, None]
        g = index * spacing
        ratio = _likelihood_ratio(g, q)
        with np.errstate(divide="ignore"):
            z0 = s * np.log(np.maximum(ratio, 0.0)) + 0.5 / s
        m0, e0, below0, above0 = _normal_masses(z0)
        m1, e1, below1, above1 = _normal_masses(z0 - 1 / s)
        lower, upper = ratio[:, :-1], np.maximum(ratio[:, 1:], 0.0)
        shrunk = q * np.exp(-g[1:])
        p = (1 - q) * m0 + q * m1
        p_error = (1 - q) * e0 + q * e1
        slack = 16 * U * (2 + self.sigma[rows] ** -2.0 + max(abs(g[0]), abs(g[-1])))
        rounding = slack[:, None] * p
        zero = np.zeros(rows.size)
        rates = self.rate[rows]
        return Cells(
            index=index,
            spacing=spacing,
            p=p,
            q=m0,
            surplus=np.maximum(q * (m1 - lower * m0), 0.0),
            deficit=np.maximum(shrunk * (upper * m0 - m1), 0.0),
            p_error=p_error,
            q_error=e0,
            surplus_error=q * (e1 + np.abs(lower) * e0) + rounding,
            deficit_error=shrunk * (upper * e0 + e1) + slack[:, None] * m0,
            p_bottom=(1 - rates) * below0 + rates * below1,
            q_bottom=below0,
            p_top=(1 - rates) * above0 + rates * above1,
            q_top=above0,
            never=zero,
            always=zero,
            slack=slack,
        )


def quantile(tail: float) -> float:
    """Z with P(N(0,1) > z) <= tail, from the bound e^{-z^2/2} / 2."""
    return math.sqrt(-2 * math.log(2 * min(tail, 0.1)))


def _mixture_loss(x: Array, sigma: Array, rate: Array) -> Array:
    """log(1 - q + q e^{(2x-1)/(2 s^2)}), without overflow."""
    exponent = (2 * x - 1) / (2 * sigma * sigma)
    with np.errstate(divide="ignore"):
        return np.asarray(np.logaddexp(np.log1p(-rate), np.log(rate) + exponent))


def _likelihood_ratio(g: Array, rate: Array) -> Array:
    """(rows, edges) u_g = 1 + (e^g - 1)/q; negative where no x has so small a loss.

    Near g = 0 through expm1, far below through e^g - (1-q): the error in q u_g is a few ulps of
    e^g either way, hence a few ulps of loss.
    """
    near = 1 + np.expm1(g) / rate
    far = (np.exp(np.minimum(g, 0.0)) - (1 - rate)) / rate
    return np.asarray(np.where(g < -0.5, far, near))
