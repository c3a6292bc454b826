# SPDX-License-Identifier: Apache-2.0
"""Certified epsilon and delta of composed pairs: privacy losses on a lattice, above the truth.

A question about one direction takes three steps: `Direction.guide` estimates epsilon by a saddle
point, `Direction.curve` chooses a window and a lattice around it and composes the losses there,
and the `Curve` certifies what the result says. A bad lattice or window cannot make a bound wrong;
it only loosens it.

`discretize` turns pairs into pmfs that dominate them. `Sum` composes these: with the tilted law
dP_t = e^{tS - K(t)} dP of S = L_1 + ... + L_k, K(t) = sum_i log E e^{t L_i},

    delta(e) = P(S = inf) + e^{K(t)} E_t[e^{-tS} (1 - e^{e-S})_+],

and only a window [x_0, x_0 + W) of S above e matters. The tilted pmf is computed modulo W, a cyclic
convolution: mass that is wrapped in only adds to delta, and what lies above the window has a
Chernoff bound. Rounding is relative to the TILTED pmf, so delta = 1e-30 is as easy as 1e-5.

Upper bounds are monotone (docs/accounting.md, section 4.1): on fixed edges, connecting the dots
keeps the order of delta curves, and so does composition. So the bound on one lattice grows with
every step and every worse setting. `Direction.spacing` chooses from powers of 2 whose edges contain
each other, and never a finer one when a setting becomes worse.

Source: Koskela et al. 2021 (arXiv 2102.12412), heterogeneous FFT; the tilt is the usual one of
large deviations (Cramer), as in the saddle-point accountant (arXiv 2208.09595), with bounds.
Proofs: docs/accounting.md, sections 3 to 5.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import partial
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy import fft
from scipy.special import erfcx, ndtr

from dualdp.accountants.pld_engine.pairs import Array, Cells, Index, Subsampled, Term, U, quantile

Complex = NDArray[np.complex128]

RTOL = 1e-2  # relative accuracy in epsilon that the lattice aims at
LEAK = 1e-12  # share of delta that each truncation may cost
# Losses beyond this are not resolved: e^loss must not overflow.
MAX_LOSS = 600.0
MAX_WINDOW = 1 << 19  # points; a longer window needs a coarser lattice
FEW = 1 << 12  # number of steps up to which the lattice does not depend on it
POINTS = (1 << 13, 1 << 16, 1 << 17)  # of the largest loss, up to `_STEPS` steps and beyond
CUT = 1e-19  # frequencies where the product is proved smaller than this are dropped
_STEPS = (1 << 12, 1 << 17)
_COARSEST = 2.0**-4
_USELESS = 16.0  # largest spacing: e^loss must not overflow at an edge
_EXPONENT = 650.0  # bound on theta times the largest loss, against overflow
_MOST_SUMS = 12  # of one direction in a memo: a few megabytes
_ROUNDING = 1e-9  # share of delta
_RARE = 1e-6  # share of delta that rounding may take before larger cuts are tried
_CUTS = (1e-6, 1e-3, 1e-2)  # share of delta spent on truncating the largest losses then
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


def connect_the_dots(cells: Cells, index: Index, spacing: float, counts: Array) -> Pmf:
    """Return the dominating pmf: cell masses go to both ends, keeping P and Q.

    Of p, the share surplus / (1 - e^{a-b}) goes to b, the rest to a. The delta of the result is the
    piecewise linear (in e^epsilon) interpolation of the true delta at the edges, which is convex:
    no smaller pair on these edges dominates.

    Rounding: masses are taken too large by their error, and so is the surplus, hence the share that
    goes up. Both move mass to larger losses, and delta grows with every loss.

    Source: Doroshenko et al. 2022 (arXiv 2207.04380), section 4.
    """
    g = index * spacing
    p = cells.mass + cells.mass_error
    share = (cells.excess + cells.excess_error) / -np.expm1(g[:-1] - g[1:])
    up = np.minimum(share, p)
    mass = np.zeros((p.shape[0], g.size))
    mass[:, 1:] = up
    mass[:, :-1] += p - up
    mass[:, 0] += cells.below * (1 + 1e-12)
    return Pmf(mass, index, cells.above * (1 + 1e-12), cells.slack, counts)


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
                last = math.ceil(max(0.0, float(high[rows[-1]])) / grid.spacing) + 1
                index = grid.edges(first, last)
                if rows.size <= max(1, _CHUNK // index.size):
                    break
                rows = rows[: max(1, _CHUNK // index.size)]
            table = term.pairs.cells(rows, index * grid.spacing, term.flipped)
            if term.flipped:
                table, index = table.reversed(), -index[::-1]
            yield connect_the_dots(table, index, grid.spacing, term.counts[rows])
            order = order[rows.size :]


class TiltError(ArithmeticError):
    """Overflow of e^{tilt x}; caught by the caller that chose the tilt."""


@dataclasses.dataclass(frozen=True)
class Window:
    """Lattice points of the sum: their spacing and number, for tilt t and `chernoff` c."""

    tilt: float
    chernoff: float
    spacing: float
    size: int


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
    """Sum of the losses so far in a window; losses can be added at any time.

    `log_finite` is log P(S < inf), `slack` the total of the losses' slack, `relative` bounds the
    relative error of all masses together.
    """

    def __init__(self, window: Window) -> None:
        self.window, self.product = window, _Product(window.size)
        self.log_mgf = self.log_mgf_chernoff = self.log_finite = 0.0
        self.slack = self.relative = 0.0

    def add(self, pmfs: Iterable[Pmf]) -> None:
        """Compose chunks of pmfs on the lattice, with counts; TiltError if e^{tilt x} overflows."""
        window = self.window
        for pmf in pmfs:
            x, counts = pmf.index * window.spacing, pmf.counts
            if window.tilt * float(x[-1]) > 700:
                raise TiltError
            weights = pmf.mass * np.exp(window.tilt * x)
            total = np.maximum(weights.sum(axis=1), 1e-300)
            exponent = window.chernoff * x
            if exponent.max() > 700:
                self.log_mgf_chernoff = math.inf
            else:
                moments = (pmf.mass * np.exp(exponent)).sum(axis=1)
                self.log_mgf_chernoff += float(counts @ np.log(np.maximum(moments, 1e-300)))
            self.log_mgf += float(counts @ np.log(total))
            self.log_finite += float(counts @ np.log1p(-np.minimum(pmf.infinite, 1 - 1e-16)))
            self.slack += float(counts @ pmf.slack)
            terms = 200 + 4 * x.size + 8 * window.chernoff * float(np.abs(x).max())
            self.relative += float(counts.sum()) * U * terms
            self.product.multiply(weights / total[:, None], pmf.index, counts)


class Curve:
    """Delta of a composed privacy loss from lattice point `start` on, with every error added to it.

    e^scale (first_m - e^{e - x_m} second_m) + constant + slope e^e for x_{m-1} <= e < x_m: between
    lattice points delta is linear in e^epsilon, so epsilon at a delta has a closed form too.
    """

    def __init__(self, total: Sum, start: int, truncation: float = 0.0) -> None:
        self.total, self.window, self.slack = total, total.window, total.slack
        window = self.window
        mass, self.rounding = total.product.invert()
        self.mass = np.roll(mass, -(start % window.size))  # tilted
        self.points = (start + np.arange(window.size)) * window.spacing
        relative = total.relative + 16 * U * (abs(total.log_mgf) + abs(total.log_mgf_chernoff))
        far = window.chernoff * window.spacing * (abs(start) + window.size)
        self.relative = relative + 16 * U * far
        # relative error of the sums: one ulp for each term, a few for each exponential
        exponents = (window.tilt + 1) * window.size * window.spacing
        self.error = U * (2 * window.size + 8 * min(exponents, 750.0) + 64)
        first, second = tail_sums(np.maximum(self.mass, 0.0) + self.rounding, window)
        self.first, self.second = first * (1 + self.error), second * (1 - self.error)
        self.scale = total.log_mgf - window.tilt * self.points[0] + self.relative
        # Chernoff bound on P(S >= x_0 + W), computed from the composed pmfs
        end = (start + window.size) * window.spacing
        above = _exp(total.log_mgf_chernoff - window.chernoff * end + self.relative)
        infinite = -math.expm1(total.log_finite) * (1 + 1e-12)
        self.constant, self.slope = above + infinite + truncation, truncation

    @property
    def is_resolved(self) -> bool:
        """True if e^scale and its inverse are far from overflow."""
        return bool(abs(self.scale) < 600)

    def epsilon(self, delta: float) -> tuple[float, bool]:
        """Return (epsilon with delta(epsilon) <= delta for certain, is it the window's start).

        A value at the start of the window is valid but may not be tight.
        """
        if not self.is_resolved or self.constant > delta:
            return math.inf, False
        shrink = _exp(-self.scale)
        more = self.constant + self.slope * np.exp(np.minimum(self.points, 700.0))
        good = np.flatnonzero(self.first - self.second + more * shrink <= delta * shrink)
        if good.size == 0:
            return math.inf, False
        m = int(good[0])
        end, slack = float(self.points[m]), self.slack
        if m == 0:
            return end + slack, True
        slope = self.second[m] - self.slope * _exp(end - self.scale)
        rise = self.first[m] - (delta - self.constant) * shrink
        if slope <= 0 or rise <= 0:
            return end + slack, False
        root = end + math.log(rise / slope)
        return min(max(root, float(self.points[m - 1])), end) + slack, False

    def delta(self, epsilon: float) -> float:
        """Return an upper bound on delta at an epsilon that is at least the window's start."""
        if not self.is_resolved:
            return 1.0
        at = epsilon - self.slack
        m = int(np.searchsorted(self.points, at, side="right"))
        inside = 0.0
        if m < self.points.size:
            inside = self.first[m] - math.exp(at - self.points[m]) * self.second[m]
        value = _exp(self.scale) * inside + self.constant + self.slope * _exp(at)
        return float(min(1.0, max(0.0, value)))

    def rounding_share(self, epsilon: float, delta: float) -> float:
        """Return the approximate share of the upper delta at epsilon that is due to rounding.

        Integral approximation of the sum over x_j >= epsilon of
        rounding e^{-t (x_j - x_0)} (1 - e^{epsilon - x_j}).
        """
        tilt = self.window.tilt
        if self.rounding <= 0 or epsilon == math.inf:
            return 0.0
        exponent = self.total.log_mgf - tilt * epsilon + math.log(self.rounding / delta)
        return _exp(exponent) / (tilt * (tilt + 1) * self.window.spacing)


def _exp(value: float) -> float:
    return math.exp(min(value, 700.0)) if value > -745 else 0.0


def tail_sums(mass: Array, window: Window) -> tuple[Array, Array]:
    """Return the sums over x_j >= x_m of mass e^{-t (x_j - x_0)}, also times e^{-(x_j - x_m)}.

    The second is computed in blocks of length 300, against overflow.
    """
    spacing, size = window.spacing, mass.size
    terms = mass * np.exp(-window.tilt * np.arange(size) * spacing)
    first = np.cumsum(terms[::-1])[::-1]
    block = min(max(1, int(300 / spacing)), size)
    local = np.arange(block) * spacing
    blocks = np.pad(terms, (0, -size % block)).reshape(-1, block) * np.exp(-local)
    sums = np.cumsum(blocks[:, ::-1], axis=1)[:, ::-1]
    carry, shrink = [0.0], math.exp(-block * spacing)
    for own in sums[:0:-1, 0]:  # of the later blocks, at the start of each
        carry.append(own + shrink * carry[-1])
    second = (sums + shrink * np.array(carry[::-1])[:, None]) * np.exp(local)
    return first, second.ravel()[:size]


class LogMoments:
    """log E e^{theta S} on a grid of theta, with its first two derivatives: the saddle point."""

    def __init__(self, theta: Array, spacing: float) -> None:
        self._theta, self._spacing = theta, spacing
        self._value, self._slope, self._curvature = np.zeros((3, theta.size))
        self._usable = np.ones(theta.size, dtype=bool)

    def add(self, pmfs: Iterable[Pmf]) -> None:
        """Add chunks of pmfs, with counts."""
        theta = self._theta
        for pmf in pmfs:
            x = pmf.index * self._spacing
            self._usable &= theta * x[-1] < _EXPONENT
            with np.errstate(over="ignore", under="ignore", invalid="ignore", divide="ignore"):
                powers = np.exp(np.minimum(np.outer(x, theta), 700.0))
                zero = pmf.mass @ powers
                one = pmf.mass @ (x[:, None] * powers) / zero
                two = pmf.mass @ ((x * x)[:, None] * powers) / zero
                self._value += pmf.counts @ np.log(zero)
            self._slope += pmf.counts @ one
            self._curvature += pmf.counts @ np.maximum(two - one * one, 0.0)

    def resolved(self) -> tuple[Array, Array, Array, Array]:
        """Return theta, log E e^{theta S} and its two derivatives where nothing overflows."""
        keep = self._usable & np.isfinite(self._value)
        return self._theta[keep], self._value[keep], self._slope[keep], self._curvature[keep]

    def epsilon(self, delta: float) -> float:
        """Return the estimate of epsilon at delta, 0 if it is negative.

        delta(e) at e = K'(t) is e^{K - t e} E[(e^{-tZ} (1 - e^{-Z}))_+] for a normal Z of variance
        K''(t): [psi(t s) - psi((t + 1) s)], psi(z) = e^{z^2/2} Phi(-z).
        """
        theta, value, slope, curvature = self.resolved()
        spread = np.sqrt(np.maximum(curvature, 1e-300) / 2)
        inside = 0.5 * (erfcx(theta * spread) - erfcx((theta + 1) * spread))
        inside = np.log(np.maximum(inside, 1e-300))
        log_delta, target = value - theta * slope + inside, math.log(delta)
        if not theta.size:
            return 0.0
        if log_delta[0] <= target:
            return max(0.0, float(slope[0]))
        below = np.flatnonzero(log_delta <= target)
        if below.size == 0:
            return float(slope[-1])
        i = int(below[0])
        share = (log_delta[i - 1] - target) / max(log_delta[i - 1] - log_delta[i], 1e-300)
        return max(0.0, float(slope[i - 1] + share * (slope[i] - slope[i - 1])))


S = TypeVar("S", LogMoments, Sum)


class PrefixMemo:
    """Sums over the mechanisms of one direction, to which a growing history adds its new ones.

    It serves histories of subsampled Gaussians that grow at their end, as those of a run do; any
    other change starts a new sum.
    """

    def __init__(self) -> None:
        self._sums: dict[Hashable, tuple[LogMoments | Sum, Sequence[Term]]] = {}

    def total(
        self,
        key: Hashable,
        terms: Sequence[Term],
        empty: Callable[[], S],
        pmfs: Callable[[Sequence[Term]], Iterable[Pmf]],
    ) -> S:
        """Return the sum over `terms`: the one kept under `key` plus new ones, or a new sum."""
        kept, earlier = self._sums.pop(key, (None, ()))
        new = beyond(terms, earlier)
        if kept is None or new is None:
            kept = empty()
        kept.add(pmfs(terms if new is None else new))
        if len(self._sums) >= _MOST_SUMS:
            self._sums.pop(next(iter(self._sums)))
        self._sums[key] = kept, terms
        return kept  # type: ignore[return-value]  # what `empty` made for this key


def beyond(terms: Sequence[Term], earlier: Sequence[Term]) -> list[Term] | None:
    """Return what `terms` have more than the `earlier` ones; None if they do not go on from them.

    Only subsampled Gaussians, which are one term, can be compared: an earlier row is there still.
    """
    if len(terms) != 1 or len(earlier) != 1:
        return None
    pairs, old, size = terms[0].pairs, earlier[0].pairs, earlier[0].counts.size
    if not isinstance(pairs, Subsampled) or not isinstance(old, Subsampled):
        return None
    rows, same = (pairs.sigma, pairs.rate), (old.sigma, old.rate)
    if not np.array_equal([row[:size] for row in rows], same):
        return None
    more = terms[0].counts.copy()
    more[:size] -= earlier[0].counts
    kept = np.flatnonzero(more)
    new = Subsampled(pairs.sigma[kept], pairs.rate[kept])
    return [Term(new, more[kept], terms[0].flipped)] if np.all(more >= 0) else None


class Direction:
    """One composed pair (P, Q): all mechanisms of a history in one direction of the relation.

    `truncation` times (1 + e^epsilon) is a term of delta outside the privacy loss; `memo` has the
    sums of earlier questions about a shorter history.
    """

    def __init__(
        self, terms: Sequence[Term], truncation: float = 0.0, memo: PrefixMemo | None = None
    ) -> None:
        self.terms, self.truncation, self._memo = terms, truncation, memo or PrefixMemo()
        steps = variance = 0.0
        self._rows = 0
        for term in terms:
            steps += float(term.counts.sum())
            variance += float(term.counts @ term.pairs.variance())
            self._rows += term.counts.size
        self.steps, self._variance = max(1.0, steps), max(variance, 1e-20)

    def base_spacing(self, rtol: float) -> float:
        """Return h with k h^2 / 4 ~ rtol V: the lattice adds the share rtol of the variance."""
        return min(_COARSEST, math.sqrt(3 * rtol * self._variance / self.steps))

    def reach(self, tail: float) -> float:
        """Return the largest loss of a single step, except for a mass of `tail`."""
        most = 0.0
        for term in self.terms:
            low, high = term.pairs.span(tail)
            most = max(most, float(-low.min() if term.flipped else high.max()))
        return min(most, MAX_LOSS)

    def tail(self, leak: float) -> float:
        """Return the mass that one step may leave outside the edges."""
        rounded = 4.0 ** math.ceil(math.log(self.steps, 4))  # seldom changes as a history grows
        return max(1e-290, leak / rounded)

    def cut(self, mass: float) -> float:
        """Return the largest tail, of a ladder, by which all steps together lose at most `mass`.

        A subsampled step loses the sampling rate times the tail of N(1), so its tail may be larger.
        """

        def lost(term: Term, tail: float) -> float:
            pairs, z = term.pairs, quantile(tail)
            if term.flipped or not isinstance(pairs, Subsampled):
                return math.inf
            above = (1 - pairs.rate) * ndtr(-z - 1 / pairs.sigma) + pairs.rate * ndtr(-z)
            return float(term.counts @ above)

        power = math.floor(math.log(self.tail(mass)) / 4)
        while power < -2:
            if sum(lost(term, math.exp(4 * (power + 1))) for term in self.terms) > mass:
                break
            power += 1
        return math.exp(4 * power)

    def guide(self, delta: float, cut: float | None = None) -> LogMoments:
        """Return the log-moments on a coarse lattice; `cut` is the tail of one step, if given."""
        tail = cut or math.exp(4 * math.floor(math.log(self.tail(LEAK * delta)) / 4))
        spacing = 2.0 ** round(math.log2(3 * self.base_spacing(RTOL)))
        # theta: powers of 2^{1/8} for losses of this variance and largest size
        best = math.sqrt(-2 * math.log(min(delta, 0.5)) / self._variance)
        least, most = min(0.02, 0.05 * best), max(2000.0, 50 * best)
        reach = self.reach(tail) + 2 * spacing
        most = max(2 * least, min(most, _EXPONENT / max(reach, 1e-300)))
        theta = 2.0 ** (np.arange(math.floor(8 * math.log2(least)), 8 * math.log2(most)) / 8)
        return self._memo.total(
            ("guide", tail, spacing, theta.size, float(theta[0])),
            self.terms,
            partial(LogMoments, theta, spacing),
            lambda terms: discretize(map(_thinned, terms), Grid(spacing, 16), tail),
        )

    def spacing(self, tail: float, length: float) -> float:
        """Return the spacing of the lattice: a power of 2, never finer for a worse setting.

        A worse setting has a larger variance, a farther largest loss and a window no shorter. Up to
        `FEW` steps the spacing does not depend on their number, so adding a step never makes the
        lattice finer.
        """
        share = 0.015 * self._variance / max(self.steps, FEW)
        points = POINTS[bisect.bisect_left(_STEPS, self.steps)]
        wanted = max(math.sqrt(share), self.reach(tail) / points)
        spacing = 2.0 ** math.floor(math.log2(min(_COARSEST, wanted)))
        while length > spacing * (MAX_WINDOW - 8):
            spacing *= 2
        if spacing > _USELESS:
            raise TiltError
        return spacing

    def curve(
        self,
        guide: LogMoments,
        delta: float,
        start: float,
        aim: float,
        *,
        rtol: float = RTOL,
        share: float = LEAK,
        cut: float | None = None,
    ) -> Curve:
        """Return the composed loss in a window from `start`, where epsilon is expected at `aim`.

        Each truncation may cost `share` of delta; with `cut`, the tail of one step, the window is
        kept short enough for the lattice. A smaller `rtol` than `RTOL` makes the lattice finer.

        Raises:
            TiltError: a loss is beyond the resolved range.
        """
        tail = cut or self.tail(share * delta)
        most = self.spacing(tail, 0.0) * (MAX_WINDOW - 8) if cut else math.inf
        tilt, length, chernoff = plan_window(guide, share * delta, start, aim, self.steps, most)
        spacing = self.spacing(tail, length) * math.sqrt(rtol / RTOL)
        size = 1 << max(6, math.ceil(math.log2(length / spacing + 4)))
        octave = 2 ** round(5 + math.log2(RTOL / rtol) / 4)
        grid = Grid(spacing, octave if self._rows <= 64 else octave // 2)
        window = Window(tilt, chernoff, spacing, size)
        discretized = partial(discretize, grid=grid, tail=tail)
        key = window, grid, tail
        total = self._memo.total(key, self.terms, partial(Sum, window), discretized)
        return Curve(total, math.floor(start / spacing), self.truncation)


def plan_window(
    guide: LogMoments, leak: float, start: float, aim: float, steps: float, most: float = math.inf
) -> tuple[float, float, float]:
    """Return (tilt, length, chernoff) of a short window from `start` with leak <= `leak`.

    For each tilt t the length must cover the left wrap, the right wrap (best c > t) and the
    truncation (best c). Rounding, about 1e-14 of the tilted mass for each step, may be as large as
    the leak; to reduce it further, the window may grow by the same factor, but not beyond `most` if
    possible.

    Raises:
        TiltError: a loss is beyond the resolved range.
    """
    theta, value, _, _ = guide.resolved()
    if theta.size == 0:
        raise TiltError
    log_leak = math.log(leak)
    ends = (value - log_leak) / theta - start
    cut = int(np.argmin(ends))
    with np.errstate(divide="ignore", invalid="ignore"):
        gaps = theta[None, :] - theta[:, None]  # (t, c)
        right = (value - theta * start - log_leak)[None, :] / gaps
    right[gaps <= 0] = np.inf
    length = np.maximum(np.maximum(-log_leak / theta, right.min(axis=1)), ends[cut])
    rounding = value - theta * aim + math.log(1e-14 * steps)
    cost = np.log(length) + np.maximum(rounding - log_leak, 0.0)
    cost += 100 * np.maximum(np.log(length / most), 0.0) if most < math.inf else 0.0
    best = int(np.argmin(cost[:-1])) if theta.size > 1 else 0
    return float(theta[best]), float(length[best]), float(theta[cut])


def _thinned(term: Term) -> Term:
    """Return fewer rows for the guide: (sigma, rate) rounded to 5 % and merged."""
    pairs = term.pairs
    if not isinstance(pairs, Subsampled) or term.counts.size <= 400:
        return term
    logs = np.round(np.log(np.stack([pairs.sigma, pairs.rate])) / 0.05) * 0.05
    unique, inverse = np.unique(logs, axis=1, return_inverse=True)
    counts = np.bincount(inverse.ravel(), weights=term.counts).astype(np.float64)
    sigma, rate = np.exp(unique)
    return Term(Subsampled(sigma, np.minimum(rate, 1.0)), counts, term.flipped)


def upper_epsilon(directions: Sequence[Direction], delta: float, rtol: float = RTOL) -> float:
    """Return a certified upper bound on epsilon >= 0: the largest over the directions.

    The direction with the largest estimate comes first. Another one is refined only if its bound
    on a lattice four times coarser is larger.
    """
    guides = [direction.guide(delta) for direction in directions]
    guesses = [guide.epsilon(delta) for guide in guides]
    first, *rest = sorted(range(len(directions)), key=lambda i: -guesses[i])
    top = _upper(directions[first], guides[first], guesses[first], delta, rtol)
    for i in rest:
        one = directions[i], guides[i], guesses[i], delta
        if top < math.inf and _upper(*one, 16 * rtol) > top:
            top = max(top, _upper(*one, rtol))
    return top


def _upper(
    direction: Direction, guide: LogMoments, guess: float, delta: float, rtol: float
) -> float:
    """Certified upper bound on epsilon of one direction; `guess` is the guide's estimate.

    If rounding dominates, the largest losses, which limit the tilt, are truncated at the cost of
    several shares of delta, and the smallest bound is returned.
    """
    best, rounding = _search(direction, guide, guess, delta, rtol)
    for share in _CUTS if rounding > _RARE else ():
        cut = direction.cut(share * delta)
        guide = direction.guide(delta, cut)
        found, _ = _search(direction, guide, guide.epsilon(delta), delta, rtol, share, cut)
        best = min(best, found)
    return max(0.0, min(best, _largest_losses(direction)))


def _search(
    direction: Direction,
    guide: LogMoments,
    guess: float,
    delta: float,
    rtol: float,
    share: float = LEAK,
    cut: float | None = None,
) -> tuple[float, float]:
    """(upper bound, share of delta due to rounding), inf if no bound is found.

    The window moves down until it contains epsilon, then up if rounding shows: rounding is least in
    a window that starts at epsilon.
    """
    margin = 0.04 * guess + 2 * direction.base_spacing(rtol)
    best, rounding = math.inf, 0.0
    for _ in range(12):
        start = max(guess - margin, 0.0)
        try:
            curve = direction.curve(guide, delta, start, guess, rtol=rtol, share=share, cut=cut)
        except TiltError:
            break
        found, is_at_start = curve.epsilon(delta)
        best = min(best, found)
        rounding = curve.rounding_share(best, delta)
        if is_at_start and start > 0:
            guess, margin = best, 3 * margin
        elif start < 0.97 * best and rounding > _ROUNDING:
            guess, margin = best, 0.02 * best
        else:
            break
    return best, rounding


def _largest_losses(direction: Direction) -> float:
    """Total of the largest losses, -log(1 - q) each: steps without the example.

    It applies to the pair (Q, P) of Poisson sampling; inf for others.
    """
    total = 0.0
    for term in direction.terms:
        if direction.truncation or not term.flipped or not isinstance(term.pairs, Subsampled):
            return math.inf
        rows = term.counts > 0
        with np.errstate(divide="ignore"):
            total -= float(term.counts[rows] @ np.log1p(-term.pairs.rate[rows]))
    return total * (1 + 1e-10)


def upper_delta(direction: Direction, epsilon: float) -> float:
    """Return a certified upper bound on delta at epsilon >= 0; 1 if no window resolves it."""
    best, guess = _all_below(direction, epsilon), 0.5
    if best < 1:
        return best
    for _ in range(60):  # the delta whose epsilon is the wanted one, to a factor of 4
        if direction.guide(guess).epsilon(guess) >= epsilon or guess < 1e-140:
            break
        guess *= 0.25
    start = max(0.0, epsilon * (1 - 1e-3) - 1e-9)
    for _ in range(4):  # the leak is a share of the guess and must be small against the result
        try:
            curve = direction.curve(direction.guide(guess), guess, start, epsilon)
        except TiltError:
            break
        best = min(best, curve.delta(epsilon))
        if not 1e-150 < best < 0.1 * guess:
            break
        guess = best
    return best


def _all_below(direction: Direction, epsilon: float) -> float:
    """Delta if the largest losses add up to less than epsilon, else 1."""
    tail = 1e-280
    grid = Grid(max(direction.reach(tail) / 32, 2.0**-30))
    total, log_finite = 0.0, 0.0
    for pmf in discretize(direction.terms, grid, tail):
        total += float(pmf.counts @ (pmf.slack + pmf.index[-1] * grid.spacing))
        log_finite += float(pmf.counts @ np.log1p(-np.minimum(pmf.infinite, 1 - 1e-16)))
    if total * (1 + 1e-12) >= epsilon:
        return 1.0
    extra = direction.truncation * (1 + _exp(epsilon))
    return min(1.0, -math.expm1(log_finite) * (1 + 1e-12) + extra)
