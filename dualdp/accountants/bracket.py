# SPDX-License-Identifier: Apache-2.0
"""Where to look, and how finely: grids, tilts and windows for a wanted accuracy.

Nothing here can make a bound wrong: a bad grid or window only loosens what `compose` and `bounds`
certify. The guide is the saddle-point estimate of delta from log-moment generating functions of a
coarse pass.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import erfcx

from dualdp.accountants import bounds
from dualdp.accountants.bounds import Extra
from dualdp.accountants.cells import Subsampled
from dualdp.accountants.compose import Composed, TiltError, Window, compose
from dualdp.accountants.lattice import Grid, Part, Pmf, discretise

Array = npt.NDArray[Any]

_MAX_WINDOW = 1 << 17  # points; the last resort is a coarser lattice
_LARGEST_WINDOW = 1 << 21  # points for a lower bound of few different mechanisms
_BUDGET = 8e6  # points for all refinements of a lower bound: a few seconds


@dataclasses.dataclass(frozen=True)
class Accuracy:
    """Relative accuracy in epsilon that the grid aims at, and the grid's shape."""

    rtol: float = 1e-2
    dense: int = 96
    ratio: float = 0.06
    max_window: int = _MAX_WINDOW

    @property
    def leak(self) -> float:
        """Share of delta that each truncation may cost."""
        return min(1e-3, 0.1 * self.rtol)

    def finer(self, factor: float) -> Accuracy:
        """As this, with the spacing times `factor`."""
        return Accuracy(
            rtol=self.rtol * factor * factor,
            dense=min(4096, int(self.dense / max(factor, 0.4))),
            ratio=max(0.004, self.ratio * max(factor, 0.5)),
            max_window=max(self.max_window, _MAX_WINDOW),
        )


@dataclasses.dataclass(frozen=True)
class Moments:
    """log E e^{theta S} on a grid of theta, and its first two derivatives there."""

    theta: Array
    value: Array
    slope: Array
    curvature: Array

    def log_deltas(self) -> tuple[Array, Array]:
        """(epsilon, log delta) at each theta by the saddle point; epsilon grows with theta.

        delta(e) at e = K'(t) is e^{K - t e} E[(e^{-tZ} (1 - e^{-Z}))_+] for a normal Z of variance
        K''(t): [psi(t s) - psi((t + 1) s)], psi(z) = e^{z^2/2} Phi(-z).
        """
        spread = np.sqrt(np.maximum(self.curvature, 1e-300))
        root = math.sqrt(2)
        near = erfcx(self.theta * spread / root)
        far = erfcx((self.theta + 1) * spread / root)
        with np.errstate(divide="ignore"):
            part = np.log(np.maximum(0.5 * (near - far), 1e-300))
        return self.slope, self.value - self.theta * self.slope + part


class Direction:
    """One composed pair (P, Q): all parts of a history, seen in one direction."""

    def __init__(self, parts: Sequence[Part], extra: Extra | None = None) -> None:
        self.parts = parts
        self.extra = extra or Extra()
        self.steps = max(1.0, float(sum(part.counts.sum() for part in parts)))
        variance = sum(float(part.counts @ part.family.variance()) for part in parts)
        self.variance = max(variance, 1e-20)
        self.rows = sum(part.family.rows for part in parts)
        self.work = 0
        self._moments: dict[int, Moments] = {}

    def base_spacing(self, rtol: float) -> float:
        """The h with k h^2 / 4 ~ rtol V: what the lattice adds is that share of the spread."""
        return min(0.05, math.sqrt(3 * rtol * self.variance / self.steps))

    def resolution(self, rtol: float) -> float:
        """Share of the base spacing that resolves the losses below 0, down to log(1 - q).

        Merging neighbours needs the masses to be smooth on the grid, there above all.
        """
        least = min(float(np.mean(np.abs(part.family.span(0.1)[0]))) for part in self.parts)
        return max(0.05 * least / self.base_spacing(rtol), 0.01)

    def moments(self, accuracy: Accuracy, delta: float) -> Moments:
        """The guide, from a coarse lattice; kept for further questions."""
        key = math.floor(math.log(self.tail(accuracy, delta)) / 4)
        if key not in self._moments:
            spacing = 3 * self.base_spacing(1e-2)
            coarse = Grid(spacing, dense=48, ratio=0.12)
            best = math.sqrt(-2 * math.log(min(delta, 0.5)) / self.variance)
            theta = np.geomspace(min(0.02, 0.05 * best), max(2000.0, 50 * best), 96)
            pmfs = discretise([_thinned(part) for part in self.parts], coarse, math.exp(4 * key))
            self._moments[key] = _moments(pmfs, spacing, theta)
        return self._moments[key]

    def tail(self, accuracy: Accuracy, delta: float) -> float:
        """Mass that one step may leave outside the edges."""
        return max(1e-290, accuracy.leak * delta / self.steps)

    def estimate(self, accuracy: Accuracy, delta: float) -> float:
        """Saddle-point estimate of epsilon at delta."""
        epsilon, log_delta = self.moments(accuracy, delta).log_deltas()
        target = math.log(delta)
        if not epsilon.size or log_delta[0] <= target:
            return max(0.0, float(epsilon[0])) if epsilon.size else 0.0
        below = np.flatnonzero(log_delta <= target)
        if below.size == 0:
            return float(epsilon[-1])
        i = int(below[0])
        share = (log_delta[i - 1] - target) / max(log_delta[i - 1] - log_delta[i], 1e-300)
        return max(0.0, float(epsilon[i - 1] + share * (epsilon[i] - epsilon[i - 1])))

    def spacing(
        self, accuracy: Accuracy, window: tuple[float, float, float, float], scale: float
    ) -> float:
        """The lattice for a window: fine enough for the variance, not finer than epsilon needs.

        A lattice of spacing h adds about k h E|L| <= h sqrt(k V) to the variance where h is above
        the losses' own size; it may add rtol epsilon / theta.
        """
        tilt, start, length, _ = window
        fine = self.base_spacing(accuracy.rtol)
        useful = 0.1 * accuracy.rtol * max(start, 0.0) / max(tilt, 1e-9)
        enough = useful / math.sqrt(self.steps * self.variance)
        return max(scale * max(fine, min(enough, 0.05)), length / (accuracy.max_window - 8))

    def composed(
        self,
        accuracy: Accuracy,
        delta: float,
        start: float,
        *,
        below: bool = False,
        scale: float = 1.0,
        caution: float = 0.2,
    ) -> Composed:
        """The composed loss in a window from `start`; the lattice is `accuracy`'s times `scale`."""
        plan = _window(self.moments(accuracy, delta), accuracy.leak * delta, start, below, caution)
        tilt, start, length, chernoff = plan
        spacing = self.spacing(accuracy, plan, scale)
        size = 1 << max(6, math.ceil(math.log2(length / spacing + 4)))
        window = Window(tilt, math.floor(start / spacing), size, chernoff)
        self.work += size
        grid = Grid(spacing, accuracy.dense, self._ratio(accuracy, tilt * start))
        pmfs = discretise(self.parts, grid, self.tail(accuracy, delta), below=below)
        return compose(pmfs, window, spacing)

    def _ratio(self, accuracy: Accuracy, exponent: float) -> float:
        """Growth of the cells: narrow against 1/tilt near epsilon, where one loss may decide alone.

        With many different mechanisms no single one does, and cells are what costs.
        """
        if self.rows > 64:
            return accuracy.ratio
        return min(accuracy.ratio, max(0.01, 1 / max(exponent, 1.0)))

    def upper(self, accuracy: Accuracy, delta: float, *, scale: float = 1.0) -> float:
        """Certified upper bound on epsilon >= 0; the window moves down until it holds epsilon."""
        try:
            return self._upper(accuracy, delta, scale)
        except TiltError:
            return math.inf

    def _upper(self, accuracy: Accuracy, delta: float, scale: float) -> float:
        guess = self.estimate(accuracy, delta)
        margin = 0.04 * guess + 2 * self.base_spacing(accuracy.rtol)
        best = math.inf
        for _ in range(12):
            start = guess - margin
            composed = self.composed(accuracy, delta, max(start, 0.0), scale=scale)
            found, hit = bounds.upper_epsilon(composed, delta, self.extra)
            best = min(best, found)
            if not hit or start <= 0:
                break
            guess, margin = best, 3 * margin
        if best == math.inf or bounds.rounding_share(composed, best, self.extra) < 0.05:
            return max(0.0, best)
        for caution in (2.0, 20.0):
            start = max(0.0, 0.9 * best)
            composed = self.composed(accuracy, delta, start, scale=scale, caution=caution)
            best = min(best, bounds.upper_epsilon(composed, delta, self.extra)[0])
        return max(0.0, best)

    def lower(self, accuracy: Accuracy, delta: float, upper: float, *, scale: float = 1.0) -> float:
        """Certified lower bound on epsilon, 0 where nothing can be said."""
        margin = 0.04 * upper + 2 * self.base_spacing(accuracy.rtol)
        best, caution = 0.0, 0.2
        for _ in range(3):
            start = max(upper - margin, 0.0)
            try:
                composed = self.composed(
                    accuracy, delta, start, below=True, scale=scale, caution=caution
                )
            except TiltError:
                break
            found = bounds.lower_epsilon(composed, delta, self.extra)
            best = max(best, found)
            if found > -math.inf or start == 0:
                break
            margin, caution = 3 * margin, 10 * caution  # below the window, or lost in rounding
        return best


def _thinned(part: Part) -> Part:
    """Fewer rows for the guide: neighbours in (sigma, rate) within 5 % count as one."""
    family = part.family
    if not isinstance(family, Subsampled) or family.rows <= 400:
        return part
    logs = np.round(np.log(np.stack([family.sigma, family.rate])) / 0.05) * 0.05
    unique, place = np.unique(logs, axis=1, return_inverse=True)
    counts = np.bincount(place.ravel(), weights=part.counts)
    sigma, rate = np.exp(unique)
    return Part(Subsampled(sigma, np.minimum(rate, 1.0)), counts, part.flipped)


def _moments(pmfs: Iterable[Pmf], spacing: float, theta: Array) -> Moments:
    """Log-moment generating function of the sum, with derivatives, where nothing overflows."""
    value, slope, curvature = np.zeros((3, theta.size))
    usable = np.ones(theta.size, dtype=bool)
    for pmf in pmfs:
        x = pmf.index * spacing
        usable &= theta * x[-1] < 450
        with np.errstate(over="ignore", under="ignore", invalid="ignore", divide="ignore"):
            factors = np.exp(np.minimum(np.outer(x, theta), 700.0))
            zero = pmf.mass @ factors
            one = pmf.mass @ (x[:, None] * factors) / zero
            two = pmf.mass @ ((x * x)[:, None] * factors) / zero
            value += pmf.counts @ np.log(zero)
        slope += pmf.counts @ one
        curvature += pmf.counts @ np.maximum(two - one * one, 0.0)
    keep = usable & np.isfinite(value)
    return Moments(theta[keep], value[keep], slope[keep], curvature[keep])


def _window(
    moments: Moments, leak: float, start: float, below: bool, caution: float
) -> tuple[float, float, float, float]:
    """(tilt, start, length, chernoff) of the shortest window that leaks at most `leak`.

    For each tilt t the length must cover the left wrap, the right wrap (best c > t) and the
    truncation (best c); see `compose`.
    """
    theta, value, log_leak = moments.theta, moments.value, math.log(leak)
    ends = (value - log_leak) / theta - start
    cut = int(np.argmin(ends))
    with np.errstate(divide="ignore", invalid="ignore"):
        gaps = theta[None, :] - theta[:, None]  # (t, c)
        right = (value - theta * start - log_leak)[None, :] / gaps
    right[gaps <= 0] = np.inf
    partner = np.argmin(right, axis=1)
    length = np.maximum(-log_leak / theta, right[np.arange(theta.size), partner])
    length = np.maximum(length, ends[cut])
    # rounding is about e^-22 of the tilted mass: where that would show, tilt more (`caution`)
    noise = np.maximum(value - theta * start - 22.0 - log_leak, 0.0)
    best = int(np.argmin((length * (1 + noise * caution))[:-1])) if theta.size > 1 else 0
    chernoff = float(theta[partner[best]] if below else theta[cut])
    return float(theta[best]), start, float(length[best]), chernoff


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
    contenders = _contenders(below, accuracy, delta)
    window = _LARGEST_WINDOW if max(d.rows for d in contenders) <= 8 else _MAX_WINDOW
    under = Accuracy(rtol=accuracy.rtol, dense=256, ratio=0.03, max_window=window)
    scale = min(0.6, min(d.resolution(accuracy.rtol) for d in contenders))
    lower, top = 0.0, upper
    if max(direction.estimate(accuracy, delta) for direction in contenders) < 0.8 * upper:
        # other pairs decide the upper bound: look where these ones are
        top = min(upper, worst(below, accuracy, delta))
    for _ in range(5):
        for direction in contenders:
            lower = max(lower, direction.lower(under, delta, top, scale=scale))
        if above:
            upper = min(upper, worst(above, accuracy, delta, 0.6))
            top = min(top, upper)
        if top - lower <= max(rtol * top, 1e-6) or sum(d.work for d in contenders) > _BUDGET:
            break
        wanted = max(rtol * top, 1e-6) / max(top - lower, 1e-300)
        factor = 0.4 if lower == 0 else min(0.7, max(0.25, 0.8 * math.sqrt(wanted)))
        accuracy, under = accuracy.finer(factor), under.finer(factor)
    return min(lower, upper), upper


def _contenders(
    directions: Sequence[Direction], accuracy: Accuracy, delta: float
) -> list[Direction]:
    """The directions that may be the worst, by the estimate."""
    estimates = [direction.estimate(accuracy, delta) for direction in directions]
    return [d for d, e in zip(directions, estimates, strict=True) if e >= 0.98 * max(estimates)]


def worst(
    directions: Sequence[Direction], accuracy: Accuracy, delta: float, scale: float = 1.0
) -> float:
    """The largest upper bound over the directions.

    The direction that the estimate calls the worst is computed first; the others may stay with
    their bound on a lattice three times coarser, if that is already smaller.
    """
    order = sorted(directions, key=lambda d: -d.estimate(accuracy, delta))
    top = order[0].upper(accuracy, delta, scale=scale)
    coarse = Accuracy(9 * accuracy.rtol, accuracy.dense // 2, 2 * accuracy.ratio)
    for direction in order[1:]:
        if top == math.inf:
            break
        bound = direction.upper(coarse, delta, scale=scale)
        if bound > top:
            bound = min(bound, direction.upper(accuracy, delta, scale=scale))
        top = max(top, bound)
    return top


def upper_delta(direction: Direction, epsilon: float) -> float:
    """Certified upper bound on delta at epsilon >= 0, at a window that the guide places."""
    accuracy = Accuracy()
    guess = 0.5
    for _ in range(60):  # the delta whose epsilon is the wanted one, to a factor of 4
        if direction.estimate(accuracy, guess) >= epsilon or guess < 1e-140:
            break
        guess *= 0.25
    try:
        composed = direction.composed(accuracy, guess, max(0.0, epsilon * (1 - 1e-3) - 1e-9))
        best = bounds.upper_delta(composed, epsilon, direction.extra)
    except TiltError:
        best = 1.0
    if best < 1:
        return best
    # losses far below epsilon, or infinite: any window from there will do
    grid = Grid(0.01)
    plain = Window(1.0, math.floor(epsilon / 0.02), 1 << 14, 2.0)
    pmfs = discretise(direction.parts, grid, direction.tail(accuracy, guess))
    try:
        composed = compose(pmfs, plain, grid.spacing)
    except TiltError:
        return 1.0
    return bounds.upper_delta(composed, epsilon, direction.extra)
