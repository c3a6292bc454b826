# SPDX-License-Identifier: Apache-2.0
"""Spot checks: an engine's numbers for one example against the definition of its gradient.

The gradient of example k is plain autodiff of example k's own loss, alone. A spot check computes
exactly that for two examples of a batch and compares it with the norm that the engine has for them
and with what they contribute to the clipped sum. This module holds what both stacks share, in
plain numbers: which steps are checked, what counts as equal, and how a failure is reported.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dualdp import _validate
from dualdp.plan import PrivacyPlan
from dualdp.randomness import bits

#: The words of `check=` of the functional calls.
CHECKS = ("first", "always", "off")
#: Share of an engine's steps at which two examples are checked.
RATE = 1 / 50
#: One of so many of these checks looks at the whole batch, too: one step in 250.
WHOLE = 5
_TURN = 1 << 52  # no block of steps has this number
#: Largest error, in units of what the clip factor is made of, by the precision that takes part.
TOLERANCE = {
    "float64": 1e-9,
    "float32": 1e-3,
    "tf32": 3e-2,
    "bfloat16": 3e-2,
    "float16": 3e-2,
}
#: Distance of 1 and the next number, of each precision.
UNIT = {
    "float64": 2.0**-52,
    "float32": 2.0**-23,
    "tf32": 2.0**-10,
    "float16": 2.0**-10,
    "bfloat16": 2.0**-8,
}
#: Largest error of the comparison that is repeated in float64: a sum of many numbers may cancel.
REPEATED = 1e-6
#: A difference is rounding where plain autodiff moves by this share of it when inputs are rounded.
ROUNDING = 0.1


class ExactnessError(RuntimeError):
    """What an engine was about to release is not what the definition says.

    Attributes:
        parameters: names of those whose gradients differ most.
        relative_error: rounded to a power of ten, such as "1e-02"; "inf" where it is not finite.
        unprotected_details: the numbers of the comparison. They are of the private data: no
            message, ledger or pickle holds them.
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
        return _without_details, (str(self), self.parameters, self.relative_error)


def _without_details(message: str, parameters: Iterable[str], error: str) -> ExactnessError:
    """The error as another process gets it."""
    return ExactnessError(message, parameters=parameters, relative_error=error)


@dataclass(frozen=True)
class Check:
    """A step that is checked.

    Attributes:
        step: of the run.
        is_whole: the forms that look at the whole batch are due, too.
        fractions: four uniform numbers in [0, 1), for whatever else is drawn.
    """

    step: int
    is_whole: bool
    fractions: tuple[float, ...]

    def draw(self, count: int, which: int = 0) -> int:
        """One of `count` things, by the fraction `which`."""
        return min(int(self.fractions[which] * count), count - 1)


def checked_rate(rate: Any) -> float:
    """The rate of `checks=`, a share of steps in [0, 1]."""
    return _validate.probability("checks", RATE if rate is None else rate)


def check_at(plan: PrivacyPlan, step: int, rate: float, *, is_first: bool = False) -> Check | None:
    """The check of one step, or None where none is due.

    One step of every 1 / rate consecutive ones is drawn, so that two checks are never further apart
    than twice that; of every five such steps, one looks at the whole batch.

    Args:
        plan: with its key, from which the checked steps are drawn.
        step: of the run.
        rate: share of steps that are checked; 0 is off.
        is_first: a check is due whatever was drawn, on the whole batch too.

    Guarantees:
        Which steps are checked depends on key, step and rate alone.
            [test_checked_steps_are_drawn_from_the_key]
    """
    if rate == 0:
        return None
    period = max(1, round(1 / rate))
    block = step // period
    place, *fractions = _fractions(plan, block)
    if step % period != int(place * period) and not is_first:
        return None
    turn = int(_fractions(plan, _TURN)[0] * WHOLE)
    return Check(step, is_first or block % WHOLE == turn, tuple(fractions))


def _fractions(plan: PrivacyPlan, number: int) -> list[float]:
    """Five uniform numbers in [0, 1)."""
    return list(_uniform(plan.step_key("check", number).tobytes()))


@functools.lru_cache(maxsize=16)  # the steps of one block ask the same
def _uniform(key: bytes) -> tuple[float, ...]:
    """Five uniform numbers in [0, 1), from the two words of a key."""
    words = bits(np.frombuffer(key, np.uint32), 5, width=64)
    return tuple([float(word) for word in (words >> np.uint64(11)) * 2.0**-53])


@dataclass(frozen=True)
class Sides:
    """One example's norm and contribution, as the engine has them and by plain autodiff.

    Attributes:
        norm: L2 norm of the whole gradient, the engine's; may be non-finite.
        expected_norm: the same by plain autodiff.
        gaps: parameter -> L2 norm of the difference of the two contributions.
        sizes: parameter -> L2 norm of the engine's contribution.
        groups: parameter -> its clipping group.
        bounds: clipping group -> C, or the expected norm where nothing is clipped.
        scale: what an error of the norm is measured in: the number that the clip factor is made of.
    """

    norm: float
    expected_norm: float
    gaps: Mapping[str, float]
    sizes: Mapping[str, float]
    groups: Mapping[str, str]
    bounds: Mapping[str, float]
    scale: float

    @property
    def counts(self) -> bool:
        """Whether the example contributes: one whose norm is not finite does not."""
        return math.isfinite(self.norm)

    @property
    def error(self) -> float:
        """The largest relative error of norm and contributions; inf where it is no number."""
        if not self.counts:
            return 0.0 if not any(self.sizes.values()) else math.inf
        errors = [abs(self.norm - self.expected_norm) / max(self.scale, _TINY), *self.group_errors]
        return math.inf if any(map(math.isnan, errors)) else max(errors)

    @property
    def group_errors(self) -> list[float]:
        """The error of each group's contribution, in units of its bound."""
        return [_length(self.gaps, self._members(g)) / max(c, _TINY) for g, c in self._bounds]

    @property
    def excess(self) -> float:
        """How far the largest contribution of a group exceeds its bound, in units of the bound."""
        return max(
            (_length(self.sizes, self._members(g)) / max(c, _TINY) for g, c in self._bounds),
            default=0.0,
        )

    @property
    def parameters(self) -> list[str]:
        """The parameters that make most of the difference, the worst first; at most five."""
        worst = max(self.gaps.values(), default=0.0)
        names = [n for n, gap in self.gaps.items() if not gap < 0.1 * worst]
        return sorted(names, key=lambda name: -self.gaps[name])[:5]

    @property
    def _bounds(self) -> Iterable[tuple[str, float]]:
        return self.bounds.items()

    def _members(self, group: str) -> list[str]:
        return [name for name, own in self.groups.items() if own == group]


_TINY = np.finfo(np.float64).tiny


def _length(lengths: Mapping[str, float], names: Iterable[str]) -> float:
    """L2 norm of vectors with these lengths, side by side; nan if one is."""
    return math.hypot(*(lengths[name] for name in names))


def is_wrong(
    sides: Sides,
    precision: str,
    repeated: Callable[[], float | None],
    moved: Callable[[], float],
) -> bool:
    """Whether a difference is a fault of the engine, and no rounding that the loss amplifies.

    A difference beyond the tolerance is looked at twice more before it counts: both sides, engine
    and plain autodiff, in float64; and plain autodiff again with everything that goes in moved by
    a rounding. A contribution beyond its bound is never excused.

    Args:
        sides: of one example.
        precision: key of `TOLERANCE`.
        repeated: () -> the error of the comparison in float64, engine and plain autodiff; None
            where the model can't run in float64.
        moved: () -> how far plain autodiff moves when its inputs are rounded otherwise, in the
            units of `Sides.error`.
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
    return not moved() >= ROUNDING * sides.error


def power_of_ten(error: float) -> str:
    """An error rounded to a power of ten, which is all that is published of it."""
    if not math.isfinite(error):
        return "inf"
    return f"1e{round(math.log10(max(error, 1e-99))):+03d}"


def failure(
    sides: Sides, where: str, advice: str, unit: str = "the clipping bound"
) -> ExactnessError:
    """The error of a failed check.

    Args:
        sides: of the example that differs.
        where: what was compared, such as "the contribution of one example to the clipped sum".
        advice: the way out, one sentence.
        unit: what the error is measured in.
    """
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
