# SPDX-License-Identifier: Apache-2.0
"""Convolutions of one to three axes, plain and transposed, with every option of torch.

The per-sample gradient is ONE backward of a convolution whose groups are the examples: the batch is
folded into the channels, (1, n c, ...) with n g groups (Rochette et al. 2019 reach the same with a
convolution of one axis more).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from dualdp import costs

from . import linear
from .base import Rule, Tensor, sq_norms

Sizes = int | Sequence[int]
#: Bytes that are folded at once on a CPU: more of them fall out of its caches (measured: 2 to 5
#: times slower for 128 examples), fewer cost calls.
FOLDED = 3 << 19


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
    """Summed over axis 0: the gradient of a weight and groups of `repeat` times the call's."""
    axes = len(shape) - 2
    stride, dilation = (_per_axis(o.get(k, 1), axes) for k in ("stride", "dilation"))
    acts, padding = _padded(acts, o.get("padding", 0), dilation, shape[2:])
    _, weight, _ = torch.ops.aten.convolution_backward(
        grads_out,
        acts,
        acts.new_empty(shape[0] * repeat, *shape[1:]),  # only its shape is read
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


def _folded_at_once(acts: Tensor, grads_out: Tensor, shape: Sequence[int]) -> int:
    """Examples whose inputs, output gradients and weight gradients fit together in a cache."""
    if acts.device.type != "cpu":
        return max(len(acts), 1)
    numbers = math.prod(acts.shape[1:]) + math.prod(grads_out.shape[1:]) + math.prod(shape)
    return min(max(FOLDED // (numbers * acts.element_size()), 4), 64)


def _frames(x: Tensor, axes: int) -> Tensor:
    """(n, c, ...) or (n, f, c, ...) -> (n, f, c, ...); several frames of one example add up."""
    return x.unsqueeze(1) if x.dim() == axes + 2 else x


def weight_grads(
    acts: Tensor, grads_out: Tensor, *, shape: torch.Size, transposed: bool = False, **options: Any
) -> Tensor:
    """(n, [f,] c, ...), (n, [f,] o, ...) -> (n, *shape)."""
    n, axes = acts.shape[0], len(shape) - 2
    a, g = _frames(acts, axes), _frames(grads_out, axes)
    size = _folded_at_once(a, g, shape)
    found = acts.new_empty(n, *shape)
    for start in range(0, n, size):
        rows = slice(start, min(start + size, n))
        folded_a, folded_g = (x[rows].transpose(0, 1).flatten(1, 2) for x in (a, g))  # (f, n c, ..)
        folded = _weight_backward(
            folded_a, folded_g, shape, rows.stop - start, transposed, **options
        )
        found[rows] = folded.view(-1, *shape)
    return found


def weight_sum(
    acts: Tensor, grads_out: Tensor, *, shape: torch.Size, transposed: bool = False, **options: Any
) -> Tensor:
    """(n, [f,] c, ...), (n, [f,] o, ...) -> shape: the plain gradient of the scaled outputs."""
    a, g = (_frames(x, len(shape) - 2).flatten(0, 1) for x in (acts, grads_out))
    return _weight_backward(a, g, shape, 1, transposed, **options)


def _patch_gram(acts: Tensor, grads_out: Tensor, shape: Sequence[int], **o: Any) -> Tensor:
    """(n, c, ...), (n, o, ...) -> (n, g, t, t) products of the patches under every two positions.

    A patch is a window of pixels, so its products are sums, along the kernel, of products of
    pixels: the patches themselves, k times larger than the input, are never written out.
    """
    kernel, groups, n = shape[2:], o.get("groups", 1), len(acts)
    axes = len(kernel)
    stride, dilation = (_per_axis(o.get(k, 1), axes) for k in ("stride", "dilation"))
    acts, padding = _padded(acts, o.get("padding", 0), dilation, kernel)
    acts = F.pad(acts, [side for p in reversed(padding) for side in (p, p)])
    pixels = acts.reshape(n, groups, -1, math.prod(acts.shape[2:]))  # (n, g, c / g, s)
    products = pixels.mT @ pixels
    products = products.view(n, groups, *acts.shape[2:], *acts.shape[2:])
    spans = [s * (out - 1) + 1 for s, out in zip(stride, grads_out.shape[2:], strict=True)]
    total: Tensor | None = None
    for offset in itertools.product(*(range(k) for k in kernel)):
        starts = [k * d for k, d in zip(offset, dilation, strict=True)]
        window: tuple[Any, ...] = tuple(
            slice(a, a + span, s) for a, span, s in zip(starts, spans, stride, strict=True)
        )
        part = products[(..., *window, *window)]
        total = part.clone() if total is None else total.add_(part)
    t = math.prod(grads_out.shape[2:])
    return torch.as_tensor(total).reshape(n, groups, t, t)


def weight_sq_norms(
    acts: Tensor, grads_out: Tensor, *, shape: torch.Size, transposed: bool = False, **options: Any
) -> Tensor:
    """(n,); the cheaper of Gram form and forming the gradient (Bu et al. 2022, section 4)."""
    if not _prefers_gram(acts, grads_out, shape):
        return sq_norms(weight_grads(acts, grads_out, shape=shape, **options))
    g = _grouped(grads_out, options)
    products = _patch_gram(acts, grads_out, shape, **options) * (g.mT @ g)
    return products.sum((1, 2, 3)).clamp(min=0)


def _grouped(grads_out: Tensor, options: Mapping[str, Any]) -> Tensor:
    """(n, o, ...) -> (n, g, o / g, t)."""
    return grads_out.reshape(
        len(grads_out), options.get("groups", 1), -1, math.prod(grads_out.shape[2:])
    )


def _prefers_gram(acts: Tensor, grads_out: Tensor, shape: Sequence[int]) -> bool:
    """Whether the products of patches are cheaper than the gradient."""
    if acts.dim() != len(shape):  # several frames per example
        return False
    return costs.convolution_prefers_gram(
        t=math.prod(grads_out.shape[2:]),
        pixels=math.prod(p + k - 1 for p, k in zip(acts.shape[2:], shape[2:], strict=True)),
        kernel=math.prod(shape[2:]),
        channels=acts.shape[1],
        d_out=grads_out.shape[1],
        weights=math.prod(shape),
    )


def cancels(acts: Tensor, grads_out: Tensor, *, shape: torch.Size, **options: Any) -> Tensor | None:
    """Bound on the error of `weight_sq_norms`, (n,); None where it does not use the Gram form."""
    if not _prefers_gram(acts, grads_out, shape):
        return None
    windows = torch.ones(1, 1, *shape[2:], dtype=acts.dtype, device=acts.device)
    squares = acts.square().sum(1, keepdim=True)  # |patch|^2 sums the pixels under the kernel
    padding = "same" if options.get("padding") == "same" else options.get("padding", 0)
    rest = {k: options.get(k, 1) for k in ("stride", "dilation")}
    convolve = (F.conv1d, F.conv2d, F.conv3d)[len(shape) - 3]
    patches = convolve(squares, windows, padding=padding, **rest).clamp(min=0).sqrt().flatten(1)
    lengths = patches * torch.linalg.vector_norm(grads_out.flatten(2), dim=1)
    bound: Tensor = lengths.sum(1).square() * (linear.GRAM_ERROR * torch.finfo(acts.dtype).eps)
    return bound


def bias_grads(_: None, grads_out: Tensor, *, axes: int, **__: Any) -> Tensor:
    """(n, [f,] o, ...) -> (n, o)."""
    return _frames(grads_out, axes).flatten(3).sum((1, 3))


def bias_sum(_: None, grads_out: Tensor, *, axes: int, **__: Any) -> Tensor:
    """(n, [f,] o, ...) -> (o,)."""
    return _frames(grads_out, axes).flatten(3).sum((0, 1, 3))


def keeps(acts: Tensor, grads_out: Tensor, shape: torch.Size) -> bool:
    """Kept, unless the Gram form is cheaper: forming it costs little more than the plain sum."""
    return not _prefers_gram(acts, grads_out, shape)


def _kept(acts: Tensor, grads_out: Tensor, shape: torch.Size) -> bool:
    """Transposed convolutions have no other way."""
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


def rule(axes: int) -> Rule:
    """The rule of convolutions over so many axes."""
    return Rule(
        arguments=("input", "weight", "bias", "stride", "padding", "dilation", "groups"),
        grads={"weight": weight_grads, "bias": partial(bias_grads, axes=axes)},
        sq_norms={"weight": weight_sq_norms},
        sums={"weight": weight_sum, "bias": partial(bias_sum, axes=axes)},
        rows_are_free=True,
        keeps=keeps,
        cancels=cancels,
        applies=_is_batched,
    )


def transposed_rule(axes: int) -> Rule:
    """The rule of transposed convolutions over so many axes."""
    first = ("input", "weight", "bias", "stride", "padding", "output_padding")
    return Rule(
        arguments=(*first, "groups", "dilation"),
        grads={"weight": _transposed_grads, "bias": partial(bias_grads, axes=axes)},
        sums={"weight": _transposed_sum, "bias": partial(bias_sum, axes=axes)},
        rows_are_free=True,
        keeps=_kept,
        applies=_is_batched,
    )
