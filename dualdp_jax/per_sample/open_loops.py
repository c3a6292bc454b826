# SPDX-License-Identifier: Apache-2.0
"""What a clipped sum needs on the chunks of a loop of the user's own.

A chunk is padded with copies of one example, and inside `jit` nothing tells its arrays from others.
So a call on as many rows as the chunks of an open loop have, or a whole part or several of them,
must give what those need.
"""

from __future__ import annotations

from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from dualdp_jax import compat


class ChunkNeeds(NamedTuple):
    """What the chunks of one loader are, and the bound that the noise of its plan is made for."""

    num_rows: int  # rows of a chunk over all devices
    has_padding: bool  # True if a chunk may hold fewer examples
    rows_per_unit: int | None  # K rows of each user, with weights; None for single rows
    max_grad_norm: float | None  # C; None if it changes


_open: WeakKeyDictionary[Any, ChunkNeeds] = WeakKeyDictionary()


def open_loop(loader: Any, needs: ChunkNeeds) -> None:
    """Note what the chunks of a loader need, for as long as the loader is in use."""
    _open[loader] = needs


def close_loop(loader: Any) -> None:
    """Forget a loader whose run has ended."""
    _open.pop(loader, None)


def require_needs(
    num_rows: int, mask: Any, rows_per_unit: int | None, row_weights: Any, max_grad_norm: Any
) -> None:
    """Raise unless a clipped sum of so many rows gives what the chunks of every open loop need."""
    for needs in _open.values():
        small, large = sorted((num_rows, needs.num_rows))
        if num_rows < 2 or large % small:
            continue
        where = f"{num_rows} rows came, as of chunks of engine.make_loader, "
        if needs.has_padding and mask is None:
            raise ValueError(
                f"{where}and no mask: its padding, copies of one example, would count. Expected "
                "mask=chunk.mask; jnp.ones(n, bool) for a batch without padding."
            )
        k = needs.rows_per_unit
        if k is not None and (rows_per_unit != k or row_weights is None):
            raise ValueError(
                f"{where}with {k} rows of each user, but the call has rows_per_unit="
                f"{rows_per_unit} and {'no ' if row_weights is None else ''}row_weights, so that a "
                "user would move the sum by more than C, or padding would count. Expected "
                f"clipped_grad_sum(..., rows_per_unit={k}, row_weights=chunk.row_weights)."
            )
        if needs.max_grad_norm is None or not _is_known_number(max_grad_norm):
            continue
        if float(max_grad_norm) > needs.max_grad_norm * (1 + 1e-6):
            raise ValueError(
                f"{where}with max_grad_norm={float(max_grad_norm)}, and the noise of that loop's "
                f"plan is for {needs.max_grad_norm}. Expected plan.max_grad_norm_at(step)."
            )


def _is_known_number(value: Any) -> bool:
    if hasattr(value, "shape"):
        return not compat.is_traced(value) and bool(value.size == 1)
    return isinstance(value, int | float)
