# SPDX-License-Identifier: Apache-2.0
"""Embedding: rows of a table, picked by id; nothing of size n times table unless asked for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from .base import Rule, Tensor, all_but_last


def _flat(
    ids: Tensor, grads_out: Tensor, shape: torch.Size, padding_idx: int | None
) -> tuple[Tensor, Tensor]:
    """(n, ...), (n, ..., d) -> (n, t), (n, t, d), the gradients of padding ids set to zero."""
    t = math.prod(ids.shape[1:])
    ids, grads_out = ids.reshape(ids.shape[0], t), grads_out.reshape(ids.shape[0], t, shape[1])
    if padding_idx is None:
        return ids, grads_out
    padding = (ids == padding_idx % shape[0]).unsqueeze(2)  # a negative index counts from the end
    return ids, grads_out.masked_fill(padding, 0)


def weight_grads(
    acts: Tensor, grads_out: Tensor, *, shape: torch.Size, padding_idx: Any = None, **_: Any
) -> Tensor:
    """(n, ...), (n, ..., d) -> (n, v, d)."""
    ids, g = _flat(acts, grads_out, shape, padding_idx)
    rows = ids + shape[0] * torch.arange(len(ids), device=ids.device).unsqueeze(1)
    out = g.new_zeros(len(ids) * shape[0], shape[1])
    return out.index_add_(0, rows.reshape(-1), g.flatten(0, 1)).view(len(ids), *shape)


def weight_sq_norms(
    acts: Tensor, grads_out: Tensor, *, shape: torch.Size, padding_idx: Any = None, **_: Any
) -> Tensor:
    """(n, ...), (n, ..., d) -> (n,): gradients of equal ids are added, then squared.

    Sorting brings equal ids of one example together; each run of them is one segment.
    """
    ids, g = _flat(acts, grads_out, shape, padding_idx)
    n, t = ids.shape
    if t == 1:
        return g.square().sum((1, 2))
    ids, order = ids.sort(dim=1)
    starts = torch.ones_like(ids, dtype=torch.bool)
    starts[:, 1:] = ids[:, 1:] != ids[:, :-1]
    segments = starts.reshape(-1).cumsum(0) - 1
    rows = order + t * torch.arange(n, device=ids.device).unsqueeze(1)
    sorted_g = g.reshape(n * t, shape[1])[rows.reshape(-1)]
    sums = torch.zeros_like(sorted_g).index_add_(0, segments, sorted_g)
    squares = sums.square().sum(1)
    owners = torch.arange(n, device=ids.device).repeat_interleave(t)[starts.reshape(-1)]
    return g.new_zeros(n).index_add_(0, owners, squares[: len(owners)])


def weight_sum(
    acts: Tensor, grads_out: Tensor, *, shape: torch.Size, padding_idx: Any = None, **_: Any
) -> Tensor:
    """(n, ...), (n, ..., d) -> (v, d)."""
    ids, g = _flat(acts, grads_out, shape, padding_idx)
    return g.new_zeros(shape).index_add_(0, ids.reshape(-1), g.flatten(0, 1))


def _refuse(options: Mapping[str, Any]) -> str | None:
    """Options under which one example's gradient depends on the others."""
    if options.get("scale_grad_by_freq"):
        return "scale_grad_by_freq=True divides by how often an id occurs in the whole batch"
    if options.get("max_norm") is not None:
        return "max_norm renormalises the rows that the batch uses, without noise"
    return None


def _keeps(acts: Tensor, grads_out: Tensor, shape: torch.Size) -> bool:
    """Never kept: it would be n tables."""
    return False


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
    keeps=_keeps,
    refuse=_refuse,
)
