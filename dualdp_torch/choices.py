# SPDX-License-Identifier: Apache-2.0
"""Which exact way a layer's norm takes: forced, recorded, measured once, or by the cost model.

All ways give the same numbers up to rounding; they differ in time and memory. Without one of the
context managers below the cost model alone decides, as it does in a run with an explicit seed: the
same program everywhere. Keys hold the sizes of one example, so that Poisson batches of any size
share a choice; the first batch that is large enough is what ways are measured on.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch

from dualdp import UnsupportedLayerError, _validate

#: Operation -> its ways. "gram" never forms a per-sample gradient, "discard" forms it for its norm,
#: "keep" keeps it for the sum; a convolution keeps it too, in one of three forms (`conv_forms`).
OPERATIONS = {
    "linear": ("gram", "keep", "discard"),
    "convolution": ("gram", "folded", "unfold", "crb"),
}
_FAR = 8.0  # times the cheapest way's cost: such a way is not measured
_ENOUGH = 8  # examples; the time of fewer says little about a whole batch
_CLEARLY = 0.9  # of the usual way's time, for another way to be taken
Ways = Mapping[str, Callable[[], Any]]


@dataclass(frozen=True)
class _Setting:
    """What decides instead of the cost model."""

    forced: Mapping[str, str] = field(default_factory=dict)
    table: dict[str, str] | None = None
    measure: bool = False
    fill: bool = True


_NOTHING = _Setting()
_setting: ContextVar[_Setting] = ContextVar("choices")


@contextlib.contextmanager
def forced(**ways: str) -> Iterator[None]:
    """Make every layer go one way, to compare the ways: `forced(linear="gram")`.

    A layer that lacks the way is refused by an `UnsupportedLayerError` when it is met.

    Raises:
        ValueError: an operation or way that is not in `OPERATIONS`.
    """
    for operation, way in ways.items():
        _validate.choice("operation", operation, OPERATIONS)
        _validate.choice(operation, way, OPERATIONS[operation])
    with _using(_Setting(forced=ways)):
        yield


@contextlib.contextmanager
def recorded(table: dict[str, str], *, measure: bool) -> Iterator[None]:
    """Choose by a run's own table: operation and sizes -> way; JSON can hold it.

    Args:
        table: choices made before; new ones are added.
        measure: time the ways of a layer that the table lacks, instead of asking the cost model.
    """
    with _using(_Setting(table=table, measure=measure)):
        yield


@contextlib.contextmanager
def of_run(table: dict[str, str], *, seeded: bool, decides: bool = True) -> Iterator[None]:
    """Choose as a run does: by its table, which its first process fills.

    Args:
        table: the run's; on other processes what the first one has told them so far.
        seeded: the run has an explicit seed, so that the cost model alone decides.
        decides: this process is the first, or the only one. Others never add to the table, and
            ask the cost model for what it lacks.
    """
    with _using(_Setting(table=table, measure=not seeded and decides, fill=decides)):
        yield


@contextlib.contextmanager
def _using(setting: _Setting) -> Iterator[None]:
    token = _setting.set(setting)
    try:
        yield
    finally:
        _setting.reset(token)


def is_forced() -> bool:
    """Whether the ways of some operation are compared."""
    return bool(_setting.get(_NOTHING).forced)


def cost_model_decides() -> bool:
    """Whether nothing is forced and no table is given."""
    setting = _setting.get(_NOTHING)
    return setting.table is None and not setting.forced


def choose(
    operation: str,
    usual: str,
    sizes: Mapping[str, Any],
    like: torch.Tensor,
    ways: Ways,
    costs: Mapping[str, float],
) -> str:
    """The way that a layer goes.

    Args:
        operation: key of `OPERATIONS`.
        usual: what the cost model says.
        sizes: of one example, so that batches of every size choose alike.
        like: has the dtype and device.
        ways: what the layer can do: way -> a call that does it, on the batch at hand.
        costs: way -> what the model thinks; the hopeless ones are not measured.
    """
    setting = _setting.get(_NOTHING)
    if operation in setting.forced:
        way = setting.forced[operation]
        if way in ways:
            return way
        raise UnsupportedLayerError(
            f"{operation}={way!r} is forced, but sizes {_words(sizes)} have no such way. Expected "
            f"one of {', '.join(sorted(ways))}."
        )
    if setting.table is None:
        return usual
    key = f"{operation} {_words(sizes)} {str(like.dtype).removeprefix('torch.')} {like.device.type}"
    found = setting.table.get(key)
    if found is not None and found in ways:
        return found
    if setting.measure and len(like) < _ENOUGH:
        return usual  # a larger batch will tell
    if setting.measure:
        likely = {w: call for w, call in ways.items() if costs[w] <= _FAR * min(costs.values())}
        usual = _fastest(likely, usual, like.device) if len(likely) > 1 else usual
    if setting.fill:
        setting.table[key] = usual
    return usual


def _words(sizes: Mapping[str, Any]) -> str:
    """Sizes as a part of a key."""
    return " ".join(f"{name}={value}" for name, value in sizes.items())


def _fastest(ways: Ways, usual: str, device: torch.device) -> str:
    """The name of the quickest call, the better of two each; the usual one unless it is beaten."""
    seconds = {w: min(_seconds(call, device) for _ in range(2)) for w, call in ways.items()}
    best = min(seconds, key=lambda way: seconds[way])
    return best if seconds[best] < _CLEARLY * seconds.get(usual, math.inf) else usual


def _seconds(call: Callable[[], Any], device: torch.device) -> float:
    """Time of a call, until the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
