# SPDX-License-Identifier: Apache-2.0
"""Privacy units of several rows: the loss of one unit, of which each row becomes a position.

The rows of a unit are an axis that only the loss of that unit knows, so every rule, norm and method
treats a unit as one example.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dualdp import _validate
from dualdp_jax import compat
from dualdp_jax.rules.arrays import widen


class Units(NamedTuple):
    """Batch of U units of K rows each."""

    rows: tuple[list[Any], Any]  # arrays (U, K, ...) and positions (U, K)
    #: callable (trained leaves, shared, one unit of `rows`) -> (loss () of the unit, aux (K, ...)).
    loss: Callable[[list[Any], Any, Any], tuple[Any, Any]]
    live: Any  # (U,) bool, False for a unit whose weights are all 0; None without weights


def grouped(
    rows: tuple[list[Any], Any],
    loss_of_row: Callable[[list[Any], Any, Any], tuple[Any, Any]],
    rows_per_unit: int,
    row_weights: Any,
) -> Units:
    """Join the rows of each unit: arrays (U * K, ...), of which unit u has u * K .. u * K + K - 1.

    The loss of a unit is the mean of its rows' losses, or their sum with these weights (U * K,). A
    row of weight 0 is replaced by another one of its unit, so that its numbers, perhaps nan, do not
    enter the gradient.
    """
    num_units = rows[1].shape[0] // rows_per_unit
    cut = lambda leaf: leaf.reshape(num_units, rows_per_unit, *leaf.shape[1:])  # noqa: E731
    arrays, positions = jax.tree.map(cut, rows)

    def losses_of(trained: list[Any], shared: Any, rows: Any) -> tuple[Any, Any]:
        losses, aux = compat.all_at_once(lambda row: loss_of_row(trained, shared, row))(rows)
        return widen(losses), aux

    def mean(trained: list[Any], shared: Any, unit: Any) -> tuple[Any, Any]:
        losses, aux = losses_of(trained, shared, unit)
        return losses.mean(), aux

    def weighted(trained: list[Any], shared: Any, unit: Any) -> tuple[Any, Any]:
        (*arrays, weights), positions = unit
        losses, aux = losses_of(trained, shared, (arrays, positions))
        return (weights.astype(losses.dtype) * losses).sum(), aux

    if row_weights is None:
        return Units((arrays, positions), mean, None)
    weights = cut(row_weights)
    counts = weights != 0
    first = jnp.argmax(counts, 1, keepdims=True)
    index = jnp.where(counts, jnp.arange(rows_per_unit), first)  # (U, K), row of the unit
    arrays = [jax.vmap(lambda leaf, at: leaf[at])(leaf, index) for leaf in arrays]
    return Units(([*arrays, weights], positions), weighted, counts.any(1))


def check_rows(rows_per_unit: Any, num_rows: int) -> int:
    """Return the validated number of rows per unit."""
    size = _validate.integer("rows_per_unit", rows_per_unit, minimum=1)
    if num_rows % size:
        raise ValueError(
            f"The batch has {num_rows} rows with rows_per_unit={size}. Expected a multiple, the "
            "rows of each unit next to each other; fill up shorter units with any rows, and give "
            "these the weight 0 in row_weights."
        )
    return size


def check_weights(row_weights: Any, num_rows: int, dtype: Any) -> Any:
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
