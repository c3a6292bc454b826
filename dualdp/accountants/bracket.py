# SPDX-License-Identifier: Apache-2.0
"""How finely to look: lattices for a wanted accuracy, refinements, and the worst direction.

Nothing here can make a bound wrong: a bad lattice or window only loosens what `compose` and
`bounds` certify.

What makes upper bounds monotone: on fixed edges, connecting the dots keeps the order of delta
curves, and so does composition. So the bound on one lattice grows with every step and every worse
setting. The lattice is chosen by `Direction.lattice` from a ladder of powers of 2 whose edges
contain each other, and never becomes finer when a setting becomes worse; truncations are kept at
1e-12 of delta, so that where the window lies does not show.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.special import ndtr

from dualdp.accountants import bounds
from dualdp.accountants.bounds import Extra
from dualdp.accountants.cells import MAX_LOSS, Subsampled, quantile
from dualdp.accountants.compose import Composed, Sum, TiltError, Window, compose
from dualdp.accountants.guide import LogMoments, Moments, plan_window, thinned, tilts
from dualdp.accountants.lattice import Grid, Part, discretise
from dualdp.accountants.memory import Memory

_MAX_WINDOW = 1 << 19  # points; the last resort is a coarser lattice
_LARGEST_WINDOW = 1 << 21  # points for a lower bound of few different mechanisms
_BUDGET = 8e6  # points for all refinements of a lower bound: a few seconds
_LEAK = 1e-12  # share of delta that each truncation may cost an upper bound
_FEW = 1 << 12  # up to so many steps the lattice does not depend on their number
_POINTS = ((1 << 12, 1 << 13), (1 << 17, 1 << 16), (math.inf, 1 << 17))  # of the largest loss
_COARSEST = 2.0**-4
_USELESS = 16.0  # no edge may lie where e^loss overflows
_ROUNDING = 1e-9  # share of delta
_RARE = 1e-6  # share of delta that rounding may take before larger cuts are tried
_CUTS = (1e-6, 1e-3, 1e-2)  # share of delta that then goes into cutting off the largest losses


@dataclasses.dataclass(frozen=True)
class Accuracy:
    """Relative accuracy in epsilon that the lattice aims at, and its cells from x to 2x."""

    rtol: float = 1e-2
    octave: int = 32
    scale: float = 1.0

    @property
    def leak(self) -> float:
        """Share of delta that each truncation may cost a lower bound."""
        return min(1e-3, 0.1 * self.rtol)

    def finer(self, factor: float) -> Accuracy:
        """As this, with the spacing times `factor`."""
        return Accuracy(self.rtol * factor * factor, min(1024, 2 * self.octave), self.scale)


class Direction:
    """One composed pair (P, Q): all parts of a history, seen in one direction.

    Args:
        parts: the mechanisms with their counts.
        extra: what no privacy loss carries.
        memory: sums of earlier questions about a shorter history; see `Memory`.
    """

    def __init__(
        self, parts: Sequence[Part], extra: Extra | None = None, memory: Memory | None = None
    ) -> None:
        self.parts = parts
        self.memory = Memory() if memory is None else memory
        self.extra = extra or Extra()
        self.steps = max(1.0, float(sum(part.counts.sum() for part in parts)))
        variance = sum(float(part.counts @ part.family.variance()) for part in parts)
        self.variance = max(variance, 1e-20)
        self.rows = sum(part.family.rows for part in parts)
        self.work = 0

    def base_spacing(self, rtol: float) -> float:
        """The h with k h^2 / 4 ~ rtol V: what the lattice adds is that share of the spread."""
        return min(_COARSEST, math.sqrt(3 * rtol * self.variance / self.steps))

    def resolution(self, rtol: float) -> float:
        """Share of the base spacing that resolves the losses below 0, down to log(1 - q).

        Merging neighbours needs the masses to be smooth on the grid, there above all.
        """
        least = min(float(np.mean(np.abs(part.family.span(0.1)[0]))) for part in self.parts)
        return max(0.05 * least / self.base_spacing(rtol), 0.01)

    def moments(self, leak: float, delta: float, cut: float | None = None) -> Moments:
        """The guide, from a coarse lattice that reaches as far as the fine one; kept."""
        tail = cut or math.exp(4 * math.floor(math.log(self.tail(leak * delta)) / 4))
        spacing = 2.0 ** round(math.log2(3 * self.base_spacing(1e-2)))
        theta = tilts(delta, self.variance, self.reach(tail) + 2 * spacing)
        total = self.memory.total(
            ("guide", tail, spacing, theta.size, float(theta[0])),
            self.parts,
            lambda: LogMoments(theta, spacing),
            lambda total, parts: total.add(
                discretise([thinned(part) for part in parts], Grid(spacing, octave=16), tail)
            ),
        )
        return total.moments()

    def reach(self, tail: float) -> float:
        """The largest loss of a single step, but for a mass of `tail`."""
        spans = [(part.flipped, *part.family.span(tail)) for part in self.parts]
        ends = [float(-low.min() if flipped else high.max()) for flipped, low, high in spans]
        return min(max(0.0, *ends), MAX_LOSS)

    def tail(self, leak: float) -> float:
        """Mass that one step may leave outside the edges."""
        rounded = 4.0 ** math.ceil(math.log(self.steps, 4))  # seldom another for a growing history
        return max(1e-290, leak / rounded)

    def cut(self, mass: float) -> float:
        """The largest tail, of a ladder, by which all steps together lose at most `mass`.

        Of a subsampled step the rate times the tail of N(1) is lost: a much larger tail will do.
        """
        power = math.floor(math.log(self.tail(mass)) / 4)
        while power < -2:
            tail = math.exp(4 * (power + 1))
            if sum(_lost(part, tail) for part in self.parts) > mass:
                break
            power += 1
        return math.exp(4 * power)

    def estimate(self, delta: float, cut: float | None = None) -> float:
        """Saddle-point estimate of epsilon at delta."""
        epsilon, log_delta = self.moments(_LEAK, delta, cut).log_deltas()
        target = math.log(delta)
        if not epsilon.size or log_delta[0] <= target:
            return max(0.0, float(epsilon[0])) if epsilon.size else 0.0
        below = np.flatnonzero(log_delta <= target)
        if below.size == 0:
            return float(epsilon[-1])
        i = int(below[0])
        share = (log_delta[i - 1] - target) / max(log_delta[i - 1] - log_delta[i], 1e-300)
        return max(0.0, float(epsilon[i - 1] + share * (epsilon[i] - epsilon[i - 1])))

    def lattice(self, tail: float, length: float) -> float:
        """The spacing for upper bounds: a power of 2, and coarser only where a setting is worse.

        Of worse settings the variance is larger, the largest loss is farther away, and the window
        is no shorter. Up to `_FEW` steps their number does not enter: no step that is added can
        make the lattice finer.
        """
        share = 0.015 * self.variance / max(self.steps, _FEW)
        points = next(points for most, points in _POINTS if self.steps <= most)
        wanted = max(math.sqrt(share), self.reach(tail) / points)
        spacing = 2.0 ** math.floor(math.log2(min(_COARSEST, wanted)))
        while length > spacing * (_MAX_WINDOW - 8):
            spacing *= 2
        if spacing > _USELESS:
            raise TiltError
        return spacing

    def spacing(self, accuracy: Accuracy, plan: tuple[float, float, float, float]) -> float:
        """The spacing for lower bounds: enough for the variance, not finer than epsilon needs.

        A lattice of spacing h adds about k h E|L| <= h sqrt(k V) to the variance where h is above
        the losses' own size; it may add rtol epsilon / theta.
        """
        tilt, start, length, _ = plan
        useful = 0.1 * accuracy.rtol * max(start, 0.0) / max(tilt, 1e-9)
        enough = useful / math.sqrt(self.steps * self.variance)
        fine = max(self.base_spacing(accuracy.rtol), min(enough, _COARSEST))
        points = _LARGEST_WINDOW if self.rows <= 8 else _MAX_WINDOW >> 2
        return max(accuracy.scale * fine, length / (points - 8))

    def composed(
        self,
        accuracy: Accuracy,
        delta: float,
        start: float,
        aim: float,
        *,
        below: bool = False,
        share: float = _LEAK,
        cut: float | None = None,
    ) -> Composed:
        """The composed loss in a window from `start`, where epsilon may be `aim`.

        Each truncation of an upper bound may cost `share` of delta; with `cut`, which is then the
        tail of one step, the window is kept short enough for the lattice.
        """
        leak = (accuracy.leak if below else share) * delta
        tail = cut or self.tail(leak)
        moments = self.moments(leak / delta, delta, cut)
        if moments.theta.size == 0:  # a loss beyond all that is resolved
            raise TiltError
        most = self.lattice(tail, 0.0) * (_MAX_WINDOW - 8) if cut else math.inf
        plan = plan_window(moments, leak, start, aim, self.steps, below=below, most=most)
        tilt, start, length, chernoff = plan
        if below:
            spacing = self.spacing(accuracy, plan)
        else:
            spacing = self.lattice(tail, length) * accuracy.scale * math.sqrt(accuracy.rtol / 1e-2)
        size = 1 << max(6, math.ceil(math.log2(length / spacing + 4)))
        window = Window(tilt, math.floor(start / spacing), size, chernoff)
        self.work += size
        octave = accuracy.octave if self.rows <= 64 else accuracy.octave // 2
        grid = Grid(spacing, octave)
        total = self.memory.total(
            (below, tilt, chernoff, size, grid, tail),
            self.parts,
            lambda: Sum(window, spacing),
            lambda total, parts: total.add(discretise(parts, grid, tail, below=below)),
        )
        return total.composed(window.start)

    def upper(self, accuracy: Accuracy, delta: float) -> float:
        """Certified upper bound on epsilon >= 0.

        Where rounding decides it, the least of several: the largest losses, which keep the tilt
        from lifting the others above rounding, are cut off at the cost of a share of delta.
        """
        best, rounding = self._search(accuracy, delta, self.estimate(delta))
        if rounding > _RARE:
            for share in _CUTS:
                cut = self.cut(share * delta)
                guess = self.estimate(delta, cut)
                best = min(best, self._search(accuracy, delta, guess, share=share, cut=cut)[0])
        pure = self.pure()
        return max(0.0, min(best, pure))

    def _search(
        self, accuracy: Accuracy, delta: float, guess: float, **options: Any
    ) -> tuple[float, float]:
        """(upper bound, share of delta that rounding takes there), inf where none is found.

        The window moves down until it holds epsilon, then up where rounding shows: it is least for
        a window that starts at epsilon.
        """
        margin = 0.04 * guess + 2 * self.base_spacing(accuracy.rtol)
        best, rounding = math.inf, 0.0
        for _ in range(12):
            start = max(guess - margin, 0.0)
            try:
                composed = self.composed(accuracy, delta, start, guess, **options)
            except TiltError:
                break
            found, hit = bounds.upper_epsilon(composed, delta, self.extra)
            best = min(best, found)
            rounding = bounds.rounding_share(composed, best, delta)
            if hit and start > 0:
                guess, margin = best, 3 * margin
            elif start < 0.97 * best and rounding > _ROUNDING:
                guess, margin = best, 0.02 * best
            else:
                break
        return best, rounding

    def pure(self) -> float:
        """Total of the largest losses where each is at most -log(1 - q): steps without an example.

        Of the pair (Q, P) of Poisson sampling; inf for others.
        """
        if self.extra != Extra():
            return math.inf
        total = 0.0
        for part in self.parts:
            if not part.flipped or not isinstance(part.family, Subsampled):
                return math.inf
            rows = part.counts > 0
            with np.errstate(divide="ignore"):
                total -= float(part.counts[rows] @ np.log1p(-part.family.rate[rows]))
        return total * (1 + 1e-10)

    def lower(self, accuracy: Accuracy, delta: float, upper: float) -> float:
        """Certified lower bound on epsilon, 0 where nothing can be said."""
        margin = 0.04 * upper + 2 * self.base_spacing(accuracy.rtol)
        best = 0.0
        for _ in range(3):
            start = max(upper - margin, 0.0)
            try:
                composed = self.composed(accuracy, delta, start, upper, below=True)
            except TiltError:
                break
            found = bounds.lower_epsilon(composed, delta, self.extra)
            best = max(best, found)
            if found > -math.inf or start == 0:
                break
            margin *= 3  # epsilon is below the window
        return best


def _lost(part: Part, tail: float) -> float:
    """Mass of P above the upper end of the span at `tail`, all steps together; a guide."""
    family, z = part.family, quantile(tail)
    if part.flipped or not isinstance(family, Subsampled):
        return math.inf
    above = (1 - family.rate) * ndtr(-z - 1 / family.sigma) + family.rate * ndtr(-z)
    return float(part.counts @ above)


def two_sided(
    below: Sequence[Direction],
    above: Sequence[Direction],
    delta: float,
    rtol: float,
    upper: float,
) -> tuple[float, float]:
    """(lower, upper) within rtol of each other if a few refinements get there.

    Args:
        below: directions of which the worst gives the lower bound; none gives 0.
        above: directions of which the worst refines the upper bound; none leaves it.
        delta: in (0, 1).
        rtol: wanted (upper - lower) / upper.
        upper: a certified upper bound already known.
    """
    if not below:
        return 0.0, upper
    if upper == math.inf:
        return max(direction.lower(Accuracy(), delta, 1.0) for direction in below), upper
    accuracy = Accuracy()
    contenders = _contenders(below, delta)
    scale = min(0.6, min(d.resolution(accuracy.rtol) for d in contenders))
    under = Accuracy(accuracy.rtol, octave=128, scale=scale)
    lower, top = 0.0, upper
    if max(direction.estimate(delta) for direction in contenders) < 0.8 * upper:
        # other pairs decide the upper bound: look where these ones are
        top = min(upper, worst(below, accuracy, delta))
    for _ in range(5):
        for direction in contenders:
            lower = max(lower, direction.lower(under, delta, top))
        if above:
            upper = min(upper, worst(above, accuracy, delta))
            top = min(top, upper)
        if top - lower <= max(rtol * top, 1e-6) or sum(d.work for d in contenders) > _BUDGET:
            break
        wanted = max(rtol * top, 1e-6) / max(top - lower, 1e-300)
        factor = 0.4 if lower == 0 else min(0.7, max(0.25, 0.8 * math.sqrt(wanted)))
        accuracy, under = accuracy.finer(factor), under.finer(factor)
    return min(lower, upper), upper


def _contenders(directions: Sequence[Direction], delta: float) -> list[Direction]:
    """The directions that may be the worst, by the estimate."""
    estimates = [direction.estimate(delta) for direction in directions]
    return [d for d, e in zip(directions, estimates, strict=True) if e >= 0.98 * max(estimates)]


def worst(directions: Sequence[Direction], accuracy: Accuracy, delta: float) -> float:
    """The largest upper bound over the directions.

    The direction that the estimate calls the worst is computed first; the others may stay with
    their bound on a lattice four times coarser, if that is already smaller.
    """
    order = sorted(directions, key=lambda d: -d.estimate(delta))
    top = order[0].upper(accuracy, delta)
    coarse = Accuracy(16 * accuracy.rtol, accuracy.octave // 2, accuracy.scale)
    for direction in order[1:]:
        if top == math.inf:
            break
        if direction.upper(coarse, delta) > top:
            top = max(top, direction.upper(accuracy, delta))
    return top


def upper_delta(direction: Direction, epsilon: float) -> float:
    """Certified upper bound on delta at epsilon >= 0, at a window that the guide places."""
    accuracy = Accuracy()
    best = _all_below(direction, epsilon)
    if best < 1:
        return best
    guess = 0.5
    for _ in range(60):  # the delta whose epsilon is the wanted one, to a factor of 4
        if direction.estimate(guess) >= epsilon or guess < 1e-140:
            break
        guess *= 0.25
    start = max(0.0, epsilon * (1 - 1e-3) - 1e-9)
    for _ in range(4):  # what leaks is a share of the guess, and must be one of the answer
        try:
            composed = direction.composed(accuracy, guess, start, epsilon)
        except TiltError:
            break
        best = min(best, bounds.upper_delta(composed, epsilon, direction.extra))
        if not 1e-150 < best < 0.1 * guess:
            break
        guess = best
    return best if best < 1 else _chernoff(direction, guess, epsilon)


def _chernoff(direction: Direction, guess: float, epsilon: float) -> float:
    """Delta by the bound P(S >= epsilon) <= e^{K(c) - c epsilon}, at the best c of the guide."""
    moments, spacing = direction.moments(_LEAK, guess), 2.0**-7
    if not moments.theta.size:
        return 1.0
    best = float(moments.theta[np.argmin(moments.value - moments.theta * epsilon)])
    window = Window(best / 2, math.floor(epsilon / spacing) - 65, 64, best)
    pmfs = discretise(direction.parts, Grid(spacing), direction.tail(_LEAK * guess))
    try:
        composed = compose(pmfs, window, spacing)
    except TiltError:
        return 1.0
    infinite = -math.expm1(composed.log_finite) * (1 + 1e-12)
    return min(1.0, bounds.truncated(composed) + infinite + direction.extra.at(epsilon))


def _all_below(direction: Direction, epsilon: float) -> float:
    """Delta where even the largest losses add up to less than epsilon, else 1."""
    tail = 1e-280
    grid = Grid(max(direction.reach(tail) / 32, 2.0**-30))
    total, log_finite = 0.0, 0.0
    for pmf in discretise(direction.parts, grid, tail):
        total += float(pmf.counts @ (pmf.slack + pmf.index[-1] * grid.spacing))
        log_finite += float(pmf.counts @ np.log1p(-np.minimum(pmf.infinite, 1 - 1e-16)))
    if total * (1 + 1e-12) >= epsilon:
        return 1.0
    return min(1.0, -math.expm1(log_finite) * (1 + 1e-12) + direction.extra.at(epsilon))
