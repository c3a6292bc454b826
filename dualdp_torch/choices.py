# SPDX-License-Identifier: Apache-2.0
"""Which exact way a layer's norm takes: forced, recorded, measured once, or by the cost model.

All ways give the same numbers up to rounding; they differ in time and memory. Without any of the
two context managers below the cost model alone decides, which is what a run with an explicit seed
wants: the same program everywhere.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch

from dualdp import _validate

#: Operation -> its ways. "gram" never forms a per-sample gradient, "discard" forms it for its norm,
#: "keep" keeps it for the sum; a convolution keeps it too, in one of three forms (`conv_forms`).
OPERATIONS = {
    "linear": ("gram", "keep", "discard"),
    "convolution": ("gram", "folded", "unfold", "crb"),
}
_FAR = 8.0
Ways = Mapping[str, Callable[[], Any]]


@dataclass(frozen=True)
class _Setting:
    """What decides instead of the cost model."""

    forced: Mapping[str, str] = field(default_factory=dict)
    table: dict[str, str] | None = None
    measure: bool = False


_NOTHING = _Setting()
_setting: ContextVar[_Setting] = ContextVar("choices")


@contextlib.contextmanager
def forced(**ways: str) -> Iterator[None]:
    """Make every layer go one way, where it can, to compare the ways: `forced(linear="gram")`.

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
            Never in one process of several: they would choose differently.
    """
    with _using(_Setting(table=table, measure=measure)):
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
        return way if way in ways else usual
    if setting.table is None:
        return usual
    numbers = " ".join(f"{name}={value}" for name, value in sizes.items())
    key = f"{operation} {numbers} {str(like.dtype).removeprefix('torch.')} {like.device.type}"
    if setting.table.get(key) not in ways:
        likely = {w: call for w, call in ways.items() if costs[w] <= _FAR * min(costs.values())}
        setting.table[key] = _fastest(likely, like.device) if setting.measure else usual
    return setting.table[key]


def _fastest(ways: Ways, device: torch.device) -> str:
    """The name of the quickest call, the better of two each."""
    return min(ways, key=lambda way: min(_seconds(ways[way], device) for _ in range(2)))


def _seconds(call: Callable[[], Any], device: torch.device) -> float:
    """Time of a call, until the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
