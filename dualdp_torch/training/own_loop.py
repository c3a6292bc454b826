# SPDX-License-Identifier: Apache-2.0
"""Logical batches of a plan for a loop of the user's own, whose steps the engine only records."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch.utils.data import DataLoader

from dualdp.plan.batches import HandedOut
from dualdp_torch.rules.base import Tensor
from dualdp_torch.training.loader import PlannedLoader


class Chunk(NamedTuple):
    """Part of a logical batch.

    Attributes:
        args: tuple of the loader's batch, the arguments of the loss after the model.
        mask: (rows,) bool, False for padding: an empty draw is one masked row.
        indices: (rows,) row of each example in the data.
    """

    args: tuple[Any, ...]
    mask: Tensor
    indices: list[int]


@dataclass(frozen=True)
class LogicalBatch:
    """Examples that the sampler drew for one step.

    Attributes:
        plan: `PrivacyPlan` that drew them.
        step: index of the step.
        chunks: tuple of at least one `Chunk`, together the whole draw; the logical batch's sum is
            that of `clipped_grad_sum` over all chunks, each with its mask.
    """

    plan: Any
    step: int
    chunks: tuple[Chunk, ...]


class OwnLoopLoader:
    """Iterable over the logical batches of a plan, from the first step not yet on record.

    One pass is the rest of the planned steps, or one pass of the user's loader for an open-ended
    plan.

    Args:
        loader: the user's `DataLoader`.
        plan: `PrivacyPlan`.
        span: function that returns the steps (start, stop) of the coming pass.

    Attributes:
        handed_out: record of the batches that were yielded.
    """

    def __init__(
        self, loader: DataLoader[Any], plan: Any, span: Callable[[], tuple[int, int]]
    ) -> None:
        self._plan, self._span = plan, span
        self._planned = PlannedLoader(loader, plan, None)
        self.handed_out = HandedOut()

    def __len__(self) -> int:
        """Logical batches of a pass that would begin now."""
        start, stop = self._span()
        return max(stop - start, 0)

    def __iter__(self) -> Iterator[LogicalBatch]:
        chunks: list[Chunk] = []
        for draw, batch in self._planned.of_steps(*self._span()):
            args = tuple(batch) if isinstance(batch, list | tuple) else (batch,)
            chunks.append(Chunk(args, draw.mask, draw.indices))
            if draw.is_last:
                self.handed_out.note(draw.step)
                yield LogicalBatch(self._plan, draw.step, tuple(chunks))
                chunks = []
