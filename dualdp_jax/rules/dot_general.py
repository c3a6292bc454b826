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


class _Axes(NamedTuple):
    """Dimension numbers of one side: the data operand or the weight."""

    batch: tuple[int, ...]
    contract: tuple[int, ...]
    free: tuple[int, ...]


def _axes(params: Mapping[str, Any], side: int, ndim: int) -> _Axes:
    contract, batch = (pair[side] for pair in params["dimension_numbers"])
    free = tuple(axis for axis in range(ndim) if axis not in (*contract, *batch))
    return _Axes(tuple(batch), tuple(contract), free)


def factors(spec: Spec, others: tuple[Any, ...], grads_out: Any) -> tuple[Any, Any]:
    """Return acts (n, b, t, i) and grads (n, b, t, o) from the data operand and grads_out.

    Loops with a weight of their own count as blocks, the others as positions.
    """
    (x,) = others
    lead = 1 + len(spec.loops)
    own = [1 + i for i, stacked in enumerate(spec.loops) if stacked]
    shared = [1 + i for i, stacked in enumerate(spec.loops) if not stacked]
    axes = _axes(spec.params, 1 - spec.position, x.ndim - lead)
    batch, contract, free = ([lead + axis for axis in part] for part in axes)
    acts = x.transpose(0, *own, *batch, *shared, *free, *contract)
    num_blocks = math.prod(acts.shape[1 : 1 + len(own) + len(batch)])
    size_in = math.prod(x.shape[axis] for axis in contract)
    acts = acts.reshape(x.shape[0], num_blocks, -1, size_in)
    # grads_out is (n, *loops, *batch, *free of the left operand, *free of the right one)
    start = lead + len(batch)
    outs = list(range(start, grads_out.ndim))
    split = len(free) if spec.position == 1 else len(outs) - len(free)
    ours, theirs = (
        (outs[:split], outs[split:]) if spec.position == 1 else (outs[split:], outs[:split])
    )
    grads = grads_out.transpose(0, *own, *range(lead, start), *shared, *ours, *theirs)
    size_out = math.prod(grads_out.shape[axis] for axis in theirs)
    return acts, grads.reshape(x.shape[0], num_blocks, acts.shape[2], size_out)


def _to_weight(spec: Spec, grads: Any, own: tuple[int, ...]) -> Any:
    """Reshape (..., b, i, o) to (..., *own loops, *shape of the weight)."""
    axes = _axes(spec.params, spec.position, len(spec.shape))
    order = (*axes.batch, *axes.contract, *axes.free)
    lead = grads.shape[:-3]
    grads = grads.reshape(*lead, *own, *(spec.shape[axis] for axis in order))
    first = len(lead) + len(own)
    return grads.transpose(*range(first), *(first + int(axis) for axis in np.argsort(order)))


def _own(spec: Spec, grads_out: Any) -> tuple[int, ...]:
    """Lengths of the loops that have a weight of their own at every step."""
    return tuple(grads_out.shape[1 + i] for i, stacked in enumerate(spec.loops) if stacked)


def weight_grads(spec: Spec, others: tuple[Any, ...], grads_out: Any) -> Any:
    """Return per-sample gradients, (n, *own, *shape)."""
    return _to_weight(spec, outer(*factors(spec, others, grads_out)), _own(spec, grads_out))


def weight_norms(spec: Spec, others: tuple[Any, ...], grads_out: Any) -> Estimate:
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


def gram_norms(acts: Any, grads: Any) -> Estimate:
    """Return norms of sums over t of acts (n, b, t, i) x grads (n, b, t, o), by a Gram form."""
    gram = lambda x: jnp.einsum("nbti,nbsi->nbts", x, x, precision=HIGHEST)  # noqa: E731
    squares = (gram(acts) * gram(grads)).sum((1, 2, 3))
    left, right = (jnp.square(x).sum(3) for x in (acts, grads))
    return of_gram(squares, left, right, (acts.shape[3], grads.shape[3]))


def weighted_sum(spec: Spec, others: tuple[Any, ...], grads_out: Any, weights: Any) -> Any:
    """Return the sum over the examples of weight times gradient, (*own, *shape)."""
    total = weighted_outer(*factors(spec, others, grads_out), weights)
    return _to_weight(spec, total, _own(spec, grads_out))


def choice(spec: Spec, others: tuple[Any, ...], grads_out: Any) -> Choice:
    """Return the form of the cheapest norm, and whether to keep the gradients."""
    acts, grads = jax.eval_shape(partial(factors, spec), others, grads_out)
    _, _, t, d_in = acts.shape
    sizes = {"t": t, "d_in": d_in, "d_out": grads.shape[3]}
    is_kept = costs.keeps_gradient(n=acts.shape[0], **sizes)
    return Choice(_form(**sizes), is_kept)


def outer_products(spec: Spec, others: tuple[Any, ...], grads_out: Any) -> Any:
    """Return left and right factors of a matrix, (n, t, rows) and (n, t, columns), or None."""
    axes = _axes(spec.params, spec.position, len(spec.shape))
    if len(axes.contract) != 1 or len(axes.free) != 1 or axes.batch:
        return None
    acts, grads = (array[:, 0] for array in factors(spec, others, grads_out))
    return (acts, grads) if axes.contract == (0,) else (grads, acts)


def _accepts(params: Mapping[str, Any], position: int, shapes: Sequence[Any]) -> bool:
    return True


RULE = Rule(_accepts, weight_grads, weight_norms, weighted_sum, choice, outer_products)
