# SPDX-License-Identifier: Apache-2.0
"""The noise of a step from the normals z of this step and of earlier ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from dualdp._validate import AccountingError
from dualdp.plan.correlated.strategies import BLT, Band, Strategy, Window

_MOST_DRAWS = 10**14  # normals that are drawn again
#: Branches of the steps that led to a release: (first step, branch), the steps increasing from 0.
Path = tuple[tuple[int, int], ...]
START: Path = ((0, 0),)


class Term(NamedTuple):
    """One summand of a noise: the z of a step and branch, times its weight."""

    step: int
    branch: int
    weight: float


@dataclass(frozen=True)
class Recursion:
    """Noise from the z of its step and d remembered rows S, which are 0 before step 0.

    n_t = scale * (z_t - sum_i taps_i S_i); then, with `decays`, S_i <- decays_i S_i + n_t, and
    without them S is the last d noises, the newest first. The rows are secret.
    """

    scale: float
    taps: tuple[float, ...]
    decays: tuple[float, ...] | None


def branch_at(path: Sequence[Sequence[int]], step: int) -> int:
    """Return the branch of a step on a path.

    >>> branch_at(((0, 0), (5, 1)), 4), branch_at(((0, 0), (5, 1)), 5)
    (0, 1)
    """
    return next(branch for first, branch in reversed(path) if first <= step)


def extended(path: Path, step: int, branch: int) -> Path:
    """Return the path with the branch of its next step.

    >>> extended(((0, 0),), 3, 0), extended(((0, 0),), 3, 2)
    (((0, 0),), ((0, 0), (3, 2)))
    """
    if step == 0:
        return ((0, branch),)
    return path if path[-1][1] == branch else (*path, (step, branch))


def as_path(data: Any) -> Path:
    """Return the path that was stored as lists; raise if it is none."""
    path = tuple((int(first), int(branch)) for first, branch in data)
    steps = [first for first, _ in path]
    if not path or steps[0] != 0 or steps != sorted(set(steps)) or min(b for _, b in path) < 0:
        raise ValueError(f"{data!r:.80} is no path. Expected pairs (first step, branch) from 0 on.")
    return path


def recursion_of(strategy: Strategy | None) -> Recursion | None:
    """Return the recursion of a band or a BLT; None for what is a sum of `window_terms`."""
    if isinstance(strategy, Band):
        c = strategy.weights
        return Recursion(1 / c[0], c[1:], None)
    if isinstance(strategy, BLT):
        return Recursion(1.0, strategy.scales, strategy.decays)
    return None


def window_terms(strategy: Strategy | None, step: int, path: Path) -> list[Term]:
    """Return the summands of the noise of a step, this step's own first.

    A window has at most as many as weights; other strategies have one for every step so far.
    """
    if strategy is None:
        weights: Sequence[float] = (1.0,)
    elif isinstance(strategy, Window):
        weights = strategy.weights[: step + 1]
    else:
        weights = strategy.inverse(step + 1).tolist()
    return [Term(step - j, branch_at(path, step - j), w) for j, w in enumerate(weights)]


def require_affordable(strategy: Strategy | None, step: int, size: int) -> None:
    """Raise if the noise of a step, of `size` numbers, takes more normals than may be drawn again.

    A strategy without a `Recursion` draws its terms at every step in any case.
    """
    if recursion_of(strategy) is not None and step * size > _MOST_DRAWS:
        raise AccountingError(
            f"The noise of step {step} depends on that of all steps before, and to draw {step} "
            f"times {size:,} normals again would take days. Expected at most {_MOST_DRAWS:.0e}: "
            "plan long runs of large models with dualdp.correlated.window, which needs the last "
            "steps only."
        )
