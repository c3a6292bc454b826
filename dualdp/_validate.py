# SPDX-License-Identifier: Apache-2.0
"""Argument checks, and the common error messages of the core.

Every function takes the argument's name as the user wrote it, returns the checked value as a plain
Python object, and raises before anything has changed.
"""

from __future__ import annotations

import errno
import inspect
import math
import operator
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

LARGEST_INTEGER = (1 << 53) - 1  # exact in every JSON reader and in float64
#: What was done with a file -> error of the system -> its name in a sentence.
_SYSTEM_ERRORS = {
    "read": {errno.ENOENT: "does not exist", errno.EISDIR: "is a folder"},
    "written": {
        errno.ENOENT: "can't be made: its folder does not exist",
        errno.ENOTDIR: "can't be made: its folder is a file",
        errno.EISDIR: "is a folder",
        errno.EEXIST: "exists",
    },
}


class UnsupportedLayerError(ValueError):
    """Model or layer without a per-sample gradient that is known to be correct."""


class AccountingError(ValueError):
    """Request for a privacy statement that would not be true."""


def kind(value: object) -> str:
    """Return the kind of a value in words: "None", "the class SGD", "an int", "a JAX array"."""
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if hasattr(value, "aval"):  # also while it is traced
        return "a JAX array"
    name = type(value).__name__.replace("ndarray", "NumPy array")
    return f"{'an' if name[0] in 'aeioAEIO' else 'a'} {name}"


def _with_kind(name: str, value: object) -> str:
    """Argument, value and kind: "delta='1' is a str", "delta=None"."""
    return f"{name}={value!r}" + ("" if value is None else f" is {kind(value)}")


def path(name: str, value: object) -> str:
    """Return the path of a file or folder as text."""
    try:
        text = os.fsdecode(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{_with_kind(name, value)}. Expected a path.") from None
    if not text or "\0" in text:
        raise ValueError(f"{name}={text!r} is no path. Expected the name of a file.")
    return text


def new_file(name: str, value: object) -> str:
    """Return the path of a file in an existing folder, which may replace a file and no folder."""
    text = path(name, value)
    if not os.path.isdir(os.path.dirname(text) or "."):
        raise FileNotFoundError(f"{name}={text!r} lies in no existing folder. Make it first.")
    if os.path.isdir(text):
        raise IsADirectoryError(f"{name}={text!r} is a folder. Expected the name of a file.")
    return text


@contextmanager
def file_errors(verb: str, file: str | os.PathLike[str], expected: str) -> Iterator[None]:
    """Put an error of the system about a file into one sentence; `verb` is "read" or "written"."""
    try:
        yield
    except OSError as error:
        if error.errno is None:  # it is a sentence already
            raise
        what = _SYSTEM_ERRORS[verb].get(error.errno, f"can't be {verb} ({error.strerror})")
        raise type(error)(f"{os.fspath(file)} {what}. Expected {expected}.") from error


def takes(name: str, function: Any, form: str, *args: object, **kwargs: object) -> None:
    """Refuse what is no function, or can't be called so; `form` names the arguments that it gets.

    A function whose arguments can't be known, such as a wrapper of (*args, **kwargs), passes.
    """
    if not callable(function):
        raise TypeError(f"{name} is {kind(function)}. Expected a function of {form}.")
    function = getattr(function, "forward", function)  # of a torch module
    try:
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(
            f"{name} takes ({', '.join(signature.parameters)}), but is called with {form}, "
            f"{len(args) + len(kwargs)} in all: {error}. Expected a function of these."
        ) from None


def real(name: str, value: object) -> float:
    """Return a real number, finite or infinite; raise on nan, bool and str."""
    is_bool = isinstance(value, bool) or str(getattr(value, "dtype", "")) == "bool"  # NumPy's too
    if is_bool or isinstance(value, str | bytes):
        raise TypeError(f"{_with_kind(name, value)}. Expected a number.")
    try:
        number = float(value)  # type: ignore[arg-type]
    except OverflowError as error:
        raise ValueError(f"{name} is out of range. Expected a number below 1e308.") from error
    except (RuntimeError, TypeError, ValueError) as error:  # RuntimeError: a tensor of several
        raise TypeError(f"{_with_kind(name, value)}. Expected a number.") from error
    if math.isnan(number):
        raise ValueError(f"{name}={value!r} is not a number. Expected a number.")
    return number


def positive(name: str, value: object) -> float:
    """Return a finite number > 0."""
    number = real(name, value)
    if not 0 < number < math.inf:
        raise ValueError(f"{name}={value!r} is out of range. Expected a finite number > 0.")
    return number


def non_negative(name: str, value: object) -> float:
    """Return a finite number >= 0."""
    number = real(name, value)
    if not 0 <= number < math.inf:
        raise ValueError(f"{name}={value!r} is out of range. Expected a finite number >= 0.")
    return number


def probability(name: str, value: object) -> float:
    """Return a number in [0, 1]."""
    number = real(name, value)
    if not 0 <= number <= 1:
        raise ValueError(f"{name}={value!r} is not a probability. Expected a number in [0, 1].")
    return number


def open_probability(name: str, value: object) -> float:
    """Return a number in (0, 1), such as the delta of a run."""
    number = real(name, value)
    if not 0 < number < 1:
        raise ValueError(f"{name}={value!r} is out of range. Expected a number between 0 and 1.")
    return number


def integer(name: str, value: object, *, minimum: int = 0, maximum: int = LARGEST_INTEGER) -> int:
    """Return an integer >= minimum; NumPy integers and integral floats such as 1e4 are accepted."""
    whole = int(value) if isinstance(value, float) and value.is_integer() else value
    try:
        number = operator.index(None if isinstance(value, bool) else whole)  # type: ignore[arg-type]
    except TypeError as error:
        raise TypeError(f"{_with_kind(name, value)}. Expected an integer.") from error
    if number < minimum:
        raise ValueError(f"{name}={value!r} is out of range. Expected an integer >= {minimum}.")
    if number > maximum:
        raise ValueError(f"{name} is out of range. Expected an integer of at most {maximum:.4g}.")
    return number


def choice(name: str, value: object, allowed: Iterable[str] | Mapping[str, Any]) -> str:
    """Return `value` if it is one of the allowed strings."""
    words = sorted(allowed)
    if not isinstance(value, str):
        raise TypeError(f"{_with_kind(name, value)}. Expected one of {', '.join(words)}.")
    if value not in words:
        raise ValueError(f"{name}={value!r} is unknown. Expected one of {', '.join(words)}.")
    return value


def newer(name: str, kind: str, found: object, known: int) -> str:
    """Return the error message about a file of another version of this library."""
    return (
        f"{name} is a {kind} of format {found}, and this version of dualdp reads format {known}. "
        "Expected one of that format; or use the version of dualdp that wrote it."
    )
