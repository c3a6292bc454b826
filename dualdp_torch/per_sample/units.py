# SPDX-License-Identifier: Apache-2.0
"""Units of privacy: blocks of rows of a batch, of which each counts as one example."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from dualdp import _validate
from dualdp_torch.per_sample.batch import Batch, check_losses, split_aux
from dualdp_torch.rules.base import Tensor, wide

#: Attribute of a loader's tensors with the `Mark` of their chunk.
_MARK = "_dualdp_chunk"


class Mark(NamedTuple):
    """What a call needs on the chunk of a loop of the user's own."""

    rows_per_unit: int
    has_weights: bool
    mask: Tensor | None = None  # (units,) bool, False for padding; None without padding
    max_grad_norm: float | None = None  # bound of the plan's noise; None if it changes


@dataclass(frozen=True)
class UnitLoss:
    """Loss function of units, made of one that returns (U K,) losses of rows, or (U,) of units."""

    loss_fn: Callable[..., Any]
    rows_per_unit: int
    has_weights: bool  # True if the first batch argument is the rows' weights, (U K,)
    has_aux: bool

    def __call__(self, model: Any, *batch: Any) -> Any:
        """Return the (U,) losses of the units: weighted sums of their rows' losses, or means."""
        rows = next(len(leaf) for leaf in pytree.tree_leaves(batch) if torch.is_tensor(leaf))
        weights, batch = (batch[0], batch[1:]) if self.has_weights else (None, batch)
        losses, aux = split_aux(self.loss_fn(model, *batch), self.has_aux)
        with torch._C.DisableTorchFunction():  # a capture has nothing to hear here
            losses = self._of_units(losses, rows, weights)
        return (losses, aux) if self.has_aux else losses

    def _of_units(self, losses: Any, rows: int, weights: Tensor | None) -> Tensor:
        k = self.rows_per_unit
        if torch.is_tensor(losses) and losses.shape == (rows // k,) and weights is None:
            return check_losses(losses, rows // k)
        if torch.is_tensor(losses) and losses.is_floating_point() and losses.shape != (rows,):
            unit = f", or ({rows // k},), one per unit" if weights is None else ""
            reason = "" if weights is None else ", since row_weights weight the losses of rows"
            raise ValueError(
                f"loss_fn returned a loss of shape {tuple(losses.shape)} for {rows} rows in units "
                f"of {k}. Expected ({rows},), one loss per row{reason}{unit}."
            )
        each = check_losses(losses, rows)
        if weights is None:
            return each.view(-1, k).mean(1)
        return (each * weights.to(each.device, wide(each.dtype))).view(-1, k).sum(1)


def of_units(
    loss_fn: Callable[..., Any],
    batch: tuple[Any, ...],
    rows_per_unit: Any,
    row_weights: Any,
    has_aux: bool,
) -> tuple[Callable[..., Any], Batch]:
    """Return loss function and batch whose examples are units of rows; weights become its first."""
    _require_units(mark_of(batch), rows_per_unit, row_weights)
    k = 1 if rows_per_unit is None else rows_per_unit
    k = _validate.integer("rows_per_unit", k, minimum=1)
    found = Batch(batch, rows_per_unit=k)
    if row_weights is None:
        return (loss_fn if k == 1 else UnitLoss(loss_fn, k, False, has_aux)), found
    rows, is_tensor = found.num_rows, torch.is_tensor(row_weights)
    expected = f"Expected ({rows},): one weight per row, floating-point and finite, 0 for padding."
    if not is_tensor or not row_weights.is_floating_point():
        came = row_weights.dtype if is_tensor else _validate.kind(row_weights)
        raise TypeError(f"row_weights is {came}. {expected}")
    if row_weights.shape != (rows,):
        raise ValueError(f"row_weights has shape {tuple(row_weights.shape)}. {expected}")
    if not bool(row_weights.isfinite().all()):
        raise ValueError(f"row_weights holds a weight that is not finite. {expected}")
    weights = row_weights.detach()
    padding = weights == 0
    if bool(padding.any()):
        found = found.on([_without_nan(t, padding) for t in found.tensors()])
    weighted = Batch((weights, *found.arguments()), rows_per_unit=k)
    return UnitLoss(loss_fn, k, True, has_aux), weighted


def mark(batch: Any, found: Mark) -> None:
    """Mark the tensors of a loader's chunk."""
    for leaf in pytree.tree_leaves(batch):
        if torch.is_tensor(leaf):
            setattr(leaf, _MARK, found)


def mark_of(batch: Any) -> Mark | None:
    """Return the mark of a loader's tensors; None if they have none, as after `.to(device)`."""
    leaves = pytree.tree_leaves(batch)
    return next((getattr(leaf, _MARK) for leaf in leaves if hasattr(leaf, _MARK)), None)


def _require_units(found: Mark | None, rows_per_unit: Any, row_weights: Any) -> None:
    """Refuse a call that would clip each row of a unit alone, or count rows of padding."""
    if row_weights is not None and rows_per_unit is None:
        raise ValueError(
            "row_weights came without rows_per_unit, so that each row would be clipped alone. "
            "Expected rows_per_unit=K, the number of rows of a unit."
        )
    if found is None:
        return
    k = 1 if rows_per_unit is None else rows_per_unit
    if found.rows_per_unit != k or (found.has_weights and row_weights is None):
        weights = ", row_weights=chunk.row_weights" if found.has_weights else ""
        raise ValueError(
            f"The loader gave {found.rows_per_unit} rows for each unit, but the call has "
            f"rows_per_unit={rows_per_unit} and {'no ' if row_weights is None else ''}row_weights. "
            f"Expected clipped_grad_sum(..., rows_per_unit={found.rows_per_unit}{weights})."
        )


def require_bound(found: Mark | None, max_grad_norm: Any) -> None:
    """Refuse a larger bound than that of the noise of the loader's plan."""
    bound = None if found is None else found.max_grad_norm
    if bound is not None and not isinstance(max_grad_norm, Mapping):
        if float(max_grad_norm) > bound * (1 + 1e-6):
            raise ValueError(
                f"max_grad_norm={float(max_grad_norm)} came for a chunk of engine.make_loader, and "
                f"the noise of its plan is for {bound}. Expected plan.max_grad_norm_at(step)."
            )


def _without_nan(tensor: Tensor, padding: Tensor) -> Tensor:
    """Return a tensor whose padding rows, (rows,) bool, hold 0 for numbers that are not finite."""
    if not tensor.is_floating_point():
        return tensor
    of_row = padding.to(tensor.device).view(-1, *(1,) * (tensor.dim() - 1))
    return tensor.masked_fill(of_row & ~tensor.isfinite(), 0)  # a factor 0 would not remove them
