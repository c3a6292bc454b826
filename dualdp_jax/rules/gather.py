# SPDX-License-Identifier: Apache-2.0
"""Rule of `gather` of whole rows, as in embeddings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from dualdp_jax.rules.arrays import scaled, sq_norm, widen
from dualdp_jax.rules.base import Choice, Rule, Spec
from dualdp_jax.rules.estimate import Estimate, of_lengths, rounding

Array = jax.Array


def _accepts(params: Mapping[str, Any], position: int, shapes: Sequence[Any]) -> bool:
    """True for whole rows of axis 0, by indices that are not batched with the table."""
    numbers, table = params["dimension_numbers"], shapes[0].shape
    return (
        position == 0
        and tuple(numbers.collapsed_slice_dims) == (0,)
        and tuple(numbers.start_index_map) == (0,)
        and not numbers.operand_batching_dims
        and tuple(params["slice_sizes"]) == (1, *table[1:])
    )


def looked_up(spec: Spec, others: tuple[Array, ...], grads_out: Array) -> tuple[Array, Array]:
    """Row numbers (n, t), and gradients of the rows (n, t, d).

    Numbers outside the table, whose gradient is dropped, become the number of rows.
    """
    (indices,) = others
    num_rows, n, lead = spec.shape[0], grads_out.shape[0], 1 + spec.loops
    numbers = _wide_integers(indices[..., 0])
    mode = str(spec.params["mode"]).rpartition(".")[2].upper()
    if mode == "CLIP":
        numbers = jnp.clip(numbers, 0, num_rows - 1)
    numbers = jnp.where((numbers >= 0) & (numbers < num_rows), numbers, num_rows)
    grads_out = _spread(spec, indices, grads_out)
    offsets = [lead + axis for axis in spec.params["dimension_numbers"].offset_dims]
    others_first = [axis for axis in range(grads_out.ndim) if axis not in offsets]
    rows = grads_out.transpose(*others_first, *offsets)
    return numbers.reshape(n, -1), rows.reshape(n, -1, math.prod(spec.shape[1:]))


def _wide_integers(numbers: Array) -> Array:
    """Indices of any dtype as int32, or int64 where they are wider and jax has it.

    Arithmetic in their own dtype could wrap around: 256 rows do not fit uint8. Unsigned numbers
    beyond the largest signed one remain outside every table.
    """
    wide = jnp.result_type(jnp.int32, jnp.int64 if numbers.dtype.itemsize > 4 else jnp.int32)
    if (
        jnp.issubdtype(numbers.dtype, jnp.unsignedinteger)
        and numbers.dtype.itemsize >= wide.itemsize
    ):
        numbers = jnp.minimum(numbers, jnp.iinfo(wide).max)
    return numbers.astype(wide)


def _spread(spec: Spec, indices: Array, grads_out: Array) -> Array:
    """Gradient of each looked-up row, broadcast from that of their sum where rows are summed."""
    offsets, lead = spec.params["dimension_numbers"].offset_dims, 1 + spec.loops
    sizes = dict(zip(offsets, spec.shape[1:], strict=True))
    sizes |= zip(_index_axes(spec, indices), indices.shape[lead:-1], strict=True)
    for axis in sorted(spec.summed):
        grads_out = jnp.expand_dims(grads_out, lead + axis)
    shape = (*grads_out.shape[:lead], *(sizes[axis] for axis in range(len(sizes))))
    return jnp.broadcast_to(grads_out, shape) if spec.summed else grads_out


def _index_axes(spec: Spec, indices: Array) -> tuple[int, ...]:
    """Axes of the result, within one example and step, that index the lookups."""
    offsets = spec.params["dimension_numbers"].offset_dims
    rank = indices.ndim - 2 - spec.loops + len(offsets)
    return tuple(axis for axis in range(rank) if axis not in offsets)


def weight_grads(spec: Spec, others: tuple[Array, ...], grads_out: Array) -> Array:
    """Return per-sample gradients, (n, *shape)."""
    numbers, rows = looked_up(spec, others, grads_out)
    return jax.vmap(partial(_added_up, spec))(numbers, widen(rows))


def _added_up(spec: Spec, numbers: Array, rows: Array) -> Array:
    """Table (*shape) of the sums of rows (t, d) with the same number (t,)."""
    empty = jnp.zeros((spec.shape[0], rows.shape[1]), rows.dtype)
    return empty.at[numbers].add(rows, mode="drop").reshape(spec.shape)


def weight_norms(spec: Spec, others: tuple[Array, ...], grads_out: Array) -> Estimate:
    """Return norms, (n,), from the gradients (t, d) added up by row.

    Where only the sum of all rows is used, their gradients are equal, and the norm follows from the
    number of lookups of each row.
    """
    numbers, rows = looked_up(spec, others, grads_out)
    rows = widen(rows)
    if not _adds_all_rows(spec, others[0]):
        moved = rounding(jnp.sqrt(jnp.square(rows).sum(2)))
        return Estimate(sq_norms_by_row(numbers, rows, spec.shape[0]), rounding=moved)
    ones = jnp.ones((*numbers.shape, 1), rows.dtype)
    counts = jnp.sqrt(sq_norms_by_row(numbers, ones, spec.shape[0]))
    row = widen(grads_out).reshape(numbers.shape[0], 1, -1)
    return of_lengths(counts[:, None, None], row)


def _adds_all_rows(spec: Spec, indices: Array) -> bool:
    """True if an example uses only the sum of all its rows."""
    axes = _index_axes(spec, indices)
    sizes = zip(axes, indices.shape[1 + spec.loops : -1], strict=True)
    is_all = all(axis in spec.summed or size == 1 for axis, size in sizes)
    return is_all and bool(spec.summed) and not spec.loops and set(spec.summed) <= set(axes)


def sq_norms_by_row(numbers: Array, rows: Array, total: int) -> Array:
    """Squared norms (n,) of rows (n, t, d), added up where their numbers (n, t) are equal.

    Each different number below `total` gets one of t places: a whole table for each example would
    take far more memory.
    """

    def added(numbers: Array, rows: Array) -> Array:
        _, place = jnp.unique(numbers, return_inverse=True, size=len(rows))
        place = jnp.where(numbers < total, place, len(rows))
        return jnp.zeros_like(rows).at[place].add(rows, mode="drop")

    return sq_norm(jax.vmap(added)(numbers, rows))


def weighted_sum(spec: Spec, others: tuple[Array, ...], grads_out: Array, weights: Array) -> Array:
    """Return the sum over the examples of weight times gradient, (*shape): one scatter."""
    numbers, rows = looked_up(spec, others, grads_out)
    rows = scaled(weights, rows)
    return _added_up(spec, numbers.reshape(-1), rows.reshape(-1, rows.shape[2]))


def choice(spec: Spec, others: tuple[Array, ...], grads_out: Array) -> Choice:
    """Return the form of the norm; tables of gradients are never kept."""
    return Choice("counts" if _adds_all_rows(spec, others[0]) else "rows")


def outer_products(spec: Spec, others: tuple[Array, ...], grads_out: Array) -> tuple[Array, Array]:
    """Return row numbers (n, t) and gradients (n, t, columns), zero where there is no such row."""
    numbers, rows = looked_up(spec, others, grads_out)
    return numbers, jnp.where((numbers < spec.shape[0])[..., None], rows, 0)


RULE = Rule(
    _accepts, weight_grads, weight_norms, weighted_sum, choice, outer_products, takes_sums=True
)
