# SPDX-License-Identifier: Apache-2.0
"""Balls-in-bins sampling (random allocation of one step out of t): a dominating pair of one epoch.

One epoch: every example draws one of t steps. With the noise of all steps seen at once, the pair is
P = mean_i N(e_i, s^2 I_t) against Q = N(0, s^2 I_t), with the likelihood ratio under Q

    X = (1/t) sum_i Y_i,   Y_i = e^{(2 x_i - 1) / (2 s^2)} independent, E Y_i = 1.

delta = E_Q(X - e^eps)_+ (remove) and E_Q(1 - e^eps X)_+ (add) are convex in X. A mean-preserving
spread of each Y_i onto a linear grid thus bounds both from above, at every epsilon: the spread X is
the likelihood ratio of a dominating pair. Its distribution is a power of one Fourier transform.

With little noise the Y_i reach from e^-20 to e^20, and no linear grid resolves both ends. Their
means are then formed by doubling, (X + X') / 2 spread back onto a geometric grid each time.

Source: the pair is that of Chua et al. 2024 (arXiv 2412.16802), Theorem 3.1, also for steps that
depend on earlier outputs; the bound by convex order is ours.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from scipy import fft
from scipy.special import ndtr, ndtri

from dualdp.accountants.pld_engine.composition import fft_error
from dualdp.accountants.pld_engine.pairs import NDTR_ERROR, Array, Atoms, Index, U, quantile

_MAX_POINTS = 1 << 21
_MANY = 1 << 14
_CELL_ERROR = 2e-11  # relative error of one step's masses [test_the_masses_of_one_step_are_exact]
_FARTHEST = 37.0  # standard deviations
_SPREAD = 4e-6  # squared spacing of the losses that are kept, divided by their variance
_CELLS = 1 << 10  # of the geometric grid
_LARGEST = 300.0  # log X on the geometric grid


def one_epoch(sigma: float, bins: int, tail: float) -> Atoms:
    """Return the dominating pair of one epoch of `bins` >= 2 steps, as atoms at losses log X.

    `tail` is the mass that may be truncated at each end; it is counted as infinite loss.
    """
    reach = 1 + 2 * quantile(tail / (2 * bins)) * sigma
    low, top = (math.exp(min(end / (2 * sigma**2), 690.0)) for end in (-reach, reach))
    spread = math.sqrt(math.expm1(min(sigma**-2, 600.0)))
    step = max(0.03 * spread * min(1.0, bins / 30), 3 * (top - low) / _MAX_POINTS, 1e-9)
    first, last = _ends(sigma, bins, tail)
    added = ((last - first) / _CELLS) ** 2 * (2 * bins + math.log2(bins) * spread**2)
    # Both sides are about 6 bins x the variance added to X.
    if last < _LARGEST and step**2 > 4 * added:
        return _doubled(sigma, bins, tail)
    leak = math.log(2 / tail)
    for _ in range(20):
        one = coordinate(sigma, step, low, top)
        end = _reach(one.q, one.p, bins, leak)
        if end < _MAX_POINTS - 8:
            break
        step *= 1.02 * end / (_MAX_POINTS - 8)
    size = 1 << math.ceil(math.log2(end + 8))
    (p, p_error), (q, q_error) = _powers(one.p, one.q, bins - 1, size)
    wrapped = math.exp(-leak) * (1 + 1e-9)
    kept, p, q = _thinned(p, q, bins * one.first, step / bins)
    errors = np.append(_merged_errors(kept), [0.0, 0.0])
    return Atoms(
        np.append(p, [one.lost_p + (bins - 1) * one.lost_q + wrapped, 0.0]),
        np.append(q, [0.0, bins * one.lost_q + wrapped]),
        np.append(_losses(kept, step / bins), [math.inf, -math.inf]),
        bins * one.error * 1.01 + (int(np.diff(kept).max()) + 16) * U,
        p_error * errors,
        q_error * errors,
        spread=wrapped,
    )


def _ends(sigma: float, bins: int, tail: float) -> tuple[float, float]:
    """First and last point of the geometric grid, in log X.

    Below the first lies next to no mean, which is at least the largest ratio divided by `bins`.
    """
    z = quantile(tail / 4)
    least = float(ndtri((tail / 4) ** (1 / bins))) - sigma * (math.log(bins) + 3)
    ends = max(-z, least), max(z + 1 / sigma, quantile(tail / (4 * bins)))
    return ends[0] / sigma - 0.5 / sigma**2, ends[1] / sigma - 0.5 / sigma**2


def _doubled(sigma: float, bins: int, tail: float) -> Atoms:
    """The pair of `one_epoch` on the grid 0, e^first, e^(first + h), ..., e^last.

    Errors: a merge (`_mean`) adds at most 4 products to a point for each lag, and moves what it
    spreads by less than 2000 U of itself, hence a loss by as much. With its copies the mean of all
    has less than `bins` merges. Masses below `least` are taken off; they and their P-masses add up
    to at most 1e-4 of the tail.
    """
    first, last = _ends(sigma, bins, tail)
    h = (last - first) / _CELLS
    loss = first + h * np.arange(_CELLS + 1)
    z = sigma * loss + 0.5 / sigma
    below = float(ndtr(z[0]))
    at_first = min(float(ndtr(z[0] - 1 / sigma)) * math.exp(-first), below)
    q = np.zeros(_CELLS + 2)  # [0] is X = 0
    q[:2] = below - at_first, at_first
    up, down = _cell_means(sigma, np.full(_CELLS, 1 / math.expm1(h)), z[:-1])
    q[1:-1] += down
    q[2:] += up
    error = _CELL_ERROR + 64 * sigma * U + 4 * NDTR_ERROR * below / max(below - at_first, 1e-300)
    merges = 2 * bins.bit_length()
    least = 1e-5 * tail / (merges * _CELLS * bins) * math.exp(-max(last, 0.0))
    one: Array = q
    mean: Array = q
    number = 1
    for bit in f"{bins:b}"[1:]:
        mean = _mean(mean, mean, 1.0, h, least)
        number *= 2
        if bit == "1":
            mean = _mean(mean, one, 1 / number, h, least)
            number += 1
    lost_q, lost_p = (float(ndtr(-x)) * (1 + NDTR_ERROR) for x in (z[-1], z[-1] - 1 / sigma))
    mean[0] += bins * lost_q + 1e-4 * tail
    return Atoms(
        np.concatenate(
            [[0.0], mean[1:] * np.exp(loss), [lost_p + (bins - 1) * lost_q + 1e-4 * tail]]
        ),
        np.append(mean, 0.0),
        np.concatenate([[-math.inf], loss, [math.inf]]),
        error=1.01 * bins * (error + (4 * _CELLS + 4000) * U),
    )


def _mean(one: Array, other: Array, ratio: float, h: float, least: float) -> Array:
    """Distribution of (X + ratio X') / (1 + ratio), spread back onto the grid 0, g, g e^h, ....

    For points `lag` apart it is the larger times a factor of the lag alone, hence a shift by whole
    cells and one share that goes to the next point: a mean-preserving spread. From e^37 on the
    smaller is lost in rounding.
    """
    size, rest = one.size - 1, 1 + ratio
    base = 1 - math.floor(math.log(ratio / rest) / h)
    total = np.zeros(base + size + 1)  # [base + i] is the point i

    def put(mass: Array, lag: int, factor: float) -> None:
        log_factor = math.log(factor)
        shift = math.floor(log_factor / h)
        up = mass * (math.expm1(log_factor - shift * h) / math.expm1(h))
        start = base + lag + shift
        total[start : start + mass.size] += mass - up
        total[start + 1 : start + 1 + mass.size] += up

    near = min(math.ceil(37 / h), size)
    shrunk = np.exp(-h * np.arange(near))
    orders = [(one, other, 1.0, ratio), (other, one, ratio, 1.0)]
    for i, (larger, smaller, weight, added) in enumerate(orders):
        far = np.repeat(smaller[0], size)
        far[near:] += np.cumsum(smaller[1 : 1 + size - near])
        put(larger[1:] * far, 0, weight / rest)
        for lag in range(i, near):  # of equal points once
            mass = larger[1 + lag :] * smaller[1 : 1 + size - lag]
            put(mass, lag, (weight + added * shrunk[lag]) / rest)
    under = total[:base]
    at_first = float(under @ np.exp(h * np.arange(-base, 0)))
    mean = np.concatenate([[one[0] * other[0] + under.sum() - at_first], total[base : base + size]])
    mean[1] += at_first
    mean[mean < least] = 0.0
    return mean


def _losses(index: Index, step: float) -> Array:
    """Logarithms of the likelihood ratios index * step."""
    with np.errstate(divide="ignore"):
        return np.asarray(np.log(index * step))


def _thinned(p: Array, q: Array, first: int, step: float) -> tuple[Index, Array, Array]:
    """(kept indices, P-masses, Q-masses), with the points in between spread onto the kept ones.

    A likelihood ratio i between the kept k and m goes to m with probability (i - k) / (m - k) under
    Q, which keeps its mean, hence with m / i times that under P: one more mean-preserving spread.
    """
    index = np.arange(first, first + p.size)
    kept = _kept(p, index, step)
    gaps = np.diff(kept)
    inner, starts = index[:-1], kept[:-1] - first
    share = (inner - np.repeat(kept[:-1], gaps)) / np.repeat(gaps, gaps)
    grown = share * (np.repeat(kept[1:], gaps) / np.maximum(inner, 1))
    masses = []
    for mass, up in ((p, grown), (q, share)):
        moved = np.add.reduceat(mass[:-1] * up, starts)
        whole = np.add.reduceat(mass, kept - first)
        whole[:-1] -= moved
        whole[1:] += moved
        masses.append(np.maximum(whole, 0.0))
    return kept, masses[0], masses[1]


def _kept(p: Array, index: Index, step: float) -> Index:
    """Kept indices: all where losses are sparse, one per `spacing` of loss elsewhere, both ends."""
    first, last = int(index[0]), int(index[-1])
    loss = _losses(np.maximum(index, 1), step)
    spacing = max(math.sqrt(_SPREAD * float(p @ (loss * loss))), 1e-9)
    dense = min(max(math.ceil(1 / spacing), first, 1), last)
    rest = dense * np.exp(np.arange(0.0, math.log(last / dense), spacing))
    rest = np.minimum(rest.astype(np.int64), last)
    kept = np.concatenate([np.arange(first, dense), rest, [first, last]])
    kept.sort()
    return kept[np.diff(kept, prepend=-1) > 0]


def _merged_errors(kept: Index) -> Array:
    """(kept,) number of point errors that the error of a kept point may amount to.

    In a gap of n points the lower end takes at most (n + 1) / 2 errors, the upper end (n - 1) / 2
    times the ratio of the ends.
    """
    gaps = np.diff(kept).astype(float)
    errors = np.ones(kept.size)
    errors[:-1] = (gaps + 1) / 2
    errors[1:] += (gaps - 1) / 2 * kept[1:] / np.maximum(kept[:-1], 1)
    return errors


@dataclasses.dataclass(frozen=True)
class Coordinate:
    """Distribution of the spread Y at the grid points `first`, `first` + 1, ... times the step.

    `q` and `p` are Q- and P-masses with relative error at most `error`; `lost_q` and `lost_p` are
    the masses outside the grid.
    """

    first: int
    q: Array
    p: Array
    error: float
    lost_q: float
    lost_p: float


def coordinate(sigma: float, step: float, low: float, top: float) -> Coordinate:
    """Y spread onto a grid over [low, top]; mass and mean of every cell are preserved.

    An outcome y in the cell [j, j + 1) goes to j + 1 with probability y - j, and to j otherwise.
    Both masses are sums of positive terms (`_cell_means`), except in the cell from 0 (`ndtr`).
    """
    first = math.floor(low / step)
    index = np.arange(first, math.ceil(top / step) + 1, dtype=float)
    with np.errstate(divide="ignore"):
        z = sigma * np.log(index * step) + 0.5 / sigma
    up, down = np.empty((2, index.size - 1))
    error, inner = _CELL_ERROR + 64 * sigma * U, int(first == 0)
    if inner:
        up[0] = float(ndtr(z[1] - 1 / sigma)) / step
        down[0] = max(float(ndtr(z[1])) - up[0], 0.0)
        doubt = NDTR_ERROR * (2 * up[0] + down[0])
        error = max(error, doubt / max(down[0], 1e-300))
    up[inner:], down[inner:] = _cell_means(sigma, index[inner:-1], z[inner:-1])
    q = np.append(down, 0.0)
    q[1:] += up
    lost = [float(ndtr(x[0]) + ndtr(-x[-1])) * (1 + NDTR_ERROR) for x in (z, z - 1 / sigma)]
    if z[-1] > _FARTHEST:  # densities underflow where P may have its mass
        lost[1] = 1.0
    return Coordinate(first, q, q * index * step, error, *lost)


def _cell_means(sigma: float, index: Array, start: Array) -> tuple[Array, Array]:
    """Integrals of (y - j) and of (j + 1 - y) over N(0, 1) in z, for cells [j, j + 1), j >= 1.

    Here y = j e^{(z - start) / sigma}. Gauss' rule of n nodes on a cell of width w: on the ellipse
    with sum of half-axes rho w / 2 the integrand is at most rho e^{|z| rho w / 4} times its size on
    the cell, and the error of the rule is about rho^{1 - 2n} of that, below 1e-12 for |z| < 37:
    w > 1/64   100 nodes, rho = 8;     w > 1/4096   5 nodes, rho = 64;
    narrower ones    3 nodes, rho = 4096. Wide cells, of the largest steps only, end where the
    density underflows, and 100 nodes do there too: they leave e^-50 of e^{-z^2/2} on [-39, 39].
    """
    log_ratio = np.log1p(1 / index)
    width = sigma * log_ratio  # falls with the index
    low = np.maximum(start, -_FARTHEST - 2)
    length = np.maximum(np.minimum(width - (low - start), _FARTHEST + 2 - low), 0.0)
    grown = np.where(length < width, length / sigma, log_ratio)
    up, down = np.empty((2, index.size))
    ends = [int(np.count_nonzero(width > least)) for least in (2.0**-6, 2.0**-12)]
    parts = slice(0, ends[0]), slice(ends[0], ends[1]), slice(ends[1], None)
    for cells, count in zip(parts, (100, 5, 3), strict=True):
        total, above = np.zeros((2, width[cells].size))
        for node, weight in zip(*np.polynomial.legendre.leggauss(count), strict=True):
            t = 0.5 * (1 + node)
            density = 0.5 * weight * np.exp(-0.5 * (low[cells] + t * length[cells]) ** 2)
            inside = t * grown[cells] + (low[cells] - start[cells]) / sigma
            share = density * (index[cells] * np.expm1(inside))
            above += share
            total += density - share
        scale = length[cells] / math.sqrt(2 * math.pi)
        up[cells], down[cells] = above * scale, total * scale
    return up, down


def _reach(single: Array, tilted: Array, bins: int, leak: float) -> float:
    """Index n with P(sum of indices >= n) <= e^-leak under both measures, by Chernoff's bound.

    Long inputs are grouped in blocks of 64, each counted at its largest index: still a bound.
    """
    block = 64 if single.size > _MANY else 1
    starts = np.arange(0, single.size, block)
    index = np.minimum(starts + block - 1, single.size - 1)
    single, tilted = np.add.reduceat(single, starts), np.add.reduceat(tilted, starts)
    best = math.inf
    for theta in np.geomspace(0.1, 60.0, 24) / index[-1]:
        weights = np.exp(theta * index)
        one, other = float(single @ weights), max(float(tilted @ weights), 1e-300)
        log_sum = (bins - 1) * math.log(one) + max(math.log(one), math.log(other))
        best = min(best, (log_sum + leak) / theta)
    return best


def _powers(
    tilted: Array, single: Array, power: int, size: int
) -> tuple[tuple[Array, float], tuple[Array, float]]:
    """Cyclic convolutions of `tilted` and of `single` with `power` copies of `single`.

    Returns:
        For each: (size,) entries and the bound on the error of an entry, see `fft._Product`.
    """
    many = fft.rfft(single, size)
    error = fft_error(size) + 16 * U
    modulus = np.abs(many)
    with np.errstate(divide="ignore"):
        log_many = power * np.log(np.maximum(modulus, 1e-300))
        major = np.exp(power * np.log(modulus + error))
    copies = np.exp(log_many + 1j * power * np.angle(many))

    def times(one: Array, total: float) -> tuple[Array, float]:
        product, largest = one * copies, major * (np.abs(one) + error * max(total, 1))
        difference = np.maximum(largest - np.abs(product), 0.0)
        difference += (fft_error(size) + 64 * U) * largest
        mass = np.maximum(fft.irfft(product, n=size), 0.0)
        return mass, 2 * float(difference.sum()) / size

    return times(fft.rfft(tilted, size), tilted.sum()), times(many, single.sum())
