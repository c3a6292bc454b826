# SPDX-License-Identifier: Apache-2.0
"""Position of the examples in a tensor inside the model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class BatchAxis:
    """Batch axis of a tensor: axis `axis`, or with the examples folded into it.

    `fold` is "outer" for rows (n, t) or "inner" for rows (t, n, rows_per_unit) folded into the
    axis, and "single" for a batch of one example, which is the whole tensor.
    """

    axis: int = 0
    fold: str | None = None
    rows_per_unit: int = 1

    def batch_first(self, tensor: Any, n: int) -> Any:
        """Return a view or copy with the examples, and nothing else, on axis 0; of each in a tuple.

        None is returned as it is.
        """
        if tensor is None or (not self.axis and self.fold is None):
            return tensor
        if isinstance(tensor, tuple):
            return tuple(self.batch_first(t, n) for t in tensor)
        if self.fold == "single":
            return tensor.unsqueeze(0)
        first = tensor.movedim(self.axis, 0) if self.axis else tensor
        if self.fold == "outer":
            return first.reshape(n, -1, *first.shape[1:])
        if self.fold == "inner":
            units = first.reshape(-1, n, self.rows_per_unit, *first.shape[1:])
            return units.transpose(0, 1).flatten(1, 2)
        return first

    def fits(self, shape: torch.Size, n: int) -> bool:
        """True if a tensor of this shape can hold n examples on this batch axis."""
        size = shape[self.axis] if len(shape) > self.axis else 0
        return size > 0 and size % self._least(n) == 0 if self.fold else size == n

    def is_candidate(self, shape: torch.Size, n: int) -> bool:
        """True if it `fits`, and no other batch axis says the same."""
        return self.fits(shape, n) and not (self.fold and shape[self.axis] <= self._least(n))

    def _least(self, n: int) -> int:
        """Rows of a folded axis that hold one position of each row of n examples."""
        return n * (self.rows_per_unit if self.fold == "inner" else 1)


def of_single(
    shape: torch.Size, axes: Iterable[int], rows_are_free: bool, rows_per_unit: int
) -> BatchAxis | None:
    """Return the batch axis of a batch of one example, where nothing needs an analysis."""
    if rows_are_free:
        return BatchAxis(0, "single")
    return next(iter(candidates(shape, 1, axes, False, rows_per_unit)), None)


def candidates(
    shape: torch.Size, n: int, axes: Iterable[int], rows_are_free: bool, rows_per_unit: int
) -> list[BatchAxis]:
    """Return every batch axis that the shape allows; the values decide between them."""
    axes = list(axes)
    found = [BatchAxis(axis) for axis in axes]
    if rows_are_free:
        found += [BatchAxis(0, "outer"), BatchAxis(0, "inner", rows_per_unit)]
    if rows_per_unit > 1:  # axes that hold the rows of all units
        rows = [axis for axis in axes if shape[axis] == n * rows_per_unit]
        found += [BatchAxis(axis, "outer") for axis in rows if axis or not rows_are_free]
    return [batch_axis for batch_axis in found if batch_axis.is_candidate(shape, n)]
