# SPDX-License-Identifier: Apache-2.0
"""Calls of one forward that may permute rows depending on data.

The analysis of the batch axes (`independence.analyze`) is made on one batch and holds for the next
as long as shapes alone determine them. After one of these calls they may depend on data: then all
rows of the present batch are checked (`permuted_use`). Listing a harmless call only costs a
check.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from dualdp_torch.per_sample.parameter_use import Use, graph_nodes
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


def _keeps_indexed(shape: torch.Size, index: Any, device: torch.device, axis: int) -> bool:
    """True if `x[index]` keeps the rows of an axis in order, tested on their row numbers."""
    entries = index if isinstance(index, tuple) else (index,)
    if not any(entry is Ellipsis for entry in entries):  # axes after the index are unchanged
        masks = (torch.bool, torch.uint8)
        are_masks = [torch.is_tensor(e) and e.dtype in masks for e in entries]
        taken = [e.dim() if m else e is not None for e, m in zip(entries, are_masks, strict=True)]
        shape = shape[: max(sum(taken), axis + 1)]
    rows = torch.arange(shape[axis], device=device)
    picked = rows.view([-1 if a == axis else 1 for a in range(len(shape))]).expand(shape)[index]
    return any(
        size == len(rows)
        and bool((picked == rows.view([-1 if a == b else 1 for a in range(picked.dim())])).all())
        for b, size in enumerate(picked.shape)
    )


def _indexed(x: Tensor, index: Any, *_: Any, **__: Any) -> Permutation | None:
    """Rows of `x[index]` and `x[index] = ...`; None for an index that takes everything."""
    entries = index if isinstance(index, tuple) else (index,)
    by_data = any(_picks_by_tensor(e) for e in entries)
    if not by_data and all(e is None or e is Ellipsis or e == slice(None) for e in entries):
        return None
    return Permutation(x.shape, partial(_keeps_indexed, x.shape, index, x.device), by_data)


def _picks_by_tensor(entry: Any) -> bool:
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


def _functions_of_torch(named: Mapping[str, _Value]) -> dict[Any, _Value]:
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
#: Functions that may add a node of `_INDEXING_NODES` to the graph.
_INDEXING_CALLS = _functions_of_torch(_INDEXING)
#: Function -> function from the call's arguments to its `Permutation`, or None.
_PERMUTING: dict[Any, _Permuting] = _INDEXING_CALLS | _functions_of_torch(
    {
        **dict.fromkeys(("unbind", "select", "narrow"), _one_axis),
        **dict.fromkeys(_SPLITTING, lambda x, sizes=None, dim=0, **__: _one_axis(x, dim)),
        **dict.fromkeys(("matmul", "mm", "bmm"), _multiplied),
        "einsum": _contracted,
    }
)
_INDEXING_NODES = {
    f"{name}Backward"
    for name in (
        *("Index", "IndexSelect", "IndexPut", "IndexAdd", "IndexCopy", "IndexFill", "Take"),
        *("IndexReduce", "Gather", "Scatter", "ScatterAdd", "ScatterReduce", "Put", "Sort"),
        *("MaskedSelect", "MaskedScatter", "Topk"),
    )
}
_READERS = (
    *("item", "tolist", "numpy", "equal", "allclose", "is_nonzero", "__contains__", "__array__"),
    *("__bool__", "__int__", "__index__", "__float__"),
)
#: Functions that turn data into Python numbers.
_READ = _functions_of_torch(dict.fromkeys(_READERS))
_TRANSPOSING = ("transpose", "permute", "movedim", "moveaxis", "swapaxes", "swapdims", "t")
#: Functions that permute axes; they are part of a use's signature, as a flag may change them.
_PERMUTING_AXES = _functions_of_torch(dict.fromkeys((*_TRANSPOSING, "adjoint"))).keys() | {
    getattr(torch.Tensor, name).__get__ for name in ("T", "mT", "H", "mH")
}
_PACK, _PAD = torch._pack_padded_sequence, torch._pad_packed_sequence
_SELECT = {torch.index_select, torch.Tensor.index_select}
_SAME = {"input": "x", "self": "x", "other": "y", "mat2": "y", "axis": "dim", "indices": "index"}


def _has_node(func: Any, args: tuple[Any, ...], out: Any) -> bool:
    """True if a call is part of the graph, and for `[]` only if a tensor is among the indices."""
    if func is torch.Tensor.__getitem__ or func is torch.Tensor.__setitem__:
        entries = args[1] if isinstance(args[1], tuple) else (args[1],)
        if not any(_picks_by_tensor(e) for e in entries):
            return False
    outs = out if isinstance(out, tuple) else (out, *args[:1])
    return any(torch.is_tensor(o) and o.requires_grad for o in outs)


#: Model -> signatures of the uses -> result of `indexes_unseen`.
_unseen: weakref.WeakKeyDictionary[nn.Module, dict[Any, bool]] = weakref.WeakKeyDictionary()


def indexes_unseen(model: nn.Module | None, uses: Sequence[Use], seen: int) -> bool:
    """True if scripted code selects rows unseen by the mode; cached per model."""
    if model is None:
        return False
    cache, key = _unseen.setdefault(model, {}), tuple(use.signature for use in uses)
    if key not in cache:
        nodes = graph_nodes(use.edge.node for use in uses)
        found = sum(node.name().rstrip("0123456789") in _INDEXING_NODES for node in nodes)
        cache[key] = found > seen
    return cache[key]


class RowPermutations:
    """Calls of one forward that may have permuted examples.

    Packing sequences sorts them; this order alone is followed, from `index_select` through packed
    data and recurrent layers until it is undone. Any other function of such a tensor counts as a
    permutation. `of_axes` is a hash of the axis permutations so far.

    `seen` counts the calls so far that add a node of `_INDEXING_NODES` to the graph;
    `has_unseen(seen)` is True if the graph has more, for instance from scripted functions. It must
    not refer to this object's owner.
    """

    def __init__(self, has_unseen: Callable[[int], bool] = lambda seen: False) -> None:
        self._has_unseen = has_unseen
        self.of_axes = self.seen = 0
        self._found: list[Permutation] = []
        self._read = self._ignores = False
        # Tensors, kept alive so that their ids stay unique, with axis and order of their examples.
        self._ordered: dict[int, tuple[Tensor, int | None, Tensor]] = {}

    def may_permute(self, n: int, num_rows: int) -> bool:
        """True if n examples of `num_rows` rows may lie elsewhere than shapes alone determine."""
        if self._has_unseen(self.seen):
            return True
        return any(found.may_permute(n, num_rows, self._read) for found in self._found)

    def order_of(self, data: Any) -> Tensor | None:
        """Return the order of the examples in packed data, if they were sorted, or None."""
        return self._ordered[id(data)][2] if id(data) in self._ordered else None

    def follow(self, value: Tensor, axis: int | None, order: Tensor) -> None:
        """Note that a tensor holds its examples in this order; packed data has no axis of them."""
        self._ordered[id(value)] = value, axis, order

    @contextlib.contextmanager
    def ignored(self) -> Iterator[None]:
        """Context in which calls do not count as permutations."""
        before, self._ignores = self._ignores, True
        try:
            yield
        finally:
            self._ignores = before

    def note(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> None:
        """Note the call of a function without parameters."""
        self.seen += func in _INDEXING_CALLS and _has_node(func, args, out)
        if self._ignores:
            return
        if func in _READ:
            self._read = True
        elif func in _PERMUTING_AXES:
            self.of_axes = hash((self.of_axes, func, repr((args[1:], kwargs))))
        elif not (self._ordered and self._follows(func, args, out)):
            self._record(func, args, kwargs, out)

    def _record(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any
    ) -> None:
        """Record the permutation that a call may make."""
        if func in _SELECT and len(args) == 3 and type(args[1]) is int and args[2].dim() == 1:
            self.follow(out, args[1], args[2])  # the first step of packing
            return
        permuting = _PERMUTING.get(func)
        if permuting is None:
            return
        try:
            found = permuting(
                *args, **{_SAME.get(k, k): v for k, v in kwargs.items() if k != "out"}
            )
        except TypeError:  # another signature than the one read here
            tensors = [a for a in (*args, *kwargs.values()) if torch.is_tensor(a)]
            found = Permutation(torch.Size([size for t in tensors for size in t.shape]))
        if found is not None:
            self._found.append(found)

    def note_use(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Record a permutation if a function takes a tensor in another order than the batch's."""
        if self._ignores or not self._ordered:
            return
        for value in (*args, *kwargs.values()):
            for item in value if isinstance(value, list | tuple) else (value,):
                order = self.order_of(item)
                if order is not None:
                    self._found.append(Permutation(order.shape))

    def _follows(self, func: Any, args: tuple[Any, ...], out: Any) -> bool:
        """True if a call keeps or undoes a known order, or computes sizes or orders only."""
        if not any(torch.is_tensor(o) for o in (out if isinstance(out, tuple) else (out,))):
            return True
        first = args[0] if args else None
        if torch.is_tensor(first) and first.dim() == 1 and not first.is_floating_point():
            return True
        if id(first) in self._ordered and len(args) > 2:
            _, axis, order = self._ordered[id(first)]
            if func is _PACK and axis == (0 if args[2] else 1):
                self.follow(out[0], None, order)
                return True
            if func is _PAD and axis is None:
                self.follow(out[0], 0 if args[2] else 1, order)
                return True
            if func in _SELECT and args[1] == axis:
                undone = order[args[2]].long()
                if torch.equal(undone, torch.arange(len(order), device=undone.device)):
                    return True
        self.note_use(args, {})
        return False
