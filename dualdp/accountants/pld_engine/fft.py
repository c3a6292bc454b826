# SPDX-License-Identifier: Apache-2.0
"""Composition of many privacy losses: their tilted sum in a window, by Fourier transforms.

S = L_1 + ... + L_k, all on one lattice, with delta(e) = P(S = inf) + E[(1 - e^{e-S})_+]. With the
tilted law dP_t = e^{tS - K(t)} dP, K(t) = sum_i log E e^{t L_i},
    delta(e) = P(S = inf) + e^{K(t)} E_t[e^{-tS} (1 - e^{e-S})_+],
and only a window [x_0, x_0 + W) of S above e matters. The tilted pmf is computed modulo W (a cyclic
convolution), which makes three errors. Each has a Chernoff bound computed from the composed pmfs:
    truncation   P(S >= x_0 + W) <= e^{K(c) - c (x_0 + W)}                  added to an upper delta
    left wrap    sum_m e^{-t m W} P(S < x_0)  <= e^{-tW} / (1 - e^{-tW})         off a lower delta
    right wrap   sum_m e^{t m W} P(S >= x_0 + m W) <= e^{K(c) - c x_0} r/(1-r),  off a lower delta
                 r = e^{-(c-t)W}, c > t.
Wrapped mass only adds to an upper delta. Rounding is relative to the TILTED pmf, so delta = 1e-30
is as easy as 1e-5; `_Product` bounds it.

Source: Koskela et al. 2021 (arXiv 2102.12412), heterogeneous FFT; the tilt is the usual one of
large deviations (Cramer), as in the saddle-point accountant (arXiv 2208.09595), with bounds.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import fft

from dualdp.accountants.pld_engine.discretize import Index, Pmf, U

Array = npt.NDArray[Any]
Complex = npt.NDArray[np.complex128]

CUT = 1e-19  # frequencies where the product is proved smaller than this are dropped
_BUFFER = 1 << 21  # numbers in one block of transforms
_ROOTS = 1 << 22  # most roots of unity in a direct sum: 64 MiB
_ROWS = 48  # cost of a root of unity, in products with it


class TiltError(ArithmeticError):
    """Overflow of e^{tilt x}; caught by the caller that chose the tilt."""


@dataclasses.dataclass(frozen=True)
class Window:
    """Window of the sum: tilt t, first point x_0 = start * h, `size` points, `chernoff` c > t."""

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

    N is a power of two, so the FFT has radix 2 and 4: an entry is a sum over paths, one for each
    input, with at most one twiddle product (2.9 u, and u for the twiddle: Higham 2002, Lemma 3.5)
    and one addition (u) for each factor 2 of N. The inputs are >= 0 with sum 1, so each entry is
    off by at most 6 u log2 N (`fft_error`), plus u for each addition in the folding. As a direct
    sum of `terms` terms it is off by (terms + 32) u: a root of unity is off by 14 u (an angle below
    2 pi with two roundings, then sine and cosine), a product of two by 31 u. A plain product costs
    3 u for each factor, a power through logarithm and angle 10 u and its sums over rows 4 u for
    each row and factor. The logarithms of the majorant over n rows add up to less than 44 in size
    where the product is not dropped (`CUT`): their sum is off by 44 n u, 44 u for each row. So,
    with F the computed values,
        |computed product - true product| <= prod(|F_i| + error)^{m_i} - prod |F_i|^{m_i},
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
        with np.errstate(divide="ignore"):
            self.log_major += counts @ np.log(size + error)
        if plain:
            power = np.multiply.reduce(values, axis=0)
        else:
            with np.errstate(divide="ignore", invalid="ignore"):
                exponent = counts @ np.log(np.maximum(size, 1e-300))
                phase = counts @ np.angle(values)
            power = np.exp(exponent) * np.exp(1j * phase)
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


def compose(pmfs: Iterable[Pmf], window: Window, spacing: float) -> Composed:
    """Return the sum of all losses in the window, from chunks of pmfs; see `Sum`."""
    total = Sum(window, spacing)
    total.add(pmfs)
    return total.composed(window.start)
