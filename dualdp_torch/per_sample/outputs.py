# SPDX-License-Identifier: Apache-2.0
"""Outputs of a recorded model, reduced to one number per example."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from dualdp._validate import UnsupportedLayerError
from dualdp_torch.per_sample.batch import Batch
from dualdp_torch.rules.base import Tensor


def projected_outputs(
    model: nn.Module, args: Any, kwargs: Any, cotangents: Any = None, *, rows_per_unit: int = 1
) -> tuple[Tensor, list[Tensor]]:
    """Return (n,) products of each example's model outputs with `cotangents`, and the outputs."""
    given = [t for t in pytree.tree_leaves((args, kwargs)) if torch.is_tensor(t)]
    rows = max(map(len, given))  # 1 in a tensor that all examples share
    outputs = float_leaves(model(*args, **kwargs))
    return combined(outputs, cotangents, rows, rows_per_unit), outputs


def projected(model: nn.Module, args: Any, kwargs: Any, *, rows_per_unit: int = 1) -> Tensor:
    """Return (n,) products of each example's model outputs with fixed numbers."""
    return projected_outputs(model, args, kwargs, rows_per_unit=rows_per_unit)[0]


def forwards_of(
    rows_per_unit: int, model: nn.Module, batch: Batch
) -> list[Callable[[], tuple[Tensor, list[Tensor]]]]:
    """Return the forwards of a batch of (args, kwargs, cotangents), for `identity.Reference`."""

    def run(call: tuple[Any, Any, Any]) -> tuple[Tensor, list[Tensor]]:
        losses, outputs = projected_outputs(model, *call, rows_per_unit=rows_per_unit)
        return losses, [output.unflatten(0, (-1, rows_per_unit)) for output in outputs]

    return [partial(run, call) for call in batch.arguments()]


def combined(
    leaves: Sequence[Tensor],
    cotangents: Sequence[Tensor] | None = None,
    rows: int | None = None,
    rows_per_unit: int = 1,
) -> Tensor:
    """Return (n,) products of each example's outputs with cotangents, or with fixed numbers.

    The number of rows is by default that of the first output.
    """
    if rows is None:
        rows = len(leaves[0]) if leaves and leaves[0].dim() else 0
    total = None
    for position, leaf in enumerate(leaves):
        require_rows(leaf, rows)
        if cotangents is None:
            weight = torch.arange(leaf[0].numel(), device=leaf.device).cos().view(leaf[0].shape)
            product = (leaf * weight.to(leaf.dtype)).flatten(1) if leaf.dim() > 1 else leaf[:, None]
        else:
            product = (leaf * cotangents[position]).reshape(rows, -1)
        total = product.sum(1) if total is None else total + product.sum(1)
    if total is None:
        raise UnsupportedLayerError("The model returned no tensor. Expected its outputs.")
    return total if rows_per_unit == 1 else total.view(-1, rows_per_unit).sum(1)


def require_rows(leaf: Tensor, n: int) -> None:
    """Refuse an output of the model that has not the n examples on axis 0."""
    if leaf.dim() and len(leaf) == n:
        return
    advice = "return the output of each example, and take means in the loop"
    if n in leaf.shape and n > 1:
        advice = "transpose it in forward (batch_first=True)"
    elif n == 1:
        advice = "name the axis to squeeze, as squeeze() drops that of a single example"
    raise UnsupportedLayerError(
        f"The model returned a tensor of shape {tuple(leaf.shape)} for "
        f"{'one example' if n == 1 else f'{n} examples'}. Expected the examples on axis 0 of every "
        f"output: {advice}; or use clipped_grad_sum, which sees the losses."
    )


def float_leaves(outputs: Any) -> list[Tensor]:
    """Return the floating-point tensors of the outputs, without numbers beside such tensors."""
    found = [
        leaf
        for leaf in pytree.tree_leaves(outputs)
        if torch.is_tensor(leaf) and leaf.is_floating_point()
    ]
    return [leaf for leaf in found if leaf.dim()] or found


def split_numbers(leaves: Sequence[Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the tensors among the leaves of outputs, and numbers beside them, such as a loss."""
    tensors = [leaf for leaf in leaves if torch.is_tensor(leaf)]
    kept = {id(leaf) for leaf in float_leaves(leaves)}
    numbers = [t for t in tensors if t.is_floating_point() and id(t) not in kept]
    return [t for t in tensors if not any(t is number for number in numbers)], numbers


#: Function of a gradient, and if leaves accumulate theirs, that returns the model's gradient.
Heard = Callable[[Tensor, bool], Tensor]


class _HandOut(torch.autograd.Function):
    """Identity whose backward reports the gradient of the loop's own use of an output.

    The model gets what the function that hears of it returns.

    Gradients of other outputs that were computed from this one are added below this node, and not
    reported. The result is no view, so that it may be changed in place like any model output.
    """

    @staticmethod
    def forward(ctx: Any, heard: Heard, leaf: Tensor, out: Tensor) -> Any:
        """Return the same values as a new tensor; `leaf` shows which kind of backward runs."""
        ctx.heard = heard
        ctx.set_materialize_grads(False)
        return out.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[None, None, Tensor | None]:
        """Report the gradient, and if leaves accumulate theirs; pass on what is returned."""
        if grad is not None:
            accumulates = torch._C._will_engine_execute_node(ctx.next_functions[0][0])
            grad = ctx.heard(grad, accumulates)
        return None, None, grad


hand_out: Callable[[Heard, Tensor, Tensor], Tensor] = _HandOut.apply


class WholeStep(nn.Module):
    """Base class of a module whose forward computes the loss, too, and hides the outputs."""

    def loss(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the scalar loss of a forward on these arguments, for a check."""
        raise NotImplementedError


class Silent:
    """Replacement of the recorder in a copy of a recorded model: the copy is not recorded.

    A deep copy binds the recorder's hook functions to this object; unpickling looks up its methods
    of the same names.
    """

    _paused, _mode = True, None

    def ignore(self, *_: Any) -> None:
        """Record nothing of a call of the copy, of an exception in it, or of its `zero_grad`."""

    def zeroing(self) -> AbstractContextManager[None]:
        """Return an empty context."""
        return nullcontext()

    _records = _enter = _leave = abandon = ignore
