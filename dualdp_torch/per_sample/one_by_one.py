# SPDX-License-Identifier: Apache-2.0
"""Forward and backward of every example alone: the definition, for models of any kind."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from dualdp._validate import UnsupportedLayerError
from dualdp_torch.per_sample.batch import Batch
from dualdp_torch.per_sample.gradients import Formed
from dualdp_torch.per_sample.outputs import combined, float_leaves, require_rows
from dualdp_torch.per_sample.random_state import on_copies
from dualdp_torch.per_sample.vmap_and_loop import each_by_autograd
from dualdp_torch.rules.base import Tensor


def each_alone(model: nn.Module, call: Callable[..., Any], batch: Batch) -> list[Any]:
    """Return the outputs of `call` for each example alone, all from one state of the model.

    Buffers and attributes are changed by the last example's forward only.
    """
    found = []
    for row in range(batch.n):
        args, kwargs = batch.rows(slice(row, row + 1)).arguments()
        is_last = row == batch.n - 1
        with contextlib.nullcontext() if is_last else on_copies(model):
            found.append(call(*args, **kwargs))
    return found


def joined(outputs: Sequence[Any], rows_per_unit: int) -> Any:
    """Join the outputs of single examples, without their graphs, into those of a batch."""
    flat = [pytree.tree_flatten(out) for out in outputs]
    if any(spec != flat[0][1] for _, spec in flat):
        raise UnsupportedLayerError(
            "The model returned another structure for one example than for another. Expected the "
            "same outputs for every example."
        )
    values = zip(*(leaves for leaves, _ in flat), strict=True)
    leaves = [_joined(of_all, rows_per_unit) for of_all in values]
    return pytree.tree_unflatten(leaves, flat[0][1])


def _joined(values: Sequence[Any], rows_per_unit: int) -> Any:
    """Join one output of all examples; other objects than tensors must be the same."""
    first = values[0]
    if not torch.is_tensor(first):
        if any(value is not first and value != first for value in values):
            raise UnsupportedLayerError(
                f"The model returned a {type(first).__name__} that differs between examples, which "
                "can't be joined. Return tensors with the examples on axis 0 (of a Hugging Face "
                "model: use_cache=False)."
            )
        return first
    if first.dim() == 0:
        raise UnsupportedLayerError(
            "The model returned a number for one example, such as the loss that models of Hugging "
            "Face return with labels, which can't be joined with those of the others. Call it "
            "without labels, and compute the loss in the loop from its outputs: "
            "per_example_loss(model, outputs, labels).mean() of dualdp_torch.trainer."
        )
    for value in values:
        require_rows(value, rows_per_unit)
        if value.shape != first.shape:
            raise UnsupportedLayerError(
                f"The model returned a tensor of shape {tuple(value.shape)} for one example and of "
                f"{tuple(first.shape)} for another. Expected one shape, padded where need be."
            )
    whole = torch.cat([value.detach() for value in values])
    return whole.requires_grad_() if any(value.requires_grad for value in values) else whole


def gradients_alone(
    outputs: Sequence[Any],
    cotangents: Sequence[Tensor],
    parameters: Mapping[str, Tensor],
    rows_per_unit: int,
) -> Formed:
    """Return each example's gradient, by plain autograd of its own outputs and their cotangents."""

    def loss_of(unit: int) -> Tensor:
        rows = slice(unit * rows_per_unit, (unit + 1) * rows_per_unit)
        own = [grads[rows] for grads in cotangents]
        return combined(float_leaves(outputs[unit]), own).sum()

    return each_by_autograd(loss_of, len(outputs), parameters)
