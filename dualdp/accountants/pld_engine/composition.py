# SPDX-License-Identifier: Apache-2.0
"""Privacy losses on a lattice, above the truth, and the sum of many by Fourier transforms.

`discretize` turns pairs into pmfs that dominate them. `Sum` composes these: with the tilted law
dP_t = e^{tS - K(t)} dP of S = L_1 + ... + L_k, K(t) = sum_i log E e^{t L_i},

    delta(e) = P(S = inf) + e^{K(t)} E_t[e^{-tS} (1 - e^{e-S})_+],

and only a window [x_0, x_0 + W) of S above e matters. The tilted pmf is computed modulo W, a cyclic
convolution: mass that is wrapped in only adds to delta, and what lies above the window has a
Chernoff bound. Rounding is relative to the TILTED pmf, so delta = 1e-30 is as easy as 1e-5.

Source: Koskela et al. 2021 (arXiv 2102.12412), heterogeneous FFT; the tilt is the usual one of
large deviations (Cramer), as in the saddle-point accountant (arXiv 2208.09595), with bounds.
Proofs: docs/accounting.md, sections 3 to 5.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray
from scipy import fft

from dualdp.accountants.pld_engine.pairs import Array, Cells, Index, Term, U, flip

Complex = NDArray[np.complex128]

# Losses beyond this are not resolved: e^loss must not overflow.
MAX_LOSS = 600.0
CUT = 1e-19  # frequencies where the product is proved smaller than this are dropped
_CHUNK = 1 << 18  # cells of the rows that are discretized at once
_BUFFER = 1 << 21  # numbers in one block of transforms
_ROOTS = 1 << 22  # most roots of unity in a direct sum: 64 MiB
_ROWS = 48  # cost of a root of unity, in products with it


@dataclasses.dataclass(frozen=True)
class Grid:
    """Spacing h of the lattice, and number of cells from x to 2x where cells are wider than h.

    The cell at n h is max(1, 2^floor(log2 n) / octave) h wide. With h and `octave` powers of 2, the
    edges of a coarser grid (larger h, smaller `octave`) are edges of every finer one, and the upper
    bound on the finer grid is never larger.
    """

    spacing: float
    octave: int = 32

    def edges(self, low: int, high: int) -> Index:
        """Return lattice indices from at most `low` <= 0 to at least `high` >= 0."""

        def side(end: int) -> Index:
            start, octaves = 1, [np.zeros(0, dtype=np.int64)]
            while start <= end:  # [start, 2 start): cells of one width
                width = max(1, start // self.octave)
                octaves.append(np.arange(start, min(2 * start, end + width), width))
                start *= 2
            if end > 0 and octaves[-1][-1] < end:
                octaves.append(np.array([start]))
            return np.concatenate(octaves)

        return np.concatenate([-side(-low)[::-1], [0], side(high)])


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


def connect_the_dots(cells: Cells, counts: Array) -> Pmf:
    """Return the dominating pmf: cell masses go to both ends, keeping P and Q.

    Of p, the share surplus / (1 - e^{a-b}) goes to b, the rest to a. The delta of the result is the
    piecewise linear (in e^epsilon) interpolation of the true delta at the edges, which is convex:
    no smaller pair on these edges dominates.

    Rounding: masses are taken too large by their error, and so is the surplus, hence the share that
    goes up. Both move mass to larger losses, and delta grows with every loss.

    Source: Doroshenko et al. 2022 (arXiv 2207.04380), section 4.
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
    return Pmf(mass, cells.index, infinite, cells.slack, counts)


def discretize(terms: Iterable[Term], grid: Grid, tail: float) -> Iterator[Pmf]:
    """Yield dominating pmfs of all terms, a chunk of rows at a time.

    Rows are sorted by their largest loss, so that the rows of a chunk need about the same edges.
    """
    for term in terms:
        low, high = term.pairs.span(tail)
        low, high = np.maximum(low, -MAX_LOSS), np.minimum(high, MAX_LOSS)
        order = np.argsort(high)
        while order.size:
            rows = order[:512]
            for _ in range(2):  # fewer rows need fewer edges
                first = math.floor(min(0.0, float(low[rows].min())) / grid.spacing) - 1
                last = math.ceil(max(0.0, float(high[rows].max())) / grid.spacing) + 1
                index = grid.edges(first, last)
                fitting = max(1, _CHUNK // index.size)
                if fitting >= rows.size:
                    break
                rows = rows[:fitting]
            table = term.pairs.cells(rows, index, grid.spacing)
            yield connect_the_dots(flip(table) if term.flipped else table, term.counts[rows])
            order = order[rows.size :]


class TiltError(ArithmeticError):
    """Overflow of e^{tilt x}; caught by the caller that chose the tilt."""


@dataclasses.dataclass(frozen=True)
class Window:
    """Window of the sum: tilt t, first point x_0 = start * h, `size` points, `chernoff` c."""

    tilt: float
    start: int
    size: int
    chernoff: float


@dataclasses.dataclass(frozen=True)
class Composed:
    """Tilted pmf of S in a window, with everything that bounds delta.

    `rounding` bounds the error of each entry of `mass`, `relative` the relative error of all masses
    together; `log_finite` is log P(S < inf), `slack` the total of the losses' slack.
    """

    mass: Array
    window: Window
    spacing: float
    log_mgf: float
    log_mgf_chernoff: float
    log_finite: float
    slack: float
    rounding: float
    relative: float

    @property
    def points(self) -> Array:
        """(size,) values of S."""
        return (self.window.start + np.arange(self.mass.size)) * self.spacing


def fft_error(size: int) -> float:
    """Return the error of an FFT entry relative to the sum of the inputs' moduli (`_Product`)."""
    return (8 + 6 * math.log2(size)) * U


class _Product:
    """Running product of transforms, with its majorant and the resulting error bound.

    With F the computed values and e the error of each,
        |computed product - true product| <= prod(|F_i| + e_i)^{m_i} - prod |F_i|^{m_i},
    since both lie in a polydisc of these radii around each other. The inverse transform is a mean
    over frequencies: its error is at most the mean of these differences plus its own rounding.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.kept = size // 2 + 1
        self.value: Complex = np.ones(self.kept, dtype=np.complex128)
        self.log_major = np.zeros(self.kept)
        self.dropped = self.growth = 0.0

    def multiply(self, weights: Array, index: Index, counts: Array) -> None:
        """Multiply by the transforms of (rows, points) weights at lattice indices, with powers."""
        start = 0
        while start < counts.size:
            step = max(1, _BUFFER // self.size)
            transform = self._fast
            # a direct sum of the kept frequencies may be faster than full transforms
            number, roots = min(step, counts.size - start), index.size * self.kept
            if roots <= _ROOTS and roots * (1 + number / _ROWS) < 2 * number * self.size:
                step = max(1, _BUFFER // self.kept)
                transform = self._direct
            rows = slice(start, start + step)
            values, terms = transform(weights[rows], index)
            self._absorb(values, counts[rows], terms)
            start += step

    def _fast(self, weights: Array, index: Index) -> tuple[Complex, int]:
        """(rows, kept) by FFT of the weights folded into one period; most terms in one entry."""
        position = index % self.size
        order = np.argsort(position, kind="stable")
        positions, starts = np.unique(position[order], return_index=True)
        folded = np.zeros((weights.shape[0], self.size))
        folded[:, positions] = np.add.reduceat(weights[:, order], starts, axis=1)
        terms = int(np.diff(starts, append=order.size).max())
        return np.asarray(fft.rfft(folded, axis=1)[:, : self.kept]), terms

    def _direct(self, weights: Array, index: Index) -> tuple[Complex, int]:
        """(rows, kept) as one matrix product with roots of unity, each a product of two."""

        def unit_roots(frequency: Index) -> Complex:
            # angles are reduced exactly, in integers
            turns = np.outer(index % self.size, frequency) % self.size
            angle = turns * (-2 * math.pi / self.size)
            return np.asarray(np.cos(angle) + 1j * np.sin(angle))

        block = 1 << (self.kept.bit_length() + 1) // 2
        near, far = unit_roots(np.arange(block)), unit_roots(np.arange(0, self.kept, block))
        roots = (far[:, :, None] * near[:, None, :]).reshape(index.size, -1)
        sums: Complex = (weights @ roots.view(np.float64)).view(np.complex128)
        return sums[:, : self.kept], index.size

    def _absorb(self, values: Complex, counts: Array, terms: int) -> None:
        """Multiply by (rows, kept) transforms, each a sum of `terms` terms, with powers."""
        plain = bool(np.all(counts == 1))
        sums = min(8 * counts.size, 48) if plain else 8 * counts.size
        error = fft_error(self.size) + (terms + 32 + sums) * U
        self.growth += float(counts.sum()) * error
        size = np.abs(values)
        with np.errstate(divide="ignore", invalid="ignore"):
            self.log_major += counts @ np.log(size + error)
            if plain:
                power = np.multiply.reduce(values, axis=0)
            else:
                exponent = counts @ np.log(np.maximum(size, 1e-300))
                power = np.exp(exponent) * np.exp(1j * (counts @ np.angle(values)))
        self.value = self.value * power
        # drop the high frequencies whose product is proved to be below CUT, now and later
        large = np.flatnonzero(self.log_major > math.log(CUT))
        kept = int(large[-1]) + 1 if large.size else 1
        if kept < self.kept:
            # later factors are at most 1 + error each: `growth` sums their logarithms
            self.dropped += 2 * float(np.exp(self.log_major[kept : self.kept]).sum()) / self.size
            self.value, self.log_major = self.value[:kept], self.log_major[:kept]
            self.kept = kept

    def invert(self) -> tuple[Array, float]:
        """(size,) cyclic pmf and the bound on the error of each entry."""
        full = np.zeros(self.size // 2 + 1, dtype=np.complex128)
        full[: self.kept] = self.value
        major, size = np.exp(self.log_major), np.abs(self.value)
        own = fft_error(self.size)
        difference = np.maximum(major - size, 0.0) + 64 * U * major + own * size
        error = 2 * float(difference.sum()) / self.size + self.dropped * math.exp(self.growth)
        return np.asarray(fft.irfft(full, n=self.size)), error


class Sum:
    """Sum of the losses so far, for one tilt, size and spacing; losses can be added at any time.

    The start of the window, where the sum is wanted, may change later.
    """

    def __init__(self, window: Window, spacing: float) -> None:
        self.window, self.spacing = window, spacing
        self._product = _Product(window.size)
        self._log_mgf = self._log_mgf_chernoff = self._log_finite = 0.0
        self._slack = self._relative = 0.0

    def add(self, pmfs: Iterable[Pmf]) -> None:
        """Compose chunks of pmfs on the lattice, with counts; TiltError if e^{tilt x} overflows."""
        window = self.window
        for pmf in pmfs:
            x, counts = pmf.index * self.spacing, pmf.counts
            if window.tilt * float(x[-1]) > 700:
                raise TiltError
            weights = pmf.mass * np.exp(window.tilt * x)
            total = np.maximum(weights.sum(axis=1), 1e-300)
            exponent = window.chernoff * x
            if exponent.max() > 700:
                self._log_mgf_chernoff = math.inf
            else:
                moments = (pmf.mass * np.exp(exponent)).sum(axis=1)
                self._log_mgf_chernoff += float(counts @ np.log(np.maximum(moments, 1e-300)))
            self._log_mgf += float(counts @ np.log(total))
            self._log_finite += float(counts @ np.log1p(-np.minimum(pmf.infinite, 1 - 1e-16)))
            self._slack += float(counts @ pmf.slack)
            terms = 200 + 4 * x.size + 8 * window.chernoff * float(np.abs(x).max())
            self._relative += float(counts.sum()) * U * terms
            self._product.multiply(weights / total[:, None], pmf.index, counts)

    def composed(self, start: int) -> Composed:
        """Return the tilted pmf from lattice point `start`, with its error bounds."""
        window = dataclasses.replace(self.window, start=start)
        mass, rounding = self._product.invert()
        relative = self._relative + 16 * U * (abs(self._log_mgf) + abs(self._log_mgf_chernoff))
        relative += 16 * U * window.chernoff * self.spacing * (abs(start) + window.size)
        return Composed(
            np.roll(mass, -(start % window.size)),
            window,
            self.spacing,
            self._log_mgf,
            self._log_mgf_chernoff,
            self._log_finite,
            self._slack,
            rounding,
            relative,
        )
