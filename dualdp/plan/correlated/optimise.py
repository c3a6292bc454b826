# SPDX-License-Identifier: Apache-2.0
"""The best strategy of a family: least error times squared sensitivity.

An evaluation with its gradient costs O(n p) for p bands or buffers. All matrices are lower
triangular and Toeplitz: a product is a filter, its adjoint the same filter over the steps in
reverse. As C^-1 C = 1, a change dC changes x = C^-1 s by
-C^-1 dC x, and a change of the inverse changes C e_0 in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dualdp import _validate
from dualdp.plan.correlated import strategies
from dualdp.plan.correlated.filters import filtered, impulse, transposed
from dualdp.plan.correlated.sensitivity import column_sums, falling, participations
from dualdp.plan.correlated.strategies import (
    BLT,
    MOST_STEPS,
    Band,
    Strategy,
    Window,
    checked_workload,
)

Vector = NDArray[np.float64]
Graded = tuple[float, Vector]
OBJECTIVES = ("mean", "max")
_OPTIONS = {"maxfun": 2000, "maxiter": 2000, "maxcor": 20, "ftol": 1e-13, "gtol": 1e-9}
#: Loss of a strategy that grows out of range, above every other logarithm.
_HOPELESS = 1e4


class Problem(NamedTuple):
    """What a strategy is judged by.

    source: (n,) s, so that the error depends on the strategy through x = C^-1 s.
    error: function of x that returns the error and its gradient.
    separation, participations: least gap and most number of steps that one unit joins.
    """

    source: Vector
    error: Callable[[Vector], Graded]
    separation: int
    participations: int


def optimise(
    *,
    family: str,
    num_steps: int,
    bands: int | None = None,
    buffers: int | None = None,
    min_separation: int = 1,
    max_participations: int | None = 1,
    workload: ArrayLike | None = None,
    objective: str = "mean",
) -> Strategy:
    """Return the strategy of a family with the least error times squared sensitivity.

    Args:
        family: "window", "band" or "blt".
        num_steps: number of releases, >= 1.
        bands: number of weights of a window or band.
        buffers: number of buffers of a buffered linear Toeplitz strategy.
        min_separation: least number of steps between two participations of one unit.
        max_participations: most participations of one unit; None for as many as fit.
        workload: (n,) first column of A, see `dualdp.correlated.workload`; None for prefix sums.
        objective: "mean" or "max" of the squared row norms of A C^-1.

    L-BFGS, from the square root. For one participation, for buffers, for windows much shorter than
    min_separation, and for bands that fall from min_separation on the loss is smooth. Wider windows
    of several participations end at a kink of the bound on their sensitivity: never worse than the
    inverse square root or identity, and within about 1 % in root mean squared error of the best
    where that was estimated.

    Source: McKenna 2024 (arXiv 2405.15913) for bands; Kalinin et al. 2025 (2505.12128) for windows;
    McMahan et al. 2024 (2408.08868) for buffers; participations: Kalinin & Lampert 2024
    (2405.13763), Theorem 2. Parametrisation and adjoints are ours.
    """
    needed, best = _FAMILIES[_validate.choice("family", family, _FAMILIES)]
    n = _validate.integer("num_steps", num_steps, minimum=1, maximum=MOST_STEPS)
    sizes = {"bands": bands, "buffers": buffers}
    if any((sizes[name] is None) == (name == needed) for name in sizes):
        raise ValueError(
            f"bands={bands!r} and buffers={buffers!r} for family={family!r}. Expected {needed}= "
            "and not the other."
        )
    size = _validate.integer(needed, sizes[needed], minimum=1, maximum=strategies.MOST[needed])
    separation, most = participations(n, min_separation, max_participations)
    _validate.choice("objective", objective, OBJECTIVES)
    source, error = error_of(workload, n, objective)
    return best(min(size, n), Problem(source, error, separation, most))


def error_of(
    workload: ArrayLike | None, n: int, objective: str
) -> tuple[Vector, Callable[[Vector], Graded]]:
    """Return s and the error as a function of x = C^-1 s, with its gradient.

    s is the first column of A, and row t of A C^-1 has the squared norm x_0^2 + ... + x_t^2.
    """
    source = checked_workload(workload, n)
    if not source.any():
        raise ValueError("workload holds zeros only. Expected a workload with an error.")
    weights = np.ones(n) if objective == "max" else np.arange(n, 0, -1) / n
    return source, lambda x: (float(weights @ x**2), 2 * weights * x)


def graded_sensitivity(c: Vector, separation: int, count: int) -> Graded:
    """Return the bound of `squared_sensitivity` by the falling column, and its gradient."""
    n = len(c)
    h, origin = falling(c, separation) if count > 1 else (np.abs(c), np.arange(n))
    rows = column_sums(h, separation, count)
    slope = 2 * column_sums(rows[::-1], separation, count)[::-1]
    by_origin = np.bincount(origin, slope, minlength=n)
    return float(rows @ rows), np.where(c < 0, -by_origin, by_origin)


def _loss(error: Graded, sensitivity: Graded) -> Graded:
    """Logarithm of error times squared sensitivity; gradients of one and the same parameters."""
    (e, de), (s, ds) = error, sensitivity
    return float(np.log(e) + np.log(s)), de / e + ds / s


def _lagged(values: Vector, column: Vector, count: int) -> Vector:
    """(count,) products of `values` with `column` shifted by 0, 1, ..., count - 1 steps."""
    n = len(column)
    return np.array([values[lag:] @ column[: n - lag] for lag in range(count)])


def _is_moderate(column: Vector) -> bool:
    return bool(np.all(np.abs(column) < 1e50))


def window_loss(weights: Vector, problem: Problem) -> Graded:
    """Return the loss of a window, and its gradient by the weights."""
    p, n = len(weights), len(problem.source)
    c = filtered([1.0], weights, impulse(n))
    if not _is_moderate(c):
        return _HOPELESS, np.zeros(p)
    error, dx = problem.error(filtered(weights, [1.0], problem.source))
    sensitivity, dc = graded_sensitivity(c, problem.separation, problem.participations)
    return _loss(
        (error, _lagged(dx, problem.source, p)),
        (sensitivity, -_lagged(transposed([1.0], weights, dc), c, p)),
    )


def band_loss(weights: Vector, problem: Problem) -> Graded:
    """Return the loss of a band, and its gradient by the weights."""
    p, n = len(weights), len(problem.source)
    x = filtered([1.0], weights, problem.source)
    if not _is_moderate(x):
        return _HOPELESS, np.zeros(p)
    error, dx = problem.error(x)
    c = np.zeros(n)
    c[:p] = weights
    sensitivity, dc = graded_sensitivity(c, problem.separation, problem.participations)
    return _loss(
        (error, -_lagged(transposed([1.0], weights, dx), x, p)),
        (sensitivity, dc[:p]),
    )


def blt_loss(decays: Vector, scales: Vector, problem: Problem) -> Graded:
    """Return the loss of a buffered strategy, and its gradient by the decays, then the scales."""
    d, n = len(decays), len(problem.source)
    buffers = list(zip(*strategies.blt_inverse(decays, scales), strict=True))

    def inverse(values: Vector) -> Vector:
        parts = [filtered([0.0, scale], [1.0, -decay], values) for decay, scale in buffers]
        return np.asarray(np.sum([values, *parts], axis=0))

    x = inverse(problem.source)
    if not _is_moderate(x):
        return _HOPELESS, np.zeros(2 * d)
    error, dx = problem.error(x)
    back = inverse(dx[::-1])[::-1]
    c = strategies.blt_column(decays, scales, n)
    sensitivity, dc = graded_sensitivity(c, problem.separation, problem.participations)
    by_error, by_sensitivity = np.zeros((2, d)), np.zeros((2, d))
    j = np.arange(n - 1)
    for i, (decay, scale) in enumerate(zip(decays, scales, strict=True)):
        once = filtered([0.0, 1.0], [1.0, -decay], x)  # dC / dscale times x
        twice = filtered([0.0, scale], [1.0, -decay], once)
        by_error[:, i] = -back @ twice, -back @ once
        powers = strategies.powers(decay, n - 1)
        by_sensitivity[0, i] = scale * (dc[2:] @ (j[1:] * powers[:-1]))
        by_sensitivity[1, i] = dc[1:] @ powers
    return _loss((error, by_error.ravel()), (sensitivity, by_sensitivity.ravel()))


def _best(
    loss: Callable[[Vector], Graded],
    start: Vector,
    bounds: Sequence[tuple[float | None, float | None]],
) -> Vector:
    """Parameters of the least loss that L-BFGS meets from `start`."""
    from scipy.optimize import minimize  # a tenth of a second that `import dualdp` does without

    least, best = np.inf, start

    def noted(parameters: Vector) -> Graded:
        nonlocal least, best
        value, gradient = loss(parameters)
        if value < least:
            least, best = value, parameters.copy()
        return value, gradient

    if start.size:
        minimize(noted, start, jac=True, method="L-BFGS-B", bounds=bounds, options=_OPTIONS)
    return best


def _best_window(bands: int, problem: Problem) -> Window:
    """Optimise the partial sums of the weights, the last one, w(1) > 0, by its logarithm.

    The noise in a prefix sum is z times the partial sums, and c grows without bound unless w(1) is
    positive; in these parameters the problem is well conditioned.
    """

    def weights(parameters: Vector) -> Vector:
        sums = np.concatenate([[1.0], parameters[:-1], np.exp(parameters[-1:])])
        return np.diff(sums, prepend=0.0)

    def loss(parameters: Vector) -> Graded:
        value, gradient = window_loss(weights(parameters), problem)
        by_sums = gradient - np.append(gradient[1:], 0.0)
        by_sums[-1] *= np.exp(parameters[-1])
        return value, by_sums[1:]

    if bands == 1:
        return strategies.identity()
    starts = (strategies.bisr(bands=bands).weights, np.eye(bands)[0])
    sums = [np.cumsum(start)[1:] for start in starts]
    bounds = [(None, None)] * (bands - 2) + [(-40.0, 40.0)]
    found = [_best(loss, np.append(each[:-1], np.log(each[-1])), bounds) for each in sums]
    return Window(tuple(weights(min(found, key=lambda parameters: loss(parameters)[0]))))


def _best_band(bands: int, problem: Problem) -> Band:
    """Optimise c_1, ..., c_(b-1), and the falls between the later coefficients, which are >= 0.

    From index b on a falling c keeps the sensitivity smooth, and attained by 0, b, 2b, ....
    """
    falls = bands if problem.participations == 1 else min(problem.separation, bands)

    def weights(parameters: Vector) -> Vector:
        c = np.concatenate([[1.0], parameters])
        c[falls:] = np.cumsum(c[falls:][::-1])[::-1]
        return c

    def loss(parameters: Vector) -> Graded:
        value, gradient = band_loss(weights(parameters), problem)
        gradient[falls:] = np.cumsum(gradient[falls:])
        return value, gradient[1:]

    start = strategies.square_root().strategy(bands)
    start[falls:-1] -= start[falls + 1 :]
    bounds = [(None, None)] * (falls - 1) + [(0, None)] * (bands - falls)
    return Band(tuple(weights(_best(loss, start[1:], bounds))))


def _best_blt(buffers: int, problem: Problem) -> BLT:
    """Optimise log(1 - decay) and log(scale).

    The start is a quadrature of c_j ~ (pi j)^(-1/2) = integral of exp(-j s) / (pi sqrt(s)) ds, on
    a geometric grid of s.
    """
    d, n = buffers, len(problem.source)

    def numbers(parameters: Vector) -> tuple[Vector, Vector]:
        return np.abs(np.expm1(parameters[:d])), np.exp(parameters[d:])

    def loss(parameters: Vector) -> Graded:
        decays, scales = numbers(parameters)
        value, gradient = blt_loss(decays, scales, problem)
        return value, gradient * np.concatenate([decays - 1, scales])

    edges = np.geomspace(1 / n, 2.0, d + 1)
    nodes = np.sqrt(edges[1:] * edges[:-1])
    scales = np.diff(edges) / np.sqrt(nodes)
    start = np.log(np.concatenate([-np.expm1(-nodes), scales / (2 * scales.sum())]))
    bounds = [(-30.0, 0.0)] * d + [(-40.0, 0.0)] * d
    decays, scales = numbers(_best(loss, start, bounds))
    order = np.argsort(-decays)
    return BLT(tuple(decays[order]), tuple(scales[order]))


#: Argument of `optimise` that is the size of a family, and the search for its best strategy.
_FAMILIES: dict[str, tuple[str, Callable[[int, Problem], Strategy]]] = {
    "window": ("bands", _best_window),
    "band": ("bands", _best_band),
    "blt": ("buffers", _best_blt),
}
