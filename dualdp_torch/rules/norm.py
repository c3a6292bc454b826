# SPDX-License-Identifier: Apache-2.0
"""Layer, RMS, group and instance norm: normalisation inside one example, with any affine part."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from dualdp_torch.rules.base import Rule, Tensor, all_but_last, on_host


def _per_feature(x: Tensor, shape: torch.Size) -> Tensor:
    """(n, ..., *shape) -> (n, *shape), summed over positions; features are last."""
    return x if x.dim() == 1 + len(shape) else x.reshape(x.shape[0], -1, *shape).sum(1)


def _per_channel(x: Tensor, shape: torch.Size) -> Tensor:
    """(n, c, ...) -> (n, c), summed over positions; channels are axis 1."""
    del shape
    return x.flatten(2).sum(2) if x.dim() > 2 else x


def _layer(x: Tensor, *, normalized_shape: Sequence[int], eps: float = 1e-5, **_: Any) -> Tensor:
    """Input normalised over its last axes; `F.layer_norm` takes twice as long on a CPU."""
    if not on_host(x):
        return F.layer_norm(x, [*normalized_shape], eps=eps)
    flat = x.flatten(-len(normalized_shape))
    centred = flat - flat.mean(-1, keepdim=True)
    lengths = torch.linalg.vector_norm(centred, dim=-1, keepdim=True)
    variances = lengths.square_().div_(flat.shape[-1])
    return centred.mul_(variances.add_(eps).rsqrt_()).view(x.shape)


def _group(x: Tensor, *, num_groups: int | None = None, eps: float = 1e-5, **_: Any) -> Tensor:
    """Input normalised over its groups; in instance norm every channel is one."""
    return F.group_norm(x, num_groups or x.shape[1], eps=eps)


def _group_pair(
    acts: Tensor, grads_out: Tensor, *, num_groups: int | None = None, eps: float = 1e-5, **_: Any
) -> tuple[Tensor, Tensor] | None:
    """(n, c, ...), (n, c, ...) -> (n, c) twice, by one backward in which examples are groups.

    None on a CPU, where it takes longer for few positions.
    """
    n, c, positions = *acts.shape[:2], math.prod(acts.shape[2:])
    if on_host(acts) or not n:
        return None
    x, g = acts.contiguous(), grads_out.contiguous()
    groups = num_groups or c
    mean, rstd = torch.native_group_norm(x, None, None, n, c, positions, groups, eps)[1:]
    weight, bias = torch.ops.aten.native_group_norm_backward(
        g.view(1, n * c, positions),
        x.view(1, n * c, positions),
        mean.view(1, n * groups),
        rstd.view(1, n * groups),
        x.new_empty(n * c),  # only its shape is read
        1,
        n * c,
        positions,
        n * groups,
        [False, True, True],
    )[1:]
    return weight.view(n, c), bias.view(n, c)


def _functions(
    normalise: Callable[..., Tensor], reduce: Callable[[Tensor, torch.Size], Tensor]
) -> dict[str, Callable[..., Tensor]]:
    """Per-sample gradients of scale and shift; `normalise` returns a fresh tensor (written to)."""

    def weight_grads(acts: Tensor, grads_out: Tensor, *, shape: torch.Size, **o: Any) -> Tensor:
        """(n, ...), (n, ...) -> (n, *shape)."""
        return reduce(normalise(acts, **o).mul_(grads_out), shape)

    def bias_grads(_: None, grads_out: Tensor, *, shape: torch.Size, **__: Any) -> Tensor:
        """(n, ...) -> (n, *shape)."""
        return reduce(grads_out, shape)

    return {"weight": weight_grads, "bias": bias_grads}


def _refuse_instance(options: Mapping[str, Any]) -> str | None:
    """Reason to refuse running statistics, which average over the batch; else None."""
    if options.get("running_mean") is not None:
        return "its running statistics mix the examples of every batch; track_running_stats=False"
    return None


LAYER = Rule(
    arguments=("input", "normalized_shape", "weight", "bias", "eps"),
    grads=_functions(_layer, _per_feature),
    batch_axes=all_but_last,
    rows_are_free=True,
)
RMS = Rule(
    arguments=("input", "normalized_shape", "weight", "eps"),
    grads=_functions(
        lambda x, *, normalized_shape, eps=None, **_: F.rms_norm(x, [*normalized_shape], eps=eps),
        _per_feature,
    ),
    batch_axes=all_but_last,
    rows_are_free=True,
)
GROUP = Rule(
    arguments=("input", "num_groups", "weight", "bias", "eps"),
    grads=_functions(_group, _per_channel),
    pair=_group_pair,
)
INSTANCE = Rule(
    arguments=(
        *("input", "running_mean", "running_var", "weight", "bias"),
        *("use_input_stats", "momentum", "eps"),
    ),
    grads=_functions(_group, _per_channel),
    pair=_group_pair,
    refuse=_refuse_instance,
)
