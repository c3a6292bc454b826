# SPDX-License-Identifier: Apache-2.0
"""Multi-head attention written out, so that each of its projections is a separate parameter use."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional as F

from dualdp_torch.rules.base import Tensor


def multi_head_attention(
    capture: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """`F.multi_head_attention_forward`: (l, n, e), (s, n, e) -> (l, n, e), weights (n, l, s).

    Source: Vaswani et al. 2017, section 3.2.2.
    """
    weights = (q_proj_weight, k_proj_weight, v_proj_weight) if use_separate_proj_weight else None
    projected = _project(query, key, value, in_proj_weight, in_proj_bias, weights)
    q, k, v = (x.transpose(0, 1) for x in projected)  # (n, l, e), (n, s, e), (n, s, e)
    n, length, width = q.shape
    if bias_k is not None and bias_v is not None:
        k = torch.cat([k, bias_k.expand(n, 1, width)], 1)
        v = torch.cat([v, bias_v.expand(n, 1, width)], 1)
    if add_zero_attn:
        k, v = (torch.cat([t, t.new_zeros(n, 1, width)], 1) for t in (k, v))
    mask = _mask(attn_mask, key_padding_mask, n, num_heads, k.shape[1], q.dtype)
    q, k, v = (t.unflatten(2, (num_heads, -1)).transpose(1, 2) for t in (q, k, v))  # type: ignore[no-untyped-call]
    dropout = dropout_p if training else 0.0
    found = None
    if need_weights:
        scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[3])  # (n, h, l, s)
        found = F.dropout((scores if mask is None else scores + mask).softmax(3), dropout)
        out = found @ v
        found = found.mean(1) if average_attn_weights else found
    else:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
    out = out.transpose(1, 2).flatten(2)  # (n, l, e)
    out = F.linear(out, out_proj_weight, out_proj_bias).transpose(0, 1)
    # Dropout draws its mask in memory order, and torch's own attention returns a contiguous tensor.
    return (out.contiguous() if dropout else out), found


def _project(
    query: Tensor, key: Tensor, value: Tensor, weight: Any, bias: Any, separate: Any
) -> list[Tensor]:
    """Projected query, key and value, by one product if they are the same tensor."""
    if separate is None and query is key and key is value:
        return list(F.linear(query, weight, bias).chunk(3, -1))
    biases = (None, None, None) if bias is None else bias.chunk(3)
    weights = weight.chunk(3) if separate is None else separate
    return [F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True)]


def _mask(
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    n: int,
    heads: int,
    keys: int,
    dtype: torch.dtype,
) -> Tensor | None:
    """Additive mask, broadcasting to (n, h, l, s); keys that attention itself adds are unmasked."""
    masks = []
    if attn_mask is not None:
        is_shared = attn_mask.dim() == 2
        masks.append(attn_mask if is_shared else attn_mask.view(n, heads, *attn_mask.shape[1:]))
    if key_padding_mask is not None:
        masks.append(key_padding_mask.view(n, 1, 1, -1))
    total = None
    for mask in masks:
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -math.inf)
        mask = F.pad(mask.to(dtype), (0, keys - mask.shape[-1]))
        total = mask if total is None else total + mask
    return total


def covers_attention(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True for a call with a batch axis and without precomputed keys or values."""
    fixed = (kwargs.get("static_k"), kwargs.get("static_v"))
    return bool(args and torch.is_tensor(args[0]) and args[0].dim() == 3) and fixed == (None, None)


def with_mask_of_each(
    capture: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """`F.scaled_dot_product_attention` with a trained mask that is expanded over the batch first.

    So that its gradient arrives for each example, as of biases of relative positions.
    """
    missing = query.dim() - attn_mask.dim()
    sizes = [1] * missing + [*attn_mask.shape]
    sizes[0] = query.shape[0]
    mask = attn_mask.expand(sizes)
    found: Tensor = F.scaled_dot_product_attention(query, key, value, mask, *args, **kwargs)
    return found


def shares_mask(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True for a call whose float mask is the same for all examples."""
    query = args[0] if args else kwargs.get("query")
    mask = args[3] if len(args) > 3 else kwargs.get("attn_mask")
    if not (torch.is_tensor(query) and torch.is_tensor(mask)) or query.dim() < 3:
        return False
    return mask.dim() < query.dim() or mask.shape[0] == 1
