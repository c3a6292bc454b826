# SPDX-License-Identifier: Apache-2.0
"""Privacy-loss distributions on a lattice, above and below the truth, from mass tables.

A table (`Cells`) is all that the engine knows of a mechanism: masses of P and Q in cells of the
privacy loss L = log(P/Q). Edges g_0 < g_1 < ... are multiples of one lattice spacing h; with
a = g_j, b = g_{j+1} a cell [a, b) holds

    p_j = P(a <= L < b),  q_j = Q(same),  surplus_j = p_j - e^a q_j,  deficit_j = q_j - e^-b p_j,

the last two >= 0 and, for subsampled mechanisms, computed without the cancellation of their
definition. Each number has an error bound, so that later results can be rounded in the safe
direction. Swapping P and Q negates the loss and swaps surplus with deficit: `flip`.

`upper_pmf` dominates: its delta is at least the mechanism's at every epsilon, also after
composition. `lower_pmf` is dominated. Both have second-order error in the spacing.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Index = npt.NDArray[np.int64]

U = 2.0**-53
# Losses beyond this are not resolved: e^loss must not overflow.
MAX_LOSS = 600.0
_CHUNK = 1 << 18  # cells of the rows that are discretized at once


@dataclasses.dataclass(frozen=True)
class Side:
    """Masses of P, or of Q, of several mechanisms (rows) in the same cells.

    `excess` is the surplus of P, or the deficit of Q; see the module docstring. `bottom` and `top`
    are the masses at finite losses outside the edges, `infinite` that where the other one is 0.
    """

    mass: Array  # (rows, cells)
    excess: Array
    mass_error: Array
    excess_error: Array
    bottom: Array  # (rows,)
    top: Array
    infinite: Array

    def reversed(self) -> Side:
        """Return the same masses, the loss negated."""
        return Side(
            self.mass[:, ::-1],
            self.excess[:, ::-1],
            self.mass_error[:, ::-1],
            self.excess_error[:, ::-1],
            self.top,
            self.bottom,
            self.infinite,
        )


@dataclasses.dataclass(frozen=True)
class Cells:
    """Mass tables of P and Q; `slack` (rows,) bounds |loss - edge| at the edges."""

    index: Index  # (edges,) multiples of the spacing
    spacing: float
    p: Side
    q: Side
    slack: Array


def flip(cells: Cells) -> Cells:
    """Return the table of the other direction: P and Q swapped, the loss negated."""
    p, q = cells.q.reversed(), cells.p.reversed()
    return Cells(-cells.index[::-1], cells.spacing, p, q, cells.slack)


class PairFamily(Protocol):
    """Dominating pairs of several mechanisms of one kind, one per row."""

    def span(self, tail: float) -> tuple[Array, Array]:
        """Return the (rows,) losses below and above which P and Q hold at most about `tail`."""
        ...

    def variance(self) -> Array:
        """Return the (rows,) approximate variance of the loss, for the choice of the grid."""
        ...

    def cells(self, rows: Index, index: Index, spacing: float) -> Cells:
        """Return the mass table of some rows on the edges `index * spacing`."""
        ...


@dataclasses.dataclass(frozen=True)
class Term:
    """Term of a sum of losses: (rows,) pairs and how often each; `flipped` swaps P and Q."""

    pairs: PairFamily
    counts: Array
    flipped: bool = False


@dataclasses.dataclass(frozen=True)
class Grid:
    """Spacing h of the lattice, and number of cells from x to 2x where cells are wider than h.

    The cell at n h is max(1, 2^floor(log2 n) / octave) h wide. With h and `octave` powers of 2, the
    edges of a coarser grid (larger h, smaller `octave`) are edges of every finer one, and the upper
    bound on the finer grid is never larger.
    """

    spacing: float
    octave: int = 32


@dataclasses.dataclass(frozen=True)
class Pmf:
    """Losses of several mechanisms on shared lattice points.

    `mass` (rows, points) at `index * spacing`; `infinite` (rows,) mass at +inf; `slack` (rows,)
    bound on the distance of true losses beyond their lattice point; `counts` (rows,) compositions.
    """

    mass: Array
    index: Index
    infinite: Array
    slack: Array
    counts: Array


def edges(low: int, high: int, grid: Grid) -> Index:
    """Return lattice indices from at most `low` <= 0 to at least `high` >= 0; see `Grid`."""

    def side(end: int) -> Index:
        start, octaves = 1, [np.zeros(0, dtype=np.int64)]
        while start <= end:  # [start, 2 start): cells of one width
            width = max(1, start // grid.octave)
            octaves.append(np.arange(start, min(2 * start, end + width), width))
            start *= 2
        if end > 0 and octaves[-1][-1] < end:
            octaves.append(np.array([start]))
        return np.concatenate(octaves)

    return np.concatenate([-side(-low)[::-1], [0], side(high)])


def upper_pmf(cells: Cells) -> Pmf:
    """Return the dominating pmf (connect the dots): cell masses go to both ends, keeping P and Q.

    Of p, the share surplus / (1 - e^{a-b}) goes to b, the rest to a. The delta of the result is the
    piecewise linear (in e^epsilon) interpolation of the true delta at the edges, which is convex:
    no smaller pair on these edges dominates.

    Rounding: masses are taken too large by their error, and so is the surplus, hence the share that
    goes up. Both move mass to larger losses, and delta grows with every loss.

    Source: Doroshenko et al. 2022 (arXiv 2207.04380), section 4 (connect the dots).
    """
    g = cells.index * cells.spacing
    p = cells.p.mass + cells.p.mass_error
    share = (cells.p.excess + cells.p.excess_error) / -np.expm1(g[:-1] - g[1:])
    up = np.minimum(share, p)
    mass = np.zeros((p.shape[0], g.size))
    mass[:, 1:] = up
    mass[:, :-1] += p - up
    mass[:, 0] += cells.p.bottom * (1 + 1e-12)
    infinite = (cells.p.infinite + cells.p.top) * (1 + 1e-12)
    return Pmf(mass, cells.index, infinite, cells.slack, np.ones(p.shape[0]))


def lower_pmf(cells: Cells) -> Pmf:
    """Return a dominated pmf by merging neighbouring cells; second order for a smooth density.

    Merging outcomes is post-processing. The fraction alpha of a cell below the edge g and beta of
    the cell above it, merged, have likelihood ratio e^g exactly if
        alpha (e^g q_j - p_j) = beta (p_{j+1} - e^g q_{j+1}),
    and at least e^g if "<=" holds: alpha = s / (e^g deficit_j), beta = s / surplus_{j+1} for any
    s >= 0. `_flux` chooses s so that the fractions of each cell add up to at most 1; the rest of a
    cell is rounded down to its lower edge, and mass beyond the edges is dropped.

    Rounding: the deficit is taken too large, the surplus and the masses too small, which moves mass
    to smaller losses.
    """
    g = cells.index * cells.spacing
    p = np.maximum(cells.p.mass - cells.p.mass_error, 0.0)
    deficit = (cells.q.excess + cells.q.excess_error) * np.exp(g[1:])
    surplus = np.maximum(cells.p.excess - cells.p.excess_error, 0.0)
    alpha, beta = _flux(deficit, surplus)
    used = np.zeros_like(p)
    used[:, :-1] += alpha
    used[:, 1:] += beta
    mass = np.zeros((p.shape[0], g.size))
    mass[:, 1:-1] = alpha * p[:, :-1] + beta * p[:, 1:]
    mass[:, :-1] += np.maximum(1 - used, 0.0) * p
    mass *= 1 - 1e-14
    return Pmf(mass, cells.index, cells.p.infinite * (1 - 1e-12), cells.slack, np.ones(p.shape[0]))


def _flux(deficit: Array, surplus: Array, sweeps: int = 3) -> tuple[Array, Array]:
    """(rows, inner edges) fractions (alpha, beta) of the cells below and above each inner edge.

    Multiplicative sweeps towards full use of every cell; the last line scales the use to at most
    1, so any number of sweeps is valid and more are tighter.
    """
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        below = np.where(deficit[:, :-1] > 0, 1 / deficit[:, :-1], 0.0)
        above = np.where(surplus[:, 1:] > 0, 1 / surplus[:, 1:], 0.0)
        below[~np.isfinite(below)] = 0.0
        above[~np.isfinite(above)] = 0.0
        half = deficit * surplus / (deficit + surplus)
        half[~np.isfinite(half)] = 0.0
        flux = np.sqrt(half[:, :-1] * half[:, 1:])
        flux[(below == 0) | (above == 0)] = 0.0

    def usage(flux: Array) -> Array:
        total = np.zeros_like(deficit)
        total[:, :-1] += flux * below
        total[:, 1:] += flux * above
        return total

    for _ in range(sweeps):
        total = usage(flux)
        total[total <= 0] = 1.0
        flux = flux * 2 / (total[:, :-1] + total[:, 1:])
    total = np.maximum(usage(flux) * (1 + 1e-14), 1.0)
    flux = flux / np.maximum(total[:, :-1], total[:, 1:])
    return flux * below, flux * above


def discretize(
    terms: Sequence[Term], grid: Grid, tail: float, *, below: bool = False
) -> Iterator[Pmf]:
    """Yield upper or (with `below`) lower pmfs of all terms, a chunk of rows at a time.

    Rows are sorted by their largest loss, so that the rows of a chunk need about the same edges.
    """
    build = lower_pmf if below else upper_pmf
    for term in terms:
        low, high = term.pairs.span(tail)
        low, high = np.maximum(low, -MAX_LOSS), np.minimum(high, MAX_LOSS)
        order = np.argsort(high)
        while order.size:
            rows = order[:512]
            for _ in range(2):  # fewer rows need fewer edges
                first = math.floor(min(0.0, float(low[rows].min())) / grid.spacing) - 1
                last = math.ceil(max(0.0, float(high[rows].max())) / grid.spacing) + 1
                index = edges(first, last, grid)
                fitting = max(1, _CHUNK // index.size)
                if fitting >= rows.size:
                    break
                rows = rows[:fitting]
            table = term.pairs.cells(rows, index, grid.spacing)
            pmf = build(flip(table) if term.flipped else table)
            yield dataclasses.replace(pmf, counts=term.counts[rows])
            order = order[rows.size :]
