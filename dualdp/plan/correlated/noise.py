# SPDX-License-Identifier: Apache-2.0
"""The noise of a step from its normals z and those of earlier steps of its segment.

A strategy counts from the first step of its segment: what an earlier process drew is not known any
more, and is taken back by nobody.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from dualdp.plan.correlated.strategies import BLT, Band, Strategy, Window


class Term(NamedTuple):
    """One summand of a noise: the z of so many steps ago, times its weight."""

    age: int
    weight: float


@dataclass(frozen=True)
class Recursion:
    """Noise from the z of its step and d remembered rows S, which are 0 before the segment.

    n_t = scale * (z_t - sum_i taps_i S_i); then, with `decays`, S_i <- decays_i S_i + n_t, and
    without them S is the last d noises, the newest first. The rows are secret.
    """

    scale: float
    taps: tuple[float, ...]
    decays: tuple[float, ...] | None


def recursion_of(strategy: Strategy | None) -> Recursion | None:
    """Return the recursion of a band or a BLT; None for what is a sum of `window_terms`."""
    if isinstance(strategy, Band):
        c = strategy.weights
        return Recursion(1 / c[0], c[1:], None)
    if isinstance(strategy, BLT):
        return Recursion(1.0, strategy.scales, strategy.decays)
    return None


def window_terms(strategy: Strategy | None, steps_since_segment_start: int) -> list[Term]:
    """Return the summands of the noise of a step, this step's own first.

    A window has at most as many as weights; other strategies have one for every step so far.

    >>> window_terms(Window((1.0, -0.5, -0.125)), 1)
    [Term(age=0, weight=1.0), Term(age=1, weight=-0.5)]
    """
    if strategy is None:
        return [Term(0, 1.0)]
    count = steps_since_segment_start + 1
    if isinstance(strategy, Window):
        return [Term(*term) for term in enumerate(strategy.weights[:count])]
    return [Term(*term) for term in enumerate(strategy.inverse(count).tolist())]
