# SPDX-License-Identifier: Apache-2.0
"""Calls that may bring examples to other rows because the data say so: indices, masks, lengths.

A proof of where the examples lie (`proof`) is made on one batch and holds for the next, as long as
shapes alone decide it. After a call of this list they may not: then all rows of the batch at hand
are looked at (`rows.moved_use`). A call that is listed without need costs that look, no more.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .movers import INDEXED, MOVERS, NODES, Arguments, Move, is_order_of, never, picks_by_tensor
from .rules.base import Tensor
from .uses import Use

_READERS = (
    *("item", "tolist", "numpy", "equal", "allclose", "is_nonzero", "__contains__", "__array__"),
    *("__bool__", "__int__", "__index__", "__float__"),
)
#: Functions that turn data into Python numbers.
_READ = {getattr(h, r) for r in _READERS for h in (torch, torch.Tensor) if hasattr(h, r)}
#: Functions that turn axes, all of which a proof must have seen: by a toggle they may differ.
_TURNERS = ("transpose", "permute", "movedim", "moveaxis", "swapaxes", "swapdims", "t", "adjoint")
_TURNED = {getattr(h, t) for t in _TURNERS for h in (torch, torch.Tensor) if hasattr(h, t)} | {
    getattr(torch.Tensor, t).__get__ for t in ("T", "mT", "H", "mH")
}
_PACK, _PAD = torch._pack_padded_sequence, torch._pad_packed_sequence


def _has_node(func: Any, args: Arguments, out: Any) -> bool:
    """Whether a call is part of the graph, and picks by tensors if it picks by `[]`."""
    if func is torch.Tensor.__getitem__ or func is torch.Tensor.__setitem__:
        entries = args[1] if isinstance(args[1], tuple) else (args[1],)
        if not any(picks_by_tensor(e) for e in entries):
            return False
    outs = out if isinstance(out, tuple) else (out, *args[:1])
    return any(torch.is_tensor(o) and o.requires_grad for o in outs)


def _indexing_nodes(nodes: Iterable[Any]) -> int:
    """Nodes, from these down to the inputs, that pick or write rows by tensors."""
    stack, known = list(nodes), set[Any]()
    while stack:
        node = stack.pop()
        if node is not None and node not in known:
            known.add(node)
            stack += [child for child, _ in node.next_functions]
    return sum(node.name().rstrip("0123456789") in NODES for node in known)


#: Model -> signatures of the uses -> whether rows are picked unseen.
_hidden: weakref.WeakKeyDictionary[nn.Module, dict[Any, bool]] = weakref.WeakKeyDictionary()


def picks_unseen(model: nn.Module | None, uses: Sequence[Use], seen: int) -> bool:
    """Whether scripted functions or operators picked rows unseen; found out once for a model."""
    if model is None:
        return False
    known = _hidden.setdefault(model, {})
    key = tuple(use.signature for use in uses)
    if key not in known:
        known[key] = _indexing_nodes(use.edge.node for use in uses) > seen
    return known[key]


@dataclass(frozen=True, eq=False)
class _Ordered:
    """A tensor whose examples are in another order, which is known.

    Attributes:
        value: the tensor, kept alive so that its id stays its own.
        axis: of the examples; None in packed data.
        order: (n,), the examples as they come.
    """

    value: Tensor
    axis: int | None
    order: Tensor


class Moves:
    """The calls of one forward that may have moved examples.

    Packing sequences sorts them; that order, the only one, is followed from `index_select` through
    packed data and recurrent layers until it is undone. Whatever else sees such a tensor is a move.

    Args:
        hidden: `seen` -> whether the graph has more such nodes, from scripted functions and the
            like; it must not hold what holds this object.

    Attributes:
        turns: what axes were turned so far, as one number.
        seen: calls so far that leave a node of `NODES` in the graph.
    """

    def __init__(self, hidden: Callable[[int], bool] = lambda seen: False) -> None:
        self._hidden = hidden
        self.turns = self.seen = 0
        self._found: list[Move] = []
        self._read = self._quiet = False
        self._ordered: dict[int, _Ordered] = {}

    def matter(self, n: int) -> bool:
        """Whether n examples may lie elsewhere than shapes say."""
        if self._hidden(self.seen):
            return True
        return any(move.matters(n, self._read) for move in self._found)

    def order_of(self, data: Tensor) -> Tensor | None:
        """The examples in the order in which packed data hold them, if they were sorted."""
        known = self._ordered.get(id(data))
        return known.order if known else None

    def follow(self, value: Tensor, axis: int | None, order: Tensor) -> None:
        """A tensor holds its examples in this order."""
        self._ordered[id(value)] = _Ordered(value, axis, order)

    @contextlib.contextmanager
    def quietly(self) -> Iterator[None]:
        """What is called inside moves nothing."""
        before, self._quiet = self._quiet, True
        try:
            yield
        finally:
            self._quiet = before

    def note(self, func: Any, args: Arguments, kwargs: Mapping[str, Any], out: Any) -> None:
        """A function without parameters was called."""
        self.seen += func in INDEXED and _has_node(func, args, out)
        if self._quiet:
            return
        if func in _READ:
            self._read = True
        elif func in _TURNED:
            self.turns = hash((self.turns, func, repr((args[1:], kwargs))))
        elif not (self._ordered and self._follows(func, args, out)):
            self._take(func, args, kwargs, out)

    def _take(self, func: Any, args: Arguments, kwargs: Mapping[str, Any], out: Any) -> None:
        """Remember what a call may have moved."""
        if func in _SELECT and len(args) == 3 and type(args[1]) is int and args[2].dim() == 1:
            self.follow(out, args[1], args[2])  # what packing begins with
            return
        mover = MOVERS.get(func)
        if mover is None:
            return
        try:
            move = mover(*args, **{_SAME.get(k, k): v for k, v in kwargs.items() if k != "out"})
        except TypeError:  # arguments in another way than they are read here
            tensors = [a for a in (*args, *kwargs.values()) if torch.is_tensor(a)]
            move = Move(torch.Size([size for t in tensors for size in t.shape]), never)
        if move is not None:
            self._found.append(move)

    def used(self, args: Arguments, kwargs: Mapping[str, Any]) -> None:
        """A function saw these: a tensor in another order than the batch's is a move."""
        if self._quiet or not self._ordered:
            return
        for value in (*args, *kwargs.values()):
            for part in value if isinstance(value, list | tuple) else (value,):
                known = self._ordered.get(id(part))
                if known is not None:
                    self._found.append(Move(torch.Size([len(known.order)]), never))

    def _follows(self, func: Any, args: Arguments, out: Any) -> bool:
        """Whether a call keeps to a known order, or is arithmetic of sizes and orders."""
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
        self.used(args, {})
        return False


_SELECT = {torch.index_select, torch.Tensor.index_select}
_SAME = {"input": "x", "self": "x", "other": "y", "mat2": "y", "axis": "dim", "indices": "index"}
