# SPDX-License-Identifier: Apache-2.0
"""Logical batches of a plan for a loop of the user's own, whose steps the engine only records."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch.utils.data import DataLoader

from dualdp.run_registry import HandedOut

from .data import Draw, PlannedLoader
from .rules.base import Tensor


class Chunk(NamedTuple):
    """Part of a logical batch.

    Attributes:
        args: arguments of the loss after the model: the items of the loader's batch.
        mask: (rows,) bool, False marks padding: an empty draw is one masked row.
        indices: (rows,) row of each example in the data.
    """

    args: tuple[Any, ...]
    mask: Tensor
    indices: list[int]


@dataclass(frozen=True)
class LogicalBatch:
    """Examples that the sampler drew for one step.

    Attributes:
        plan: the plan that drew them.
        step: index of the step.
        chunks: at least one, together the whole draw; each is given to `clipped_grad_sum` with its
            mask, and their sums are added up.
    """

    plan: Any
    step: int
    chunks: tuple[Chunk, ...]


class OwnLoopLoader:
    """Iterates over the logical batches of a plan, from the first step not yet on record.

    One pass is the rest of the planned steps, or one pass of the user's loader for an open-ended
    plan.

    Args:
        loader: the user's.
        plan: `PrivacyPlan`.
        span: () -> steps (start, stop) of the coming pass.

    Attributes:
        handed_out: the batches that were handed out.
    """

    def __init__(
        self, loader: DataLoader[Any], plan: Any, span: Callable[[], tuple[int, int]]
    ) -> None:
        self._plan, self._span = plan, span
        self._planned = PlannedLoader(loader, plan, span, lambda: 0, self._note)
        self._draw: Draw | None = None
        self.handed_out = HandedOut()

    def _note(self, draw: Draw, batch: Any, number: int) -> None:
        """Keep the draw of the batch that comes next."""
        self._draw = draw

    def __len__(self) -> int:
        """Logical batches of the pass that would begin now."""
        start, stop = self._span()
        return max(stop - start, 0)

    def __iter__(self) -> Iterator[LogicalBatch]:
        chunks: list[Chunk] = []
        for batch in self._planned:
            draw = self._draw
            assert draw is not None  # noqa: S101 - told before each batch
            args = tuple(batch) if isinstance(batch, list | tuple) else (batch,)
            chunks.append(Chunk(args, draw.mask, draw.indices))
            if draw.is_last:
                self.handed_out.note(draw.step)
                yield LogicalBatch(self._plan, draw.step, tuple(chunks))
                chunks = []
