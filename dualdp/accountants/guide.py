# SPDX-License-Identifier: Apache-2.0
"""Where to look: the saddle-point estimate of delta, and the window that it places.

Nothing here can make a bound wrong: a bad window only loosens what `compose` and `bounds` certify.
The estimate comes from log-moment generating functions of a coarse pass.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import erfcx

from dualdp.accountants.cells import Subsampled
from dualdp.accountants.lattice import Part, Pmf

Array = npt.NDArray[Any]

_EXPONENT = 650.0  # theta times the largest loss must not come near overflow


def tilts(delta: float, variance: float, reach: float) -> Array:
    """Powers of 2^{1/8} to look at as theta, for losses of some variance and largest size."""
    best = math.sqrt(-2 * math.log(min(delta, 0.5)) / variance)
    least, most = min(0.02, 0.05 * best), max(2000.0, 50 * best)
    most = max(2 * least, min(most, _EXPONENT / max(reach, 1e-300)))
    return 2.0 ** (np.arange(math.floor(8 * math.log2(least)), 8 * math.log2(most)) / 8)


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


def thinned(part: Part) -> Part:
    """Fewer rows for the guide: neighbours in (sigma, rate) within 5 % count as one."""
    family = part.family
    if not isinstance(family, Subsampled) or family.rows <= 400:
        return part
    logs = np.round(np.log(np.stack([family.sigma, family.rate])) / 0.05) * 0.05
    unique, place = np.unique(logs, axis=1, return_inverse=True)
    counts = np.bincount(place.ravel(), weights=part.counts)
    sigma, rate = np.exp(unique)
    return Part(Subsampled(sigma, np.minimum(rate, 1.0)), counts, part.flipped)


class LogMoments:
    """Log-moment generating functions, added up, with derivatives, where nothing overflows."""

    def __init__(self, theta: Array, spacing: float) -> None:
        self.theta, self.spacing = theta, spacing
        self._value, self._slope, self._curvature = np.zeros((3, theta.size))
        self._usable = np.ones(theta.size, dtype=bool)

    def add(self, pmfs: Iterable[Pmf]) -> None:
        """Add chunks of pmfs, with counts."""
        theta = self.theta
        for pmf in pmfs:
            x = pmf.index * self.spacing
            self._usable &= theta * x[-1] < _EXPONENT
            with np.errstate(over="ignore", under="ignore", invalid="ignore", divide="ignore"):
                factors = np.exp(np.minimum(np.outer(x, theta), 700.0))
                zero = pmf.mass @ factors
                one = pmf.mass @ (x[:, None] * factors) / zero
                two = pmf.mass @ ((x * x)[:, None] * factors) / zero
                self._value += pmf.counts @ np.log(zero)
            self._slope += pmf.counts @ one
            self._curvature += pmf.counts @ np.maximum(two - one * one, 0.0)

    def moments(self) -> Moments:
        """The sums so far."""
        keep = self._usable & np.isfinite(self._value)
        return Moments(
            self.theta[keep], self._value[keep], self._slope[keep], self._curvature[keep]
        )


def plan_window(
    moments: Moments,
    leak: float,
    start: float,
    aim: float,
    steps: float,
    *,
    below: bool,
    most: float = math.inf,
) -> tuple[float, float, float, float]:
    """(tilt, start, length, chernoff) of a short window around `aim` that leaks at most `leak`.

    For each tilt t the length must cover the left wrap, the right wrap (best c > t) and the
    truncation (best c); see `compose`. Rounding, about 1e-14 of the tilted mass for each step, may
    be as large as the leak; beyond that, the window may grow as much as it shrinks, but not beyond
    `most` if that can be.
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
    rounding = value - theta * aim + math.log(1e-14 * steps)
    cost = np.log(length) + np.maximum(rounding - log_leak, 0.0)
    cost += 100 * np.maximum(np.log(length / most), 0.0) if most < math.inf else 0.0
    best = int(np.argmin(cost[:-1])) if theta.size > 1 else 0
    chernoff = float(theta[partner[best]] if below else theta[cut])
    return float(theta[best]), start, float(length[best]), chernoff
