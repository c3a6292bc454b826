# SPDX-License-Identifier: Apache-2.0
"""The `Rule` type: per-sample gradients, norms and sums of one function's parameters.

All rules share the functions here: dtypes, norms, memory that may be kept, and the choice among the
exact methods of a layer.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dualdp._validate import UnsupportedLayerError

Tensor = torch.Tensor
RuleFunction = Callable[..., Tensor]
#: (n,) squared norms, and a (n,) bound on their error or None.
Norms = tuple[Tensor, Tensor | None]
Shapes = Sequence[torch.Size]


def first_axis(shape: torch.Size, parameters: Shapes) -> Sequence[int]:
    """Axis 0 of the output, the only one that may hold the batch."""
    return range(min(len(shape), 1))


def all_but_last(shape: torch.Size, parameters: Shapes) -> Sequence[int]:
    """Axes of the output that may hold the batch: all but the last, which holds features."""
    return range(len(shape) - 1)


@functools.cache
def wide(dtype: torch.dtype) -> torch.dtype:
    """Dtype of norms, factors and sums: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


#: Types of devices where a call costs little and memory much; elsewhere each call starts a kernel.
HOSTS = {"cpu"}


def on_host(tensor: Tensor) -> bool:
    """True if fewer passes over memory are worth more calls."""
    return tensor.device.type in HOSTS


def is_narrow(tensors: Iterable[Tensor]) -> bool:
    """True if one of the tensors holds floating-point numbers narrower than float32."""
    for tensor in tensors:
        if has_narrow_type(tensor.dtype):
            return True
    return False


@functools.cache
def has_narrow_type(dtype: torch.dtype) -> bool:
    """True for a floating-point dtype narrower than float32."""
    return dtype.itemsize < 4 and dtype.is_floating_point


def widened(tensor: Any) -> Any:
    """Return the tensor, or tuple of tensors, with floating-point numbers at least float32."""
    if isinstance(tensor, tuple):
        return tuple(widened(t) for t in tensor)
    return tensor.float() if tensor is not None and has_narrow_type(tensor.dtype) else tensor


_BLOCK = 1024  # numbers that float32 sums without a notable loss of digits


@functools.lru_cache(1024)
def _block_of(size: int) -> int:
    """Largest divisor of a size that is at most _BLOCK, or _BLOCK if that is a small one."""
    return next((b for b in range(_BLOCK, _BLOCK // 8, -1) if size % b == 0), _BLOCK)


def lengths(grads: Tensor) -> Tensor:
    """(n, ...) -> (n,) norms, of blocks first: `square().sum()` would write a full copy."""
    if grads.dim() == 2 and grads.shape[1] <= _BLOCK:
        return torch.linalg.vector_norm(grads, dim=1)
    return last_lengths(grads.reshape(grads.shape[0], math.prod(grads.shape[1:])))


def last_lengths(x: Tensor) -> Tensor:
    """(..., d) -> (...) norms over the last axis, which is read where it lies."""
    while x.shape[-1] > _BLOCK:
        size, block = x.shape[-1], _block_of(x.shape[-1])
        x, rest = x.split([size // block * block, size % block], -1)  # type: ignore[no-untyped-call]
        x = torch.linalg.vector_norm(x.unflatten(-1, (-1, block)), dim=-1)
        if rest.shape[-1]:
            x = torch.cat([x, torch.linalg.vector_norm(rest, dim=-1, keepdim=True)], -1)
    found: Tensor = torch.linalg.vector_norm(x, dim=-1)
    return found


def sq_norms(grads: Tensor) -> Tensor:
    """(n, ...) -> (n,) squared norms."""
    return lengths(grads).square_()


def exact_sq_norms(grads: Tensor) -> Tensor:
    """(n, ...) -> (n,) float64 squared norms; squares of float32 neither overflow nor underflow."""
    flat = grads.reshape(grads.shape[0], math.prod(grads.shape[1:]))
    return torch.linalg.vector_norm(flat, dim=1, dtype=torch.float64).square_()


def weighted_sum(factors: Tensor, grads: Tensor) -> Tensor:
    """(n,) factors, (n, *shape) gradients -> (*shape) weighted sum over the examples."""
    factors = factors.to(grads.dtype)
    if grads.dim() <= 2:
        return factors @ grads
    return (factors @ grads.flatten(1)).view(grads.shape[1:])


#: Bytes that are taken without asking the device, and fraction of its free memory for one call.
SURELY_FREE = 1 << 26
PART = 0.5


def free_memory(device: torch.device) -> int:
    """Bytes that can still be allocated on a device."""
    if device.type == "cuda":
        reusable = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + reusable
    with contextlib.suppress(OSError), open("/proc/meminfo") as lines:
        sizes = dict(line.split(":", 1) for line in lines)
        return 1024 * int(sizes["MemAvailable"].split()[0])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def may_keep(numbers: int, like: Tensor) -> bool:
    """True if `numbers` more elements of the dtype of `like` may be kept on its device."""
    size = numbers * like.element_size()
    return size < SURELY_FREE or size < PART * free_memory(like.device)


def row_slices(n: int, each: int, like: Tensor) -> Iterator[slice]:
    """Yield slices of n rows, each of at most SURELY_FREE bytes at `each` numbers per row."""
    rows = max(SURELY_FREE // max(each * like.element_size(), 1), 1)
    for start in range(0, max(n, 1), rows):
        yield slice(start, min(start + rows, n))


#: Operation -> its exact methods, which differ in time and memory. "gram" forms no per-sample
#: gradient, "discard" forms it for its norm, "keep" keeps it for the sum, as do the three forms of
#: a convolution (`conv_forms`).
OPERATIONS = {
    "linear": ("gram", "keep", "discard"),
    "convolution": ("gram", "folded", "unfold", "crb"),
}
#: Operation -> method of every layer, to compare them; without an entry the cost model decides.
FORCED: dict[str, str] = {}


def choose(operation: str, usual: str, methods: Iterable[str], sizes: Iterable[int]) -> str:
    """Return the forced one of a layer's methods, or else `usual`.

    Args:
        operation: key of `OPERATIONS`.
        usual: method that the cost model prefers.
        methods: names of the methods that the layer has.
        sizes: sizes of one example, for the error message.
    """
    method = FORCED.get(operation, usual)
    if method not in methods:
        raise UnsupportedLayerError(
            f"{operation}={method!r} is forced, but sizes {'x'.join(map(str, sizes))} have no such "
            f"way. Expected one of {', '.join(sorted(methods))}."
        )
    return method


@dataclass(frozen=True)
class Rule:
    """Per-sample gradients of one function, from its saved inputs and the gradient of its output.

    Each function below is called as `f(acts, grads_out, *, shape, **options)`: `acts` are the
    saved inputs and `grads_out` the output's gradient, both with the n examples on axis 0; `shape`
    is the parameter's; `options` are the call's other arguments by name. Letters: n examples, t
    positions, i in, o out, c channels, k kernel points, g groups, v vocabulary, d features.

    Attributes:
        arguments: names of the function's arguments, in order.
        grads: mapping from parameter argument to a function for the (n, *shape) gradients.
        sq_norms: mapping from parameter argument to a function for (n,) squared norms, where that
            is cheaper than the gradients, and their (n,) error bound, None if nothing cancels; or
            for a description of them (`rules.together`). With the further argument `can_keep=True`
            it returns None where it is cheapest to keep the gradients for the sum.
        sums: mapping from parameter argument to a function for the (*shape) sum over the
            examples; its `grads_out` are scaled already.
        pair: function for the gradients of weight and bias in one pass, called like that of the
            weight, or None; it may return None where two passes are faster.
        acts: argument or arguments saved as `acts`, or a function that names the argument, given
            the parameter arguments.
        light: parameter arguments whose functions need no `acts` (they get None).
        batch_axes: function of the shapes of output and parameters; axes that may hold the batch.
        rows_are_free: bool, True if any number of position axes may follow the batch axis.
        join: function that joins several (acts, grads_out) of one parameter along the positions.
        refuse: function of the arguments; why the call has no per-sample gradient, or None.
        alone: bool, True if calls without any tensor but parameters are covered.
        applies: predicate of the arguments, False to send the call through `vmap`.
    """

    arguments: tuple[str, ...]
    grads: Mapping[str, RuleFunction]
    sq_norms: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    sums: Mapping[str, RuleFunction] = field(default_factory=dict)
    pair: Callable[..., tuple[Tensor, Tensor] | None] | None = None
    acts: str | tuple[str, ...] | Callable[[Mapping[str, str]], str] = "input"
    light: frozenset[str] = frozenset({"bias"})
    batch_axes: Callable[[torch.Size, Shapes], Sequence[int]] = first_axis
    rows_are_free: bool = False
    alone: bool = False
    join: Callable[[Sequence[tuple[Any, Tensor]]], tuple[Any, Tensor]] | None = None
    refuse: Callable[[Mapping[str, Any]], str | None] | None = None
    applies: Callable[[Mapping[str, Any]], bool] | None = None
