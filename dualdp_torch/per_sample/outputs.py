# SPDX-License-Identifier: Apache-2.0
"""Outputs of a recorded model: as one number per example, as handed out, and a loss among them.

The loss that a model computes in its own forward, as `model(**batch).loss` of Hugging Face, is
handed out as a function of the outputs that the loop receives: its gradient arrives there, like
that of any loss of the loop, and is checked like one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
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
    if leaf.dim() and len(leaf) > 1 and n > 1:
        advice = (
            "rows of unequal lengths that were joined, such as the nodes of graphs, are padded to "
            "one length and masked; a list of rows is stacked (torch.stack) before the model"
        )
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
    found, numbers = list[Tensor](), list[Tensor]()
    for leaf in pytree.tree_leaves(outputs):
        if torch.is_tensor(leaf) and leaf.is_floating_point():
            (found if leaf.dim() else numbers).append(leaf)
    return found or numbers


def split_numbers(leaves: Sequence[Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the tensors among the leaves of outputs, and numbers beside them, such as a loss."""
    tensors, numbers = list[Tensor](), list[Tensor]()
    has_axes = any(leaf.dim() for leaf in float_leaves(leaves))
    for leaf in leaves:
        if torch.is_tensor(leaf):
            is_number = has_axes and leaf.is_floating_point() and not leaf.dim()
            (numbers if is_number else tensors).append(leaf)
    return tensors, numbers


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


# ---------------------------------------------------------------------- a loss inside


#: Function that returns a context in which backwards are not recorded.
Pause = Callable[[], AbstractContextManager[None]]


class _FromOutputs(torch.autograd.Function):
    """Identity of a number whose gradient goes to the outputs that it was computed from."""

    @staticmethod
    def forward(
        ctx: Any, pause: Pause, number: Tensor, made: list[Tensor], *handed_out: Tensor
    ) -> Tensor:
        """Return the number; `made` are the outputs inside the model's graph."""
        ctx.pause, ctx.number, ctx.made = pause, number, made
        return number.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Pass the gradient to the outputs, or refuse it."""
        if not _is_determined(ctx.number, ctx.made):
            raise UnsupportedLayerError(
                "The loss uses a number that the model computed inside its forward from more than "
                "the outputs that it returns, so it can't be told whether it is the mean of the "
                "examples' own losses. Compute the loss in the loop, from outputs with the "
                "examples on axis 0 (for models of Hugging Face, per_example_loss(model, outputs, "
                "labels).mean() of dualdp_torch.trainer); or use clipped_grad_sum."
            )
        with ctx.pause():
            grads = partial_gradients([ctx.number], ctx.made, [grad])
        return None, None, None, *grads


#: Function of `pause`, a number of a forward (), the outputs inside the model's graph, and those
#: that the loop gets, of which the result is a function; a number of more than these is refused.
from_outputs: Callable[..., Tensor] = _FromOutputs.apply


def partial_gradients(
    totals: Sequence[Tensor], tensors: Sequence[Tensor], given: Sequence[Tensor]
) -> list[Tensor | None]:
    """Return the gradient of each tensor by its own uses, and not by tensors made from it.

    Where a model returns outputs that are made from each other, each gets the rest by its graph.
    """
    cut: dict[Any, set[int]] = {}
    for tensor in tensors:
        if tensor.grad_fn is not None:
            cut.setdefault(tensor.grad_fn, set()).add(tensor.output_nr)

    def stopped(at: set[int], grads: Any) -> Any:  # after the gradient was taken
        parts = enumerate(grads)
        return tuple([None if g is None else g * 0 if i in at else g for i, g in parts])

    handles = [node.register_prehook(partial(stopped, at)) for node, at in cut.items()]
    try:
        return list(
            torch.autograd.grad(totals, tensors, given, retain_graph=True, allow_unused=True)
        )
    finally:
        for handle in handles:
            handle.remove()


def _is_determined(number: Tensor, made: Sequence[Tensor]) -> bool:
    """True if every path of the number's graph passes an output."""
    cut = {(tensor.grad_fn, tensor.output_nr) for tensor in made}
    seen, stack = set[Any](), [number.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if not node.next_functions:  # a leaf
            return False
        stack += [child for child, i in node.next_functions if (child, i) not in cut]
    return number.grad_fn is not None
