# SPDX-License-Identifier: Apache-2.0
"""Choice among the exact methods for a layer's norm: forced, cached, measured, or by cost model.

All methods agree up to rounding and differ in time and memory. Outside the context managers below
the cost model alone decides, as in a run with an explicit seed, so that such a run is the same
program everywhere. Keys hold the sizes of one example, so that Poisson batches of any size share a
choice; methods are measured on the first batch that is large enough.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch

from dualdp import _validate
from dualdp._validate import UnsupportedLayerError

#: Operation -> its methods. "gram" forms no per-sample gradient, "discard" forms it for its norm,
#: "keep" keeps it for the sum, as do the three forms of a convolution (`conv_forms`).
OPERATIONS = {
    "linear": ("gram", "keep", "discard"),
    "convolution": ("gram", "folded", "unfold", "crb"),
}
_FAR = 8.0  # methods that cost more than this many times the cheapest are not measured
_ENOUGH = 8  # examples; the time of fewer says little about a whole batch
_CLEARLY = 0.9  # fraction of the usual method's time that another method has to stay below
Methods = Mapping[str, Callable[[], Any]]


@dataclass(frozen=True)
class _Override:
    """Forced methods, or the table of cached methods, that override the cost model."""

    forced: Mapping[str, str] = field(default_factory=dict)
    table: dict[str, str] | None = None
    measure: bool = False
    fill: bool = True


_NOTHING = _Override()
_override: ContextVar[_Override] = ContextVar("choices", default=_NOTHING)


@contextlib.contextmanager
def _overridden(override: _Override) -> Iterator[None]:
    token = _override.set(override)
    try:
        yield
    finally:
        _override.reset(token)


def forced(**methods: str) -> AbstractContextManager[None]:
    """Context that forces one method for every layer, to compare them: `forced(linear="gram")`.

    A layer without that method raises `UnsupportedLayerError` when it is reached.

    Raises:
        ValueError: an operation or method that is not in `OPERATIONS`.
    """
    for operation, method in methods.items():
        _validate.choice("operation", operation, OPERATIONS)
        _validate.choice(operation, method, OPERATIONS[operation])
    return _overridden(_Override(forced=methods))


def recorded(table: dict[str, str], *, measure: bool) -> AbstractContextManager[None]:
    """Context that takes methods from a table, which JSON can hold, and adds new ones to it.

    Args:
        table: mapping from operation and sizes to method.
        measure: bool, True to time the methods of a layer that the table lacks.
    """
    return _overridden(_Override(table=table, measure=measure))


def of_run(
    table: dict[str, str], *, seeded: bool, decides: bool = True
) -> AbstractContextManager[None]:
    """Context that takes methods from the table of a run, which its rank 0 fills.

    Args:
        table: mapping from operation and sizes to method; on other ranks, as broadcast so far.
        seeded: bool, True if the run has an explicit seed: the cost model alone decides.
        decides: bool, True on rank 0 and in a single process. Other ranks add nothing to the
            table and ask the cost model for choices that it lacks.
    """
    return _overridden(_Override(table=table, measure=not seeded and decides, fill=decides))


def is_forced() -> bool:
    """True if the method of some operation is forced."""
    return bool(_override.get().forced)


def cost_model_decides() -> bool:
    """True if no method is forced and no table is in use."""
    override = _override.get()
    return override.table is None and not override.forced


def choose(
    operation: str,
    usual: str,
    sizes: Mapping[str, Any],
    like: torch.Tensor,
    methods: Methods,
    costs: Mapping[str, float],
) -> str:
    """Return the method for a layer.

    Args:
        operation: key of `OPERATIONS`.
        usual: method that the cost model prefers.
        sizes: mapping from name to size of one example, so that all batch sizes choose alike.
        like: tensor with the batch's length, dtype and device.
        methods: mapping from each method that the layer has to a call that runs it on this batch.
        costs: mapping from method to estimated cost; far costlier methods are not measured.
    """
    override, shown = _override.get(), " ".join(f"{name}={size}" for name, size in sizes.items())
    if operation in override.forced:
        method = override.forced[operation]
        if method in methods:
            return method
        raise UnsupportedLayerError(
            f"{operation}={method!r} is forced, but sizes {shown} have no such way. Expected "
            f"one of {', '.join(sorted(methods))}."
        )
    if override.table is None:
        return usual
    key = f"{operation} {shown} {str(like.dtype).removeprefix('torch.')} {like.device.type}"
    found = override.table.get(key)
    if found is not None and found in methods:
        return found
    if override.measure and len(like) < _ENOUGH:
        return usual  # not cached: a larger batch will be measured
    if override.measure:
        most = _FAR * min(costs.values())
        likely = {method: call for method, call in methods.items() if costs[method] <= most}
        usual = _fastest(likely, usual, like.device) if len(likely) > 1 else usual
    if override.fill:
        override.table[key] = usual
    return usual


def _fastest(methods: Methods, usual: str, device: torch.device) -> str:
    """Method with the shortest time, the better of two runs; `usual` unless clearly beaten."""
    seconds = {m: min(_seconds(call, device) for _ in range(2)) for m, call in methods.items()}
    best = min(seconds, key=lambda method: seconds[method])
    return best if seconds[best] < _CLEARLY * seconds.get(usual, math.inf) else usual


def _seconds(call: Callable[[], Any], device: torch.device) -> float:
    """Wall time of a call, until the device has finished."""

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    start = now()
    call()
    return now() - start
