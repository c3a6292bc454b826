# SPDX-License-Identifier: Apache-2.0
"""Privacy units of several rows: the loss of one unit, of which each row becomes a position.

The rows of a unit are an axis that only the loss of that unit knows, so every rule, norm and method
treats a unit as one example.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dualdp import _validate
from dualdp_jax import compat
from dualdp_jax.rules.arrays import widen

PyTree = Any
Array = jax.Array
Row = tuple[list[Array], Array]  # arrays of one example, and its position in the batch
Loss = Callable[[list[Array], PyTree, Row], tuple[Array, PyTree]]


def grouped(
    rows: Row, loss_of_row: Loss, rows_per_unit: int, row_weights: Array | None
) -> tuple[Row, Loss]:
    """Join the rows of each unit: arrays (U * K, ...), of which unit u has u * K .. u * K + K - 1.

    The loss of a unit is the mean of its rows' losses, or their sum with these weights (U * K,). A
    row of weight 0 is replaced by another one of its unit, so that its numbers, perhaps nan, do not
    enter the gradient.

    Returns:
        Arrays (U, K, ...), weights the last of them, and positions (U, K); the loss of one unit of
        these, with aux (K, ...). Rows and loss as they are for K = 1 without weights.
    """
    if rows_per_unit == 1 and row_weights is None:
        return rows, loss_of_row
    num_units = rows[1].shape[0] // rows_per_unit

    def cut(leaf: Array) -> Array:
        return leaf.reshape(num_units, rows_per_unit, *leaf.shape[1:])

    def loss(trained: list[Array], shared: PyTree, unit: Row) -> tuple[Array, PyTree]:
        (*arrays, weights), positions = unit
        each = compat.all_at_once(lambda row: loss_of_row(trained, shared, row))
        losses, aux = each((arrays, positions))
        losses = widen(losses)
        return (weights.astype(losses.dtype) * losses).sum(), aux

    arrays, positions = jax.tree.map(cut, rows)
    if row_weights is None:
        return ([*arrays, jnp.full(positions.shape, 1 / rows_per_unit)], positions), loss
    weights = cut(row_weights)
    counts = weights != 0
    first = jnp.argmax(counts, 1, keepdims=True)
    index = jnp.where(counts, jnp.arange(rows_per_unit), first)  # (U, K), row of the unit
    arrays = [jax.vmap(lambda leaf, at: leaf[at])(leaf, index) for leaf in arrays]
    return ([*arrays, weights], positions), loss


def check_rows(rows_per_unit: int | None, row_weights: Array | None, num_rows: int) -> int:
    """Return the validated number of rows per unit."""
    if row_weights is not None and rows_per_unit is None:
        raise ValueError(
            "row_weights came without rows_per_unit, so that each row would be clipped alone. "
            "Expected rows_per_unit=K, the number of rows of a unit."
        )
    given = 1 if rows_per_unit is None else rows_per_unit
    size = _validate.integer("rows_per_unit", given, minimum=1)
    if num_rows % size:
        raise ValueError(
            f"The batch has {num_rows} rows with rows_per_unit={size}. Expected a multiple, the "
            "rows of each unit next to each other; fill up shorter units with any rows, and give "
            "these the weight 0 in row_weights."
        )
    return size


def check_weights(row_weights: Any, num_rows: int, dtype: np.dtype) -> Array | None:
    """Return the weights (num_rows,) in this dtype, None for None."""
    if row_weights is None:
        return None
    expected = f"Expected a floating array ({num_rows},), a number for each row, 0 for padding."
    if not isinstance(row_weights, jax.Array | np.ndarray):
        raise TypeError(f"row_weights is {_validate.kind(row_weights)}. {expected}")
    if not jnp.issubdtype(row_weights.dtype, jnp.floating):
        raise TypeError(f"row_weights is an array of {row_weights.dtype}. {expected}")
    if row_weights.shape != (num_rows,):
        raise ValueError(f"row_weights has the shape {row_weights.shape}. {expected}")
    with np.errstate(over="ignore"):
        weights = jnp.asarray(row_weights, dtype)
    if not compat.is_traced(weights) and not bool(jnp.isfinite(weights).all()):
        raise ValueError(f"row_weights holds a number that is not finite in {dtype}. {expected}")
    return weights
