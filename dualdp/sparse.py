# SPDX-License-Identifier: Apache-2.0
"""Arithmetic of sparse noisy gradients of a table of embeddings (DP-AdaFEST).

A step releases two sums with one Gaussian mechanism: the contribution map, which says how many
examples touch each row of the table, and the gradient. Rows whose noisy count is too small get no
gradient, and no noise.

Source: Ghazi et al. 2023, "Sparsity-preserving differentially private training of large embedding
models", Algorithm 1 (arXiv 2311.08357).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dualdp import _validate


class Scales(NamedTuple):
    """Factors of the two sums before they get the noise of one plan.

    With a = map_share, an example moves (gradient x sums, map x contributions) by at most
    root((1 - a) C^2 + a C^2) = C, the sensitivity of the plan; its contribution to the map has norm
    at most 1.
    """

    gradient: float  # root(1 - a); the gradient alone has the plan's noise multiplier over it
    map: float  # root(a) C


def joint_scales(map_share: Any, max_grad_norm: Any) -> Scales:
    """Return the factors by which gradient and contribution map together cost what the plan costs.

    The noise multipliers s2 = s / root(1 - a) of the gradient and s1 = s / root(a) of the map
    satisfy 1 / s^2 = 1 / s1^2 + 1 / s2^2. `max_grad_norm` is a number or a scalar array.

    Source: Ghazi et al. 2023, section 3 (the two Gaussian mechanisms accounted as one).

    >>> [round(scale, 3) for scale in joint_scales(0.36, 2.0)]
    [0.8, 1.2]
    """
    share = _validate.open_probability("map_share", map_share)
    return Scales(math.sqrt(1 - share), math.sqrt(share) * max_grad_norm)


def contribution_norms(num_rows: Any, max_rows: int, *, xp: Any) -> Any:
    """Return (n,) root(max(num_rows, max_rows)): an example adds 1 / this to each of its rows.

    It is the norm of each example's part of the map, of `num_rows` (n,) rows, before it is clipped
    to 1; examples of up to `max_rows` rows count alike.

    Source: Ghazi et al. 2023, Algorithm 1, its map divided by C1 = root(max_rows).
    """
    return xp.sqrt(xp.clip(num_rows, max_rows, None))


def padding_rows(padding_idx: Any, num_rows: int) -> tuple[int, ...]:
    """Return the rows, counted from 0, that do not enter the map; raise on what is no row.

    `padding_idx` is None, an integer in [-num_rows, num_rows), or a sequence of them.
    """
    given = padding_idx if isinstance(padding_idx, Sequence) else (padding_idx,)
    found = [
        _validate.integer("padding_idx", row, minimum=-num_rows) for row in given if row is not None
    ]
    if beyond := [row for row in found if row >= num_rows]:
        raise ValueError(
            f"padding_idx={beyond[0]} is no row of the table. Expected {-num_rows} to "
            f"{num_rows - 1}."
        )
    return tuple(row % num_rows for row in found)


def units_of(shape: tuple[int, ...], rows_per_unit: int, mask_fits: Any, mask: str) -> int:
    """Return the number of units of (n, ...) ids of which K consecutive rows are one unit.

    `mask_fits(units)` is True if the mask has one bool for each of them; `mask` describes it in the
    error.
    """
    units = -1 if not shape or shape[0] % rows_per_unit else shape[0] // rows_per_unit
    if units < 0 or not mask_fits(units):
        raise ValueError(
            f"ids has shape {shape} and mask is {mask}, with rows_per_unit={rows_per_unit}. "
            "Expected (n, ...), n a multiple of it, and one bool for each unit."
        )
    return units


def check_range(least: int, most: int, num_rows: int) -> None:
    """Refuse ids, from `least` to `most`, that are no rows of the table."""
    if not 0 <= least <= most < num_rows:
        raise ValueError(
            f"ids lie in {least} to {most}. Expected rows of the table, 0 to {num_rows - 1}."
        )


def table_rows(table: Any, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, slice]:
    """Return table -> its rows of the map, in the order of the tables, one name or several.

    Raises on a name that is not in `shapes` or comes twice, and on a parameter without rows.
    """
    names = [table] if isinstance(table, str) else table
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"table={table!r}. Expected a name, or a sequence of names.")
    found: dict[str, slice] = {}
    start = 0
    for name in names:
        if name not in shapes:
            raise ValueError(f"table={name!r} is not in grads. Expected one of {sorted(shapes)}.")
        if name in found or not shapes[name]:
            what = "comes twice" if name in found else "is a scalar and has no rows"
            raise ValueError(f"table={name!r} {what}. Expected each table of embeddings once.")
        found[name] = slice(start, start + shapes[name][0])
        start = found[name].stop
    if not found:
        raise ValueError("table names no table. Expected the name of one in grads, or several.")
    return found


def not_a_map(what: Any, num_rows: int) -> ValueError:
    """Return the error for what is no contribution map; `what` is its kind, dtype or shape."""
    return ValueError(
        f"contributions is {what}, but the tables have {num_rows} rows. Expected the result of "
        f"contribution_map(ids, {num_rows}, mask=mask), summed over the chunks."
    )
