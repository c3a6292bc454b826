# SPDX-License-Identifier: Apache-2.0
"""Certified delta at an epsilon, and epsilon at a delta, from a composed privacy loss.

Between lattice points delta is linear in e^epsilon, so both have closed forms. Every error of
`Composed` enters with the safe sign: added to an upper delta, subtracted from a lower one.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import numpy.typing as npt

from dualdp.accountants.pld_engine.discretize import U
from dualdp.accountants.pld_engine.fft import Composed

Array = npt.NDArray[Any]


@dataclasses.dataclass(frozen=True)
class Extra:
    """Term `constant + slope * e^epsilon` of delta that is not part of the privacy loss."""

    constant: float = 0.0
    slope: float = 0.0

    def at(self, epsilon: float) -> float:
        """Return the term at an epsilon."""
        return self.constant + self.slope * _exp(epsilon)


@dataclasses.dataclass(frozen=True)
class _Curve:
    """e^scale (first_m - e^{e - x_m} second_m) + constant + slope e^e for x_{m-1} <= e < x_m."""

    points: Array
    first: Array
    second: Array
    scale: float
    constant: float
    slope: float

    @property
    def is_resolved(self) -> bool:
        """True if e^scale and its inverse are far from overflow; otherwise unused."""
        return abs(self.scale) < 600

    def at_points(self) -> Array:
        """(points,) delta at the lattice points, divided by e^scale."""
        more = self.constant + self.slope * np.exp(np.minimum(self.points, 700.0))
        return np.asarray(self.first - self.second + more * _exp(-self.scale))

    def at(self, epsilon: float) -> float:
        """Delta at an epsilon in the window."""
        m = int(np.searchsorted(self.points, epsilon, side="right"))
        inside = 0.0
        if m < self.points.size:
            inside = self.first[m] - math.exp(epsilon - self.points[m]) * self.second[m]
        return _exp(self.scale) * inside + self.constant + self.slope * _exp(epsilon)

    def root(self, m: int, target: float) -> float:
        """Epsilon in (x_{m-1}, x_m] where delta is `target`, or x_m if there is none."""
        end = self.points[m]
        slope = self.second[m] - self.slope * _exp(end - self.scale)
        rise = self.first[m] - (target - self.constant) * _exp(-self.scale)
        if slope <= 0 or rise <= 0:
            return float(end)
        return float(min(max(end + math.log(rise / slope), self.points[m - 1]), end))


def _exp(value: float) -> float:
    return math.exp(min(value, 700.0)) if value > -745 else 0.0


def _tail_sums(composed: Composed, mass: Array) -> tuple[Array, Array]:
    """Sums over x_j >= x_m of mass e^{-t (x_j - x_0)}, and the same times e^{-(x_j - x_m)}.

    The second is computed in blocks of length 300, or by shifts if the spacing is wide, to avoid
    overflow.
    """
    spacing = composed.spacing
    distance = np.arange(mass.size) * spacing
    terms = mass * np.exp(-composed.window.tilt * distance)
    first = np.cumsum(terms[::-1])[::-1]
    if spacing > 10:
        second = terms.copy()
        for shift in range(1, min(mass.size, math.ceil(740 / spacing))):
            second[:-shift] += terms[shift:] * math.exp(-shift * spacing)
        return first, second
    second = np.empty_like(terms)
    block, carry = int(300 / spacing) if spacing > 300 / mass.size else mass.size, 0.0
    for start in range((mass.size - 1) // block * block, -1, -block):
        some = terms[start : start + block]
        local = distance[: some.size]
        sums = np.cumsum((some * np.exp(-local))[::-1])[::-1]
        second[start : start + some.size] = (sums + carry * math.exp(-local[-1])) * np.exp(local)
        carry = float(second[start]) * math.exp(-spacing)
    return first, second


def _curve(composed: Composed, extra: Extra, *, below: bool) -> _Curve:
    """Delta with all errors added, or subtracted with `below`."""
    window, sign = composed.window, -1 if below else 1
    # relative error of the sums: one ulp for each term, a few for each exponential
    exponents = (window.tilt + 1) * window.size * composed.spacing
    error = sign * U * (2 * window.size + 8 * min(exponents, 750.0) + 64)
    if below:
        mass = np.maximum(composed.mass - composed.rounding, 0.0)
        outside = -wrapped(composed)
    else:
        mass = np.maximum(composed.mass, 0.0) + composed.rounding
        outside = truncated(composed)
    first, second = _tail_sums(composed, mass)
    infinite = -math.expm1(composed.log_finite) * (1 + sign * 1e-12)
    return _Curve(
        composed.points,
        first * (1 + error),
        second * (1 - error),
        composed.log_mgf - window.tilt * composed.points[0] + sign * composed.relative,
        outside + infinite + sign * extra.constant,
        sign * extra.slope,
    )


def truncated(composed: Composed) -> float:
    """Return the Chernoff bound on P(S >= x_0 + W), computed from the composed pmfs."""
    window = composed.window
    end = (window.start + window.size) * composed.spacing
    return _exp(composed.log_mgf_chernoff - window.chernoff * end + composed.relative)


def wrapped(composed: Composed) -> float:
    """Return a bound on the delta that mass outside the window adds inside it; see `fft`."""
    window, length = composed.window, composed.window.size * composed.spacing
    decay = (window.chernoff - window.tilt) * length
    if window.tilt <= 0 or decay <= 0:
        return math.inf
    start = window.start * composed.spacing
    outside = composed.log_mgf_chernoff - window.chernoff * start + composed.relative
    left = _exp(-window.tilt * length) / -math.expm1(-window.tilt * length)
    return left + _exp(outside - decay) / -math.expm1(-decay)


def upper_epsilon(composed: Composed, delta: float, extra: Extra) -> tuple[float, bool]:
    """Return (epsilon with delta(epsilon) <= delta for certain, is it the window's start).

    A value at the start of the window is valid but may not be tight.
    """
    curve = _curve(composed, extra, below=False)
    good = np.flatnonzero(curve.at_points() <= delta * _exp(-curve.scale))
    if good.size == 0 or not curve.is_resolved or curve.constant > delta:
        return math.inf, False
    m = int(good[0])
    if m == 0:
        return float(curve.points[0]) + composed.slack, True
    return curve.root(m, delta) + composed.slack, False


def rounding_share(composed: Composed, epsilon: float, delta: float) -> float:
    """Return the approximate share of the upper delta at epsilon that is due to rounding.

    Integral approximation of the sum over x_j >= epsilon of
    rounding e^{-t (x_j - x_0)} (1 - e^{epsilon - x_j}).
    """
    tilt, h = composed.window.tilt, composed.spacing
    if composed.rounding <= 0 or epsilon == math.inf:
        return 0.0
    exponent = composed.log_mgf - tilt * epsilon + math.log(composed.rounding / delta)
    return _exp(exponent) / (tilt * (tilt + 1) * h)


def lower_epsilon(composed: Composed, delta: float, extra: Extra) -> float:
    """Return an epsilon below which delta(epsilon) > delta for certain; -inf if none is known."""
    curve = _curve(composed, extra, below=True)
    if curve.constant > delta:
        return math.inf
    if not curve.is_resolved:
        return -math.inf
    good = np.flatnonzero(curve.at_points() <= delta * _exp(-curve.scale))
    if good.size == 0 or good[0] == 0:
        return -math.inf
    return curve.root(int(good[0]), delta) - composed.slack


def upper_delta(composed: Composed, epsilon: float, extra: Extra = Extra()) -> float:
    """Return an upper bound on delta at an epsilon that is at least the window's start."""
    curve = _curve(composed, extra, below=False)
    if not curve.is_resolved:
        return 1.0
    return min(1.0, max(0.0, curve.at(epsilon - composed.slack)))


def lower_delta(composed: Composed, epsilon: float, extra: Extra = Extra()) -> float:
    """Return a lower bound on delta at an epsilon in the window."""
    curve = _curve(composed, extra, below=True)
    if not curve.is_resolved:
        return 0.0
    return min(1.0, max(0.0, curve.at(epsilon + composed.slack)))
