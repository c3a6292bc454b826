# SPDX-License-Identifier: Apache-2.0
"""`gather` of whole rows, as embeddings do it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from dualdp_jax.rules.kinds import Rule, Spec
from dualdp_jax.rules.product import scaled, widen


def _accepts(params: Mapping[str, Any], position: int, shapes: Sequence[Any]) -> bool:
    """Only rows of axis 0, all of each row, by indices that are not batched with the table."""
    numbers, table = params["dimension_numbers"], shapes[0].shape
    return (
        position == 0
        and tuple(numbers.collapsed_slice_dims) == (0,)
        and tuple(numbers.start_index_map) == (0,)
        and not numbers.operand_batching_dims
        and tuple(params["slice_sizes"]) == (1, *table[1:])
    )


def _rows(spec: Spec, others: tuple[Any, ...], grads_out: Any) -> tuple[Any, Any, int]:
    """Row numbers (n, t), gradients of the rows (n, t, d), and the number of rows.

    Numbers outside the table, whose gradient is dropped, become the number of rows. A loop with a
    table of its own at every step counts as one higher table.
    """
    (indices,) = others
    num_rows, lead = spec.shape[0], 1 + len(spec.loops)
    numbers = indices[..., 0]
    mode = str(spec.params["mode"]).rpartition(".")[2].upper()
    if mode == "CLIP":
        numbers = jnp.clip(numbers, 0, num_rows - 1)
    inside = (numbers >= 0) & (numbers < num_rows)
    total = num_rows
    for axis, stacked in enumerate(spec.loops):
        if stacked:
            step = jax.lax.broadcasted_iota(numbers.dtype, numbers.shape, 1 + axis)
            numbers, total = numbers + step * total, total * numbers.shape[1 + axis]
    numbers = jnp.where(inside, numbers, total)
    offsets = [lead + axis for axis in spec.params["dimension_numbers"].offset_dims]
    others_first = [axis for axis in range(grads_out.ndim) if axis not in offsets]
    rows = grads_out.transpose(*others_first, *offsets)
    width = math.prod(spec.shape[1:])
    n = grads_out.shape[0]
    return numbers.reshape(n, -1), rows.reshape(n, -1, width), total


def _to_table(spec: Spec, grads_out: Any, table: Any) -> Any:
    """(..., rows of all tables, d) to (..., *own loops, *shape of the table)."""
    own = [grads_out.shape[1 + axis] for axis, stacked in enumerate(spec.loops) if stacked]
    lead = table.shape[:-2]
    # the outermost loop varies fastest in the row numbers of `_rows`
    table = table.reshape(*lead, *reversed(own), *spec.shape)
    first = len(lead)
    loops = range(first + len(own) - 1, first - 1, -1)
    return table.transpose(*range(first), *loops, *range(first + len(own), table.ndim))


def weight_grads(spec: Spec, others: tuple[Any, ...], grads_out: Any) -> Any:
    """Per-sample gradients, (n, *own, *shape)."""
    numbers, rows, total = _rows(spec, others, grads_out)
    empty = jnp.zeros((total, rows.shape[2]), widen(rows).dtype)
    add = lambda number, row: empty.at[number].add(row, mode="drop")  # noqa: E731
    return _to_table(spec, grads_out, jax.vmap(add)(numbers, widen(rows)))


def weight_sq_norms(spec: Spec, others: tuple[Any, ...], grads_out: Any) -> Any:
    """Squared norms, (n,): gradients of the same row are added up first, (t, d)."""
    numbers, rows, total = _rows(spec, others, grads_out)
    rows = jnp.where((numbers < total)[..., None], widen(rows), 0)
    by_table = partial(_sq_norms_by_table, total=total)
    return jax.lax.platform_dependent(numbers, rows, cpu=by_table, default=_sq_norms_by_sort)


def _sq_norm(leaders: Any, rows: Any) -> Any:
    """Squared norm of one example, whose rows (t, d) are added up at their leaders' positions."""
    return jnp.square(jnp.zeros_like(rows).at[leaders].add(rows)).sum()


def _sq_norms_by_table(numbers: Any, rows: Any, *, total: int) -> Any:
    """One example after the other, with one small table that says where a number was seen.

    Each example writes its positions into the table and reads them back: it reads what it wrote.
    """
    positions = jnp.arange(numbers.shape[1])

    def step(table: Any, example: Any) -> tuple[Any, Any]:
        number, row = example
        table = table.at[number].set(positions)
        return table, _sq_norm(table[number], row)

    return jax.lax.scan(step, jnp.zeros(total + 1, positions.dtype), (numbers, rows))[1]


def _sq_norms_by_sort(numbers: Any, rows: Any) -> Any:
    """All examples at once by a sort, for devices on which steps in sequence are slow."""
    positions = jnp.broadcast_to(jnp.arange(numbers.shape[1]), numbers.shape)
    numbers, order = jax.lax.sort((numbers, positions), num_keys=1)
    is_new = numbers[:, 1:] != numbers[:, :-1]
    starts = jax.lax.cummax(jnp.pad(jnp.where(is_new, positions[:, 1:], 0), ((0, 0), (1, 0))), 1)
    leaders = jnp.take_along_axis(order, starts, 1)
    leaders = jax.vmap(lambda o, leader: jnp.zeros_like(o).at[o].set(leader))(order, leaders)
    return jax.vmap(_sq_norm)(leaders, rows)


def weighted_sum(spec: Spec, others: tuple[Any, ...], grads_out: Any, weights: Any) -> Any:
    """Sum over the examples of weight times gradient, (*own, *shape): one scatter."""
    numbers, rows, total = _rows(spec, others, grads_out)
    rows = scaled(weights, rows)
    empty = jnp.zeros((total, rows.shape[2]), rows.dtype)
    table = empty.at[numbers.reshape(-1)].add(rows.reshape(-1, rows.shape[2]), mode="drop")
    return _to_table(spec, grads_out, table)


RULE = Rule(_accepts, weight_grads, weight_sq_norms, weighted_sum)
