# SPDX-License-Identifier: Apache-2.0
"""Whether a loss is the mean or the sum that was declared, as far as its graph shows it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch

from .rules.base import Tensor

REDUCTIONS = ("mean", "sum")
_SAVED = {1: "mean", 2: "sum"}  # torch's numbers in `_saved_reduction`
_FULL = {"MeanBackward0": "mean", "SumBackward0": "sum"}
#: Nodes between a scalar and its reduction that leave the kind of reduction as it is.
_THROUGH = {"AddBackward0", "SubBackward0", "NegBackward0", "ViewBackward0", "SqueezeBackward0"}


def check_reduction(loss: Tensor, declared: str) -> None:
    """Refuse a loss whose graph contradicts the declaration, and weighted means.

    Args:
        loss: the scalar that backward is called on.
        declared: "mean" or "sum".

    Raises:
        ValueError: the loss is no scalar, is reduced otherwise, or its weights depend on the batch.
    """
    if loss.numel() != 1:
        raise ValueError(
            f"backward was called on a loss of shape {tuple(loss.shape)}. Expected a scalar, the "
            f"{declared} over the examples."
        )
    for node in _reductions(loss.grad_fn):
        kind = _SAVED.get(getattr(node, "_saved_reduction", 0)) or _FULL.get(node.name())
        if kind is not None and kind != declared:
            raise ValueError(
                f"loss_reduction={declared!r}, but the loss is a {kind} ({node.name()}). Declare "
                f"loss_reduction={kind!r}: the clipping bound depends on it."
            )
        if kind == "mean" and _is_weighted(node):
            raise ValueError(
                "The loss is a weighted mean: class weights or ignored targets make one example's "
                'weight depend on the others. Use reduction="sum", or average each example alone.'
            )


def current_loss() -> Tensor | None:
    """The loss whose backward is running, seen from inside one of its hooks.

    Autograd does not tell a hook where its backward began, but the call stands on the stack. None
    where hooks run in a thread of their own, as on a GPU.
    """
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code is torch.Tensor.backward.__code__:
            loss: Tensor = frame.f_locals["self"]
            return loss
        if frame.f_code is torch.autograd.backward.__code__:
            tensors = frame.f_locals["tensors"]
            return tensors if torch.is_tensor(tensors) else tensors[0]
        frame = frame.f_back
    return None


def _reductions(node: Any) -> Iterator[Any]:
    """The first reductions below a scalar."""
    seen, stack = set(), [node]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() in _FULL or getattr(node, "_saved_reduction", 0) in _SAVED:
            yield node
        elif node.name() in _THROUGH:
            stack += [child for child, _ in node.next_functions]


def _is_weighted(node: Any) -> bool:
    """Whether a mean divides by something else than the number of examples."""
    if not node.name().startswith("NllLoss"):
        return False
    try:
        if node._saved_weight is not None:
            return True
        return bool(torch.any(node._saved_target == node._saved_ignore_index))
    except RuntimeError:  # what it saved is gone, as inside backward
        return False
