# SPDX-License-Identifier: Apache-2.0
"""One recorded forward of a batch, of which there may be several, or each example's own one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from dualdp._validate import UnsupportedLayerError
from dualdp_torch.per_sample.analysis_cache import AnalysisCache
from dualdp_torch.per_sample.batch import Batch
from dualdp_torch.per_sample.batch_axis import BatchAxis
from dualdp_torch.per_sample.capture import Capture
from dualdp_torch.per_sample.gradients import Formed
from dualdp_torch.per_sample.outputs import combined, float_leaves, require_rows
from dualdp_torch.per_sample.parameter_use import Derived, Use
from dualdp_torch.per_sample.random_state import Start, on_copies
from dualdp_torch.per_sample.vmap_and_loop import each_by_autograd
from dualdp_torch.rules.base import Tensor, wide


class Forward:
    """One recorded forward: its arguments, parameter uses, outputs, and the gradients of both.

    Gradients of the outputs of each row are multiplied by `row_factors`, (rows,); None for 1.
    """

    def __init__(self, batch: Batch, row_factors: Tensor | None = None) -> None:
        self.batch, self.row_factors = batch, row_factors
        self.cache = AnalysisCache([])  # analyses of the model on batches like this one
        self.start: Start | None = None  # state before the forward, if it may be run again
        self.has_drawn = False  # True if it drew random numbers; known only with `start`
        self.by_vmap = False  # True if it has no graph, and its gradients need `vmap`
        self.alone: list[Any] | None = None  # outputs of each example's own forward, for "loop"
        self.capture: Capture | None = None  # for activation checkpoints, which run again
        self.is_open = True  # False once its gradients were used or dropped
        self.uses: dict[Use, BatchAxis | None] = {}  # parameter uses with their batch axes
        self.derived: dict[str, Derived] = {}  # tensors computed from parameters, by name in uses
        self.outputs: list[Tensor] = []  # floating-point tensors that it returned
        self.differentiable: list[int] = []  # positions of those with a gradient
        self.cotangents: dict[int, Tensor] = {}  # gradients that arrived, by position
        self.reached: set[Use] = set()  # uses whose gradient arrived
        self.versions: list[tuple[Tensor, int]] = []  # at its end, if it is computed again

    def hear(self, capture: Capture, axes: Sequence[BatchAxis | None], number: int) -> None:
        """Take the uses of an ended capture; names of derived tensors become unique by `number`."""
        self.capture = capture
        if capture.derived:
            unique = {name: f"{name}.{number}" for name in capture.derived}
            self.derived = {unique[name]: value for name, value in capture.derived.items()}
            for use in capture.uses:
                use.held = {slot: unique.get(name, name) for slot, name in use.held.items()}
        self.uses = dict(zip(capture.uses, axes, strict=True))

    def end_by_vmap(self, model: nn.Module, parameters: Iterable[Tensor]) -> None:
        """Note what the forward was computed from, as it is computed again by `vmap`."""
        given = (*self.inputs(), *parameters, *model.buffers())
        tracked = [t for t in given if not t.is_inference()]
        self.versions = [(t, t._version) for t in tracked]

    @property
    def is_formed(self) -> bool:
        """True if its gradients are formed from outputs and cotangents, not from captured uses."""
        return self.by_vmap or self.alone is not None

    @property
    def needs_values(self) -> bool:
        """True if the values of its outputs are needed after it."""
        return self.start is not None or self.is_formed

    def inputs(self) -> list[Tensor]:
        """Return the tensors among its arguments, also those that all examples share."""
        return [leaf for leaf in self.batch.leaves if torch.is_tensor(leaf)]

    def has_gradient(self) -> bool:
        """True if a gradient arrived."""
        return bool(self.reached or self.cotangents)

    def close(self) -> None:
        """Free what it holds: the graph, whose hooks lead here, may live on in the loop."""
        self.is_open, self.start, self.alone, self.capture = False, None, None, None
        for use in self.uses:
            use.acts = use.grads_out = None
            use.versions.clear()
        self.uses, self.derived = {}, {}
        self.outputs, self.cotangents, self.reached = [], {}, set()
        self.versions = []
        del self.batch

    def weighted(self, grad: Tensor) -> Tensor:
        """Return the gradient of an output, each row times its factor."""
        if self.row_factors is None:
            return grad
        require_rows(grad, len(self.row_factors))
        factors = self.row_factors.to(grad.device, wide(grad.dtype))
        return (grad * factors.view(-1, *(1,) * (grad.dim() - 1))).to(grad.dtype)

    def scaled_cotangents(self, scale: float) -> list[Tensor]:
        """Return the scaled and weighted gradient of each output, zeros where none arrived."""
        return [
            self.weighted(self.cotangents[i]) * scale
            if i in self.cotangents
            else torch.zeros_like(out)
            for i, out in enumerate(self.outputs)
        ]


# ---------------------------------------------------------------------- each example alone


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
