# SPDX-License-Identifier: Apache-2.0
"""Functions that select, write or permute rows by data, and the axes that each call permutes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from dualdp_torch.rules.base import Tensor


@dataclass(frozen=True, eq=False)
class Permutation:
    """One call that selects, writes or permutes rows of a tensor of this shape.

    `keeps(axis)` is True if no row along the axis changes its position. `by_data` is False if
    Python numbers determine the rows, which depend on data only after some were read.
    """

    shape: torch.Size
    keeps: Callable[[int], bool] = lambda axis: False
    by_data: bool = True

    def may_permute(self, n: int, num_rows: int, read: bool) -> bool:
        """True if an axis that may hold n examples of `num_rows` rows is permuted, or may be."""
        if not (self.by_data or read):
            return False
        axes = [
            axis
            for axis, size in enumerate(self.shape)
            if size in (n, num_rows) or (axis == 0 and size and size % n == 0)
        ]
        return any(not self.keeps(axis) for axis in axes)


def is_order_of(index: Any, size: int) -> bool:
    """True if an index lists all rows in their order."""
    if not torch.is_tensor(index) or index.dtype == torch.bool or index.shape != (size,):
        return False
    return bool((index == torch.arange(size, device=index.device)).all())


def _keeps_indexed(shape: torch.Size, index: Any, device: torch.device, axis: int) -> bool:
    """True if `x[index]` keeps the rows of an axis in order, tested on their row numbers."""
    entries = index if isinstance(index, tuple) else (index,)
    if not any(entry is Ellipsis for entry in entries):  # axes after the index are unchanged
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
    return torch.is_tensor(entry) and entry.dtype in (torch.bool, torch.uint8)


def _indexed(x: Tensor, index: Any, *_: Any, **__: Any) -> Permutation | None:
    """Rows of `x[index]` and `x[index] = ...`; None for an index that takes everything."""
    entries = index if isinstance(index, tuple) else (index,)
    by_data = any(picks_by_tensor(e) for e in entries)
    if not by_data and all(e is None or e is Ellipsis or e == slice(None) for e in entries):
        return None
    return Permutation(x.shape, partial(_keeps_indexed, x.shape, index, x.device), by_data)


def picks_by_tensor(entry: Any) -> bool:
    """True if an index is an array of positions rather than a number or a slice."""
    return not (entry is None or entry is Ellipsis or isinstance(entry, int | slice))


def _along(x: Tensor, dim: int, index: Any, *_: Any, **__: Any) -> Permutation | None:
    """Rows selected or written along an axis: index (size,), or one per element."""
    if not torch.is_tensor(index):
        return None
    dim = dim % max(x.dim(), 1)

    def is_order() -> bool:
        rows = torch.arange(x.shape[dim], device=index.device)
        picked = index.movedim(dim, -1) if index.dim() == x.dim() > 1 else index
        return picked.shape[-1:] == rows.shape and bool((picked == rows).all())

    return Permutation(x.shape, lambda axis: axis != dim or is_order())


def _sorted(x: Tensor, dim: Any = -1, *_: Any, **__: Any) -> Permutation | None:
    """Rows of a sort along an axis; None for a vector of integers, as lengths of sequences are."""
    if x.dim() == 1 and not x.is_floating_point():
        return None
    moved = dim % max(x.dim(), 1) if type(dim) is int else 0
    return Permutation(x.shape, lambda axis: axis != moved)


def _one_axis(x: Tensor, dim: Any = 0, *_: Any, **__: Any) -> Permutation:
    """Rows of one axis taken apart, which Python code may join in another order."""
    moved = dim % max(x.dim(), 1) if type(dim) is int else None
    return Permutation(x.shape, lambda axis: moved is not None and axis != moved, by_data=False)


def _multiplied(x: Any, y: Any, *_: Any, **__: Any) -> Permutation | None:
    """Rows of a product with a square matrix of data, which may be a permutation."""
    if not (torch.is_tensor(x) and torch.is_tensor(y)) or nn.Parameter in (type(x), type(y)):
        return None
    if x.dim() < 2 or y.dim() < 2 or x.shape[-2] != x.shape[-1]:
        return None
    batched = (1,) if y.dim() > 2 else ()  # the rows of a matrix may be examples times positions
    return Permutation(torch.Size([*batched, y.shape[-2]]))


def _contracted(equation: Any, *given: Any, **_: Any) -> Permutation | None:
    """Rows of an einsum over data, whose contracted axes may be permuted."""
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
    return Permutation(torch.Size([1, *sizes]))


def functions_of_torch(named: Mapping[str, _Value]) -> dict[Any, _Value]:
    """Return function -> value for the functions and methods of torch with these names."""
    homes = (torch, torch.Tensor)
    return {getattr(h, n): v for n, v in named.items() for h in homes if hasattr(h, n)}


_Value = TypeVar("_Value")
_Permuting = Callable[..., Permutation | None]
_ALONG = (
    *("index_select", "gather", "index_add", "index_copy", "index_fill", "index_reduce"),
    *("scatter", "scatter_add", "scatter_reduce"),
)
_ANYWHERE = ("masked_select", "masked_scatter", "masked_scatter_", "take", "put_")
_INDEXING: dict[str, _Permuting] = {
    **dict.fromkeys(("__getitem__", "__setitem__"), _indexed),
    **dict.fromkeys(
        ("index_put", "index_put_"), lambda x, indices, *_, **__: _indexed(x, tuple(indices))
    ),
    **{name + end: _along for name in _ALONG for end in ("", "_")},
    "take_along_dim": lambda x, index, dim=None, *_: (
        Permutation(x.shape) if dim is None else _along(x, dim, index)
    ),
    "sort": _sorted,
    "msort": lambda x: _sorted(x, 0),
    "topk": lambda x, k, dim=-1, *_, **__: _sorted(x, dim),
    **dict.fromkeys(_ANYWHERE, lambda x, *_, **__: Permutation(x.shape)),
    "repeat_interleave": lambda x, repeats=None, *_, **__: (
        Permutation(x.shape) if torch.is_tensor(repeats) else None
    ),
}
_SPLITTING = ("split", "split_with_sizes", "tensor_split", "chunk", "roll")
#: Functions that may add a node of `INDEXING_NODES` to the graph.
INDEXING = functions_of_torch(_INDEXING)
#: Function -> function from the call's arguments to its `Permutation`, or None.
PERMUTING: dict[Any, _Permuting] = INDEXING | functions_of_torch(
    {
        **dict.fromkeys(("unbind", "select", "narrow"), _one_axis),
        **dict.fromkeys(_SPLITTING, lambda x, sizes=None, dim=0, **__: _one_axis(x, dim)),
        **dict.fromkeys(("matmul", "mm", "bmm"), _multiplied),
        "einsum": _contracted,
    }
)
INDEXING_NODES = {
    f"{name}Backward"
    for name in (
        *("Index", "IndexSelect", "IndexPut", "IndexAdd", "IndexCopy", "IndexFill", "Take"),
        *("IndexReduce", "Gather", "Scatter", "ScatterAdd", "ScatterReduce", "Put", "Sort"),
        *("MaskedSelect", "MaskedScatter", "Topk"),
    )
}
