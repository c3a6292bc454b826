# SPDX-License-Identifier: Apache-2.0
"""Rule of `dot_general`, with any batch and contracting dimensions, the weight on either side."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dualdp import costs
from dualdp_jax.rules.arrays import HIGHEST, outer, weighted_outer, widen
from dualdp_jax.rules.base import Choice, Rule, Spec, form_of
from dualdp_jax.rules.estimate import Estimate, of_gradients, of_gram, of_lengths

Array = jax.Array
Params = Mapping[str, Any]  # of an equation


class _Axes(NamedTuple):
    """Dimension numbers of one side: the data operand or the weight."""

    batch: tuple[int, ...]
    contract: tuple[int, ...]
    free: tuple[int, ...]


def _axes(params: Params, side: int, ndim: int) -> _Axes:
    contract, batch = (pair[side] for pair in params["dimension_numbers"])
    free = tuple(axis for axis in range(ndim) if axis not in (*contract, *batch))
    return _Axes(tuple(batch), tuple(contract), free)


def factors(spec: Spec, others: tuple[Array, ...], grads_out: Array) -> tuple[Array, Array]:
    """Return acts (n, b, t, i) and grads (n, b, t, o) from the data operand and grads_out.

    The steps of loops count as positions.
    """
    (x,) = others
    n, lead = x.shape[0], 1 + spec.loops
    loops = range(1, lead)
    axes = _axes(spec.params, 1 - spec.position, x.ndim - lead)
    batch, contract, free = ([lead + axis for axis in part] for part in axes)
    num_blocks, size_in = (math.prod(x.shape[axis] for axis in part) for part in (batch, contract))
    acts = x.transpose(0, *batch, *loops, *free, *contract).reshape(n, num_blocks, -1, size_in)
    # grads_out is (n, *loops, *batch, *free of the left operand, *free of the right one)
    start = lead + len(batch)
    outs = list(range(start, grads_out.ndim))
    if spec.position == 1:
        ours, theirs = outs[: len(free)], outs[len(free) :]
    else:
        theirs, ours = outs[: len(outs) - len(free)], outs[len(outs) - len(free) :]
    grads = grads_out.transpose(0, *range(lead, start), *loops, *ours, *theirs)
    size_out = math.prod(grads_out.shape[axis] for axis in theirs)
    return acts, grads.reshape(n, num_blocks, acts.shape[2], size_out)


def _to_weight(spec: Spec, grads: Array) -> Array:
    """Reshape (..., b, i, o) to (..., *shape of the weight)."""
    axes = _axes(spec.params, spec.position, len(spec.shape))
    order, lead = (*axes.batch, *axes.contract, *axes.free), grads.shape[:-3]
    grads = grads.reshape(*lead, *(spec.shape[axis] for axis in order))
    return grads.transpose(*range(len(lead)), *(len(lead) + int(a) for a in np.argsort(order)))


def weight_grads(spec: Spec, others: tuple[Array, ...], grads_out: Array) -> Array:
    """Return per-sample gradients, (n, *shape)."""
    return _to_weight(spec, outer(*factors(spec, others, grads_out)))


def weight_norms(spec: Spec, others: tuple[Array, ...], grads_out: Array) -> Estimate:
    """Return norms by the cheapest form: lengths for one position, else Gram form or gradients.

    Source: Li et al. 2022, eq. 3 (Gram form); Goodfellow 2015 (one position).
    """
    acts, grads = map(widen, factors(spec, others, grads_out))
    form = _form(acts.shape[2], acts.shape[3], grads.shape[3])
    if form == "lengths":
        return of_lengths(acts[:, :, 0], grads[:, :, 0])
    if form == "gram":
        return gram_norms(acts, grads)
    lengths = [jnp.sqrt(jnp.square(x).sum(3)) for x in (acts, grads)]
    return of_gradients(outer(acts, grads), lengths[0] * lengths[1])


def _form(t: int, d_in: int, d_out: int) -> str:
    """Cheapest form of a norm, or the forced one."""
    if t == 1:
        return form_of("lengths", "lengths", "gram", "gradients")
    is_gram = costs.prefers_gram(t=t, d_in=d_in, d_out=d_out)
    return form_of("gram" if is_gram else "gradients", "gram", "gradients")


def gram_norms(acts: Array, grads: Array) -> Estimate:
    """Return norms of sums over t of acts (n, b, t, i) x grads (n, b, t, o), by a Gram form."""
    inner = (jnp.einsum("nbti,nbsi->nbts", x, x, precision=HIGHEST) for x in (acts, grads))
    left, right = (jnp.square(x).sum(3) for x in (acts, grads))
    squares = next(inner) * next(inner)
    return of_gram(squares.sum((1, 2, 3)), left, right, (acts.shape[3], grads.shape[3]))


def weighted_sum(spec: Spec, others: tuple[Array, ...], grads_out: Array, weights: Array) -> Array:
    """Return the sum over the examples of weight times gradient, (*shape)."""
    return _to_weight(spec, weighted_outer(*factors(spec, others, grads_out), weights))


def choice(spec: Spec, others: tuple[Array, ...], grads_out: Array) -> Choice:
    """Return the form of the cheapest norm, and whether to keep the gradients."""
    acts, grads = jax.eval_shape(partial(factors, spec), others, grads_out)
    _, _, t, d_in = acts.shape
    sizes = {"t": t, "d_in": d_in, "d_out": grads.shape[3]}
    is_kept = costs.keeps_gradient(n=acts.shape[0], **sizes)
    return Choice(_form(**sizes), is_kept)


def outer_products(
    spec: Spec, others: tuple[Array, ...], grads_out: Array
) -> tuple[Array, Array] | None:
    """Return left and right factors of a matrix, (n, t, rows) and (n, t, columns), or None."""
    axes = _axes(spec.params, spec.position, len(spec.shape))
    if len(axes.contract) != 1 or len(axes.free) != 1 or axes.batch:
        return None
    acts, grads = (array[:, 0] for array in factors(spec, others, grads_out))
    return (acts, grads) if axes.contract == (0,) else (grads, acts)


def accepts(params: Params, position: int, shapes: Sequence[jax.ShapeDtypeStruct]) -> bool:
    """True: any dimension numbers, the weight on either side."""
    return True


RULE = Rule(accepts, weight_grads, weight_norms, weighted_sum, choice, outer_products)
