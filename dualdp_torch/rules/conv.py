# SPDX-License-Identifier: Apache-2.0
"""Convolutions of one to three axes, plain and transposed, with every option of torch.

The per-sample gradient is ONE backward of a convolution whose groups are the examples: the batch is
folded into the channels, (1, n c, ...) with n g groups (Rochette et al. 2019 reach the same with a
convolution of one axis more).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from .base import Rule, Tensor

Sizes = int | Sequence[int]


def _per_axis(value: Sizes, axes: int) -> list[int]:
    """One number per axis."""
    return (
        [value] * axes
        if isinstance(value, int)
        else [int(v) for v in value] * (axes if len(value) == 1 else 1)
    )


def _padded(acts: Tensor, padding: Any, dilation: list[int], kernel: Sequence[int]) -> Any:
    """The input and the number of zeros on both sides; uneven "same" padding is written out."""
    axes = len(kernel)
    if padding == "valid":
        return acts, [0] * axes
    if padding != "same":
        return acts, _per_axis(padding, axes)
    total = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    if all(t % 2 == 0 for t in total):
        return acts, [t // 2 for t in total]
    sides = [side for t in reversed(total) for side in (t // 2, t - t // 2)]
    return F.pad(acts, sides), [0] * axes


def _weight_backward(
    acts: Tensor, grads_out: Tensor, shape: Sequence[int], repeat: int, transposed: bool, **o: Any
) -> Tensor:
    """Gradient of a weight and groups of `repeat` times the call's."""
    axes = len(shape) - 2
    stride, dilation = (_per_axis(o.get(k, 1), axes) for k in ("stride", "dilation"))
    acts, padding = _padded(acts, o.get("padding", 0), dilation, shape[2:])
    n = acts.shape[0]
    rows = n // repeat
    _, weight, _ = torch.ops.aten.convolution_backward(
        grads_out.reshape(rows, -1, *grads_out.shape[2:]),
        acts.reshape(rows, -1, *acts.shape[2:]),
        acts.new_empty(1).expand(shape[0] * repeat, *shape[1:]),  # only its shape is read
        None,
        stride,
        padding,
        dilation,
        transposed,
        _per_axis(o.get("output_padding", 0), axes),
        o.get("groups", 1) * repeat,
        [False, True, False],
    )
    return torch.as_tensor(weight)


def weight_grads(
    acts: Tensor, grads_out: Tensor, *, shape: torch.Size, transposed: bool = False, **options: Any
) -> Tensor:
    """(n, c, ...), (n, o, ...) -> (n, *shape)."""
    n = acts.shape[0]
    folded = _weight_backward(acts, grads_out, shape, n, transposed, **options)
    return folded.reshape(n, *shape)


def weight_sum(
    acts: Tensor, grads_out: Tensor, *, shape: torch.Size, transposed: bool = False, **options: Any
) -> Tensor:
    """(n, c, ...), (n, o, ...) -> shape: the plain weight gradient of the scaled outputs."""
    return _weight_backward(acts, grads_out, shape, 1, transposed, **options)


def bias_grads(_: None, grads_out: Tensor, **__: Any) -> Tensor:
    """(n, o, ...) -> (n, o)."""
    return grads_out.flatten(2).sum(2)


def bias_sum(_: None, grads_out: Tensor, **__: Any) -> Tensor:
    """(n, o, ...) -> (o,)."""
    return grads_out.flatten(2).sum((0, 2))


def keeps(acts: Tensor, grads_out: Tensor, shape: torch.Size) -> bool:
    """Kept: the folded backward costs as much as the plain one it replaces."""
    return True


def _transposed_grads(acts: Tensor, grads_out: Tensor, **options: Any) -> Tensor:
    """(n, i, ...), (n, o, ...) -> (n, *shape)."""
    return weight_grads(acts, grads_out, transposed=True, **options)


def _transposed_sum(acts: Tensor, grads_out: Tensor, **options: Any) -> Tensor:
    """(n, i, ...), (n, o, ...) -> shape."""
    return weight_sum(acts, grads_out, transposed=True, **options)


def _is_batched(call: Mapping[str, Any]) -> bool:
    """Whether the input has a batch axis."""
    return bool(call["input"].dim() == call["weight"].dim())


RULE = Rule(
    arguments=("input", "weight", "bias", "stride", "padding", "dilation", "groups"),
    grads={"weight": weight_grads, "bias": bias_grads},
    sums={"weight": weight_sum, "bias": bias_sum},
    keeps=keeps,
    applies=_is_batched,
)
TRANSPOSED = Rule(
    arguments=(
        *("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation"),
    ),
    grads={"weight": _transposed_grads, "bias": bias_grads},
    sums={"weight": _transposed_sum, "bias": bias_sum},
    keeps=keeps,
    applies=_is_batched,
)
