# SPDX-License-Identifier: Apache-2.0
"""Spot checks: per-sample gradients of an engine against plain autodiff of single examples.

A spot check computes the gradient of each of two examples' own loss by plain autodiff, and compares
it with the engine's norm and with the contribution to the clipped sum. This module has the code
common to both backends, in plain numbers: the choice of the checked steps, the tolerances and the
error of a failed check.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dualdp import _validate
from dualdp.randomness.bits import SegmentBits
from dualdp.randomness.threefry import bits as words

#: Values of `check=` of the functional calls.
CHECKS = ("first", "always", "off")
#: Share of an engine's steps at which two examples are checked.
RATE = 1 / 50
#: Every fifth of these checks also compares the whole batch: one step in 250.
WHOLE = 5
_TURN = 1 << 52  # above every block number
_TINY = np.finfo(np.float64).tiny
#: Largest relative error, by the precision of the computation.
TOLERANCE = {"float64": 1e-9, "float32": 1e-3, "tf32": 3e-2, "bfloat16": 3e-2, "float16": 3e-2}
#: Distance of 1 to the next larger number, by precision.
UNIT = {
    "float64": 2.0**-52,
    "float32": 2.0**-23,
    "tf32": 2.0**-10,
    "float16": 2.0**-10,
    "bfloat16": 2.0**-8,
}
#: Largest error of the comparison repeated in float64, where a sum of many numbers may cancel.
REPEATED = 1e-6
#: A difference is rounding if rounding the inputs changes plain autodiff by this share of it.
ROUNDING = 0.1


class ExactnessError(RuntimeError):
    """Mismatch between an engine's gradient and plain autodiff, found before the release.

    Attributes:
        parameters: names of the parameters whose gradients differ most.
        relative_error: str, rounded to a power of ten, such as "1e-02"; "inf" if not finite.
        unprotected_details: mapping with the compared numbers. They are private data: no message,
            ledger or pickle contains them.
    """

    def __init__(
        self,
        message: str,
        *,
        parameters: Iterable[str] = (),
        relative_error: str = "",
        unprotected_details: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.parameters, self.relative_error = tuple(parameters), relative_error
        self.unprotected_details = dict(unprotected_details or {})

    def __reduce__(self) -> Any:
        kept: Any = {"parameters": self.parameters, "relative_error": self.relative_error}
        return functools.partial(ExactnessError, **kept), (str(self),)  # no private number


@dataclass(frozen=True)
class SpotCheck:
    """Spot check of one step."""

    step: int
    is_whole: bool  # the whole batch is compared too
    fractions: tuple[float, ...]  # four uniform numbers in [0, 1), for further random choices

    def draw(self, count: int, which: int = 0) -> int:
        """Return a number in range(count), by the fraction `which`."""
        return min(int(self.fractions[which] * count), count - 1)


def checked_rate(rate: float | None) -> float:
    """Return the validated rate of `checks=`, a share of steps in [0, 1]."""
    return _validate.probability("checks", RATE if rate is None else rate)


def check_at(
    bits: SegmentBits, step: int, rate: float, *, is_first: bool = False
) -> SpotCheck | None:
    """Return the check of one step, or None if none is due; rate 0 is off.

    One step of every 1 / rate consecutive ones is drawn, so consecutive checks are at most twice
    that far apart. One in five such steps compares the whole batch, and so does a step with
    `is_first`, whatever was drawn.

    Guarantees:
        Which steps are checked depends on the segment's bits, step and rate alone.
            [test_checked_steps_are_drawn_from_the_key]
    """
    if rate == 0:
        return None
    period = max(1, round(1 / rate))
    block = step // period
    position, *fractions = _uniform(bits.key("check", block).tobytes())
    if step % period != int(position * period) and not is_first:
        return None
    turn = int(_uniform(bits.key("check", _TURN).tobytes())[0] * WHOLE)
    return SpotCheck(step, is_first or block % WHOLE == turn, tuple(fractions))


@functools.lru_cache(maxsize=16)  # the steps of one block use the same key
def _uniform(key: bytes) -> tuple[float, ...]:
    """Five uniform numbers in [0, 1), from the key of a block."""
    drawn = words(np.frombuffer(key, np.uint32), 5, width=64)
    return tuple([float(word) for word in (drawn >> np.uint64(11)) * 2.0**-53])


@dataclass(frozen=True)
class Sides:
    """One example's norm and contribution, by the engine and by plain autodiff."""

    norm: float  # L2 norm of the whole gradient by the engine; may be non-finite
    expected_norm: float  # L2 norm of the whole gradient by plain autodiff
    gaps: Mapping[str, float]  # L2 norm of the difference of the two contributions, by parameter
    sizes: Mapping[str, float]  # L2 norm of the engine's contribution, by parameter
    groups: Mapping[str, str]  # clipping group of each parameter
    bounds: Mapping[str, float]  # C of each group, or the expected norm without clipping
    scale: float  # unit of the error of the norm: the number on which the clip factor depends

    @property
    def counts(self) -> bool:
        """True if the example contributes, that is, has a finite norm."""
        return math.isfinite(self.norm)

    @property
    def error(self) -> float:
        """Largest relative error of norm and contributions; inf for nan."""
        if not self.counts:
            return 0.0 if not any(self.sizes.values()) else math.inf
        errors = [abs(self.norm - self.expected_norm) / max(self.scale, _TINY)]
        errors += self._by_bound(self.gaps)
        return math.inf if any(map(math.isnan, errors)) else max(errors)

    @property
    def excess(self) -> float:
        """Largest contribution of a group in units of its bound; above 1 it exceeds the bound."""
        return max(self._by_bound(self.sizes), default=0.0)

    def _by_bound(self, lengths: Mapping[str, float]) -> list[float]:
        """L2 norm of each group, in units of its bound; nan if a length is nan."""
        return [
            math.hypot(*(lengths[name] for name, own in self.groups.items() if own == group))
            / max(bound, _TINY)
            for group, bound in self.bounds.items()
        ]

    @property
    def parameters(self) -> list[str]:
        """Parameters with the largest differences, in decreasing order; at most five."""
        worst = max(self.gaps.values(), default=0.0)
        names = [n for n, gap in self.gaps.items() if not gap < 0.1 * worst]
        return sorted(names, key=lambda name: -self.gaps[name])[:5]


def is_wrong(
    sides: Sides,
    precision: str,
    repeated: Callable[[], float | None],
    perturbed: Callable[[], float],
) -> bool:
    """Return True if a difference is a fault of the engine, not rounding amplified by the loss.

    A difference beyond the tolerance is examined twice before it counts: both sides, engine and
    plain autodiff, are computed in float64, and plain autodiff is repeated with its inputs changed
    by a rounding error. A contribution beyond its bound is always a fault.

    `precision` is a key of `TOLERANCE`. `repeated` returns the error of the comparison in float64,
    None if the model can't run in it. `perturbed` returns the change of plain autodiff when its
    inputs are rounded otherwise, in the units of `Sides.error`.
    """
    # A loss may compute in half precision; the sums are formed in float32 or wider.
    formed_in = "float32" if precision in ("bfloat16", "float16") else precision
    if not sides.excess <= 1 + TOLERANCE[formed_in]:
        return True
    if sides.error <= TOLERANCE[precision]:
        return False
    exact = repeated()
    if exact is not None and not exact <= REPEATED:
        return True
    return not perturbed() >= ROUNDING * sides.error


def power_of_ten(error: float) -> str:
    """Return an error rounded to a power of ten, the only precision that is published."""
    if not math.isfinite(error):
        return "inf"
    return f"1e{round(math.log10(max(error, 1e-99))):+03d}"


def failure(
    sides: Sides, where: str, advice: str, unit: str = "the clipping bound"
) -> ExactnessError:
    """Return the error of a failed check."""
    size, names = power_of_ten(sides.error), sides.parameters
    return ExactnessError(
        f"A spot check failed: {where} differs from plain autodiff of that example's own loss by "
        f"{size} of {unit} (parameters {', '.join(map(repr, names)) or 'none'}). "
        f"Nothing was released for this batch. {advice}",
        parameters=names,
        relative_error=size,
        unprotected_details={
            "norm": sides.norm,
            "expected_norm": sides.expected_norm,
            "gaps": dict(sides.gaps),
            "error": sides.error,
        },
    )
