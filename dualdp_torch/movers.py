# SPDX-License-Identifier: Apache-2.0
"""The functions that pick or write rows by data, and what each call of them may move."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from .rules.base import Tensor

Arguments = tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class Move:
    """One call that picks or writes rows.

    Attributes:
        shape: of the tensor whose rows they are.
        stays: axis -> whether every row comes out where it went in.
        by_data: the rows are in the call's tensors; else in Python numbers, which are data only
            where some were read.
    """

    shape: torch.Size
    stays: Callable[[int], bool]
    by_data: bool = True

    def matters(self, n: int, read: bool) -> bool:
        """Whether an axis that may hold n examples is among those that do not stay."""
        if not (self.by_data or read):
            return False
        axes = [a for a, s in enumerate(self.shape) if s == n or (a == 0 and s and s % n == 0)]
        return any(not self.stays(axis) for axis in axes)


def never(axis: int) -> bool:
    """Of no axis is it known that it stays."""
    return False


def is_order_of(index: Any, size: int) -> bool:
    """Whether an index lists all rows, in their order."""
    if not torch.is_tensor(index) or index.dtype == torch.bool or index.shape != (size,):
        return False
    return bool((index == torch.arange(size, device=index.device)).all())


def _stays_indexed(shape: torch.Size, index: Any, device: torch.device, axis: int) -> bool:
    """Whether an axis stays in `x[index]`: its row numbers are picked as its rows would be."""
    entries = index if isinstance(index, tuple) else (index,)
    if not any(entry is Ellipsis for entry in entries):  # axes behind the index are left alone
        taken = [e.dim() if _is_mask(e) else e is not None for e in entries]
        shape = shape[: max(sum(taken), axis + 1)]
    rows = torch.arange(shape[axis], device=device)
    picked = rows.view([-1 if a == axis else 1 for a in range(len(shape))]).expand(shape)[index]
    return any(
        size == len(rows)
        and bool((picked == rows.view([-1 if a == b else 1 for a in range(picked.dim())])).all())
        for b, size in enumerate(picked.shape)
    )


def _is_mask(entry: Any) -> bool:
    """Whether an index is a tensor of booleans."""
    return torch.is_tensor(entry) and entry.dtype in (torch.bool, torch.uint8)


def _indexed(x: Tensor, index: Any, *_: Any, **__: Any) -> Move | None:
    """`x[index]` and `x[index] = ...`; an index that takes everything moves nothing."""
    entries = index if isinstance(index, tuple) else (index,)
    by_data = any(picks_by_tensor(e) for e in entries)
    if not by_data and all(e is None or e is Ellipsis or e == slice(None) for e in entries):
        return None
    return Move(x.shape, partial(_stays_indexed, x.shape, index, x.device), by_data)


def picks_by_tensor(entry: Any) -> bool:
    """Whether an index is an array of positions rather than one number or a span."""
    return not (entry is None or entry is Ellipsis or isinstance(entry, int | slice))


def _put(x: Tensor, indices: Any, *_: Any, **__: Any) -> Move | None:
    """`x.index_put(indices, values)`."""
    return _indexed(x, tuple(indices))


def _along(x: Tensor, dim: int, index: Any, *_: Any, **__: Any) -> Move | None:
    """Rows picked or written along an axis: (size,) of them, or one for every number."""
    if not torch.is_tensor(index):
        return None
    dim = dim % max(x.dim(), 1)

    def is_order() -> bool:
        rows = torch.arange(x.shape[dim], device=index.device)
        picked = index.movedim(dim, -1) if index.dim() == x.dim() > 1 else index
        return picked.shape[-1:] == rows.shape and bool((picked == rows).all())

    return Move(x.shape, lambda axis: axis != dim or is_order())


def _taken(x: Tensor, index: Any, dim: Any = None, *_: Any) -> Move | None:
    """`torch.take_along_dim`, which names the axis last."""
    return Move(x.shape, never) if dim is None else _along(x, dim, index)


def _sorted(x: Tensor, dim: Any = -1, *_: Any, **__: Any) -> Move | None:
    """Values sorted along an axis; a list of integers holds the sizes of sequences."""
    if x.dim() == 1 and not x.is_floating_point():
        return None
    moved = dim % max(x.dim(), 1) if type(dim) is int else 0
    return Move(x.shape, lambda axis: axis != moved)


def _topmost(x: Tensor, k: int, dim: int = -1, *_: Any, **__: Any) -> Move | None:
    """The `k` largest along an axis."""
    return _sorted(x, dim)


def _anywhere(x: Tensor, *_: Any, **__: Any) -> Move:
    """Rows picked by a mask, or from everything as one list."""
    return Move(x.shape, never)


def _repeated(x: Tensor, repeats: Any = None, *_: Any, **__: Any) -> Move | None:
    """Rows repeated, each as often as the data say."""
    return Move(x.shape, never) if torch.is_tensor(repeats) else None


def _part(x: Tensor, dim: Any = 0, *_: Any, **__: Any) -> Move:
    """Rows of one axis taken apart, to be put together as Python numbers say."""
    moved = dim % max(x.dim(), 1) if type(dim) is int else None
    return Move(x.shape, lambda axis: moved is not None and axis != moved, by_data=False)


def _parts(x: Tensor, sizes: Any = None, dim: Any = 0, **__: Any) -> Move:
    """The same, by sizes."""
    return _part(x, dim)


def _multiplied(x: Any, y: Any, *_: Any, **__: Any) -> Move | None:
    """A product over the rows of data by a square of data, as a permutation is one."""
    if not (torch.is_tensor(x) and torch.is_tensor(y)) or nn.Parameter in (type(x), type(y)):
        return None
    if x.dim() < 2 or y.dim() < 2 or x.shape[-2] != x.shape[-1]:
        return None
    batched = (1,) if y.dim() > 2 else ()  # the rows of a matrix may be examples times positions
    return Move(torch.Size([*batched, y.shape[-2]]), never)


def _contracted(equation: Any, *given: Any, **_: Any) -> Move | None:
    """The same, written as einsum."""
    operands = given[0] if len(given) == 1 and isinstance(given[0], list | tuple) else given
    if type(equation) is not str or "->" not in equation or nn.Parameter in map(type, operands):
        return None
    terms, out = equation.replace(" ", "").split("->")
    sizes = [
        operand.shape[at]
        for term, operand in zip(terms.split(","), operands, strict=False)
        for at, letter in enumerate(term)
        if letter not in out and "..." not in term
    ]
    return Move(torch.Size([1, *sizes]), never)


_ALONG = (
    *("index_select", "gather", "index_add", "index_copy", "index_fill", "index_reduce"),
    *("scatter", "scatter_add", "scatter_reduce"),
)
_BY_NAME: dict[str, Callable[..., Move | None]] = {
    "__getitem__": _indexed,
    "__setitem__": _indexed,
    "index_put": _put,
    "index_put_": _put,
    **{name + end: _along for name in _ALONG for end in ("", "_")},
    "take_along_dim": _taken,
    "sort": _sorted,
    "msort": lambda x: _sorted(x, 0),
    "topk": _topmost,
    **dict.fromkeys(("masked_select", "masked_scatter", "masked_scatter_"), _anywhere),
    **dict.fromkeys(("take", "put_"), _anywhere),
    "repeat_interleave": _repeated,
    **dict.fromkeys(("unbind", "select", "narrow"), _part),
    **dict.fromkeys(("split", "split_with_sizes", "tensor_split", "chunk", "roll"), _parts),
    **dict.fromkeys(("matmul", "mm", "bmm"), _multiplied),
    "einsum": _contracted,
}
#: Function -> what its call may move.
MOVERS: dict[Any, Callable[..., Move | None]] = {
    getattr(home, name): mover
    for name, mover in _BY_NAME.items()
    for home in (torch, torch.Tensor)
    if hasattr(home, name)
}
#: Functions that leave a node of `NODES` in the graph; they may leave others.
INDEXED = {
    getattr(home, name)
    for name, mover in _BY_NAME.items()
    for home in (torch, torch.Tensor)
    if hasattr(home, name) and mover not in (_part, _parts, _multiplied, _contracted)
}
NODES = {
    f"{name}Backward"
    for name in (
        *("Index", "IndexSelect", "IndexPut", "IndexAdd", "IndexCopy", "IndexFill", "Take"),
        *("IndexReduce", "Gather", "Scatter", "ScatterAdd", "ScatterReduce", "Put", "Sort"),
        *("MaskedSelect", "MaskedScatter", "Topk"),
    )
}
