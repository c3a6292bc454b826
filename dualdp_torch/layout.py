# SPDX-License-Identifier: Apache-2.0
"""Where the examples lie in a tensor inside the model: proved by gradients, not by sizes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from .rules.base import Tensor


@dataclass(frozen=True)
class Layout:
    """The examples are axis `axis`, or are folded into axis 0 with `fold` outside or inside.

    Attributes:
        axis: axis of the examples, 0 when folded.
        fold: None, "outer" for rows (n, t) or "inner" for rows (t, n) folded into axis 0, "single"
            where there is only one example, all of it.
    """

    axis: int = 0
    fold: str | None = None

    def batch_first(self, tensor: Tensor, n: int) -> Tensor:
        """A view or copy with the examples, and nothing else, on axis 0."""
        if self.fold == "single":
            return tensor.unsqueeze(0)
        if self.fold == "outer":
            return tensor.reshape(n, -1, *tensor.shape[1:])
        if self.fold == "inner":
            return tensor.reshape(-1, n, *tensor.shape[1:]).transpose(0, 1)
        return tensor.movedim(self.axis, 0) if self.axis else tensor

    def fits(self, shape: torch.Size, n: int) -> bool:
        """Whether a tensor of this shape can hold n examples this way."""
        if self.fold:
            return len(shape) > 0 and shape[0] > n and shape[0] % n == 0
        return len(shape) > self.axis and shape[self.axis] == n


def of_single(shape: torch.Size, axes: Iterable[int], rows_are_free: bool) -> Layout | None:
    """Where the one example of a batch of one lies: there is nothing to be proved."""
    if rows_are_free:
        return Layout(0, "single")
    return next((Layout(axis) for axis in axes if Layout(axis).fits(shape, 1)), None)


def candidates(shape: torch.Size, n: int, axes: Iterable[int], rows_are_free: bool) -> list[Layout]:
    """Every layout that the shape allows; the gradients decide."""
    found = [Layout(axis) for axis in axes]
    if rows_are_free:
        found += [Layout(0, "outer"), Layout(0, "inner")]
    return [layout for layout in found if layout.fits(shape, n)]


def belongs_to(grad: Tensor, layout: Layout, n: int, example: int) -> bool:
    """Whether a gradient vanishes outside one example's rows."""
    others = torch.arange(n, device=grad.device) != example
    return not bool(layout.batch_first(grad, n)[others].any())
