# SPDX-License-Identifier: Apache-2.0
"""Loss that a model computes in its own forward, as `model(**batch).loss` of Hugging Face.

The number is handed out as a function of the outputs that the loop receives: its gradient arrives
there, like that of any loss of the loop, and is checked like one.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

import torch

from dualdp._validate import UnsupportedLayerError
from dualdp_torch.rules.base import Tensor


class _Recorder(Protocol):
    def pause(self) -> AbstractContextManager[None]:
        """Return a context in which backwards are not recorded."""


class _FromOutputs(torch.autograd.Function):
    """Identity of a number whose gradient goes to the outputs that it was computed from."""

    @staticmethod
    def forward(
        ctx: Any, recorder: _Recorder, number: Tensor, made: list[Tensor], *handed_out: Tensor
    ) -> Tensor:
        """Return the number; `made` are the outputs inside the model's graph."""
        ctx.recorder, ctx.number, ctx.made = recorder, number, made
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
        with ctx.recorder.pause():
            grads = partial_gradients([ctx.number], ctx.made, [grad])
        return None, None, None, *grads


def from_outputs(
    recorder: _Recorder, number: Tensor, made: list[Tensor], handed_out: Sequence[Tensor]
) -> Tensor:
    """Return a number of a forward () as a function of the outputs that the loop receives.

    Its backward is refused if the number was computed from more than these.
    """
    return _FromOutputs.apply(recorder, number, made, *handed_out)  # type: ignore[no-any-return]


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
