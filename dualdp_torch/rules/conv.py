# SPDX-License-Identifier: Apache-2.0
"""Convolutions of one to three axes, plain and transposed, with every option of torch.

Per-sample gradients come from one of the `conv_forms`, their norms also from products of patches.
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
from dualdp_torch import choices, memory

from . import conv_forms, linear
from .base import Norms, Rule, Tensor, sq_norms, weighted_sum
from .conv_forms import frames, padded, patches, per_axis, weight_backward
from .products import product

#: Channels that oneDNN handles at once, on a processor.
BLOCK = 8
#: Positions of a whole batch below which one product of patches beats the convolution's backward.
FEW = 256


def weight_grads(
    acts: Tensor, grads_out: Tensor, *, shape: torch.Size, transposed: bool = False, **options: Any
) -> Tensor:
    """(n, [f,] c, ...), (n, [f,] o, ...) -> (n, *shape), in the form that suits the sizes."""
    way = _way(acts, grads_out, shape, transposed=transposed, **options)
    if way == "gram":
        way = _usual_form(acts, shape, transposed, options.get("groups", 1))
    if transposed:
        options["transposed"] = True
    return conv_forms.FORMS[way](acts, grads_out, shape=shape, **options)


def _is_plain(acts: Tensor, shape: Sequence[int]) -> bool:
    """Whether it is one frame per example, over one or two axes: all forms can do it."""
    return acts.dim() == len(shape) <= 4


def _has_gram(acts: Tensor, shape: Sequence[int], transposed: bool) -> bool:
    """Whether products of patches give the norm: of one frame per example, not transposed."""
    return not transposed and acts.dim() == len(shape)


def _usual_form(acts: Tensor, shape: Sequence[int], transposed: bool, groups: int) -> str:
    """The form that the cost model takes."""
    if transposed or not _is_plain(acts, shape):
        return "folded"
    block = BLOCK if acts.device.type == "cpu" else 1
    return costs.convolution_form(channels=shape[1], d_out=shape[0] // groups, block=block)


def _ways(
    acts: Tensor, grads_out: Tensor, shape: torch.Size, transposed: bool, **o: Any
) -> choices.Ways:
    """What this convolution can do: way -> a call that does it."""

    def kept(form: str) -> tuple[Tensor, Tensor]:
        grads = conv_forms.FORMS[form](acts, grads_out, shape=shape, **o)
        norms = sq_norms(grads)
        return norms, weighted_sum(norms, grads)

    def gram() -> tuple[Norms, Tensor]:
        total = weight_sum(acts, grads_out, shape=shape, **o)
        return _gram_norms(acts, grads_out, shape, **o), total

    if transposed:
        o["transposed"] = True
    forms = conv_forms.FORMS if _is_plain(acts, shape) and not transposed else ("folded",)
    ways: dict[str, Any] = {form: partial(kept, form) for form in forms}
    return {"gram": gram} | ways if _has_gram(acts, shape, transposed) else ways


def _way(
    acts: Tensor, grads_out: Tensor, shape: torch.Size, *, transposed: bool = False, **o: Any
) -> str:
    """Either "gram" or the form of a kept gradient."""
    usual = _usual_form(acts, shape, transposed, o.get("groups", 1))
    at = dict.fromkeys(conv_forms.FORMS, 1.0)
    if _has_gram(acts, shape, transposed):
        numbers = _sizes(acts, grads_out, shape)
        at = dict.fromkeys(at, costs.form_cost(**numbers))
        at["gram"] = costs.patch_gram_cost(**numbers)
        usual = "gram" if costs.convolution_prefers_gram(**numbers) else usual
    if choices.cost_model_decides():
        return usual
    sizes = {"input": _by(acts.shape[1:]), "weight": _by(shape), "output": _by(grads_out.shape[2:])}
    options = ("stride", "padding", "dilation", "groups", "output_padding")
    sizes |= {name: _by(o[name]) for name in options if name in o}
    ways = _ways(acts, grads_out, shape, transposed, **o)
    return choices.choose("convolution", usual, sizes, acts, ways, at)


def _by(value: Any) -> str:
    """Sizes as one word."""
    return str(value) if isinstance(value, int | str) else "x".join(map(str, value))


def weight_sum(
    acts: Tensor, grads_out: Tensor, *, shape: torch.Size, transposed: bool = False, **options: Any
) -> Tensor:
    """(n, [f,] c, ...), (n, [f,] o, ...) -> shape: the plain gradient of the scaled outputs."""
    plain = not transposed and acts.dim() == len(shape) <= 4 and options.get("groups", 1) == 1
    rows = len(acts) * math.prod(grads_out.shape[2:])
    if plain and rows <= FEW:
        under = patches(acts, shape=shape, **options).transpose(1, 2).reshape(rows, -1)
        g = grads_out.flatten(2).transpose(1, 2).reshape(rows, shape[0])
        return product(g.T, under.T).view(shape)
    a, g = (frames(x, len(shape) - 2).flatten(0, 1) for x in (acts, grads_out))
    return weight_backward(a, g, shape, 1, transposed, **options)


def _patch_gram(acts: Tensor, grads_out: Tensor, shape: Sequence[int], **o: Any) -> Tensor:
    """(n, c, ...), (n, o, ...) -> (n, g, t, t) products of the patches under every two positions.

    A patch is a window of pixels, so its products are sums, along the kernel, of products of
    pixels: the patches themselves, k times larger than the input, are never written out.
    """
    kernel, groups, n = shape[2:], o.get("groups", 1), len(acts)
    axes = len(kernel)
    stride, dilation = (per_axis(o.get(k, 1), axes) for k in ("stride", "dilation"))
    acts, padding = padded(acts, o.get("padding", 0), dilation, kernel)
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


def _gram_norms(acts: Tensor, grads_out: Tensor, shape: Sequence[int], **o: Any) -> Norms:
    """(n,) without the gradient."""
    g = _grouped(grads_out, o)
    return linear.gram_norms(_patch_gram(acts, grads_out, shape, **o), g.mT @ g)


def weight_sq_norms(
    acts: Tensor, grads_out: Tensor, *, shape: torch.Size, transposed: bool = False, **options: Any
) -> Norms:
    """(n,); the cheaper of Gram form and forming the gradient (Bu et al. 2022, section 4)."""
    if _way(acts, grads_out, shape, transposed=transposed, **options) == "gram":
        return _gram_norms(acts, grads_out, shape, **options)
    options["transposed"] = transposed
    parts = memory.pieces(len(acts), math.prod(shape), acts)
    grads = (weight_grads(acts[p], grads_out[p], shape=shape, **options) for p in parts)
    norms = torch.cat([sq_norms(grad) for grad in grads])
    # Pixels that several windows see count once for each kernel point.
    return norms, linear.formed_error(acts, grads_out).mul_(math.prod(shape[2:]))


def _grouped(grads_out: Tensor, options: Mapping[str, Any]) -> Tensor:
    """(n, o, ...) -> (n, g, o / g, t)."""
    return grads_out.reshape(
        len(grads_out), options.get("groups", 1), -1, math.prod(grads_out.shape[2:])
    )


def _sizes(acts: Tensor, grads_out: Tensor, shape: Sequence[int]) -> dict[str, int]:
    """What the cost model asks for."""
    return {
        "t": math.prod(grads_out.shape[2:]),
        "pixels": math.prod(p + k - 1 for p, k in zip(acts.shape[2:], shape[2:], strict=True)),
        "kernel": math.prod(shape[2:]),
        "channels": acts.shape[1],
        "d_out": grads_out.shape[1],
        "weights": math.prod(shape),
        "n": len(acts),
    }


def bias_grads(_: None, grads_out: Tensor, *, axes: int, **__: Any) -> Tensor:
    """(n, [f,] o, ...) -> (n, o)."""
    return frames(grads_out, axes).flatten(3).sum((1, 3))


def bias_sum(_: None, grads_out: Tensor, *, axes: int, **__: Any) -> Tensor:
    """(n, [f,] o, ...) -> (o,)."""
    return frames(grads_out, axes).flatten(3).sum((0, 1, 3))


def keeps(acts: Tensor, grads_out: Tensor, *, shape: torch.Size, **options: Any) -> bool:
    """Kept, unless the Gram form is cheaper: forming it costs little more than the plain sum.

    And unless memory lacks: then it is formed in pieces, for its norm alone.
    """
    fits = memory.may_keep(len(acts) * math.prod(shape), acts)
    return fits and _way(acts, grads_out, shape, **options) != "gram"


def _transposed_sq_norms(acts: Tensor, grads_out: Tensor, **options: Any) -> Norms:
    """(n, i, ...), (n, o, ...) -> (n,)."""
    return weight_sq_norms(acts, grads_out, transposed=True, **options)


def _transposed_keeps(acts: Tensor, grads_out: Tensor, **options: Any) -> bool:
    """As `keeps`."""
    return keeps(acts, grads_out, transposed=True, **options)


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
        applies=_is_batched,
    )


def transposed_rule(axes: int) -> Rule:
    """The rule of transposed convolutions over so many axes."""
    first = ("input", "weight", "bias", "stride", "padding", "output_padding")
    return Rule(
        arguments=(*first, "groups", "dilation"),
        grads={"weight": _transposed_grads, "bias": partial(bias_grads, axes=axes)},
        sq_norms={"weight": _transposed_sq_norms},
        sums={"weight": _transposed_sum, "bias": partial(bias_sum, axes=axes)},
        rows_are_free=True,
        keeps=_transposed_keeps,
        applies=_is_batched,
    )
