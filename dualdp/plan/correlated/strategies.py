# SPDX-License-Identifier: Apache-2.0
"""Families of correlated noise: lower-triangular Toeplitz strategies C and their inverses.

Training adds stddev * (C^-1 z)_t to the clipped sum of step t, with z_t independent standard
normals. The run is the Gaussian mechanism C G + stddev * z, followed by the public map C^-1, and
as private as that, also for gradients that depend on earlier releases (Denisov et al. 2022, arXiv
2202.08312, Theorem 2.1). In DP-SGD C is the identity.

A strategy is judged by its error in a workload A, sums of noisy gradients: SGD has moved by row t
of A (G + C^-1 z) after step t, so row t of A C^-1 z is the noise in its parameters. A is lower
triangular and Toeplitz too, and given by its first column.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dualdp import _validate
from dualdp.plan.correlated.filters import convolved, filtered, impulse
from dualdp.plan.correlated.sensitivity import PATTERNS, participations, squared_sensitivity

Vector = NDArray[np.float64]
MOST_STEPS = 10**7
#: Most numbers in a strategy: each weight costs a normal a step, each buffer a row of memory.
MOST = {"weights": 10**5, "bands": 10**5, "decays": 256, "scales": 256, "buffers": 256}
#: Largest coefficient: its square, summed over all steps, is finite.
_LARGEST = 1e100


@dataclass(frozen=True)
class Strategy:
    """Lower-triangular Toeplitz matrix C for any number of steps; a family is a subclass."""

    def __post_init__(self) -> None:
        """Make every field a tuple of finite floats, not too long."""
        for item in fields(self):
            given = getattr(self, item.name)
            listed = list(given) if isinstance(given, Iterator) else given
            values = numbers(item.name, listed)
            if values.ndim != 1 or not 0 < len(values) <= MOST[item.name]:
                raise ValueError(
                    f"{item.name} has shape {values.shape}. Expected a list of 1 to "
                    f"{MOST[item.name]} numbers."
                )
            object.__setattr__(self, item.name, tuple(values.tolist()))

    def strategy(self, num_steps: int) -> Vector:
        """Return (num_steps,) float64, the first column of C.

        Raises:
            ValueError: it grows past 1e100.
        """
        return self._column("C", self._strategy, num_steps)

    def inverse(self, num_steps: int) -> Vector:
        """Return (num_steps,) float64, the first column of C^-1: z_(t-j) has the weight w_j.

        Raises:
            ValueError: it grows past 1e100.
        """
        return self._column("C^-1", self._inverse, num_steps)

    def sensitivity(
        self,
        num_steps: int,
        min_separation: int = 1,
        max_participations: int | None = 1,
        pattern: str = "min_separation",
    ) -> float:
        """Return an upper bound on the L2 change of C G by one unit with rows of norm <= 1.

        Args:
            num_steps: number of releases.
            min_separation: int b >= 1, least number of steps from one participation of a unit to
                its next.
            max_participations: most participations of a unit; None for as many as fit.
            pattern: "min_separation", any gaps >= b, or "fixed", gaps of exactly b.

        For one participation it is the largest column norm of C. A unit whose rows are replaced by
        others changes C G by twice as much. When the bound is attained and by which theorem:
        `dualdp.plan.correlated.sensitivity.squared_sensitivity`.
        """
        c = self.strategy(num_steps)
        separation, count = participations(len(c), min_separation, max_participations)
        _validate.choice("pattern", pattern, PATTERNS)
        return math.sqrt(squared_sensitivity(c, separation, count, pattern)) if count else 0.0

    def mean_error(self, num_steps: int, workload: ArrayLike | None = None) -> float:
        """Return the mean over the steps of the squared row norms of A C^-1.

        Times (noise standard deviation of z)^2 it is the mean squared error of one coordinate.

        Args:
            num_steps: number of releases, n.
            workload: (n,) first column of A, see `dualdp.correlated.workload`; None for prefix
                sums.

        >>> identity().mean_error(1000)
        500.5
        """
        errors = row_errors(self.inverse(num_steps), workload)
        return float(errors.mean()) if errors.size else 0.0

    def max_error(self, num_steps: int, workload: ArrayLike | None = None) -> float:
        """Return the largest squared row norm of A C^-1; arguments as for `mean_error`."""
        return float(row_errors(self.inverse(num_steps), workload).max(initial=0.0))

    def _strategy(self, n: int) -> Vector:
        """(n,) first column of C."""
        raise NotImplementedError

    def _inverse(self, n: int) -> Vector:
        """(n,) first column of C^-1."""
        raise NotImplementedError

    def _column(self, name: str, of: Callable[[int], Vector], num_steps: int) -> Vector:
        column = of(_validate.integer("num_steps", num_steps, maximum=MOST_STEPS))
        if not np.all(np.abs(column) <= _LARGEST):
            raise ValueError(
                f"{name} of {self!r:.80} grows past {_LARGEST:g} within {len(column)} steps. "
                "Expected weights that fall off, or fewer steps."
            )
        return column


@dataclass(frozen=True)
class Window(Strategy):
    """C^-1 is banded: the noise of step t is sum_j weights_j z_(t-j), with nothing to remember."""

    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weights[0] != 1:
            raise ValueError(
                f"weights[0]={self.weights[0]!r}. Expected 1: divide all weights by it; the noise "
                "is scaled by the noise multiplier."
            )

    def _strategy(self, n: int) -> Vector:
        return filtered([1.0], self.weights[: max(n, 1)], impulse(n))

    def _inverse(self, n: int) -> Vector:
        return _padded(self.weights, n)


@dataclass(frozen=True)
class Band(Strategy):
    """C is banded (BandMF): a unit that joins every b-th step, b >= bands, meets no own noise."""

    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.weights[0] > 0:
            raise ValueError(
                f"weights[0]={self.weights[0]!r}. Expected a number > 0, the diagonal of C."
            )

    def _strategy(self, n: int) -> Vector:
        return _padded(self.weights, n)

    def _inverse(self, n: int) -> Vector:
        return filtered([1.0], self.weights[: max(n, 1)], impulse(n))


@dataclass(frozen=True)
class BLT(Strategy):
    """Buffered linear Toeplitz: c_0 = 1, c_j = sum_i scales_i decays_i^(j-1).

    Source: Dvijotham et al. 2024 (arXiv 2404.16706), section 5.
    """

    decays: tuple[float, ...]
    scales: tuple[float, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.decays) != len(self.scales):
            raise ValueError(
                f"{len(self.decays)} decays came with {len(self.scales)} scales. Expected one of "
                "each for every buffer."
            )
        for decay, scale in zip(self.decays, self.scales, strict=True):
            if not 0 <= decay < 1:
                raise ValueError(f"decays hold {decay!r}. Expected numbers in [0, 1).")
            _validate.non_negative("scales", scale)

    def _strategy(self, n: int) -> Vector:
        return blt_column(np.asarray(self.decays), np.asarray(self.scales), n)

    def _inverse(self, n: int) -> Vector:
        return blt_column(*blt_inverse(np.asarray(self.decays), np.asarray(self.scales)), n)


@dataclass(frozen=True)
class SquareRoot(Strategy):
    """C C = prefix sums: c_j = (1/2)(3/4) ... ((2j-1)/(2j)), all of the noise so far.

    Source: Fichtenberger, Henzinger & Upadhyay 2023 (arXiv 2202.11205).
    """

    def _strategy(self, n: int) -> Vector:
        return _power_series(-0.5, n)

    def _inverse(self, n: int) -> Vector:
        return _power_series(0.5, n)


def identity() -> Window:
    """Return independent noise: DP-SGD."""
    return Window((1.0,))


def square_root() -> SquareRoot:
    """Return the square root of the prefix sums, the best Toeplitz C for the largest error.

    Source: Fichtenberger et al. 2023 (arXiv 2202.11205); best: Dvijotham et al. 2024 (2404.16706).
    """
    return SquareRoot()


def window(weights: Iterable[float]) -> Window:
    """Return the strategy whose inverse has these coefficients, the first of them 1.

    Args:
        weights: (p,) w_0 = 1, w_1, ..., of z_t, z_(t-1), ... in the noise of step t.
    """
    return Window(weights)  # type: ignore[arg-type]


def bisr(*, bands: int) -> Window:
    """Return the window of the first weights of the inverse square root: 1, -1/2, -1/8, ....

    Args:
        bands: number of weights, >= 1.

    Source: Kalinin et al. 2025 (arXiv 2505.12128), banded inverse square root.
    """
    number = _validate.integer("bands", bands, minimum=1, maximum=MOST["weights"])
    return Window(tuple(_power_series(0.5, number).tolist()))


def lambda_cgd(lam: float) -> Window:
    """Return the window (1, -lam): a step takes back a share of the noise before it.

    Args:
        lam: float in [0, 1]; 0 is DP-SGD.

    Source: Kalinin et al. 2026, "DP-lambda-CGD", without its normalisation of columns.
    """
    lam = _validate.probability("lam", lam)
    return Window((1.0, -lam)) if lam else identity()


def band(weights: Iterable[float]) -> Band:
    """Return the strategy C with these coefficients, of any scale: the sensitivity has it too.

    Args:
        weights: (p,) c_0 > 0, c_1, ....

    Source: Choquette-Choo et al. 2023 (arXiv 2306.08153); Toeplitz: McKenna 2024 (2405.15913).
    """
    return Band(weights)  # type: ignore[arg-type]


def blt(*, decays: Iterable[float], scales: Iterable[float]) -> BLT:
    """Return the buffered linear Toeplitz strategy c_0 = 1, c_j = sum_i scales_i decays_i^(j-1).

    Args:
        decays: (d,) in [0, 1).
        scales: (d,) >= 0.
    """
    return BLT(decays, scales)  # type: ignore[arg-type]


def blt_column(decays: Vector, scales: Vector, n: int) -> Vector:
    """Return (n,) 1 and then sum_i scales_i decays_i^(j-1)."""
    column = impulse(n)
    for decay, scale in zip(decays, scales, strict=True):
        column[1:] += scale * powers(decay, n - 1)
    return column


def powers(base: float, n: int) -> Vector:
    """Return (n,) base^j, 0 once it is below 1e-300: denormal numbers are ten times slower."""
    size = abs(base)
    kept = n if size >= 1 else min(n, 1 + int(690 / -np.log(size))) if size else min(n, 1)
    column = np.zeros(max(n, 0))
    column[: max(kept, 0)] = base ** np.arange(max(kept, 0))
    return column


def blt_inverse(decays: Vector, scales: Vector) -> tuple[Vector, Vector]:
    """Return decays and scales of C^-1, another buffered linear Toeplitz matrix.

    C^-1 takes from z_t the sum of scales times the buffers, and the buffers move by
    diag(decays) - 1 scales'. With s = sqrt(scales) that is similar to the symmetric
    diag(decays) - s s', whose eigenvalues are exact to rounding also for decays close to 1.

    Source: Dvijotham et al. 2024 (arXiv 2404.16706), Lemma 5.2, by another route.
    """
    root = np.sqrt(scales)
    values, vectors = np.linalg.eigh(np.diag(decays) - np.outer(root, root))
    return values, -((root @ vectors) ** 2)


def workload(num_steps: int, *, momentum: float = 0.0) -> Vector:
    """Return the workload of SGD at a constant rate, for `workload=` of the errors and `optimise`.

    Args:
        num_steps: number of steps, n.
        momentum: float in [0, 1), heavy ball.

    Returns:
        (n,) first column of A, 1 + momentum + ... + momentum^j.

    >>> workload(4, momentum=0.5)
    array([1.   , 1.5  , 1.75 , 1.875])
    """
    n = _validate.integer("num_steps", num_steps, maximum=MOST_STEPS)
    beta = _validate.real("momentum", momentum)
    if not 0 <= beta < 1:
        raise ValueError(f"momentum={momentum!r} is out of range. Expected a number in [0, 1).")
    return np.cumsum(np.asarray(beta ** np.arange(n), dtype=np.float64))


def checked_workload(workload: ArrayLike | None, n: int) -> Vector:
    """Return the first column (n,) of a workload of n steps; None is that of prefix sums."""
    if workload is None:
        return np.ones(n)
    column = numbers("workload", workload)
    if column.shape != (n,):
        raise ValueError(
            f"workload has shape {column.shape}. Expected ({n},), its first column, for "
            f"num_steps={n}."
        )
    return column


def row_errors(inverse: Vector, workload: ArrayLike | None) -> Vector:
    """Return (n,) squared norms of the rows of A C^-1, from the first column of C^-1."""
    if workload is None:
        return np.cumsum(np.cumsum(inverse) ** 2)
    return np.cumsum(convolved(checked_workload(workload, len(inverse)), inverse) ** 2)


def numbers(name: str, values: ArrayLike) -> Vector:
    """Return a float64 array of finite numbers; raise on anything else."""
    try:
        array = np.asarray(values)
        if array.dtype.kind not in "fiu":
            raise TypeError
        array = array.astype(np.float64)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} is a {type(values).__name__}. Expected numbers.") from error
    if not np.isfinite(array).all():
        raise ValueError(f"{name} holds a number that is not finite. Expected finite numbers.")
    return array


FAMILIES: Mapping[str, type[Strategy]] = {
    "window": Window,
    "band": Band,
    "blt": BLT,
    "square_root": SquareRoot,
}
_NAMES = {kind: name for name, kind in FAMILIES.items()}


def to_json(strategy: Strategy) -> dict[str, Any]:
    """Return plain data: the family and its numbers, which JSON writes exactly.

    >>> to_json(lambda_cgd(0.5))
    {'family': 'window', 'weights': [1.0, -0.5]}
    """
    named = {item.name: list(getattr(strategy, item.name)) for item in fields(strategy)}
    return {"family": _NAMES[type(strategy)], **named}


def from_json(name: str, data: Mapping[str, Any]) -> Strategy:
    """Return the strategy that `to_json` wrote; `name` is that of the data in error messages.

    Raises:
        ValueError: anything else, or numbers that the family refuses.
    """
    try:
        given = dict(data)
        return FAMILIES[given.pop("family")](**given)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{name} is not a stored strategy ({error}). Expected what a plan wrote: a family of "
            f"{', '.join(FAMILIES)} with its numbers."
        ) from error


def _padded(weights: tuple[float, ...], n: int) -> Vector:
    column = np.zeros(n)
    column[: len(weights)] = weights[:n]
    return column


def _power_series(exponent: float, n: int) -> Vector:
    """(n,) coefficients of (1 - x)^exponent."""
    j = np.arange(1, max(n, 1))
    return np.concatenate([[1.0], np.cumprod((j - 1 - exponent) / j)])[:n]
