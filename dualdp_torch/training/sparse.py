# SPDX-License-Identifier: Apache-2.0
"""Sparse noisy gradients of a table of embeddings, for a loop of your own (DP-AdaFEST)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from dualdp import _validate, sparse
from dualdp.plan.clipping import clip_factors
from dualdp.plan.plan import require_plan
from dualdp_torch.noise.noise import check_sum, noisy_mean
from dualdp_torch.per_sample.units import mark_of
from dualdp_torch.rules.base import Tensor, wide

_MAP = "contribution map"  # name of the map among the sums; no parameter's, which has no blank


class SparseNoisyMean(NamedTuple):
    """Result of `sparse_noisy_mean`, all of it private.

    Attributes:
        grads: mapping from name to noisy mean; rows of a table that do not survive are zero.
        survives: (rows,) bools, the rows of the map that survive.
        noisy_map: (rows,) the noisy contribution map.
    """

    grads: dict[str, Tensor]
    survives: Tensor
    noisy_map: Tensor

    @property
    def rows(self) -> Tensor:
        """Rows of the map that survive, (k,) increasing int64."""
        return self.survives.nonzero()[:, 0]


def contribution_map(
    ids: Tensor,
    num_rows: int,
    *,
    mask: Tensor | None,
    max_rows: int = 1,
    rows_per_unit: int = 1,
    padding_idx: int | Sequence[int] | None = None,
) -> Tensor:
    """Return how many examples touch each row of a table, each example clipped to norm 1.

    An example that touches k rows adds 1 / root(max(k, max_rows)) to each of them, however often
    it does. In the paper's words the map is divided by its bound C1 = root(max_rows).

    Several tables have one map, in which their rows are numbered through: of tables with 1000 and
    50 rows, `contribution_map(torch.cat([words, 1000 + tags], 1), 1050, mask=mask)`.

    Args:
        ids: (n, ...) integers in [0, num_rows), the rows that each example looks up.
        num_rows: number of rows of the table, or of all tables.
        mask: (n / K,) bools, False for the padding of a chunk, which must not count; None if there
            is none.
        max_rows: number of rows up to which examples count alike.
        rows_per_unit: int K, as in `clipped_grad_sum`: K consecutive rows of ids are one unit,
            which counts once.
        padding_idx: row that gets no gradient and is not counted, as in `nn.Embedding`; or a
            sequence of such rows.

    Returns:
        (num_rows,) float32, not private.

    Raises:
        TypeError: ids or mask of another kind.
        ValueError: ids or settings out of range, or shapes that do not fit; or ids of a loader that
            gives several rows for each unit, with another rows_per_unit.

    Guarantees:
        No example's contribution has a norm above 1.
            [test_every_contribution_to_the_map_is_bounded]

    Source: Ghazi et al. 2023, Algorithm 1 (arXiv 2311.08357).

    >>> contribution_map(torch.tensor([[0, 0], [0, 2]]), 4, mask=None).round(decimals=3)
    tensor([1.7070, 0.0000, 0.7070, 0.0000])
    """
    num_rows = _validate.integer("num_rows", num_rows, minimum=1)
    least = _validate.integer("max_rows", max_rows, minimum=1)
    unit = _validate.integer("rows_per_unit", rows_per_unit, minimum=1)
    paddings = sparse.padding_rows(padding_idx, num_rows)
    if not torch.is_tensor(ids) or ids.is_floating_point() or ids.dtype == torch.bool:
        raise TypeError(f"ids is {_kind(ids)}. Expected a tensor of integers, (n, ...).")
    found = mark_of(ids)
    if found is not None and found.rows_per_unit != unit:
        raise ValueError(
            f"The loader gave {found.rows_per_unit} rows for each unit, but rows_per_unit={unit}, "
            "so that a unit would count several times. Expected contribution_map(..., "
            f"rows_per_unit={found.rows_per_unit})."
        )
    units = sparse.units_of(tuple(ids.shape), unit, partial(_fits, mask), _kind(mask))
    rows = ids.reshape(units, unit * math.prod(ids.shape[1:])).long().sort(1).values  # (u, t)
    if rows.numel():
        sparse.check_range(int(rows.min()), int(rows.max()), num_rows)
    counted = torch.ones_like(rows, dtype=torch.bool)
    counted[:, 1:] = rows[:, 1:] != rows[:, :-1]
    for padding in paddings:
        counted &= rows != padding
    if mask is not None:
        counted &= mask.to(rows.device)[:, None]
    touched = counted.sum(1, dtype=torch.float32)
    norms = sparse.contribution_norms(touched, least, xp=torch)
    weights = clip_factors(norms, 1.0, xp=torch)[:, None] * counted  # (u, t)
    total = torch.zeros(num_rows, dtype=torch.float32, device=rows.device)
    return total.index_add_(0, rows.flatten(), weights.flatten())


def _kind(value: Any) -> str:
    """Dtype and shape of a tensor, or the kind of anything else."""
    if torch.is_tensor(value):
        return f"{value.dtype} {tuple(value.shape)}"
    return _validate.kind(value)


def _fits(mask: Any, units: int) -> bool:
    """True for no mask, or one bool for each unit."""
    if mask is None:
        return True
    return torch.is_tensor(mask) and mask.dtype == torch.bool and mask.shape == (units,)


def sparse_noisy_mean(
    grads: Mapping[str, Tensor],
    contributions: Tensor,
    plan: Any,
    step: int,
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
    are lost then. Not for `AdamBC`: the noise of a row depends on whether it survives.

    Args:
        grads: mapping from every trainable parameter name to its clipped SUM, see `noisy_mean`.
        contributions: (rows,) `contribution_map` of the same logical batch, summed over its chunks.
        plan: `PrivacyPlan`.
        step: index of the release.
        table: name of the table in `grads`, (rows, ...); or names of several, in the order in which
            the map numbers their rows.
        threshold: least noisy entry of the map of a row that survives; -inf keeps all.
        map_share: number in (0, 1), part of the privacy that the map gets.
        max_grad_norm: C of this step if the ledger adapts it; None for the plan's.

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

    Source: Ghazi et al. 2023, Algorithm 1 (arXiv 2311.08357).
    """
    require_plan(plan)
    check_sum(grads)
    rows = sparse.table_rows(table, {name: tuple(grad.shape) for name, grad in grads.items()})
    first, num_rows = grads[next(iter(rows))], max(place.stop for place in rows.values())
    is_real = torch.is_tensor(contributions) and contributions.is_floating_point()
    if not is_real or contributions.shape != (num_rows,):
        raise sparse.not_a_map(_kind(contributions), num_rows)
    least = _validate.real("threshold", threshold)
    bound = plan.max_grad_norm_at(step) if max_grad_norm is None else max_grad_norm
    scales = sparse.joint_scales(map_share, bound)
    sums = {name: scales.gradient * grad.to(wide(grad.dtype)) for name, grad in grads.items()}
    sums[_MAP] = scales.map * contributions.to(first.device, wide(first.dtype))
    mean = noisy_mean(sums, plan, step, max_grad_norm=max_grad_norm)
    noisy_map = mean.pop(_MAP) * (plan.expected_batch_size_at(step) / scales.map)
    survives = ~(noisy_map < least)
    found = {name: value / scales.gradient for name, value in mean.items()}
    for name, place in rows.items():
        kept = survives[place].to(found[name].device)
        kept = kept.view(-1, *[1] * (found[name].ndim - 1))
        found[name] = torch.where(kept, found[name], 0)
    return SparseNoisyMean(found, survives, noisy_map)
