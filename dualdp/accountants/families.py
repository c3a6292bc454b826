# SPDX-License-Identifier: Apache-2.0
"""Mass tables of single mechanisms: given by distribution functions, or by their outcomes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from dualdp.accountants.cells import NDTR_ERROR, Cells, Index, U

Array = npt.NDArray[Any]


@dataclasses.dataclass(frozen=True)
class Monotone:
    """One mechanism on the real line whose loss grows with x, given by its distribution functions.

    `cut(g)` gives x where the loss passes g (to `slack` in the loss), `p_tails(x)` and `q_tails(x)`
    the pair (mass below x, mass above x), each accurate relative to itself (NDTR_ERROR).
    """

    cut: Callable[[Array], Array]
    p_tails: Callable[[Array], tuple[Array, Array]]
    q_tails: Callable[[Array], tuple[Array, Array]]
    ends: Callable[[float], tuple[float, float]]
    size: float
    slack: float = 64 * U

    @property
    def rows(self) -> int:
        """One."""
        return 1

    def span(self, tail: float) -> tuple[Array, Array]:
        """The losses that leave out about `tail`."""
        low, high = self.ends(tail)
        return np.array([low]), np.array([high])

    def variance(self) -> Array:
        """As given."""
        return np.array([self.size])

    def cells(self, rows: Index, index: Index, spacing: float) -> Cells:
        """The mass table."""
        g = index * spacing
        x = self.cut(g)
        p, p_error, p_bottom, p_top = _between_cuts(*self.p_tails(x))
        q, q_error, q_bottom, q_top = _between_cuts(*self.q_tails(x))
        zero = np.zeros(1)
        slack = self.slack * (2 + max(abs(g[0]), abs(g[-1])))
        return _from_masses(
            index,
            spacing,
            (p, p_error, p_bottom, p_top),
            (q, q_error, q_bottom, q_top),
            never=zero,
            always=zero,
            slack=np.array([slack]),
        )


def _between_cuts(below: Array, above: Array) -> tuple[Array, Array, Array, Array]:
    """(edges,) tails -> (1, cells) masses, errors and both ends, from the smaller tails."""
    small = np.minimum(below, above)
    rising, falling = np.diff(below), -np.diff(above)
    mass = np.where(above[:-1] < below[:-1], falling, np.where(below[1:] < above[1:], rising, 0.0))
    across = (above[:-1] >= below[:-1]) & (below[1:] >= above[1:])
    mass = np.where(across, (1.0 - below[:-1]) - above[1:], mass)
    error = NDTR_ERROR * (small[:-1] + small[1:]) + 4 * U * mass
    return np.maximum(mass, 0.0)[None], error[None], below[:1], above[-1:]


Masses = tuple[Array, Array, Array, Array]


def _from_masses(
    index: Index,
    spacing: float,
    p: Masses,
    q: Masses,
    *,
    never: Array,
    always: Array,
    slack: Array,
) -> Cells:
    """A table whose surplus and deficit come from subtraction, with the error that this brings."""
    g = index * spacing
    a, b = np.exp(g[:-1]), np.exp(-g[1:])
    p_mass, p_error, p_bottom, p_top = p
    q_mass, q_error, q_bottom, q_top = q
    ulps = 8 * U + slack[:, None]
    return Cells(
        index=index,
        spacing=spacing,
        p=p_mass,
        q=q_mass,
        surplus=np.maximum(p_mass - a * q_mass, 0.0),
        deficit=np.maximum(q_mass - b * p_mass, 0.0),
        p_error=p_error,
        q_error=q_error,
        surplus_error=p_error + a * q_error + ulps * (p_mass + a * q_mass),
        deficit_error=q_error + b * p_error + ulps * (q_mass + b * p_mass),
        p_bottom=p_bottom,
        q_bottom=q_bottom,
        p_top=p_top,
        q_top=q_top,
        never=never,
        always=always,
        slack=slack,
    )


@dataclasses.dataclass(frozen=True)
class Atoms:
    """One mechanism with finitely many outcomes: P- and Q-masses and the loss of each.

    `error` bounds the relative, `p_error`/`q_error` (outcomes,) the absolute error of the masses.
    The loss is log(p/q) unless given: +inf where q = 0, -inf where p = 0. `spread` is mass that may
    lie anywhere. `left_p`/`left_q` is mass that was not resolved: infinite loss if that is worse.
    """

    p: Array
    q: Array
    error: float = 4 * U
    loss: Array | None = None
    p_error: Array | None = None
    q_error: Array | None = None
    spread: float = 0.0
    left_p: float = 0.0
    left_q: float = 0.0

    @property
    def rows(self) -> int:
        """One."""
        return 1

    def losses(self) -> Array:
        """(outcomes,) log(p/q)."""
        if self.loss is not None:
            return self.loss
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.asarray(np.log(self.p) - np.log(self.q))

    @functools.cached_property
    def _tails(self) -> tuple[Array, Array, Array]:
        """(finite outcomes,) rising losses, Q-mass up to each, P-mass from the end to each."""
        loss = self.losses()
        order = np.argsort(loss, kind="stable")
        order = order[np.isfinite(loss[order])]
        return loss[order], np.cumsum(self.q[order]), np.cumsum(self.p[order[::-1]])

    def span(self, tail: float) -> tuple[Array, Array]:
        """Losses of all outcomes but those that hold less than `tail`, or than their own error."""
        loss, below, above = self._tails
        if loss.size == 0:
            return np.zeros(1), np.zeros(1)
        low = min(int(np.searchsorted(below, tail)), loss.size - 1)
        high = max(loss.size - 1 - int(np.searchsorted(above, tail)), 0)
        return np.array([min(loss[low], 0.0)]), np.array([max(loss[high], 0.0)])

    def variance(self) -> Array:
        """Second moment of the finite losses under P."""
        loss = self.losses()
        keep = np.isfinite(loss)
        return np.array([max(float(np.sum(self.p[keep] * loss[keep] ** 2)), 1e-280)])

    def cells(self, rows: Index, index: Index, spacing: float) -> Cells:
        """The mass table."""
        loss, g = self.losses(), index * spacing
        finite = np.isfinite(loss)
        place = np.clip(np.searchsorted(g, loss[finite], side="right"), 0, index.size)

        def summed(mass: Array, absolute: Array | None) -> Masses:
            total = np.bincount(place, weights=mass[finite], minlength=index.size + 1)
            error = (self.error + 2 * U * mass.size) * total + self.spread
            if absolute is not None:
                error += np.bincount(place, weights=absolute[finite], minlength=index.size + 1)
            outside = total + error
            return total[None, 1:-1], error[None, 1:-1], outside[:1], outside[-1:]

        slack = np.array([self.error + 8 * U * (2 + max(abs(g[0]), abs(g[-1])))])
        return _from_masses(
            index,
            spacing,
            summed(self.p, self.p_error),
            summed(self.q, self.q_error),
            never=np.array([self.q[loss == -np.inf].sum() + self.left_q]),
            always=np.array([self.p[loss == np.inf].sum() + self.left_p]),
            slack=slack,
        )
