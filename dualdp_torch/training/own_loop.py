# SPDX-License-Identifier: Apache-2.0
"""Logical batches of a plan for a loop of the user's own, whose steps the engine only records."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DataLoader

from dualdp.plan.batches import HandedOut
from dualdp.plan.plan import PrivacyPlan
from dualdp.plan.units import UserRows
from dualdp.randomness import SegmentBits
from dualdp_torch.per_sample.units import Mark, mark
from dualdp_torch.rules.base import Tensor
from dualdp_torch.training.loader import Draw, PlannedLoader
from dualdp_torch.training.views import Views


class Chunk(NamedTuple):
    """Part of a logical batch.

    Attributes:
        args: tuple of the loader's batch, the arguments of the loss after the model; with views=K,
            or users and the plan's rows_per_unit=K, it holds K rows of each example, for
            `clipped_grad_sum(..., rows_per_unit=K)`.
        mask: (examples,) bool, False for padding: an empty draw is one masked example.
        indices: (examples,) row of each example in the data, or user.
        row_weights: (examples K,) float64 weight of each row, with users, for
            `clipped_grad_sum(..., rows_per_unit=K, row_weights=...)`; None without.
    """

    args: tuple[Any, ...]
    mask: Tensor
    indices: list[int]
    row_weights: Tensor | None = None


@dataclass(frozen=True)
class LogicalBatch:
    """Examples that the sampler drew for one step.

    Attributes:
        plan: `PrivacyPlan` that drew them.
        step: index of the step.
        chunks: tuple of at least one `Chunk`, together the whole draw; the logical batch's sum is
            that of `clipped_grad_sum` over all chunks, each with its mask.
    """

    plan: PrivacyPlan
    step: int
    chunks: tuple[Chunk, ...]


class OwnLoopLoader:
    """Iterable over the logical batches of a plan, from the first step not yet on record.

    One pass is an epoch, or what is left of the plan; `remaining` is the rest of the plan.

    Attributes:
        handed_out: record of the batches that were yielded.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        plan: PrivacyPlan,
        bits: SegmentBits,
        span: Callable[[bool], tuple[int, int]],
        views: Views,
        users: UserRows | None = None,
    ) -> None:
        self._plan, self._span, self._is_whole = plan, span, False
        self._planned = PlannedLoader(loader, plan, bits, None, views=views, users=users)
        self._rows_per_unit = views.count * (plan.rows_per_unit or 1)
        is_constant = plan.is_constant("max_grad_norm")
        self._bound = plan.max_grad_norm_at(0) if is_constant else None
        self.handed_out = HandedOut()

    def __len__(self) -> int:
        """Logical batches of a pass that would begin now."""
        start, stop = self._span(self._is_whole)
        return max(stop - start, 0)

    def remaining(self) -> OwnLoopLoader:
        """Return the same loader with passes that run to the end of the plan."""
        other = copy.copy(self)
        other._is_whole = True
        return other

    def indices(self) -> Iterator[tuple[NDArray[np.int64], NDArray[np.bool_]]]:
        """Yield the draws of a pass for readers of your own: (indices, mask) of each step.

        Both are (examples,), of rows of the data or of users; the one padded example of an empty
        draw has index 0 and mask False.
        """
        parts = list[Draw]()
        for draw in self._planned.draws_of_steps(*self._coming()):
            parts.append(draw)
            if draw.is_last:
                self.handed_out.note(draw.step)
                indices = [np.array(part.indices, np.int64) for part in parts]
                masks = [part.mask.numpy() for part in parts]
                yield np.concatenate(indices), np.concatenate(masks)
                parts = []

    def _coming(self) -> tuple[int, int]:
        """Steps of the coming pass; none where the rest of the plan is empty."""
        start, stop = self._span(self._is_whole)
        if start >= stop and not self._is_whole:
            self._planned.of_steps(start, stop)  # raises, unless the plan stops silently
        return start, stop

    def __iter__(self) -> Iterator[LogicalBatch]:
        span, chunks = self._coming(), list[Chunk]()
        if span[0] >= span[1]:
            return
        for draw, batch in self._planned.of_steps(*span):
            args = tuple(batch) if isinstance(batch, list | tuple) else (batch,)
            mask = None if bool(draw.mask.all()) else draw.mask
            has_weights = draw.row_weights is not None
            mark(args, Mark(self._rows_per_unit, has_weights, mask, self._bound))
            chunks.append(Chunk(args, draw.mask, draw.indices, draw.row_weights))
            if draw.is_last:
                self.handed_out.note(draw.step)
                yield LogicalBatch(self._plan, draw.step, tuple(chunks))
                chunks = []
