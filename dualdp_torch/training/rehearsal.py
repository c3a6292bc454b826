# SPDX-License-Identifier: Apache-2.0
"""Rehearsal: the user's loss on small batches of other rows, before a long run, without release.

A twin follows torch functions; what a loop does in NumPy, in Python or in functions of its own it
can't follow. Here the whole function runs again instead, with one row alone and with the other rows
replaced. The model's outputs are those that it gave for the batch, so that only the code around it
is compared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

from dualdp.exactness import TOLERANCE, power_of_ten
from dualdp_torch.per_sample.random_state import RandomState, on_copies
from dualdp_torch.rules.base import Tensor

_ROWS = 4  # examples that are tried


def rehearse(
    model: nn.Module, step: Callable[[Any], Tensor], batch: Any, reduction: str
) -> list[str]:
    """Return what `step` does to examples that depends on others, as sentences.

    Args:
        model: module that `step` calls, not recorded; its buffers and generators are restored.
        step: function of a batch that returns the scalar loss, without backward.
        batch: at least two examples, on axis 0 of every tensor and array that holds them.
        reduction: "mean" or "sum" of the examples' losses.

    Raises:
        ValueError: fewer than two examples.
    """
    sizes = [len(v) for v in pytree.tree_leaves(batch) if _has_rows(v)]
    n = max(set(sizes), key=sizes.count, default=0)
    if n < 2:
        raise ValueError(f"The batch has {n} examples. Expected at least two, on axis 0.")
    state, outputs = RandomState.of(model), list[Tensor]()  # of the whole batch, in their order
    index, leaves = torch.arange(n), list[Tensor]()  # rows of a run, and its outputs

    def hand_out(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point() or not tensor.dim():
            return tensor
        if len(leaves) == len(outputs):
            outputs.append(tensor.detach())
        kept = outputs[len(leaves)]
        leaves.append((kept[index] if len(kept) == n else kept.clone()).requires_grad_())
        return leaves[-1].clone()

    def gradients(rows: Tensor, at: int) -> Tensor:
        nonlocal index
        index = rows
        leaves.clear()
        with state.repeated():
            loss = step(pytree.tree_map(lambda v: _rows_of(v, rows, n), batch))
            draws.append(state.has_drawn())
        found = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
        return torch.cat([g[at].flatten().double() for g in found if len(g) == len(rows)])

    draws, found, rng = list[bool](), dict[str, str](), torch.Generator().manual_seed(n)
    handle = model.register_forward_hook(
        lambda model, args, out: pytree.tree_map_only(Tensor, hand_out, out)
    )
    try:
        with torch.enable_grad(), on_copies(model):
            for row in torch.randperm(n, generator=rng)[:_ROWS].tolist():
                others = torch.randint(n, (n,), generator=rng)
                others[row] = row
                theirs = gradients(torch.arange(n), row)
                tried = [("among other rows", others, row, 1.0)]
                if not any(draws):  # one row alone would draw other numbers
                    scale = float(n) if reduction == "mean" else 1.0
                    tried.append(("alone", torch.tensor([row]), 0, scale))
                for what, rows, at, scale in tried:
                    reason = _difference(lambda: gradients(rows, at), theirs * scale)  # noqa: B023
                    if reason:
                        found.setdefault(what, f"An example {what} {reason}")
        return list(found.values())
    finally:
        handle.remove()


def _difference(gradient: Callable[[], Tensor], expected: Tensor) -> str:
    """Return how a gradient differs from the expected one, or nothing."""
    try:
        ours = gradient()
    except Exception as error:  # noqa: BLE001 - the user's function
        return f"can't be computed: {(str(error).splitlines() or [type(error).__name__])[0]}"
    gap = float((ours - expected).norm()) if ours.shape == expected.shape else np.inf
    gap /= max(float(expected.norm()), 1e-2)
    if gap <= TOLERANCE["float32"]:
        return ""
    return (
        f"has another gradient of its outputs than in the batch (by {power_of_ten(gap)} of it): "
        "its loss depends on other examples."
    )


def _has_rows(value: Any) -> bool:
    return isinstance(value, Tensor | np.ndarray) and value.ndim > 0


def _rows_of(value: Any, index: Tensor, n: int) -> Any:
    """Return rows of a tensor or array that has n."""
    if not _has_rows(value) or len(value) != n:
        return value
    chosen = index.to(value.device) if isinstance(value, Tensor) else index.numpy()
    return value[chosen]
