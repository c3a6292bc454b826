# SPDX-License-Identifier: Apache-2.0
"""PReLU, Bilinear, EmbeddingBag and the cells of recurrent networks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from dualdp_torch.rules import linear
from dualdp_torch.rules.base import Rule, Tensor, all_but_last


def _prelu_grads(acts: Tensor, grads_out: Tensor, *, shape: torch.Size, **_: Any) -> Tensor:
    """(n, c, ...), (n, c, ...) -> (n, 1) or (n, c) per-sample gradients."""
    slopes = torch.where(acts > 0, 0, acts * grads_out)
    if shape.numel() == 1:
        return slopes.flatten(1).sum(1, keepdim=True)
    return slopes.flatten(2).sum(2) if slopes.dim() > 2 else slopes


PRELU = Rule(arguments=("input", "weight"), grads={"weight": _prelu_grads}, light=frozenset())


def _pairs(acts: tuple[Tensor, Tensor]) -> Tensor:
    """(n, ..., i), (n, ..., j) -> (n, ..., i j) products, in which bilinear is linear."""
    left, right = acts
    return (left.unsqueeze(-1) * right.unsqueeze(-2)).flatten(-2)


def _bilinear_grads(
    acts: tuple[Tensor, Tensor], grads_out: Tensor, *, shape: torch.Size, **_: Any
) -> Tensor:
    """(n, ..., i), (n, ..., j), (n, ..., o) -> (n, o, i, j)."""
    grads = linear.weight_grads(_pairs(acts), grads_out)
    return grads.reshape(len(grads), *shape)


def _bilinear_sum(
    acts: tuple[Tensor, Tensor], grads_out: Tensor, *, shape: torch.Size, **_: Any
) -> Tensor:
    """(n, ..., i), (n, ..., j), (n, ..., o) -> (o, i, j)."""
    return linear.weight_sum(_pairs(acts), grads_out).reshape(shape)


BILINEAR = Rule(
    arguments=("input1", "input2", "weight", "bias"),
    grads={"weight": _bilinear_grads, "bias": linear.bias_grads},
    sums={"weight": _bilinear_sum, "bias": linear.bias_sum},
    acts=("input1", "input2"),
    batch_axes=all_but_last,
    rows_are_free=True,
)


def embedding_bag(
    capture: Any,
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """`F.embedding_bag` on bags of equal length: (n, t) ids -> (n, d)."""
    rows = F.embedding(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(-1)
    if padding_idx is None:
        return rows.amax(1) if mode == "max" else getattr(rows, mode)(1)
    padding = (input == padding_idx % len(weight)).unsqueeze(-1)  # (n, t, 1)
    if mode == "max":
        largest = rows.masked_fill(padding, -math.inf).max(1).values
        return largest.masked_fill(padding.all(1), 0)
    total = rows.masked_fill(padding, 0).sum(1)
    return total / (~padding).sum(1).clamp(min=1) if mode == "mean" else total


def covers_bag(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if each row of a table of ids is one bag."""
    return bool(args and args[0].dim() == 2 and args[0].shape[1] > 0)


def lstm_cell(
    capture: Any, x: Tensor, state: Any, w_ih: Tensor, w_hh: Tensor, b_ih: Any, b_hh: Any
) -> tuple[Tensor, Tensor]:
    """One step of an LSTM: (n, i), (n, h) twice -> (n, h) twice."""
    h, c = state
    gates = F.linear(x, w_ih, b_ih) + F.linear(h, w_hh, b_hh)
    i, f, g, o = gates.chunk(4, -1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def gru_cell(
    capture: Any, x: Tensor, h: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Any, b_hh: Any
) -> Tensor:
    """One step of a GRU: (n, i), (n, h) -> (n, h)."""
    x_r, x_z, x_n = F.linear(x, w_ih, b_ih).chunk(3, -1)
    h_r, h_z, h_n = F.linear(h, w_hh, b_hh).chunk(3, -1)
    z = (x_z + h_z).sigmoid()
    candidate = (x_n + (x_r + h_r).sigmoid() * h_n).tanh()
    return candidate + z * (h - candidate)


def rnn_cell(activation: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """Return one step of an Elman network: (n, i), (n, h) -> (n, h)."""

    def rewritten(
        capture: Any, x: Tensor, h: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Any, b_hh: Any
    ) -> Tensor:
        return activation(F.linear(x, w_ih, b_ih) + F.linear(h, w_hh, b_hh))

    return rewritten
