# SPDX-License-Identifier: Apache-2.0
"""Physical batches of a logical batch, passes over the data, and the batches handed out."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dualdp import _validate
from dualdp._validate import AccountingError


def num_physical_batches(num_drawn: int, size: int | None) -> int:
    """Return the number of physical batches of a draw; an empty draw has one."""
    return 1 if size is None else max(1, -(-num_drawn // size))


def physical_batches(
    indices: NDArray[np.int64], size: int | None
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.bool_]]]:
    """Split a logical batch into physical batches of one static shape, without truncation.

    Args:
        indices: (k,) examples of the logical batch.
        size: rows of a physical batch; None for one batch of exactly the drawn size.

    Yields:
        `(indices, mask)`, each (size,): padding repeats example 0 and has mask False. An empty
        draw yields one fully masked batch, since it releases noise like every other.

    Guarantees:
        The unmasked rows of all batches are `indices`, in order.  [test_batches_lose_nothing]
    """
    indices = np.asarray(indices, dtype=np.int64)
    if size is not None:
        _validate.integer("physical_batch_size", size, minimum=1)
    rows = max(1, len(indices)) if size is None else size
    for start in range(0, num_physical_batches(len(indices), size) * rows, rows):
        part = indices[start : start + rows]
        padded = np.zeros(rows, np.int64)
        padded[: len(part)] = part
        yield padded, np.arange(rows) < len(part)


def end_of_pass(plan: Any, start: int, end: int | None, until: int = 0) -> int:
    """Return the step after the last one of a pass: one epoch from `start`, or what is left of it.

    An epoch is ceil(num_examples / expected_batch_size) steps, by the size at its first step. `end`
    ends the run, None if it is open-ended; `until` ends a pass that a checkpoint interrupted.
    """
    if end is not None and start >= end:
        return start
    stop: int = start + math.ceil(plan.num_examples / plan.expected_batch_size_at(start))
    limits = [limit for limit in (end, until) if limit is not None and limit > start]
    return int(min([stop, *limits]))


def require_end(end: int | None) -> int:
    """Return the step that ends a run; raise if it is open-ended."""
    if end is None:
        raise AccountingError(
            "remaining() runs to the end of the plan, but num_steps=None has none. Expected "
            "num_steps= or epochs= in the plan, or target_epsilon= with on_budget='stop'; a pass "
            "over the loader itself is one epoch."
        )
    return end


@dataclass
class HandedOut:
    """Batches handed out to a loop of the user: the first step, and the number of steps so far."""

    first: int | None = None
    count: int = 0
    pass_end: int = 0  # step that ends the pass under way, or interrupted by a checkpoint

    def note(self, step: int) -> None:
        """Note the batch of a step."""
        self.first = step if self.first is None else self.first
        self.count = max(self.count, step + 1 - self.first)

    def require_recorded(self, position: int) -> None:
        """Raise if the loop took steps and recorded none; `position` is that of the ledger."""
        if position == self.first and self.count > 1:
            raise AccountingError(
                f"The loader handed out {self.count} batches, but no release is on record since, "
                "so epsilon would not count them. Call engine.record() before each release."
            )
