# SPDX-License-Identifier: Apache-2.0
"""From mass tables to privacy-loss distributions on a lattice, above and below the truth.

`upper` dominates: its delta is at least the mechanism's at every epsilon, also after composition.
`lower` is dominated. Both are of second order in the spacing.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dualdp.accountants.cells import MAX_LOSS, Cells, Family, flip

Array = npt.NDArray[Any]
Index = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class Part:
    """Mechanisms of one kind with their counts; `flipped` swaps P and Q."""

    family: Family
    counts: Array
    flipped: bool = False


@dataclasses.dataclass(frozen=True)
class Grid:
    """Spacing h of the lattice, and how many cells there are from x to 2x where cells are wider.

    The cell at n h is max(1, 2^floor(log2 n) / octave) h wide. So with h a power of 2 the edges of
    a coarser grid (larger h, smaller `octave`, a power of 2 too) are edges of every finer one, and
    an upper bound on the finer grid is never the larger one.
    """

    spacing: float
    octave: int = 32


@dataclasses.dataclass(frozen=True)
class Pmf:
    """Losses of several mechanisms on shared lattice points.

    `mass` (rows, points) at `index * spacing`, `infinite` (rows,) at +inf, `slack` (rows,) by which
    true losses may lie beyond their lattice point, `counts` (rows,) how often each is composed.
    """

    mass: Array
    index: Index
    infinite: Array
    slack: Array
    counts: Array


def edges(low: int, high: int, grid: Grid) -> Index:
    """Lattice indices from low <= 0 to high >= 0 at least; see `Grid`."""

    def side(end: int) -> Index:
        start, parts = 1, []
        while start <= end:  # [start, 2 start): cells of one width
            width = max(1, start // grid.octave)
            parts.append(np.arange(start, min(2 * start, end + width), width, dtype=np.int64))
            start *= 2
        if parts and parts[-1][-1] < end:
            parts.append(np.array([start], dtype=np.int64))
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)

    return np.concatenate([-side(-low)[::-1], np.zeros(1, dtype=np.int64), side(high)])


def upper(cells: Cells) -> Pmf:
    """Connect-the-dots: every cell's mass goes to its two ends so that P AND Q keep their masses.

    Of p, the share surplus / (1 - e^{a-b}) goes to b, the rest to a. The result's delta is the
    piecewise linear (in e^epsilon) interpolation of the true delta at the edges, which is convex:
    no smaller pair on these edges dominates.

    Rounding: masses are taken p_error too large, and surplus_error is added to the share that goes
    up. Either moves mass to larger losses, and delta grows with every loss.

    Source: Doroshenko et al. 2022 (arXiv 2207.04380), section 4 (connect the dots).
    """
    g = cells.edges
    p = cells.p + cells.p_error
    share = (cells.surplus + cells.surplus_error) / -np.expm1(g[:-1] - g[1:])
    up = np.minimum(share, p)
    mass = np.zeros((p.shape[0], g.size))
    mass[:, 1:] = up
    mass[:, :-1] += p - up
    mass[:, 0] += cells.p_bottom * (1 + 1e-12)
    infinite = (cells.always + cells.p_top) * (1 + 1e-12)
    return Pmf(mass, cells.index, infinite, cells.slack, np.ones(p.shape[0]))


def lower(cells: Cells) -> Pmf:
    """Merged neighbours: a dominated pair, of second order where the density is smooth.

    Merging outcomes is post-processing. The fraction alpha of a cell below the edge g and beta of
    the cell above it, merged, have likelihood ratio e^g exactly if
        alpha (e^g q_j - p_j) = beta (p_{j+1} - e^g q_{j+1}),
    and at least e^g if "<=" holds: alpha = s / (e^g deficit_j), beta = s / surplus_{j+1} for any
    s >= 0. `_flux` chooses s so that each cell is used up to 1 in all; what is left of a cell is
    rounded down to its lower edge, and mass beyond the edges is dropped.

    Rounding: alpha is taken with the deficit too large, beta with the surplus too small, masses too
    small: every move is towards smaller losses.
    """
    g = cells.edges
    p = np.maximum(cells.p - cells.p_error, 0.0)
    deficit = (cells.deficit + cells.deficit_error) * np.exp(g[1:])
    surplus = np.maximum(cells.surplus - cells.surplus_error, 0.0)
    alpha, beta = _flux(deficit, surplus)
    used = np.zeros_like(p)
    used[:, :-1] += alpha
    used[:, 1:] += beta
    mass = np.zeros((p.shape[0], g.size))
    mass[:, 1:-1] = alpha * p[:, :-1] + beta * p[:, 1:]
    mass[:, :-1] += np.maximum(1 - used, 0.0) * p
    mass *= 1 - 1e-14
    return Pmf(mass, cells.index, cells.always * (1 - 1e-12), cells.slack, np.ones(p.shape[0]))


def _flux(deficit: Array, surplus: Array, sweeps: int = 3) -> tuple[Array, Array]:
    """(rows, inner edges) fractions (alpha, beta) of the cell below and above each inner edge.

    Multiplicative sweeps towards "every cell is used up"; the last line scales the usage below 1,
    so that any number of sweeps is right and more are only tighter.
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


def discretise(
    parts: Sequence[Part],
    grid: Grid,
    tail: float,
    *,
    below: bool = False,
    cells_limit: int = 1 << 18,
) -> Iterator[Pmf]:
    """Pmfs of all parts, a chunk of rows at a time, upper or (with `below`) lower ones.

    Rows are sorted by how far their losses reach, so that a chunk shares its edges without waste.
    """
    build = lower if below else upper
    for part in parts:
        low, high = part.family.span(tail)
        low, high = np.maximum(low, -MAX_LOSS), np.minimum(high, MAX_LOSS)
        order = np.argsort(high)
        start = 0
        while start < order.size:
            rows, index = _chunk(order[start:], low, high, grid, cells_limit)
            table = part.family.cells(rows, index, grid.spacing)
            pmf = build(flip(table) if part.flipped else table)
            yield dataclasses.replace(pmf, counts=part.counts[rows])
            start += rows.size


def _chunk(order: Index, low: Array, high: Array, grid: Grid, limit: int) -> tuple[Index, Index]:
    """The next rows that fit `limit` cells, and their common edges."""
    rows = order[:512]
    for _ in range(2):
        first = math.floor(min(0.0, float(low[rows].min())) / grid.spacing) - 1
        last = math.ceil(max(0.0, float(high[rows].max())) / grid.spacing) + 1
        index = edges(first, last, grid)
        fitting = max(1, limit // index.size)
        if fitting >= rows.size:
            break
        rows = rows[:fitting]
    return rows, index
