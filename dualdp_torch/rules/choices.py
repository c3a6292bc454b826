# SPDX-License-Identifier: Apache-2.0
"""Choice among the exact methods for a layer's norm: the cost model's, unless one is forced.

All methods agree up to rounding and differ in time and memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar

from dualdp import _validate
from dualdp._validate import UnsupportedLayerError

#: Operation -> its methods. "gram" forms no per-sample gradient, "discard" forms it for its norm,
#: "keep" keeps it for the sum, as do the three forms of a convolution (`conv_forms`).
OPERATIONS = {
    "linear": ("gram", "keep", "discard"),
    "convolution": ("gram", "folded", "unfold", "crb"),
}
_forced: ContextVar[Mapping[str, str] | None] = ContextVar("forced", default=None)
_static: ContextVar[bool] = ContextVar("static", default=False)


@contextlib.contextmanager
def forced(**methods: str) -> Iterator[None]:
    """Context that forces one method for every layer, to compare them: `forced(linear="gram")`.

    A layer without that method raises `UnsupportedLayerError` when it is reached.

    Raises:
        ValueError: an operation or method that is not in `OPERATIONS`.
    """
    for operation, method in methods.items():
        _validate.choice("operation", operation, OPERATIONS)
        _validate.choice(operation, method, OPERATIONS[operation])
    token = _forced.set(methods)
    try:
        yield
    finally:
        _forced.reset(token)


def is_forced() -> bool:
    """True if the method of some operation is forced."""
    return bool(_forced.get())


@contextlib.contextmanager
def static() -> Iterator[None]:
    """Context in which rules choose by shapes alone and read no data, as a traced step must."""
    token = _static.set(True)
    try:
        yield
    finally:
        _static.reset(token)


def is_static() -> bool:
    """True if a rule may not read data: its operations and shapes must hold for any batch."""
    return _static.get()


def choose(operation: str, usual: str, methods: Iterable[str], sizes: Iterable[int]) -> str:
    """Return the forced one of a layer's methods, or else `usual`.

    Args:
        operation: key of `OPERATIONS`.
        usual: method that the cost model prefers.
        methods: names of the methods that the layer has.
        sizes: sizes of one example, for the error message.
    """
    method = (_forced.get() or {}).get(operation, usual)
    if method not in methods:
        raise UnsupportedLayerError(
            f"{operation}={method!r} is forced, but sizes {'x'.join(map(str, sizes))} have no such "
            f"way. Expected one of {', '.join(sorted(methods))}."
        )
    return method
