# SPDX-License-Identifier: Apache-2.0
"""Logical batches of a plan, cut into masked chunks of one static shape."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from dualdp.batches import physical_batches
from dualdp_jax.call import split_batch


class Chunk(NamedTuple):
    """Part of a logical batch.

    Attributes:
        args: arguments of the loss after the parameters, every array leaf (rows, ...).
        mask: (rows,) bool, False marks padding.
        indices: (rows,) index of each example in the data; 0 for padding.
    """

    args: tuple[Any, ...]
    mask: Any
    indices: Any


@dataclass(frozen=True)
class LogicalBatch:
    """What the sampler drew for one step.

    Attributes:
        plan: the plan that drew it.
        step: index of the step.
        chunks: at least one, together the whole draw; an empty draw is one fully masked chunk.
    """

    plan: Any
    step: int
    chunks: tuple[Chunk, ...]


class Loader:
    """Iterates over the logical batches of a plan, from the first step not yet released.

    One pass is the rest of the planned steps, or one epoch of an open-ended plan. A pass that is
    left early and started again draws the batch that was not used once more.

    Args:
        data: tuple of arrays or pytrees of arrays, examples on axis 0.
        plan: `PrivacyPlan`.
        next_step: function to the number of steps released so far.

    Guarantees:
        Every drawn example is in exactly one chunk, unmasked.  [test_loader_cuts_no_draw]
    """

    def __init__(self, data: tuple[Any, ...], plan: Any, next_step: Callable[[], int]) -> None:
        arrays, num_examples, self.rebuild = split_batch(data)
        if num_examples != plan.num_examples:
            raise ValueError(
                f"The data has {num_examples} examples but the plan has num_examples="
                f"{plan.num_examples}. Both must be the same."
            )
        self._arrays, self._plan, self._next_step = arrays, plan, next_step
        self.physical_batch_size = plan.physical_batch_size or default_rows(plan)

    def __len__(self) -> int:
        """Batches of the pass that would begin now."""
        if self._plan.num_steps is None:
            size = self._plan.expected_batch_size_at(0)
            return math.ceil(self._plan.num_examples / size)
        return max(self._plan.num_steps - self._next_step(), 0)

    def __iter__(self) -> Iterator[LogicalBatch]:
        start = self._next_step()
        for step in range(start, start + len(self)):
            yield self.batch(step)

    def batch(self, step: int) -> LogicalBatch:
        """The logical batch of a step: a pure function of the plan's key and the step."""
        pieces = physical_batches(self._plan.batch_indices(step), self.physical_batch_size)
        chunks = tuple(Chunk(self._rows(index), mask, index) for index, mask in pieces)
        return LogicalBatch(self._plan, step, chunks)

    def _rows(self, indices: Any) -> tuple[Any, ...]:
        """The examples of some rows, as arguments of the loss."""
        return self.rebuild([leaf[indices] for leaf in self._arrays])


def default_rows(plan: Any) -> int:
    """Rows of a chunk when the plan leaves them open: nearly every Poisson draw fits in one.

    Three standard deviations above the mean draw, so that about one draw in a thousand takes a
    second chunk and one compilation serves all.
    """
    steps = np.arange(max(plan.num_steps or 1, 1))
    expected = float(np.max(plan.expected_batch_size.at(steps)))
    return max(1, min(plan.num_examples, math.ceil(expected + 3 * math.sqrt(expected))))


def examples_of(data: Any) -> tuple[Any, ...]:
    """The data as arguments of the loss: a tuple is several, anything else is one."""
    return data if isinstance(data, tuple) and not hasattr(data, "_fields") else (data,)
