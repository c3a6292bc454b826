# SPDX-License-Identifier: Apache-2.0
"""Embedding: rows of a table, selected by id; norms and sums never form n gradient tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from dualdp_torch.rules import linear
from dualdp_torch.rules.base import (
    Norms,
    Rule,
    Tensor,
    all_but_last,
    last_lengths,
    on_host,
    sq_norms,
)
from dualdp_torch.rules.together import Described, Gram

#: Entries of the lookup table that finds equal ids (4 bytes each, mostly untouched).
TABLE = 1 << 20
#: Positions, in units of the features, up to which products of all pairs of them are formed.
MOST = 4


def _flat(
    ids: Tensor, grads_out: Tensor, shape: torch.Size, padding_idx: int | None
) -> tuple[Tensor, Tensor]:
    """(n, ...), (n, ..., d) -> (n, t), (n, t, d), with zero gradients for padding ids."""
    t = math.prod(ids.shape[1:])
    ids, grads_out = ids.reshape(ids.shape[0], t), grads_out.reshape(ids.shape[0], t, shape[1])
    if padding_idx is None:
        return ids, grads_out
    padding = (ids == padding_idx % shape[0]).unsqueeze(2)  # a negative index counts from the end
    return ids, grads_out.masked_fill(padding, 0)


def weight_grads(
    acts: Tensor, grads_out: Tensor, *, shape: torch.Size, padding_idx: Any = None, **_: Any
) -> Tensor:
    """(n, ...), (n, ..., d) -> (n, v, d) per-sample gradients."""
    ids, g = _flat(acts, grads_out, shape, padding_idx)
    rows = ids + shape[0] * torch.arange(len(ids), device=ids.device).unsqueeze(1)
    out = g.new_zeros(len(ids) * shape[0], shape[1])
    return out.index_add_(0, rows.reshape(-1), g.flatten(0, 1)).view(len(ids), *shape)


def _slots(ids: Tensor, rows: int) -> Tensor:
    """(n, t) ids below `rows` -> (n * t,) positions, the same for equal ids of one example.

    Every id writes its position to a table and reads it back, so that equal ids read the same one;
    entries of absent ids are never read. The table covers a few examples at a time.
    """
    n, t = ids.shape
    at_once = max(TABLE // rows, 1)
    kind = torch.int32 if n * t < 2**31 else torch.int64
    table = torch.empty(min(at_once, n) * rows, dtype=kind, device=ids.device)
    slots = torch.empty(n * t, dtype=torch.int64, device=ids.device)
    for start in range(0, n, at_once):
        some = ids[start : start + at_once]
        entries = some + rows * torch.arange(len(some), device=ids.device).unsqueeze(1)
        entries = entries.reshape(-1)
        here = torch.arange(start * t, start * t + len(entries), dtype=kind, device=ids.device)
        table.scatter_(0, entries, here)
        slots[start * t : start * t + len(entries)] = table[entries]
    return slots


def _summed_sq_norms(ids: Tensor, grads_out: Tensor) -> Norms:
    """(n, t), (n, t, d) -> (n,) squared norms, in few calls that never wait for the device.

    Gradients are added at the place of their id among the sorted ids of the example. Rounding
    matters where rows cancel: those of ids that occur more than once.
    """
    n, t = ids.shape
    ids = ids.contiguous()
    ordered = ids.sort(1).values
    places = torch.searchsorted(ordered, ids)  # of an id's first occurrence
    is_alone = torch.searchsorted(ordered, ids, right=True) - places == 1
    places += torch.arange(0, n * t, t, device=ids.device).unsqueeze(1)
    g = grads_out.reshape(n * t, grads_out.shape[2])
    sums = torch.zeros_like(g).index_add_(0, places.view(-1), g)
    lengths = last_lengths(grads_out).masked_fill_(is_alone, 0).sum(1)
    return sq_norms(sums.view(grads_out.shape)), linear.rounding_error(lengths.square_())


def _equal_ids(ids: Tensor, grads_out: Tensor, by_acts: Tensor, by_grads: Tensor) -> None:
    """Fill (n, 1, t, t) with 1 where two ids are equal, else 0, and with products of gradients."""
    torch.eq(ids.unsqueeze(2), ids.unsqueeze(1), out=by_acts.squeeze(1))
    torch.bmm(grads_out, grads_out.mT, out=by_grads.squeeze(1))


def weight_sq_norms(
    acts: Tensor, grads_out: Tensor, *, shape: torch.Size, padding_idx: Any = None, **_: Any
) -> Described:
    """(n, ...), (n, ..., d) -> (n,) squared norms; gradients of equal ids are added first.

    Where calls cost more than products and positions are few, ids are taken for rows of the unit
    matrix, and their products for those of a linear layer's inputs.
    """
    ids, g = _flat(acts, grads_out, shape, padding_idx)
    n, t = ids.shape
    if t == 1:
        return sq_norms(g), None
    if not on_host(g):
        few = t <= MOST * shape[1]
        return Gram((1, t), g, partial(_equal_ids, ids, g)) if few else _summed_sq_norms(ids, g)
    g = g.reshape(n * t, shape[1])
    slots = _slots(ids, shape[0])
    is_repeated = slots != torch.arange(n * t, device=g.device)
    # Rounding matters where rows cancel: then the row that they are added to is about as long.
    lengths = 2 * last_lengths(g).masked_fill(~is_repeated, 0).view(n, t).sum(1)
    sums = torch.zeros_like(g).index_add_(0, slots, g)
    return sq_norms(sums.view(n, t, shape[1])), linear.rounding_error(lengths.square_())


def weight_sum(
    acts: Tensor, grads_out: Tensor, *, shape: torch.Size, padding_idx: Any = None, **_: Any
) -> Tensor:
    """(n, ...), (n, ..., d) -> (v, d) sum over the examples."""
    ids, g = _flat(acts, grads_out, shape, padding_idx)
    return g.new_zeros(shape).index_add_(0, ids.reshape(-1), g.flatten(0, 1))


def cross_products(
    ids: Tensor, grads_out: Tensor, acts: Tensor, head_grads: Tensor, *, shape: torch.Size, **o: Any
) -> tuple[Tensor, Tensor]:
    """(n,) inner products of a table's two gradients, as embedding and as the head tied to it.

    Embedding: ids (n, ...), grads_out (n, ..., d). Head: acts (n, ..., d), head_grads (n, ..., v).
    Also the (n,) sum of the lengths of all terms of both gradients.
    """
    ids, g = _flat(ids, grads_out, shape, o.get("padding_idx"))
    a, h = linear.flatten_positions(acts), linear.flatten_positions(head_grads)
    picked = h.gather(2, ids.unsqueeze(1).expand(-1, h.shape[1], -1))  # (n, s, t)
    inner = (a @ g.mT * picked).sum((1, 2))
    norm = torch.linalg.vector_norm
    lengths = norm(g, dim=2).sum(1) + (norm(a, dim=2) * norm(h, dim=2)).sum(1)
    return inner, lengths


def _join(uses: Sequence[tuple[Any, Tensor]]) -> tuple[Any, Tensor]:
    """Join uses of one table, each (n, ...), (n, ..., d) -> (n, t), (n, t, d), t in total."""
    ids = torch.cat([ids.reshape(len(ids), math.prod(ids.shape[1:])) for ids, _ in uses], 1)
    return ids, torch.cat([linear.flatten_positions(g) for _, g in uses], 1)


def _refuse(options: Mapping[str, Any]) -> str | None:
    """Option under which one example's gradient depends on the others, as a reason, or None."""
    if options.get("scale_grad_by_freq"):
        return "scale_grad_by_freq=True divides by how often an id occurs in the whole batch"
    if options.get("max_norm") is not None:
        return "max_norm renormalises the rows that the batch uses, without noise"
    return None


RULE = Rule(
    arguments=(
        *("input", "weight", "padding_idx", "max_norm", "norm_type"),
        *("scale_grad_by_freq", "sparse"),
    ),
    grads={"weight": weight_grads},
    sq_norms={"weight": weight_sq_norms},
    sums={"weight": weight_sum},
    light=frozenset(),
    batch_axes=all_but_last,
    rows_are_free=True,
    join=_join,
    refuse=_refuse,
)
