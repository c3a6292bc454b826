# SPDX-License-Identifier: Apache-2.0
"""Rule of `conv_general_dilated`, with all its parameters except batch groups.

A per-sample gradient is one small product per kernel offset, of the input as that offset reads it
and the gradient of the output; patches are written only where one product over them is faster.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dualdp import costs
from dualdp_jax import compat
from dualdp_jax.rules.arrays import HIGHEST, drop, scaled, sq_norm, widen
from dualdp_jax.rules.base import Choice, Rule, Spec, form_of
from dualdp_jax.rules.estimate import Estimate, of_gradients, of_gram, rounding

Array = jax.Array
#: Elements of kept gradients that fit a processor's cache: keeping costs next to nothing.
CACHED = 2**18
#: Elements of patches of few channels beyond which writing them costs as much as thin products.
PATCHES = 2**22


def _accepts(params: Mapping[str, Any], position: int, shapes: Sequence[Any]) -> bool:
    return position == 1 and params["batch_group_count"] == 1


def _padded(spec: Spec, x: Array) -> Array:
    """Input with its padding and dilation zeros written out, (n, rows, *spatial, channels)."""
    lhs = spec.params["dimension_numbers"][0]
    x = x.transpose(0, *(1 + axis for axis in (lhs[0], *lhs[2:], lhs[1])))
    spread = zip(spec.params["padding"], spec.params["lhs_dilation"], strict=True)
    pads = [(low, high, step - 1) for (low, high), step in spread]
    return jax.lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0)] * 2 + pads + [(0, 0, 0)])


def _reads(spec: Spec, spatial: tuple[int, ...]) -> Iterator[list[slice]]:
    """Slices of the padded input that each offset of an axis of the kernel reads, axis by axis."""
    kernel = [spec.shape[axis] for axis in spec.params["dimension_numbers"][1][2:]]
    steps = spec.params["window_strides"], spec.params["rhs_dilation"]
    for offsets, size, step, apart in zip(kernel, spatial, *steps, strict=True):
        length = max(0, (size - 1) * step + 1)  # an output without pixels reads nothing
        yield [slice(o * apart, o * apart + length, step) for o in range(offsets)]


def _windows(spec: Spec, spatial: tuple[int, ...]) -> Iterator[tuple[slice, ...]]:
    """Slices of the padded input that each kernel offset reads, for this output shape."""
    return itertools.product(*_reads(spec, spatial))


def _grouped(spec: Spec, grads_out: Array) -> tuple[Array, tuple[int, ...]]:
    """Reshape grads_out to (n, t, g, o); also returns the spatial shape of the output."""
    out = spec.params["dimension_numbers"][2]
    grads = grads_out.transpose(0, *(1 + axis for axis in (out[0], *out[2:], out[1])))
    groups = spec.params["feature_group_count"]
    spatial = grads.shape[2:-1]
    return grads.reshape(grads.shape[0], -1, groups, grads.shape[-1] // groups), spatial


def _to_weight(spec: Spec, grads: Array) -> Array:
    """Reshape (n, k, g, i, o) to (n, *shape): g * o outputs, i inputs, and the kernel."""
    rhs = spec.params["dimension_numbers"][1]
    n, _, g, i, o = grads.shape
    grads = grads.transpose(0, 2, 4, 3, 1).reshape(n, g * o, i, *(spec.shape[a] for a in rhs[2:]))
    return grads.transpose(0, *(1 + int(axis) for axis in np.argsort(rhs)))


def offset_grads(spec: Spec, x: Array, grads_out: Array) -> Iterator[Array]:
    """Yield the per-sample gradients of each kernel offset, (n, g, i, o)."""
    grads, spatial = _grouped(spec, widen(grads_out))  # (n, t, g, o)
    x, every = _padded(spec, widen(x)), slice(None)
    for window in _windows(spec, spatial):
        view = x[(every, every, *window)].reshape(*grads.shape[:3], x.shape[-1] // grads.shape[2])
        yield jnp.einsum("ntgi,ntgo->ngio", view, grads, precision=HIGHEST)


def _all_grads(spec: Spec, x: Array, grads_out: Array) -> Array:
    """Per-sample gradients of all kernel offsets, (n, k, g, i, o).

    With few inputs per group a product per offset is too thin: patches are written for one product.
    """
    if not _prefers_patches(spec, grads_out):
        return jnp.stack(list(offset_grads(spec, x, grads_out)), 1)
    grads, spatial = _grouped(spec, widen(grads_out))
    patches = patches_of(spec, widen(x), spatial)
    return jnp.einsum("nktgi,ntgo->nkgio", patches, grads, precision=HIGHEST)


def patches_of(spec: Spec, x: Array, spatial: tuple[int, ...]) -> Array:
    """Input as all kernel offsets read it, (n, k, t, g, i).

    Written for one axis of the kernel after the other: fewer and larger copies than one per offset.
    """
    x = _padded(spec, x)
    for i, reads in enumerate(_reads(spec, spatial)):
        before = (slice(None),) * (2 + 2 * i)  # examples, offsets and rows, axes that were read
        x = jnp.stack([x[(*before, read)] for read in reads], 1 + i)
    n, groups = len(x), spec.params["feature_group_count"]
    t = math.prod(x.shape[1 + len(spatial) : -1])
    return x.reshape(n, _num_offsets(spec), t, groups, x.shape[-1] // groups)


def _prefers_patches(spec: Spec, grads_out: Array) -> bool:
    """True if patches are faster, by inputs per group and elements of all patches."""
    rhs, out = (spec.params["dimension_numbers"][i] for i in (1, 2))
    positions = math.prod(grads_out.shape[1:]) // grads_out.shape[1 + out[1]]
    channels = spec.shape[rhs[1]]
    inputs = channels * spec.params["feature_group_count"]
    numbers = grads_out.shape[0] * positions * inputs * _num_offsets(spec)
    is_thin = channels == 1 or (channels <= 16 and numbers <= PATCHES)
    return form_of("patches" if is_thin else "offsets", "patches", "offsets") == "patches"


def _joined(spec: Spec, others: tuple[Array, ...], grads_out: Array) -> tuple[Spec, Array, Array]:
    """Use outside of loops, whose steps become rows of the convolution."""
    (x,), (lhs, _, out) = others, spec.params["dimension_numbers"]
    for lead in range(spec.loops, 0, -1):
        x, grads_out = _merge(x, lead + lhs[0]), _merge(grads_out, lead + out[0])
    return spec._replace(loops=0), x, grads_out


def _merge(array: Array, rows: int) -> Array:
    """Join axis 1 with the axis that is `rows` once axis 1 is removed."""
    moved = jnp.moveaxis(array, 1, rows)
    shape = moved.shape
    return moved.reshape(*shape[:rows], shape[rows] * shape[rows + 1], *shape[rows + 2 :])


def weight_grads(spec: Spec, others: tuple[Array, ...], grads_out: Array) -> Array:
    """Return per-sample gradients, (n, *shape); for one example the plain gradient."""
    if grads_out.shape[0] == 1:
        return weighted_sum(spec, others, grads_out, jnp.ones(1))[None]
    return _to_weight(spec, _all_grads(*_joined(spec, others, grads_out)))


def weight_norms(spec: Spec, others: tuple[Array, ...], grads_out: Array) -> Estimate:
    """Return norms, (n,), by the cheapest form."""
    spec, x, grads_out = _joined(spec, others, grads_out)
    x, grads_out = widen(x), widen(grads_out)
    form = gram_norms if _form(**_sizes(spec, x, grads_out)) == "gram" else formed_norms
    return form(spec, x, grads_out)


def _form(**sizes: int) -> str:
    """Cheapest form of a norm, or the forced one."""
    is_gram = costs.convolution_prefers_gram(**sizes)
    return form_of("gram" if is_gram else "gradients", "gram", "gradients")


def formed_norms(spec: Spec, x: Array, grads_out: Array) -> Estimate:
    """Norms (n,) through the gradients, one kernel offset at a time."""
    left, right = _sq_lengths(spec, x, grads_out)
    lengths = jnp.sqrt(left) * jnp.sqrt(right)
    if _prefers_patches(spec, grads_out):
        return of_gradients(_all_grads(spec, x, grads_out), lengths)
    parts = [sq_norm(grads) for grads in offset_grads(spec, x, grads_out)]
    return Estimate(sum(parts[1:], parts[0]), rounding=rounding(lengths))


def _sq_lengths(spec: Spec, x: Array, grads_out: Array) -> tuple[Array, Array]:
    """Squared norms (n, g, t) of the patches, and of the output gradients at their positions."""
    grads, spatial = _grouped(spec, grads_out)
    x = _padded(spec, x)
    pixels = jnp.square(x.reshape(*x.shape[:-1], grads.shape[2], -1)).sum(-1)
    every = slice(None)
    patches = sum(pixels[(every, every, *window)] for window in _windows(spec, spatial))
    left = jnp.reshape(patches, grads.shape[:3])
    return left.swapaxes(1, 2), jnp.square(grads).sum(3).swapaxes(1, 2)


def gram_norms(spec: Spec, x: Array, grads_out: Array) -> Estimate:
    """Norms (n,) by inner products of pixels.

    The inner product of two patches is the sum, over the kernel offsets, of inner products of two
    pixels; these are computed once for all pixels, and sliced as each offset reads them.
    """
    grads, spatial = _grouped(spec, grads_out)  # (n, t, g, o)
    pixels = _padded(spec, x)
    n, shape, groups = len(pixels), pixels.shape[1:-1], grads.shape[2]
    pixels = pixels.reshape(n, -1, groups, pixels.shape[-1] // groups)
    of_pixels, of_grads = (
        jnp.einsum("npgi,nqgi->ngpq", v, v, precision=HIGHEST) for v in (pixels, grads)
    )
    of_pixels = of_pixels.reshape(n, groups, *shape, *shape)
    of_grads = of_grads.reshape(n, groups, shape[0], *spatial, shape[0], *spatial)
    norms, every = jnp.zeros(n, grads.dtype), slice(None)
    for window in _windows(spec, spatial):
        seen = of_pixels[(every, every, every, *window, every, *window)]
        norms = norms + (seen * of_grads).reshape(*of_grads.shape[:2], -1).sum((1, 2))
    sizes = _num_offsets(spec) * pixels.shape[3], grads.shape[3]
    return of_gram(norms, *_sq_lengths(spec, x, grads_out), sizes)


def weighted_sum(spec: Spec, others: tuple[Array, ...], grads_out: Array, weights: Array) -> Array:
    """Return the sum over the examples of weight times gradient, by one plain gradient."""
    spec, x, grads_out = _joined(spec, others, grads_out)
    (x,), cotangents = drop(weights, x), scaled(weights, grads_out)
    options = {**spec.params, "preferred_element_type": cotangents.dtype}

    def convolve(kernel: Array) -> Array:
        return jax.vmap(lambda one: jax.lax.conv_general_dilated_p.bind(one, kernel, **options))(x)

    axes = compat.varying_axes(cotangents)
    like = compat.varying_zeros(spec.shape, cotangents.dtype, axes)
    return jax.linear_transpose(convolve, like)(cotangents)[0]


def _num_offsets(spec: Spec) -> int:
    return math.prod(spec.shape[axis] for axis in spec.params["dimension_numbers"][1][2:])


def _sizes(spec: Spec, x: Array, grads_out: Array) -> dict[str, int]:
    """Sizes of one group, for `dualdp.costs`."""
    grads = jax.eval_shape(lambda g: _grouped(spec, g)[0], grads_out)
    padded = jax.eval_shape(lambda x: _padded(spec, x), x)
    channels, kernel = spec.shape[spec.params["dimension_numbers"][1][1]], _num_offsets(spec)
    return {
        "t": grads.shape[1],
        "pixels": math.prod(padded.shape[1:-1]),
        "kernel": kernel,
        "channels": channels,
        "d_out": grads.shape[3],
        "weights": channels * kernel * grads.shape[3],
    }


def choice(spec: Spec, others: tuple[Array, ...], grads_out: Array) -> Choice:
    """Return the form of the cheapest norm, and whether to keep the gradients (outside loops)."""
    if spec.loops:
        return Choice()
    sizes = _sizes(spec, others[0], grads_out)
    if _form(**sizes) == "gram":
        return Choice("gram")
    fits = grads_out.shape[0] * math.prod(spec.shape) <= CACHED
    return Choice("gradients", fits or costs.keeps_convolution(t=sizes["t"]))


RULE = Rule(_accepts, weight_grads, weight_norms, weighted_sum, choice)
