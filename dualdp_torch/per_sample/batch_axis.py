# SPDX-License-Identifier: Apache-2.0
"""Position of the examples in a tensor inside the model, found by gradients, not by sizes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from dualdp_torch.rules.base import Tensor


@dataclass(frozen=True)
class BatchAxis:
    """Batch axis of a tensor: axis `axis`, or axis 0 with the examples folded into it.

    `fold` is "outer" for rows (n, t) or "inner" for rows (t, n) folded into axis 0, and "single"
    for a batch of one example, which is the whole tensor.
    """

    axis: int = 0
    fold: str | None = None

    def batch_first(self, tensor: Tensor, n: int) -> Tensor:
        """Return a view or copy with the examples, and nothing else, on axis 0."""
        if self.fold == "single":
            return tensor.unsqueeze(0)
        if self.fold == "outer":
            return tensor.reshape(n, -1, *tensor.shape[1:])
        if self.fold == "inner":
            return tensor.reshape(-1, n, *tensor.shape[1:]).transpose(0, 1)
        return tensor.movedim(self.axis, 0) if self.axis else tensor

    def fits(self, shape: torch.Size, n: int) -> bool:
        """True if a tensor of this shape can hold n examples on this batch axis."""
        if self.fold:
            return len(shape) > 0 and shape[0] > n and shape[0] % n == 0
        return len(shape) > self.axis and shape[self.axis] == n


def of_single(shape: torch.Size, axes: Iterable[int], rows_are_free: bool) -> BatchAxis | None:
    """Return the batch axis of a batch of one example, where nothing needs an analysis."""
    if rows_are_free:
        return BatchAxis(0, "single")
    return next((BatchAxis(axis) for axis in axes if BatchAxis(axis).fits(shape, 1)), None)


def candidates(
    shape: torch.Size, n: int, axes: Iterable[int], rows_are_free: bool
) -> list[BatchAxis]:
    """Return every batch axis that the shape allows; the gradients decide between them."""
    found = [BatchAxis(axis) for axis in axes]
    if rows_are_free:
        found += [BatchAxis(0, "outer"), BatchAxis(0, "inner")]
    return [batch_axis for batch_axis in found if batch_axis.fits(shape, n)]


def belongs_to(grad: Tensor, batch_axis: BatchAxis, n: int, example: int) -> bool:
    """True if a gradient vanishes outside one example's rows."""
    others = torch.arange(n, device=grad.device) != example
    return not bool(batch_axis.batch_first(grad, n)[others].any())
