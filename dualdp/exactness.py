# SPDX-License-Identifier: Apache-2.0
"""Checks: what is about to be released against plain autodiff of the examples' own losses.

This module has what both backends share, in plain numbers: the choice of the checked steps, the
tolerances and the error of a failed check.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dualdp import _validate
from dualdp.randomness.bits import SegmentBits

#: Values of `check=` of the functional calls.
CHECKS = ("first", "always", "off")
#: Share of an engine's steps that are checked.
RATE = 1 / 50
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
        public: Any = {"parameters": self.parameters, "relative_error": self.relative_error}
        return functools.partial(ExactnessError, **public), (str(self),)


@dataclass(frozen=True)
class SpotCheck:
    """Check of one step."""

    step: int
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
    that far apart. A step with `is_first` is checked whatever was drawn.

    Guarantees:
        Which steps are checked depends on the segment's bits, step and rate alone.
            [test_checked_steps_are_drawn_from_the_key]
    """
    if rate == 0:
        return None
    period = max(1, round(1 / rate))
    block = step // period
    words = np.frombuffer(bits.bits("check", block), "<u8") >> np.uint64(11)  # 53 bits each
    position, *fractions = (words[:5] * 2.0**-53).tolist()
    if step % period != int(position * period) and not is_first:
        return None
    return SpotCheck(step, tuple(fractions))


def power_of_ten(error: float) -> str:
    """Return an error rounded to a power of ten, the only precision that is published."""
    if not math.isfinite(error):
        return "inf"
    return f"1e{round(math.log10(max(error, 1e-99))):+03d}"
