# SPDX-License-Identifier: Apache-2.0
"""`conv_general_dilated`, with all its parameters but batch groups.

The weight gradient is one small product per kernel offset, of the input as that offset sees it and
the gradient of the output: no patches are written for it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dualdp import costs
from dualdp_jax.rules import Rule, Spec
from dualdp_jax.rules.product import HIGHEST, drop, outer, scaled, sq_norms, widen


def _accepts(params: Mapping[str, Any], position: int, shapes: Sequence[Any]) -> bool:
    return position == 1 and params["batch_group_count"] == 1


def _views(spec: Spec, x: Any, out_shape: tuple[int, ...]) -> Iterator[Any]:
    """The input as each kernel offset sees it, (n, rows, *spatial of the output, channels)."""
    params = spec.params
    lhs, rhs, _ = params["dimension_numbers"]
    x = x.transpose(0, *(1 + axis for axis in (lhs[0], *lhs[2:], lhs[1])))
    pads = [
        (low, high, step - 1)
        for (low, high), step in zip(params["padding"], params["lhs_dilation"], strict=True)
    ]
    x = jax.lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0)] * 2 + pads + [(0, 0, 0)])
    strides, dilation = params["window_strides"], params["rhs_dilation"]
    kernel = [spec.shape[axis] for axis in rhs[2:]]
    for offset in itertools.product(*map(range, kernel)):
        starts = [o * d for o, d in zip(offset, dilation, strict=True)]
        stops = [
            a + (size - 1) * s + 1 for a, size, s in zip(starts, out_shape, strides, strict=True)
        ]
        yield jax.lax.slice(
            x,
            (0, 0, *starts, 0),
            (*x.shape[:2], *stops, x.shape[-1]),
            (1, 1, *strides, 1),
        )


def _grouped(spec: Spec, grads_out: Any) -> tuple[Any, tuple[int, ...]]:
    """grads_out to (n, t, g, o), and the spatial shape of the output."""
    out = spec.params["dimension_numbers"][2]
    grads = grads_out.transpose(0, *(1 + axis for axis in (out[0], *out[2:], out[1])))
    groups = spec.params["feature_group_count"]
    spatial = grads.shape[2:-1]
    return grads.reshape(grads.shape[0], -1, groups, grads.shape[-1] // groups), spatial


def _flat(spec: Spec, view: Any) -> Any:
    """(n, rows, *spatial, channels) to (n, t, g, i)."""
    groups = spec.params["feature_group_count"]
    return view.reshape(view.shape[0], -1, groups, view.shape[-1] // groups)


def _to_weight(spec: Spec, grads: Any) -> Any:
    """(n, k, g, i, o) to (n, *shape): the weight has g * o outputs, i inputs and the kernel."""
    rhs = spec.params["dimension_numbers"][1]
    n, _, g, i, o = grads.shape
    grads = grads.transpose(0, 2, 4, 3, 1).reshape(n, g * o, i, *(spec.shape[a] for a in rhs[2:]))
    return grads.transpose(0, *(1 + int(axis) for axis in np.argsort(rhs)))


def _offset_grads(spec: Spec, x: Any, grads_out: Any) -> Iterator[Any]:
    """Per-sample gradients of one kernel offset after the other, (n, g, i, o)."""
    grads, spatial = _grouped(spec, widen(grads_out))
    for view in _views(spec, widen(x), spatial):
        yield jnp.einsum("ntgi,ntgo->ngio", _flat(spec, view), grads, precision=HIGHEST)


def _patches(spec: Spec, x: Any, grads_out: Any) -> tuple[Any, Any]:
    """Acts (n, g, t, k * i) and grads (n, g, t, o), for the forms that need whole patches."""
    grads, spatial = _grouped(spec, widen(grads_out))
    views = [_flat(spec, view) for view in _views(spec, widen(x), spatial)]
    acts = jnp.stack(views, 3)  # (n, t, g, k, i)
    acts = acts.reshape(*acts.shape[:3], -1)
    return acts.transpose(0, 2, 1, 3), grads.transpose(0, 2, 1, 3)


def _has_few_channels(spec: Spec) -> bool:
    """So few inputs per group that one product over patches beats one per kernel offset."""
    return spec.shape[spec.params["dimension_numbers"][1][1]] <= 4


def _by_loop(function: Callable[..., Any], combine: Callable[[Any], Any]) -> Callable[..., Any]:
    """The function for uses inside loops.

    Steps that share the weight become rows of the convolution; for steps with weights of their own
    the function is mapped, and `combine` takes the steps from axis 0 to where they belong.
    """

    def looped(spec: Spec, others: tuple[Any, ...], grads_out: Any, *factors: Any) -> Any:
        if not spec.loops:
            return function(spec, others, grads_out, *factors)
        inner = spec._replace(loops=spec.loops[1:])
        (x,) = others
        if spec.loops[0]:
            step = lambda x, g: looped(inner, (x,), g, *factors)  # noqa: E731
            return combine(jax.vmap(step, in_axes=(1, 1))(x, grads_out))
        lhs, _, out = spec.params["dimension_numbers"]
        lead = len(spec.loops)
        x, grads_out = _merge(x, lead + lhs[0]), _merge(grads_out, lead + out[0])
        return looped(inner, (x,), grads_out, *factors)

    return looped


def _merge(array: Any, rows: int) -> Any:
    """Axis 1 joined with the axis that is `rows` once axis 1 is gone."""
    moved = jnp.moveaxis(array, 1, rows)
    shape = moved.shape
    return moved.reshape(*shape[:rows], shape[rows] * shape[rows + 1], *shape[rows + 2 :])


def weight_grads(spec: Spec, others: tuple[Any, ...], grads_out: Any) -> Any:
    """Per-sample gradients, (n, *shape)."""
    (x,) = others
    if _has_few_channels(spec):
        grads = outer(*_patches(spec, x, grads_out))  # (n, g, k * i, o)
        n, g, _, o = grads.shape
        per_offset = grads.reshape(n, g, _num_offsets(spec), -1, o).transpose(0, 2, 1, 3, 4)
    else:
        per_offset = jnp.stack(list(_offset_grads(spec, x, grads_out)), 1)
    return _to_weight(spec, per_offset)


def weight_sq_norms(spec: Spec, others: tuple[Any, ...], grads_out: Any) -> Any:
    """Squared norms, (n,)."""
    (x,) = others
    if _has_few_channels(spec) or costs.prefers_gram(**sizes(spec, others, grads_out)):
        return sq_norms(*_patches(spec, x, grads_out))
    parts = [jnp.square(grads).sum((1, 2, 3)) for grads in _offset_grads(spec, x, grads_out)]
    return sum(parts[1:], parts[0])


def weighted_sum(spec: Spec, others: tuple[Any, ...], grads_out: Any, weights: Any) -> Any:
    """Sum over the examples of weight times gradient: the plain gradient of one convolution."""
    (x,) = drop(weights, *others)
    cotangents = scaled(weights, grads_out)
    options = {**spec.params, "preferred_element_type": cotangents.dtype}

    def convolve(kernel: Any) -> Any:
        return jax.vmap(lambda one: jax.lax.conv_general_dilated_p.bind(one, kernel, **options))(x)

    pull = jax.linear_transpose(convolve, jax.ShapeDtypeStruct(spec.shape, cotangents.dtype))
    return pull(cotangents)[0]


def _num_offsets(spec: Spec) -> int:
    return math.prod(spec.shape[axis] for axis in spec.params["dimension_numbers"][1][2:])


def sizes(spec: Spec, others: tuple[Any, ...], grads_out: Any) -> dict[str, int]:
    """Of one group."""
    _, rhs, out = spec.params["dimension_numbers"]
    lead, groups = 1 + len(spec.loops), spec.params["feature_group_count"]
    steps = zip(spec.loops, grads_out.shape[1:lead], strict=True)
    shared = math.prod(length for is_stacked, length in steps if not is_stacked)
    positions = math.prod(grads_out.shape[lead + axis] for axis in (out[0], *out[2:]))
    inputs, outputs = spec.shape[rhs[1]] * _num_offsets(spec), spec.shape[rhs[0]] // groups
    return {"t": shared * positions, "d_in": inputs, "d_out": outputs}


RULE = Rule(
    _accepts,
    _by_loop(weight_grads, lambda steps: jnp.moveaxis(steps, 0, 1)),
    _by_loop(weight_sq_norms, lambda steps: steps.sum(0)),
    _by_loop(weighted_sum, lambda steps: steps),
    sizes,
)
