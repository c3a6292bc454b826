# SPDX-License-Identifier: Apache-2.0
"""Argument checks, and the common error messages of the core.

Every function takes the argument's name as the user wrote it, returns the checked value as a plain
Python object, and raises before anything has changed.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping
from typing import Any

LARGEST_INTEGER = (1 << 53) - 1  # exact in every JSON reader and in float64


class UnsupportedLayerError(ValueError):
    """Model or layer without a per-sample gradient that is known to be correct."""


class AccountingError(ValueError):
    """Request for a privacy statement that would not be true."""


def real(name: str, value: Any) -> float:
    """Return a real number, finite or infinite; raise on nan, bool and str."""
    if isinstance(value, bool | str | bytes) or value is None:
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}. Expected a number.")
    try:
        number = float(value)
    except OverflowError as error:
        raise ValueError(f"{name} is out of range. Expected a number below 1e308.") from error
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{name}={value!r} is a {type(value).__name__}. Expected a number."
        ) from error
    if math.isnan(number):
        raise ValueError(f"{name}={value!r} is not a number. Expected a number.")
    return number


def positive(name: str, value: Any) -> float:
    """Return a finite number > 0."""
    number = real(name, value)
    if not 0 < number < math.inf:
        raise ValueError(f"{name}={value!r} is out of range. Expected a finite number > 0.")
    return number


def non_negative(name: str, value: Any) -> float:
    """Return a finite number >= 0."""
    number = real(name, value)
    if not 0 <= number < math.inf:
        raise ValueError(f"{name}={value!r} is out of range. Expected a finite number >= 0.")
    return number


def probability(name: str, value: Any, *, hint: str = "") -> float:
    """Return a number in [0, 1]."""
    number = real(name, value)
    if not 0 <= number <= 1:
        fix = f"; {hint}" if hint else ""
        raise ValueError(
            f"{name}={value!r} is not a probability. Expected a number in [0, 1]{fix}."
        )
    return number


def open_probability(name: str, value: Any) -> float:
    """Return a number in (0, 1), such as the delta of a run."""
    number = real(name, value)
    if not 0 < number < 1:
        raise ValueError(f"{name}={value!r} is out of range. Expected a number between 0 and 1.")
    return number


def sample_rate(value: Any) -> float:
    """Return the probability with which one example joins a logical batch."""
    return probability("sample_rate", value, hint="use expected_batch_size / num_examples")


def integer(name: str, value: Any, *, minimum: int = 0, maximum: int = LARGEST_INTEGER) -> int:
    """Return an integer >= minimum; NumPy integers and integral floats such as 1e4 are accepted."""
    if isinstance(value, bool | str | bytes) or value is None:
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}. Expected an integer.")
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    try:
        number = operator.index(value)
    except TypeError as error:
        raise TypeError(
            f"{name}={value!r} is a {type(value).__name__}. Expected an integer."
        ) from error
    if number < minimum:
        raise ValueError(f"{name}={value!r} is out of range. Expected an integer >= {minimum}.")
    if number > maximum:
        raise ValueError(f"{name} is out of range. Expected an integer of at most {maximum:.4g}.")
    return number


def choice(name: str, value: Any, allowed: Iterable[str] | Mapping[str, Any]) -> str:
    """Return `value` if it is one of the allowed strings."""
    words = sorted(allowed)
    if not isinstance(value, str):
        raise TypeError(
            f"{name}={value!r} is a {type(value).__name__}. Expected one of {', '.join(words)}."
        )
    if value not in words:
        raise ValueError(f"{name}={value!r} is unknown. Expected one of {', '.join(words)}.")
    return value


def newer(name: str, kind: str, found: int, known: int) -> str:
    """Return the error message about a file of a later version of this library."""
    return (
        f"{name} is a {kind} of format {found}, and this version of dualdp reads format {known}. "
        "Expected an older file; or use the version of dualdp that wrote it, or a later one."
    )
