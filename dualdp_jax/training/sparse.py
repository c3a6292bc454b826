# SPDX-License-Identifier: Apache-2.0
"""Sparse noisy gradients of a table of embeddings, for a loop of your own (DP-AdaFEST)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dualdp import _validate, sparse
from dualdp.plan.clipping import clip_factors
from dualdp.plan.plan import checked_step, require_plan
from dualdp_jax import compat
from dualdp_jax.noise import noise
from dualdp_jax.rules.arrays import beside, widen


class SparseNoisyMean(NamedTuple):
    """Result of `sparse_noisy_mean`, all of it private.

    Attributes:
        grads: pytree of noisy means; rows of a table that do not survive are zero.
        survives: (rows,) bools, the rows of the map that survive.
        noisy_map: (rows,) the noisy contribution map.
    """

    grads: Any
    survives: Any
    noisy_map: Any

    @property
    def rows(self) -> Any:
        """Rows of the map that survive, (k,) increasing integers; k is data, so not inside jit."""
        return jnp.nonzero(self.survives)[0]


@compat.promoting
def contribution_map(
    ids: Any,
    num_rows: int,
    *,
    mask: Any,
    max_rows: int = 1,
    rows_per_unit: int = 1,
    padding_idx: int | Sequence[int] | None = None,
) -> Any:
    """Return how many examples touch each row of a table, each example clipped to norm 1.

    An example that touches k rows adds 1 / root(max(k, max_rows)) to each of them, however often
    it does. In the paper's words the map is divided by its bound C1 = root(max_rows).

    Several tables have one map, in which their rows are numbered through: of tables with 1000 and
    50 rows, `contribution_map(jnp.concatenate([words, 1000 + tags], 1), 1050, mask=mask)`.

    Args:
        ids: (n, ...) integers in [0, num_rows), the rows that each example looks up. Inside `jit`,
            where their values are not known, others are not counted.
        num_rows: number of rows of the table, or of all tables.
        mask: (n / K,) bools, False for the padding of a chunk, which must not count; None if there
            is none.
        max_rows: number of rows up to which examples count alike.
        rows_per_unit: int K, as in `clipped_grad_sum`: K consecutive rows of ids are one unit,
            which counts once. Only the length of a mask tells that it was forgotten.
        padding_idx: row that gets no gradient and is not counted; or a sequence of such rows.

    Returns:
        (num_rows,) float32, not private.

    Raises:
        TypeError: ids or mask of another kind.
        ValueError: ids or settings out of range, or shapes that do not fit.

    Guarantees:
        No example's contribution has a norm above 1.
            [test_every_contribution_to_the_map_is_bounded]
        The map of PyTorch.  [test_the_map_is_that_of_a_loop]

    Source: Ghazi et al. 2023, Algorithm 1 (arXiv 2311.08357).

    >>> import jax.numpy as jnp
    >>> contribution_map(jnp.array([[0, 0], [0, 2]]), 4, mask=None).round(3).tolist()
    [1.7070000171661377, 0.0, 0.7070000171661377, 0.0]
    """
    num_rows = _validate.integer("num_rows", num_rows, minimum=1)
    least = _validate.integer("max_rows", max_rows, minimum=1)
    unit = _validate.integer("rows_per_unit", rows_per_unit, minimum=1)
    paddings = sparse.padding_rows(padding_idx, num_rows)
    if not _is_array(ids) or not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(f"ids is {_kind(ids)}. Expected an array of integers, (n, ...).")
    units = sparse.units_of(ids.shape, unit, partial(_fits, mask), _kind(mask))
    if compat.is_sharded_in_type((ids, mask)):
        raise ValueError(
            "ids lie on a mesh with explicit axes. Expected a mesh of automatic axes "
            "(jax.sharding.AxisType.Auto for each), or ids on one device."
        )
    if not compat.is_traced(ids) and ids.size:
        sparse.check_range(int(ids.min()), int(ids.max()), num_rows)
    rows = jnp.asarray(ids).reshape(units, unit * math.prod(ids.shape[1:]))  # (u, t)
    rows = jnp.sort(rows if rows.itemsize >= 4 else rows.astype(jnp.int32), 1)
    counted = jnp.ones(rows.shape, bool).at[:, 1:].set(rows[:, 1:] != rows[:, :-1])
    counted &= (rows >= 0) & (rows < num_rows)
    for padding in paddings:
        counted &= rows != padding
    if mask is not None:
        counted &= jnp.asarray(mask)[:, None]
    touched = counted.sum(1, dtype=jnp.float32)
    norms = sparse.contribution_norms(touched, least, xp=jnp)
    weights = clip_factors(norms, 1.0, xp=jnp)[:, None] * counted  # (u, t)
    return jnp.zeros(num_rows, jnp.float32).at[jnp.where(counted, rows, 0)].add(weights)


def _is_array(value: Any) -> bool:
    return isinstance(value, jax.Array | np.ndarray)


def _fits(mask: Any, units: int) -> bool:
    """True for no mask, or one bool for each unit."""
    return mask is None or (_is_array(mask) and mask.dtype == bool and mask.shape == (units,))


def _kind(value: Any) -> str:
    """Dtype and shape of an array, or the kind of anything else."""
    return f"{value.dtype} {value.shape}" if _is_array(value) else _validate.kind(value)


@compat.promoting
def sparse_noisy_mean(
    grads: Any,
    contributions: Any,
    plan: Any,
    step: Any,
    *,
    table: str | Sequence[str],
    threshold: float,
    map_share: float,
    max_grad_norm: float | None = None,
) -> SparseNoisyMean:
    """Add noise to gradient and contribution map, and keep the rows that many examples touch.

    It stands for `noisy_mean`, costs the same epsilon, and is one release. The gradient has noise
    of standard deviation noise_multiplier C / root(1 - map_share) in its sum, the map of
    noise_multiplier / root(map_share). Which rows survive depends on the noisy map alone, so
    epsilon holds also if `contributions` is not what the model looked up; gradients of other rows
    are lost then. Not for `adam_bc`: the noise of a row depends on whether it survives.

    Args:
        grads: pytree, the SUM of clipped gradients of one logical batch, see `noisy_mean`.
        contributions: (rows,) `contribution_map` of the same logical batch, summed over its chunks.
        plan: `PrivacyPlan`.
        step: int, index of the release; inside a traced function a traced integer.
        table: path of the table in `grads`, keys joined by "/", (rows, ...); or paths of several,
            in the order in which the map numbers their rows.
        threshold: least noisy entry of the map of a row that survives; -inf keeps all.
        map_share: number in (0, 1), part of the privacy that the map gets.
        max_grad_norm: float, C of this step if the ledger adapts it; None for the plan's.

    Returns:
        `SparseNoisyMean`.

    Raises:
        AccountingError, TypeError, ValueError: as `noisy_mean`; or settings out of range, a table
            that is not in `grads`, or a map of another length or kind.

    Guarantees:
        The whole costs what the plan says.  [test_gradient_and_map_are_one_gaussian_of_the_plan]
        With threshold=-inf, the noisy mean of a plan with more noise.
            [test_without_a_threshold_it_is_the_dense_run]
        Rows that do not survive are exactly zero; which do is a function of the noisy map.
            [test_rows_below_the_threshold_carry_no_trace_of_the_data]
        With noise="portable" the numbers of PyTorch, for sums of the same shapes in the same order.
            [test_both_stacks_have_the_same_survivors_and_rows]
        No compiled program holds the key.  [test_a_jitted_step_is_the_eager_one]

    Source: Ghazi et al. 2023, Algorithm 1 (arXiv 2311.08357).
    """
    require_plan(plan)
    noise.check_sum(grads)
    leaves, treedef = jax.tree.flatten(grads)
    names = [name for name, _ in compat.leaf_paths(grads, "/")]
    shapes = dict(zip(names, (leaf.shape for leaf in leaves), strict=True))
    rows = sparse.table_rows(table, {n: s for n, s in shapes.items() if names.count(n) == 1})
    num_rows = max(place.stop for place in rows.values())
    if not _is_map(contributions, num_rows):
        raise sparse.not_a_map(_kind(contributions), num_rows)
    least = _validate.real("threshold", threshold)
    bound, size = _bound_and_size(plan, step, max_grad_norm, leaves)
    scales = sparse.joint_scales(map_share, bound)
    sums = [scales.gradient * widen(leaf) for leaf in leaves]
    first = sums[names.index(next(iter(rows)))]
    sums.append((scales.map * _beside(contributions, first)).astype(first.dtype))
    *found, noisy_map = noise.noisy_mean(sums, plan, step, max_grad_norm=max_grad_norm)
    noisy_map = noisy_map * (size / scales.map).astype(noisy_map.dtype)
    survives = ~(noisy_map < least)  # the nan of a step that is not on record is to be seen
    found = [leaf / scales.gradient for leaf in found]
    for name, place in rows.items():
        leaf = found[names.index(name)]
        found[names.index(name)] = jnp.where(beside(survives[place], leaf), leaf, 0)
    return SparseNoisyMean(jax.tree.unflatten(treedef, found), survives, noisy_map)


def _is_map(value: Any, num_rows: int) -> bool:
    return (
        _is_array(value)
        and jnp.issubdtype(value.dtype, jnp.floating)
        and value.shape == (num_rows,)
    )


def _beside(contributions: Any, like: Any) -> Any:
    """Map on the devices of a sum, whole on each of them."""
    if not all(isinstance(array, jax.Array) for array in (contributions, like)):
        return contributions
    if compat.is_traced(contributions, like):
        return contributions
    if contributions.sharding.device_set == like.sharding.device_set:
        return contributions
    if not compat.spans_devices(like):
        return jax.device_put(contributions, like.sharding)
    whole = jax.sharding.NamedSharding(like.sharding.mesh, jax.sharding.PartitionSpec())
    return jax.device_put(contributions, whole)


def _bound_and_size(
    plan: Any, step: Any, max_grad_norm: float | None, leaves: Sequence[Any]
) -> Any:
    """C and expected batch size of a step; of a traced one from the host, for schedules."""
    dtype = jnp.result_type(jnp.float32, *leaves)

    def of(step: Any) -> list[Any]:
        step = checked_step(plan, step)
        bound = plan.max_grad_norm_at(step) if max_grad_norm is None else max_grad_norm
        return [np.asarray(value, dtype) for value in (bound, plan.expected_batch_size_at(step))]

    if not compat.is_traced(step):
        return of(step)
    if max_grad_norm is None:
        noise.refuse_adaptive(plan)
    scalar = jax.ShapeDtypeStruct((), dtype)
    # One step at a time under vmap, which `noisy_mean` refuses in the user's words.
    return jax.pure_callback(of, [scalar, scalar], step, vmap_method="sequential")
