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
from dualdp_torch.per_sample.random_state import RandomState
from dualdp_torch.rules.base import Tensor

_ROWS = 4  # examples that are tried


class _Outputs:
    """Forward hook that keeps a model's outputs on a batch, then hands out those of some rows."""

    def __init__(self, n: int) -> None:
        self._n, self._kept = n, list[Tensor]()
        self.index: Tensor | None = None  # rows; None for the first run, on the whole batch
        self.leaves, self._at = list[Tensor](), 0

    def begin(self, index: Tensor | None) -> None:
        """Begin a run on these rows."""
        self.index, self.leaves, self._at = index, [], 0

    def __call__(self, model: nn.Module, args: Any, out: Any) -> Any:
        """Replace the floating-point tensors of an output by leaves."""
        return pytree.tree_map_only(Tensor, self._leaf, out)

    def _leaf(self, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point() or not tensor.dim():
            return tensor
        if self.index is None:
            self._kept.append(tensor.detach())
        kept = self._kept[self._at]
        self._at += 1
        has_rows = self.index is not None and len(kept) == self._n
        leaf = (kept[self.index] if has_rows else kept.clone()).requires_grad_()
        self.leaves.append(leaf)
        return leaf.clone()


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
    outputs, before = _Outputs(n), RandomState.of(model)
    buffers = {name: b.detach().clone() for name, b in model.named_buffers()}

    def gradients(index: Tensor | None, at: int) -> Tensor:
        outputs.begin(index)
        before.put()
        chosen = torch.arange(n) if index is None else index
        loss = step(pytree.tree_map(lambda v: _rows_of(v, chosen, n), batch))
        found = torch.autograd.grad(loss, outputs.leaves, allow_unused=True, materialize_grads=True)
        return torch.cat([g[at].flatten().double() for g in found if len(g) == len(chosen)])

    handle = model.register_forward_hook(outputs)
    try:
        with torch.enable_grad():
            gradients(None, 0)
            draws = before.has_drawn()  # one row alone would draw other numbers
            return _compared(gradients, n, reduction, draws)
    finally:
        handle.remove()
        before.put()
        for name, b in model.named_buffers():
            b.data.copy_(buffers[name])


def _compared(
    gradients: Callable[[Tensor | None, int], Tensor], n: int, reduction: str, draws: bool
) -> list[str]:
    """Compare the gradients of some rows' outputs, alone and among others, with the batch's."""
    found = dict[str, str]()
    rng = torch.Generator().manual_seed(n)
    for row in torch.randperm(n, generator=rng)[:_ROWS].tolist():
        others = torch.randint(n, (n,), generator=rng)
        others[row] = row
        scale = float(n) if reduction == "mean" else 1.0
        tried = [("among other rows", others, row, 1.0)]
        tried += [] if draws else [("alone", torch.tensor([row]), 0, scale)]
        theirs = gradients(None, row)
        for what, index, at, factor in tried:
            try:
                ours = gradients(index, at)
            except Exception as error:  # noqa: BLE001 - the user's function
                reason = (str(error).splitlines() or [type(error).__name__])[0]
                found.setdefault(what, f"An example {what} can't be computed: {reason}")
                continue
            gap = float((ours - theirs * factor).norm()) if ours.shape == theirs.shape else np.inf
            gap /= max(float(theirs.norm()) * factor, 1e-2)
            if gap > TOLERANCE["float32"]:
                found[what] = (
                    f"An example {what} has another gradient of its outputs than in the batch (by "
                    f"{power_of_ten(gap)} of it): its loss depends on other examples."
                )
    return list(found.values())


def _has_rows(value: Any) -> bool:
    return isinstance(value, Tensor | np.ndarray) and value.ndim > 0


def _rows_of(value: Any, index: Tensor, n: int) -> Any:
    """Return rows of a tensor or array that has n."""
    if not _has_rows(value) or len(value) != n:
        return value
    chosen = index.to(value.device) if isinstance(value, Tensor) else index.numpy()
    return value[chosen]
