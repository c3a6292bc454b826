# SPDX-License-Identifier: Apache-2.0
"""Record of the calls of one forward that may permute rows depending on data.

The analysis of the batch axes (`independence.analyze`) is made on one batch and holds for the next
as long as shapes alone determine them. After one of these calls they may depend on data: then all
rows of the present batch are checked (`permutation_check`). Listing a harmless call only costs a
check.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dualdp_torch.per_sample.parameter_use import Use, graph_nodes
from dualdp_torch.per_sample.permuting_functions import (
    INDEXING,
    INDEXING_NODES,
    PERMUTING,
    Permutation,
    functions_of_torch,
    is_order_of,
    picks_by_tensor,
)
from dualdp_torch.rules.base import Tensor

_READERS = (
    *("item", "tolist", "numpy", "equal", "allclose", "is_nonzero", "__contains__", "__array__"),
    *("__bool__", "__int__", "__index__", "__float__"),
)
#: Functions that turn data into Python numbers.
_READ = functions_of_torch(dict.fromkeys(_READERS))
_TRANSPOSING = ("transpose", "permute", "movedim", "moveaxis", "swapaxes", "swapdims", "t")
#: Functions that permute axes; they are part of a use's signature, as a flag may change them.
_PERMUTING_AXES = functions_of_torch(dict.fromkeys((*_TRANSPOSING, "adjoint"))).keys() | {
    getattr(torch.Tensor, name).__get__ for name in ("T", "mT", "H", "mH")
}
_PACK, _PAD = torch._pack_padded_sequence, torch._pad_packed_sequence
_SELECT = {torch.index_select, torch.Tensor.index_select}
_SAME = {"input": "x", "self": "x", "other": "y", "mat2": "y", "axis": "dim", "indices": "index"}


def _has_node(func: Any, args: tuple[Any, ...], out: Any) -> bool:
    """True if a call is part of the graph, and for `[]` only if a tensor is among the indices."""
    if func is torch.Tensor.__getitem__ or func is torch.Tensor.__setitem__:
        entries = args[1] if isinstance(args[1], tuple) else (args[1],)
        if not any(picks_by_tensor(e) for e in entries):
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
        found = sum(node.name().rstrip("0123456789") in INDEXING_NODES for node in nodes)
        cache[key] = found > seen
    return cache[key]


@dataclass(frozen=True, eq=False)
class _Ordered:
    """Tensor whose examples are in another, known order, (n,); in packed data they have no axis."""

    value: Tensor  # kept alive so that its id stays unique
    axis: int | None
    order: Tensor


class RowPermutations:
    """Calls of one forward that may have permuted examples.

    Packing sequences sorts them; this order alone is followed, from `index_select` through packed
    data and recurrent layers until it is undone. Any other function of such a tensor counts as a
    permutation. `of_axes` is a hash of the axis permutations so far.

    `seen` counts the calls so far that add a node of `INDEXING_NODES` to the graph;
    `has_unseen(seen)` is True if the graph has more, for instance from scripted functions. It must
    not refer to this object's owner.
    """

    def __init__(self, has_unseen: Callable[[int], bool] = lambda seen: False) -> None:
        self._has_unseen = has_unseen
        self.of_axes = self.seen = 0
        self._found: list[Permutation] = []
        self._read = self._ignores = False
        self._ordered: dict[int, _Ordered] = {}

    def may_permute(self, n: int, num_rows: int) -> bool:
        """True if n examples of `num_rows` rows may lie elsewhere than shapes alone determine."""
        if self._has_unseen(self.seen):
            return True
        return any(found.may_permute(n, num_rows, self._read) for found in self._found)

    def order_of(self, data: Tensor) -> Tensor | None:
        """Return the order of the examples in packed data, if they were sorted, or None."""
        ordered = self._ordered.get(id(data))
        return ordered.order if ordered else None

    def follow(self, value: Tensor, axis: int | None, order: Tensor) -> None:
        """Note that a tensor holds its examples in this order."""
        self._ordered[id(value)] = _Ordered(value, axis, order)

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
        self.seen += func in INDEXING and _has_node(func, args, out)
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
        permuting = PERMUTING.get(func)
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
                ordered = self._ordered.get(id(item))
                if ordered is not None:
                    self._found.append(Permutation(torch.Size([len(ordered.order)])))

    def _follows(self, func: Any, args: tuple[Any, ...], out: Any) -> bool:
        """True if a call keeps or undoes a known order, or computes sizes or orders only."""
        if not any(torch.is_tensor(o) for o in (out if isinstance(out, tuple) else (out,))):
            return True
        first = args[0] if args else None
        if torch.is_tensor(first) and first.dim() == 1 and not first.is_floating_point():
            return True
        known = self._ordered.get(id(first))
        if known is not None and len(args) > 2:
            if func is _PACK and known.axis == (0 if args[2] else 1):
                self.follow(out[0], None, known.order)
                return True
            if func is _PAD and known.axis is None:
                self.follow(out[0], 0 if args[2] else 1, known.order)
                return True
            if func in _SELECT and args[1] == known.axis:
                if is_order_of(known.order[args[2]], len(known.order)):
                    return True  # undone
        self.note_use(args, {})
        return False
