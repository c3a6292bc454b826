# SPDX-License-Identifier: Apache-2.0
"""What a recorded model returns, as one number per example."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from dualdp import UnsupportedLayerError

from .rules.base import Tensor


def projected(model: nn.Module, args: Any, kwargs: Any, cotangents: Any = None) -> Tensor:
    """(n,) one number per example from the model's outputs: their product with `cotangents`."""
    return combined(float_leaves(model(*args, **kwargs)), cotangents)


def combined(leaves: Sequence[Tensor], cotangents: Sequence[Tensor] | None = None) -> Tensor:
    """(n,) one number per example: the product of its outputs with what they received.

    Args:
        leaves: floating-point outputs of a model.
        cotangents: of the same shapes; None for fixed numbers.

    Raises:
        UnsupportedLayerError: an output does not hold the examples on axis 0, or there is none.
    """
    n = len(leaves[0]) if leaves and leaves[0].dim() else 0
    total = None
    for position, leaf in enumerate(leaves):
        if leaf.dim() == 0 or len(leaf) != n:
            raise UnsupportedLayerError(
                f"The model returned a tensor of shape {tuple(leaf.shape)}. Expected the examples "
                "on axis 0 of every output; use clipped_grad_sum, which sees the losses."
            )
        if cotangents is None:
            weight = torch.arange(leaf[0].numel(), device=leaf.device).cos().view(leaf[0].shape)
            part = (leaf * weight.to(leaf.dtype)).flatten(1) if leaf.dim() > 1 else leaf[:, None]
        else:
            part = (leaf * cotangents[position]).reshape(n, -1)
        total = part.sum(1) if total is None else total + part.sum(1)
    if total is None:
        raise UnsupportedLayerError("The model returned no tensor. Expected its outputs.")
    return total


def float_leaves(outputs: Any) -> list[Tensor]:
    """The floating-point tensors of the outputs."""
    return [
        leaf
        for leaf in pytree.tree_leaves(outputs)
        if torch.is_tensor(leaf) and leaf.is_floating_point()
    ]


class _HandOut(torch.autograd.Function):
    """Hands an output on under another name, at which its gradient is heard.

    The gradient that arrives is that of the loop alone: what other outputs, made from this one,
    receive is added further below. The same numbers are no view, so that they may be changed in
    place as if the model had returned them.
    """

    @staticmethod
    def forward(ctx: Any, heard: Callable[[Tensor], None], out: Tensor) -> Tensor:
        """The same tensor, as another one."""
        ctx.heard = heard
        ctx.set_materialize_grads(False)
        return out.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[None, Tensor | None]:
        """Tell of the gradient, and hand it on."""
        if grad is not None:
            ctx.heard(grad)
        return None, grad


hand_out: Callable[[Callable[[Tensor], None], Tensor], Tensor] = _HandOut.apply


class WholeStep(nn.Module):
    """A module whose forward computes the loss, too, from outputs that nobody else sees."""

    def loss(self, *args: Any, **kwargs: Any) -> Tensor:
        """The scalar loss of a forward on these arguments, for a check."""
        raise NotImplementedError


class Silent:
    """What a copy of a recorded model has in the recorder's place: it is not recorded.

    A deep copy binds the recorder's own functions to it, a pickle its methods of the same names.
    """

    _paused, _mode = True, None

    def _enter(self, *_: Any) -> None:
        """The copy is entered."""

    def _leave(self, *_: Any) -> None:
        """The copy is left."""
