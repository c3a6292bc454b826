# SPDX-License-Identifier: Apache-2.0
"""Forms of a convolution's per-sample weight gradients in the literature.

`conv.weight_grads` chooses one by the sizes; all of them are kept so that the comparison of
Rochette et al. 2019, section 4, can be repeated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from dualdp_torch.rules.base import Tensor, on_host

Sizes = int | Sequence[int]
#: Bytes that a thread folds at once on a CPU: more of them exceed its caches (measured: 2 to 5
#: times slower for 128 examples), fewer need more calls.
FOLDED = 3 << 19
#: Bytes of patches that a thread forms at once on a CPU; more are no faster.
UNFOLDED = 1 << 22
#: The same on any other device: more of them would only take memory.
UNFOLDED_ELSEWHERE = 1 << 28
#: Points of a kernel's last axis from which frames are the channels of `by_crb` (measured with 8
#: and 16 frames: 0.4 to 0.9 of the time for 7 and 8 points, up to 5 times for 3).
WIDE = 7


def per_axis(value: Sizes, axes: int) -> list[int]:
    """One number for each axis."""
    if isinstance(value, int):
        return [value] * axes
    return [int(v) for v in value] * (axes if len(value) == 1 else 1)


def padded(acts: Tensor, padding: Any, dilation: list[int], kernel: Sequence[int]) -> Any:
    """Input and its zero padding per axis; uneven "same" padding is applied to the input."""
    axes = len(kernel)
    if padding == "valid":
        return acts, [0] * axes
    if padding != "same":
        return acts, per_axis(padding, axes)
    total = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    if all(t % 2 == 0 for t in total):
        return acts, [t // 2 for t in total]
    sides = [side for t in reversed(total) for side in (t // 2, t - t // 2)]
    return F.pad(acts, sides), [0] * axes


def weight_backward(
    acts: Tensor,
    grads_out: Tensor,
    shape: Sequence[int],
    transposed: bool,
    *,
    repeat: int = 1,
    has_bias: bool = False,
    **o: Any,
) -> tuple[Tensor, Tensor]:
    """(repeat * shape[0], *shape[1:]) weight gradient summed over axis 0; groups times `repeat`.

    With `has_bias` also the bias's, (repeat * o,).
    """
    axes = len(shape) - 2
    stride, dilation = (per_axis(o.get(k, 1), axes) for k in ("stride", "dilation"))
    acts, padding = padded(acts, o.get("padding", 0), dilation, shape[2:])
    _, weight, bias = torch.ops.aten.convolution_backward.default(
        grads_out,
        acts,
        acts.new_empty(shape[0] * repeat, *shape[1:]),  # only its shape is read
        [grads_out.shape[1]],
        stride,
        padding,
        dilation,
        transposed,
        per_axis(o.get("output_padding", 0), axes),
        o.get("groups", 1) * repeat,
        [False, True, has_bias],
    )
    return weight, bias


def _at_once(acts: Tensor, each: int) -> int:
    """Examples that are processed together: `each` per thread on a CPU; else all."""
    if not on_host(acts):
        return max(len(acts), 1)
    return each * torch.get_num_threads()


def frames(x: Tensor, axes: int) -> Tensor:
    """(n, c, ...) or (n, f, c, ...) -> (n, f, c, ...); gradients of an example's frames add up."""
    return x.unsqueeze(1) if x.dim() == axes + 2 else x


def by_folding(
    acts: Tensor,
    grads_out: Tensor,
    *,
    shape: torch.Size,
    transposed: bool = False,
    has_bias: bool = False,
    **options: Any,
) -> Any:
    """(n, [f,] c, ...), (n, [f,] o, ...) -> (n, *shape): one backward with examples as groups.

    The batch is folded into the channels, (f, n c, ...) with n g groups, as functorch does. With
    `has_bias` the result is a pair with (n, o), the bias's gradients.
    """
    n, axes = acts.shape[0], len(shape) - 2
    a, g = frames(acts, axes), frames(grads_out, axes)
    # A frame's inputs and output gradients, and the weight gradients, of the examples at once fit
    # in a cache together.
    numbers = math.prod(a.shape[2:]) + math.prod(g.shape[2:]) + math.prod(shape)
    size = _at_once(a, min(max(FOLDED // (numbers * a.element_size()), 4), 64))
    size = math.ceil(max(n, 1) / math.ceil(max(n, 1) / size))  # alike, for all threads
    shapes = [shape, g.shape[2:3]][: 1 + has_bias]

    def of(rows: slice) -> list[Tensor]:
        a_rows, g_rows = (x[rows].transpose(0, 1).flatten(1, 2) for x in (a, g))  # (f, n c, ...)
        count = len(range(n)[rows])
        options.update(repeat=count, has_bias=has_bias)
        found = weight_backward(a_rows, g_rows, shape, transposed, **options)
        return [x.view(count, *each) for x, each in zip(found, shapes, strict=False)]

    if 0 < n <= size:
        found = of(slice(0, n))
    else:
        found = [acts.new_empty(n, *each) for each in shapes]
        for start in range(0, n, size):
            rows = slice(start, start + size)
            for x, part in zip(found, of(rows), strict=True):
                x[rows] = part
    return tuple(found) if has_bias else found[0]


def patches(acts: Tensor, *, shape: torch.Size, **o: Any) -> Tensor:
    """(n, c, ...) -> (n, c k, t), the inputs under the kernel at each position."""
    axes = len(shape) - 2
    stride, dilation = (per_axis(o.get(k, 1), axes) for k in ("stride", "dilation"))
    acts, padding = padded(acts, o.get("padding", 0), dilation, shape[2:])
    if any(padding):
        acts = F.pad(acts, [side for p in reversed(padding) for side in (p, p)])
    spans = [d * (k - 1) for d, k in zip(dilation, shape[2:], strict=True)]
    out = [
        (size - span - 1) // s + 1
        for size, span, s in zip(acts.shape[2:], spans, stride, strict=True)
    ]
    steps = [
        step * by
        for many in (dilation, stride)
        for step, by in zip(acts.stride()[2:], many, strict=True)
    ]
    windows = acts.as_strided(
        (*acts.shape[:2], *shape[2:], *out), (*acts.stride()[:2], *steps), acts.storage_offset()
    )
    return windows.reshape(len(acts), acts.shape[1] * math.prod(shape[2:]), math.prod(out))


def by_unfolding(acts: Tensor, grads_out: Tensor, *, shape: torch.Size, **o: Any) -> Tensor:
    """(n, c, ...), (n, o, ...) -> (n, *shape): patches are formed, then one product per example.

    Source: Opacus; Goodfellow 2015 for the product. One or two axes.
    """
    n, groups, t = len(acts), o.get("groups", 1), math.prod(grads_out.shape[2:])
    found = acts.new_empty(n * groups, shape[0] // groups, math.prod(shape[1:]))
    patch_bytes = groups * math.prod(shape[1:]) * t * acts.element_size()  # of one example
    share, shares = UNFOLDED_ELSEWHERE, 1
    if on_host(acts):
        share, shares = UNFOLDED, torch.get_num_threads()
    size = max(share // patch_bytes, 1) * shares
    g = grads_out.reshape(n * groups, -1, t)
    for start in range(0, n, size):
        rows = slice(start * groups, (start + size) * groups)
        under = patches(acts[start : start + size], shape=shape, **o)
        under = under.reshape(len(g[rows]), -1, t)
        torch.bmm(g[rows], under.mT, out=found[rows])
    return found.view(n, *shape)


def by_crb(acts: Tensor, grads_out: Tensor, *, shape: torch.Size, **o: Any) -> Tensor:
    """(n, [f,] c, ...), (n, [f,] o, ...) -> (n, *shape): a convolution with one axis more.

    The output's gradient is the kernel, stride and dilation are exchanged, and the channels of a
    group become the new axis. Frames are its channels, or examples of their own under a small
    kernel. One or two axes. Source: Rochette et al. 2019, algorithm 2 (`crb`).
    """
    axes, groups = len(shape) - 2, o.get("groups", 1)
    if acts.dim() > len(shape) and shape[-1] < WIDE:
        found = by_crb(acts.flatten(0, 1), grads_out.flatten(0, 1), shape=shape, **o)
        return found.unflatten(0, acts.shape[:2]).sum(1)
    stride, dilation = (per_axis(o.get(k, 1), axes) for k in ("stride", "dilation"))
    acts, padding = padded(acts, o.get("padding", 0), dilation, shape[2:])
    a, g = frames(acts, axes), frames(grads_out, axes)
    n, f = a.shape[:2]
    # The new axis and its stride or dilation, and padding; one channel needs no such axis.
    depth, one, zero = (shape[1:2], (1,), (0,)) if shape[1] > 1 else ((), (), ())
    convolve: Callable[..., Tensor] = (F.conv1d, F.conv2d, F.conv3d)[axes + len(depth) - 1]
    found = convolve(
        a.unflatten(2, (groups, -1)).transpose(1, 2).reshape(1, -1, *depth, *a.shape[3:]),
        g.transpose(1, 2).reshape(n * shape[0], f, *one, *g.shape[3:]),
        stride=(*one, *dilation),
        dilation=(*one, *stride),
        padding=(*zero, *padding),
        groups=n * groups,
    )  # (1, n o, [c / g,] at least k ...)
    kept: tuple[Any, ...] = (..., *(slice(k) for k in shape[2:]))
    return found[kept].reshape(n, *shape)


#: Name in the literature -> function of (acts, grads_out, *, shape, **options).
FORMS: dict[str, Callable[..., Any]] = {
    "folded": by_folding,
    "unfold": by_unfolding,
    "crb": by_crb,
}
