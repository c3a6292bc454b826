# SPDX-License-Identifier: Apache-2.0
"""Certified epsilon and delta of composed pairs: windows, refinements, and the worst direction.

A question about one direction takes three steps: `Direction.guide` estimates epsilon,
`Direction.compose` chooses a window and a lattice around it and composes the losses there, and
`bounds` certifies what the result says.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from dualdp.accountants.pld_engine import bounds
from dualdp.accountants.pld_engine.bounds import Extra
from dualdp.accountants.pld_engine.discretize import Grid, discretize
from dualdp.accountants.pld_engine.dominating_pairs import Subsampled
from dualdp.accountants.pld_engine.fft import TiltError
from dualdp.accountants.pld_engine.window import Accuracy, Direction, LogMoments

_BUDGET = 8e6  # points for all refinements of a lower bound: a few seconds
_ROUNDING = 1e-9  # share of delta
_RARE = 1e-6  # share of delta that rounding may take before larger cuts are tried
_CUTS = (1e-6, 1e-3, 1e-2)  # share of delta spent on truncating the largest losses then


def upper_epsilon(directions: Sequence[Direction], accuracy: Accuracy, delta: float) -> float:
    """Return a certified upper bound on epsilon >= 0: the largest over the directions.

    The direction with the largest estimate comes first. Another one is refined only if its bound
    on a lattice four times coarser is larger.
    """
    guides = [direction.guide(delta) for direction in directions]
    estimates = [guide.epsilon(delta) for guide in guides]
    first, *rest = sorted(range(len(directions)), key=lambda i: -estimates[i])

    def upper(i: int, accuracy: Accuracy) -> float:
        return _upper(directions[i], guides[i], estimates[i], accuracy, delta)

    top = upper(first, accuracy)
    coarse = Accuracy(16 * accuracy.rtol, accuracy.octave // 2)
    for i in rest:
        if top < math.inf and upper(i, coarse) > top:
            top = max(top, upper(i, accuracy))
    return top


def _upper(
    direction: Direction, guide: LogMoments, guess: float, accuracy: Accuracy, delta: float
) -> float:
    """Certified upper bound on epsilon of one direction; `guess` is the guide's estimate.

    If rounding dominates, the largest losses, which limit the tilt, are truncated at the cost of
    several shares of delta, and the smallest bound is returned.
    """
    best, rounding = _search(direction, guide, guess, accuracy, delta)
    if rounding > _RARE:
        for share in _CUTS:
            cut = direction.cut(share * delta)
            guide = direction.guide(delta, cut=cut)
            guess, options = guide.epsilon(delta), {"share": share, "cut": cut}
            best = min(best, _search(direction, guide, guess, accuracy, delta, **options)[0])
    return max(0.0, min(best, _largest_losses(direction)))


def _search(
    direction: Direction,
    guide: LogMoments,
    guess: float,
    accuracy: Accuracy,
    delta: float,
    **options: Any,
) -> tuple[float, float]:
    """(upper bound, share of delta due to rounding), inf if no bound is found.

    The window moves down until it contains epsilon, then up if rounding shows: rounding is least in
    a window that starts at epsilon.
    """
    margin = 0.04 * guess + 2 * direction.base_spacing(accuracy.rtol)
    best, rounding = math.inf, 0.0
    for _ in range(12):
        start = max(guess - margin, 0.0)
        try:
            composed = direction.compose(guide, accuracy, delta, start, guess, **options)
        except TiltError:
            break
        found, is_at_start = bounds.upper_epsilon(composed, delta, direction.extra)
        best = min(best, found)
        rounding = bounds.rounding_share(composed, best, delta)
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
    if direction.extra != Extra():
        return math.inf
    total = 0.0
    for term in direction.terms:
        if not term.flipped or not isinstance(term.pairs, Subsampled):
            return math.inf
        rows = term.counts > 0
        with np.errstate(divide="ignore"):
            total -= float(term.counts[rows] @ np.log1p(-term.pairs.rate[rows]))
    return total * (1 + 1e-10)


def _lower(direction: Direction, accuracy: Accuracy, delta: float, upper: float) -> float:
    """Certified lower bound on epsilon of one direction, 0 if none is known."""
    guide = direction.guide(delta, accuracy.leak)
    margin = 0.04 * upper + 2 * direction.base_spacing(accuracy.rtol)
    best = 0.0
    for _ in range(3):
        start = max(upper - margin, 0.0)
        try:
            composed = direction.compose(guide, accuracy, delta, start, upper, below=True)
        except TiltError:
            break
        found = bounds.lower_epsilon(composed, delta, direction.extra)
        best = max(best, found)
        if found > -math.inf or start == 0:
            break
        margin *= 3  # epsilon is below the window
    return best


def two_sided(
    below: Sequence[Direction],
    above: Sequence[Direction],
    delta: float,
    rtol: float,
    upper: float,
) -> tuple[float, float]:
    """Return (lower, upper), (upper - lower) / upper <= rtol if a few refinements suffice.

    The worst direction `below` gives the lower bound, 0 without one; the worst `above` refines
    `upper`, a certified upper bound that is known already, unless there is none.
    """
    if not below:
        return 0.0, upper
    if upper == math.inf:
        return max(_lower(direction, Accuracy(), delta, 1.0) for direction in below), upper
    accuracy = Accuracy()
    estimates = [direction.guide(delta).epsilon(delta) for direction in below]
    largest = max(estimates)
    contenders = [d for d, e in zip(below, estimates, strict=True) if e >= 0.98 * largest]
    scale = min(0.6, min(d.resolution(accuracy.rtol) for d in contenders))
    under = Accuracy(accuracy.rtol, octave=128, scale=scale)
    lower, top = 0.0, upper
    if largest < 0.8 * upper:
        # the upper bound comes from other pairs: use the range of these ones
        top = min(upper, upper_epsilon(below, accuracy, delta))
    for _ in range(5):
        for direction in contenders:
            lower = max(lower, _lower(direction, under, delta, top))
        if above:
            upper = min(upper, upper_epsilon(above, accuracy, delta))
            top = min(top, upper)
        if top - lower <= max(rtol * top, 1e-6) or sum(d.work for d in contenders) > _BUDGET:
            break
        wanted = max(rtol * top, 1e-6) / max(top - lower, 1e-300)
        factor = 0.4 if lower == 0 else min(0.7, max(0.25, 0.8 * math.sqrt(wanted)))
        accuracy, under = accuracy.finer(factor), under.finer(factor)
    return min(lower, upper), upper


def upper_delta(direction: Direction, epsilon: float) -> float:
    """Return a certified upper bound on delta at epsilon >= 0; 1 if no window resolves it."""
    best = _all_below(direction, epsilon)
    if best < 1:
        return best
    guess = 0.5
    for _ in range(60):  # the delta whose epsilon is the wanted one, to a factor of 4
        if direction.guide(guess).epsilon(guess) >= epsilon or guess < 1e-140:
            break
        guess *= 0.25
    start = max(0.0, epsilon * (1 - 1e-3) - 1e-9)
    for _ in range(4):  # the leak is a share of the guess and must be small against the result
        try:
            composed = direction.compose(direction.guide(guess), Accuracy(), guess, start, epsilon)
        except TiltError:
            break
        best = min(best, bounds.upper_delta(composed, epsilon, direction.extra))
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
    return min(1.0, -math.expm1(log_finite) * (1 + 1e-12) + direction.extra.at(epsilon))
