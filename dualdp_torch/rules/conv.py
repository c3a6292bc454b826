# SPDX-License-Identifier: Apache-2.0
"""Convolutions over one to three axes, plain and transposed, with every option of torch.

Per-sample gradients come from one of the `conv_forms`, norms also from Gram matrices of patches.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from dualdp import costs
from dualdp_torch.rules import base, conv_forms, linear
from dualdp_torch.rules.base import Rule, Tensor, may_keep, on_host, row_slices, sq_norms
from dualdp_torch.rules.conv_forms import frames, padded, patches, per_axis, weight_backward
from dualdp_torch.rules.together import Described, Gram

#: Channels that oneDNN handles at once on a CPU.
BLOCK = 8
#: Positions of a batch up to which one product of patches beats the convolution's backward.
FEW = 256
#: Numbers of a batch's gradients up to which they are formed off the host by folding, in one call;
#: products of patches take eight. cuDNN has no fast kernels for many groups of many channels.
FORMED = 1 << 20


def weight_grads(
    acts: Tensor, grads_out: Tensor, *, shape: torch.Size, transposed: bool = False, **options: Any
) -> Tensor:
    """(n, [f,] c, ...), (n, [f,] o, ...) -> (n, *shape), in the form that suits the sizes."""
    form = _method(acts, grads_out, shape, transposed=transposed, has_gram=False, **options)
    if transposed:  # only "folded" takes this option
        options["transposed"] = True
    return conv_forms.FORMS[form](acts, grads_out, shape=shape, **options)


def grads_with_bias(
    acts: Tensor, grads_out: Tensor, *, shape: torch.Size, **options: Any
) -> tuple[Tensor, Tensor] | None:
    """(n, [f,] c, ...), (n, [f,] o, ...) -> (n, *shape), (n, o); None where two passes are faster.

    A backward in which examples are groups returns both.
    """
    if _method(acts, grads_out, shape, has_gram=False, **options) != "folded":
        return None
    pair: tuple[Tensor, Tensor] = conv_forms.FORMS["folded"](
        acts, grads_out, shape=shape, has_bias=True, **options
    )
    return pair


def _is_large(acts: Tensor, shape: Sequence[int]) -> bool:
    """True off the host if one call for all gradients, with examples as groups, is no gain."""
    return not on_host(acts) and len(acts) * math.prod(shape) > FORMED


def _usual_form(
    acts: Tensor, grads_out: Tensor, shape: Sequence[int], transposed: bool, groups: int
) -> str:
    """Form that the cost model prefers; three axes and transposes have one form only.

    Frames are folded, unless a gradient for each of them is small and the fastest.
    """
    if transposed or len(shape) > 4:
        return "folded"
    if acts.dim() == len(shape) and _is_large(acts, shape):
        return "unfold"
    block = BLOCK if on_host(acts) else 1
    usual = costs.convolution_form(channels=shape[1], d_out=shape[0] // groups, block=block)
    if acts.dim() == len(shape):
        return usual
    seen = math.prod(acts.shape[2:]) + math.prod(grads_out.shape[2:])  # numbers of a frame
    return usual if usual == "crb" and math.prod(shape) <= seen else "folded"


def _method(
    acts: Tensor, grads_out: Tensor, shape: torch.Size, *, has_gram: bool = True, **o: Any
) -> str:
    """Return the form of a gradient, or if norms are asked for (`has_gram`) perhaps "gram"."""
    transposed, groups = o.get("transposed", False), o.get("groups", 1)
    form = _usual_form(acts, grads_out, shape, transposed, groups)
    if transposed or acts.dim() != len(shape):  # several frames per example
        methods = ("folded",) if transposed or len(shape) > 4 else ("folded", "crb")
        return base.choose("convolution", form, methods, acts.shape[1:])
    is_gram = _prefers_gram(acts, grads_out, shape, groups)
    methods = ("gram", *(conv_forms.FORMS if acts.dim() <= 4 else ("folded",)))
    found = base.choose("convolution", "gram" if is_gram else form, methods, acts.shape[1:])
    return form if found == "gram" and not has_gram else found


def _prefers_gram(acts: Tensor, grads_out: Tensor, shape: torch.Size, groups: int) -> bool:
    """True if products of patches are the cheaper way to the norms."""
    t, kernel = math.prod(grads_out.shape[2:]), math.prod(shape[2:])
    if on_host(acts):
        return costs.convolution_prefers_gram(
            t=t,
            pixels=math.prod(p + k - 1 for p, k in zip(acts.shape[2:], shape[2:], strict=True)),
            kernel=kernel,
            channels=acts.shape[1],
            d_out=grads_out.shape[1],
            weights=math.prod(shape),
            n=len(acts),
        )
    # Either way patches are formed, and then it is a linear layer of patches.
    sizes = {"t": t, "d_in": shape[1] * kernel, "d_out": shape[0] // groups}
    return _is_large(acts, shape) and costs.gram_cost(**sizes) < costs.keep_cost(**sizes)


def weight_sum(
    acts: Tensor, grads_out: Tensor, *, shape: torch.Size, transposed: bool = False, **options: Any
) -> Tensor:
    """(n, [f,] c, ...), (n, [f,] o, ...) -> shape: the weight's gradient for scaled `grads_out`."""
    plain = not transposed and acts.dim() == len(shape) <= 4 and options.get("groups", 1) == 1
    rows = len(acts) * math.prod(grads_out.shape[2:])
    if plain and rows <= FEW and on_host(acts):
        under = patches(acts, shape=shape, **options).transpose(1, 2).reshape(rows, -1)
        g = grads_out.flatten(2).transpose(1, 2).reshape(rows, shape[0])
        return (g.T @ under).view(shape)
    a, g = (frames(x, len(shape) - 2).flatten(0, 1) for x in (acts, grads_out))
    return weight_backward(a, g, shape, transposed, **options)[0]


def _patch_gram(acts: Tensor, sizes: Sequence[int], kernel: Sequence[int], **o: Any) -> Tensor:
    """(n, c, ...), output sizes -> (n, g, t, t) products of the patches at every two positions.

    A product of patches is a sum, over the kernel points, of products of pixels, so the patches,
    k times larger than the input, are never formed.
    """
    groups, n, axes = o.get("groups", 1), len(acts), len(kernel)
    stride, dilation = (per_axis(o.get(k, 1), axes) for k in ("stride", "dilation"))
    acts, padding = padded(acts, o.get("padding", 0), dilation, kernel)
    acts = F.pad(acts, [side for p in reversed(padding) for side in (p, p)])
    pixels = acts.reshape(n, groups, -1, math.prod(acts.shape[2:]))  # (n, g, c / g, s)
    products = pixels.mT @ pixels
    products = products.view(n, groups, *acts.shape[2:], *acts.shape[2:])
    spans = [s * (out - 1) + 1 for s, out in zip(stride, sizes, strict=True)]
    total: Tensor | None = None
    for offset in itertools.product(*(range(k) for k in kernel)):
        starts = [k * d for k, d in zip(offset, dilation, strict=True)]
        window: tuple[Any, ...] = tuple(
            slice(a, a + span, s) for a, span, s in zip(starts, spans, stride, strict=True)
        )
        part = products[(..., *window, *window)]
        total = part.clone() if total is None else total.add_(part)
    t = math.prod(sizes)
    return torch.as_tensor(total).reshape(n, groups, t, t)


def _without_gradient(acts: Tensor, grads_out: Tensor, shape: torch.Size, **o: Any) -> Gram:
    """(n, c, ...), (n, o, ...) -> description of norms that form no gradient."""
    n, groups, sizes = len(acts), o.get("groups", 1), grads_out.shape[2:]
    t = math.prod(sizes)

    def fill(by_acts: Tensor, by_grads: Tensor) -> None:
        if on_host(acts):
            by_acts.copy_(_patch_gram(acts, sizes, shape[2:], **o))
        else:  # one product of more numbers instead of a sum for each kernel point
            under = patches(acts, shape=shape, **o).view(n, groups, -1, t)
            torch.matmul(under.mT, under, out=by_acts)
        g = grads_out.reshape(n, groups, -1, t)
        torch.matmul(g.mT, g, out=by_grads)

    return Gram((groups, t), grads_out, fill)


def weight_sq_norms(
    acts: Tensor,
    grads_out: Tensor,
    *,
    shape: torch.Size,
    transposed: bool = False,
    can_keep: bool = False,
    **options: Any,
) -> Described | None:
    """(n,) squared norms, by Gram form or by forming the gradient (Bu et al. 2022, section 4).

    None if gradients that are formed can be kept and fit in memory; else they are formed for their
    norms alone, a few examples at a time.
    """
    if _method(acts, grads_out, shape, transposed=transposed, **options) == "gram":
        return _without_gradient(acts, grads_out, shape, **options)
    if can_keep and may_keep(len(acts) * math.prod(shape), acts):
        return None
    options |= {"transposed": transposed, "shape": shape}
    rows = row_slices(len(acts), math.prod(shape), acts)
    norms = torch.cat([sq_norms(weight_grads(acts[r], grads_out[r], **options)) for r in rows])
    # A pixel that lies in several patches counts once for each kernel point.
    return norms, linear.formed_error(acts, grads_out).mul_(math.prod(shape[2:]))


def bias_grads(_: None, grads_out: Tensor, *, axes: int, **__: Any) -> Tensor:
    """(n, [f,] o, ...) -> (n, o) per-sample gradients."""
    return frames(grads_out, axes).flatten(3).sum((1, 3))


def bias_sum(_: None, grads_out: Tensor, *, axes: int, **__: Any) -> Tensor:
    """(n, [f,] o, ...) -> (o,) sum over the examples."""
    return frames(grads_out, axes).flatten(3).sum((0, 1, 3))


def rule(axes: int, *, transposed: bool = False) -> Rule:
    """Return the rule of convolutions, or transposed convolutions, over `axes` axes."""
    last = ("dilation", "groups") if not transposed else ("output_padding", "groups", "dilation")

    def of(function: Callable[..., Any]) -> Callable[..., Any]:
        return partial(function, transposed=transposed)

    return Rule(
        arguments=("input", "weight", "bias", "stride", "padding", *last),
        grads={"weight": of(weight_grads), "bias": partial(bias_grads, axes=axes)},
        sq_norms={"weight": of(weight_sq_norms)},
        sums={"weight": of(weight_sum), "bias": partial(bias_sum, axes=axes)},
        pair=of(grads_with_bias),
        rows_are_free=True,
        applies=lambda call: bool(call["input"].dim() == call["weight"].dim()),  # has a batch axis
    )
