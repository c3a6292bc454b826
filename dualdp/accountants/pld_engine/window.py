# SPDX-License-Identifier: Apache-2.0
"""Choice of the lattice and of the composition window, by a saddle-point estimate.

A bad lattice or window cannot make a bound wrong; it only loosens the bounds that `fft` and
`bounds` certify. The estimate comes from log-moment generating functions on a coarse lattice.

Upper bounds are monotone: on fixed edges, connecting the dots keeps the order of delta curves, and
so does composition. So the bound on one lattice grows with every step and every worse setting.
`Direction.upper_spacing` chooses from powers of 2 whose edges contain each other, and never a finer
one when a setting becomes worse; truncations cost at most 1e-12 of delta, so that the position of
the window has no visible effect.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import erfcx, ndtr

from dualdp.accountants.pld_engine.bounds import Extra
from dualdp.accountants.pld_engine.discretize import MAX_LOSS, Grid, Pmf, Term, discretize
from dualdp.accountants.pld_engine.dominating_pairs import Subsampled, quantile
from dualdp.accountants.pld_engine.fft import Composed, Sum, TiltError, Window
from dualdp.accountants.pld_engine.prefix_cache import PrefixCache

Array = npt.NDArray[Any]

LEAK = 1e-12  # share of delta that each truncation may cost an upper bound
_MAX_WINDOW = 1 << 19  # points; a longer window needs a coarser lattice
_LARGEST_WINDOW = 1 << 21  # points for a lower bound of few different mechanisms
_FEW = 1 << 12  # number of steps up to which the lattice does not depend on it
_POINTS = ((1 << 12, 1 << 13), (1 << 17, 1 << 16), (math.inf, 1 << 17))  # of the largest loss
_COARSEST = 2.0**-4
_USELESS = 16.0  # largest spacing: e^loss must not overflow at an edge
_EXPONENT = 650.0  # bound on theta times the largest loss, against overflow


@dataclasses.dataclass(frozen=True)
class Accuracy:
    """Relative accuracy in epsilon that the lattice aims at, and number of cells from x to 2x.

    `scale` multiplies the spacing for lower bounds.
    """

    rtol: float = 1e-2
    octave: int = 32
    scale: float = 1.0

    @property
    def leak(self) -> float:
        """Share of delta that each truncation may cost a lower bound."""
        return min(1e-3, 0.1 * self.rtol)

    def finer(self, factor: float) -> Accuracy:
        """Return this accuracy with the spacing multiplied by `factor`."""
        return Accuracy(self.rtol * factor * factor, min(1024, 2 * self.octave), self.scale)


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
        spread = np.sqrt(np.maximum(curvature, 1e-300))
        near, far = (erfcx(t * spread / math.sqrt(2)) for t in (theta, theta + 1))
        with np.errstate(divide="ignore"):
            inside = np.log(np.maximum(0.5 * (near - far), 1e-300))
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


class Direction:
    """One composed pair (P, Q): all mechanisms of a history in one direction of the relation.

    `extra` is the term of delta outside the privacy loss; `cache` has the sums of earlier calls
    about a shorter history.
    """

    def __init__(
        self,
        terms: Sequence[Term],
        extra: Extra | None = None,
        cache: PrefixCache | None = None,
    ) -> None:
        self.terms, self.extra = terms, extra or Extra()
        self.steps = max(1.0, float(sum(term.counts.sum() for term in terms)))
        self.work = 0  # points of all windows so far
        self._cache = cache or PrefixCache()
        variance = sum(float(term.counts @ term.pairs.variance()) for term in terms)
        self._variance = max(variance, 1e-20)
        self._rows = sum(term.counts.size for term in terms)

    def base_spacing(self, rtol: float) -> float:
        """Return h with k h^2 / 4 ~ rtol V: the lattice adds the share rtol of the variance."""
        return min(_COARSEST, math.sqrt(3 * rtol * self._variance / self.steps))

    def resolution(self, rtol: float) -> float:
        """Return the share of the base spacing that resolves losses below 0, down to log(1 - q).

        Merging neighbours needs masses that are smooth on the grid, there above all.
        """
        least = min(float(np.mean(np.abs(term.pairs.span(0.1)[0]))) for term in self.terms)
        return max(0.05 * least / self.base_spacing(rtol), 0.01)

    def reach(self, tail: float) -> float:
        """Return the largest loss of a single step, except for a mass of `tail`."""
        spans = [(term.flipped, *term.pairs.span(tail)) for term in self.terms]
        ends = [float(-low.min() if flipped else high.max()) for flipped, low, high in spans]
        return min(max(0.0, *ends), MAX_LOSS)

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

    def guide(self, delta: float, leak: float = LEAK, cut: float | None = None) -> LogMoments:
        """Return the log-moments on a coarse lattice; `cut` is the tail of one step, if given."""
        tail = cut or math.exp(4 * math.floor(math.log(self.tail(leak * delta)) / 4))
        spacing = 2.0 ** round(math.log2(3 * self.base_spacing(1e-2)))
        # theta: powers of 2^{1/8} for losses of this variance and largest size
        best = math.sqrt(-2 * math.log(min(delta, 0.5)) / self._variance)
        least, most = min(0.02, 0.05 * best), max(2000.0, 50 * best)
        reach = self.reach(tail) + 2 * spacing
        most = max(2 * least, min(most, _EXPONENT / max(reach, 1e-300)))
        theta = 2.0 ** (np.arange(math.floor(8 * math.log2(least)), 8 * math.log2(most)) / 8)
        return self._cache.total(
            ("guide", tail, spacing, theta.size, float(theta[0])),
            self.terms,
            lambda: LogMoments(theta, spacing),
            lambda terms: discretize(
                [_thinned(term) for term in terms], Grid(spacing, octave=16), tail
            ),
        )

    def upper_spacing(self, tail: float, length: float) -> float:
        """Return the spacing for upper bounds: a power of 2, never finer for a worse setting.

        A worse setting has a larger variance, a farther largest loss and a window no shorter. Up to
        `_FEW` steps the spacing does not depend on their number, so adding a step never makes the
        lattice finer.
        """
        share = 0.015 * self._variance / max(self.steps, _FEW)
        points = next(points for most, points in _POINTS if self.steps <= most)
        wanted = max(math.sqrt(share), self.reach(tail) / points)
        spacing = 2.0 ** math.floor(math.log2(min(_COARSEST, wanted)))
        while length > spacing * (_MAX_WINDOW - 8):
            spacing *= 2
        if spacing > _USELESS:
            raise TiltError
        return spacing

    def lower_spacing(self, accuracy: Accuracy, start: float, tilt: float, length: float) -> float:
        """Return the spacing for lower bounds: fine enough for the variance and for epsilon.

        A lattice of spacing h adds about k h E|L| <= h sqrt(k V) to the variance where h exceeds
        the size of the losses; it may add rtol epsilon / theta.
        """
        useful = 0.1 * accuracy.rtol * max(start, 0.0) / max(tilt, 1e-9)
        enough = useful / math.sqrt(self.steps * self._variance)
        fine = max(self.base_spacing(accuracy.rtol), min(enough, _COARSEST))
        points = _LARGEST_WINDOW if self._rows <= 8 else _MAX_WINDOW >> 2
        return max(accuracy.scale * fine, length / (points - 8))

    def compose(
        self,
        guide: LogMoments,
        accuracy: Accuracy,
        delta: float,
        start: float,
        aim: float,
        *,
        below: bool = False,
        share: float = LEAK,
        cut: float | None = None,
    ) -> Composed:
        """Return the composed loss in a window from `start`, where epsilon is expected at `aim`.

        Each truncation of an upper bound may cost `share` of delta; with `cut`, the tail of one
        step, the window is kept short enough for the lattice.

        Raises:
            TiltError: a loss is beyond the resolved range.
        """
        leak = (accuracy.leak if below else share) * delta
        tail = cut or self.tail(leak)
        most = self.upper_spacing(tail, 0.0) * (_MAX_WINDOW - 8) if cut else math.inf
        tilt, length, chernoff = plan_window(
            guide, leak, start, aim, self.steps, below=below, most=most
        )
        if below:
            spacing = self.lower_spacing(accuracy, start, tilt, length)
        else:
            spacing = self.upper_spacing(tail, length) * math.sqrt(accuracy.rtol / 1e-2)
        size = 1 << max(6, math.ceil(math.log2(length / spacing + 4)))
        window = Window(tilt, math.floor(start / spacing), size, chernoff)
        grid = Grid(spacing, accuracy.octave if self._rows <= 64 else accuracy.octave // 2)
        self.work += size
        total = self._cache.total(
            (below, tilt, chernoff, size, grid, tail),
            self.terms,
            lambda: Sum(window, spacing),
            lambda terms: discretize(terms, grid, tail, below=below),
        )
        return total.composed(window.start)


def plan_window(
    guide: LogMoments,
    leak: float,
    start: float,
    aim: float,
    steps: float,
    *,
    below: bool,
    most: float = math.inf,
) -> tuple[float, float, float]:
    """Return (tilt, length, chernoff) of a short window from `start` with leak <= `leak`.

    For each tilt t the length must cover the left wrap, the right wrap (best c > t) and the
    truncation (best c); see `fft`. Rounding, about 1e-14 of the tilted mass for each step, may be
    as large as the leak; to reduce it further, the window may grow by the same factor, but not
    beyond `most` if possible.

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
    partner = np.argmin(right, axis=1)
    length = np.maximum(-log_leak / theta, right[np.arange(theta.size), partner])
    length = np.maximum(length, ends[cut])
    rounding = value - theta * aim + math.log(1e-14 * steps)
    cost = np.log(length) + np.maximum(rounding - log_leak, 0.0)
    cost += 100 * np.maximum(np.log(length / most), 0.0) if most < math.inf else 0.0
    best = int(np.argmin(cost[:-1])) if theta.size > 1 else 0
    chernoff = float(theta[partner[best]] if below else theta[cut])
    return float(theta[best]), float(length[best]), chernoff


def _thinned(term: Term) -> Term:
    """Return fewer rows for the guide: (sigma, rate) rounded to 5 % and merged."""
    pairs = term.pairs
    if not isinstance(pairs, Subsampled) or term.counts.size <= 400:
        return term
    logs = np.round(np.log(np.stack([pairs.sigma, pairs.rate])) / 0.05) * 0.05
    unique, inverse = np.unique(logs, axis=1, return_inverse=True)
    counts = np.bincount(inverse.ravel(), weights=term.counts)
    sigma, rate = np.exp(unique)
    return Term(Subsampled(sigma, np.minimum(rate, 1.0)), counts, term.flipped)
