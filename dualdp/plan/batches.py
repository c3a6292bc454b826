# SPDX-License-Identifier: Apache-2.0
"""Draws of logical batches, their physical batches, passes over the data, and what was handed out.

bits = SegmentBits(plan.seed)                      # one object for each segment of a run
for step in range(plan.num_steps):
    for indices, mask in physical_batches(drawn_indices(plan, bits, step), 64):
        ...
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from dualdp import _validate
from dualdp._validate import AccountingError
from dualdp.plan.accounting import Cost, num_batches
from dualdp.plan.samplers import RESOLUTION, SAMPLERS
from dualdp.plan.units import DrawnRows, UserRows, rows_with_least_words
from dualdp.randomness import SegmentBits, fold_in, grid_noise, threefry

_AHEAD = 4  # most batches without a release when epsilon is asked for: loops may prefetch


def drawn_indices(plan: Cost, bits: SegmentBits, step: int) -> NDArray[np.int64]:
    """Draw the logical batch of a step: (k,) increasing int64 indices of examples, or of users.

    Args:
        plan: settings of the run.
        bits: of the run's segment; a new segment draws its passes, classes and bins anew.
        step: int, step of the plan.

    Guarantees:
        A pure function of (settings, bits, step), the same on every stack and machine.
            [test_seeded_batches]
    """

    def words(at: int, stream: int) -> NDArray[np.uint64]:
        if plan.noise == "secure":
            drawn = grid_noise.words(bits.bits("sampling", at), plan.num_examples, stream=stream)
        else:
            key = bits.key("sampling", at)
            key = fold_in(key, stream) if stream else key
            drawn = threefry.bits(key, plan.num_examples, width=64)
        return drawn >> np.uint64(64 - RESOLUTION)

    return SAMPLERS[plan.sampler](plan, step, words).astype(np.int64, copy=False)


def drawn_rows(
    plan: Cost,
    bits: SegmentBits,
    step: int,
    units: NDArray[np.int64],
    users: UserRows,
    most: int,
) -> DrawnRows:
    """Draw at most K rows of each of some users, for one step.

    Args:
        plan: settings of the run.
        bits: of the run's segment.
        step: int, step of the plan.
        units: (units,) int64, users of the step, or some of them.
        users: rows of each user.
        most: int, K.

    Guarantees:
        All subsets of min(K, rows) rows of a user are equally likely, independently of other users
            and steps.  [test_every_subset_is_as_likely]
        Pure function of (bits, step, user), the same for every split of a batch, on every stack
            and machine.  [test_rows_of_a_user_do_not_depend_on_the_split, test_seeded_batches]
    """
    rows, owner = users.of(units)
    if plan.noise == "secure":
        count = int(rows.max(initial=-1)) + 1
        words = grid_noise.words(bits.bits("rows", step), count)[rows]
    else:
        words = threefry.bits_at(bits.key("rows", step), rows)
    return rows_with_least_words(rows, owner, words, len(units), most)


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


def end_of_pass(plan: Cost, start: int, end: int | None, until: int = 0) -> int:
    """Return the step after the last one of a pass: one epoch from `start`, or what is left of it.

    An epoch is ceil(num_examples / expected_batch_size) steps, by the size at its first step. `end`
    ends the run, None if it is open-ended; `until` ends a pass that a checkpoint interrupted.
    """
    if end is not None and start >= end:
        return start
    stop = start + num_batches(plan.num_examples, plan.expected_batch_size_at(start))
    return min([stop, *(limit for limit in (end, until) if limit is not None and limit > start)])


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
    """Batches handed out to a loop of the user, which records its releases itself.

    Each release needs a batch of its own, drawn for its step, and each batch that is used a release
    on record. A loop may draw some batches ahead, and record a release before its batch is drawn.
    """

    begun: int | None = None  # position when the loop began; None if the engine takes the steps
    pass_end: int = 0  # step that ends the pass under way, or interrupted by a checkpoint
    _steps: set[int] = field(default_factory=set)  # of the batches, without those long on record
    _first: int | None = None  # step of the first batch
    _count: int = 0  # batches handed out, one for a step
    _owed: int | None = None  # step on record whose batch is still to be drawn

    def note(self, step: int) -> None:
        """Note the batch of a step."""
        if self.begun is None:
            return
        self._first = step if self._first is None else self._first
        self._count += step not in self._steps
        self._steps.add(step)

    def record(self, position: int) -> None:
        """Note the release of one step; raise if the batch of the one before was never drawn."""
        self._steps = {step for step in self._steps if step >= position - 1}
        if self._owed is not None and self._owed not in self._steps:
            raise AccountingError(
                f"The release of step {self._owed} is on record and its batch was never drawn, so "
                "an earlier batch was used again: epsilon holds for batches that are drawn anew "
                "for each release. Take a batch of the loader, or loader.remaining(), for each."
            )
        drawn_ahead = self._first is None or position in self._steps
        self._owed = None if drawn_ahead else position

    def require_recorded(self, position: int) -> None:
        """Raise if batches were handed out whose releases are not on record."""
        ahead = sum(step >= position for step in self._steps)
        if ahead > _AHEAD or (ahead > 1 and position == self._first):
            raise AccountingError(
                f"The loader handed out {ahead} batches for which no release is on record, so "
                "epsilon would not count them. Call engine.record() once for each batch, before "
                "its release, also where a batch is empty or its sum is added to that of others. "
                "A loop that draws batches ahead asks after its last step; for the releases on "
                "record alone, engine.ledger.get_epsilon(delta=...)."
            )

    def warn_of_undrawn(self, plan: Cost, position: int, num_without_noise: int) -> None:
        """Warn of releases on record whose batches or whose noise were not drawn for them."""
        if num_without_noise > 1:  # one may be about to get its noise
            warnings.warn(
                f"{num_without_noise} releases are on record whose noise was never asked for: this "
                "epsilon does not hold for sums that were used without it. Expected noisy_mean, or "
                "add_noise(plan), for the sum of each release.",
                stacklevel=3,
            )
        released, drawn = position - (self.begun or 0), self._count
        by_itself = self._first is None and plan.seed is not None  # from plan.batch_indices
        if released > drawn + 1 and not by_itself:
            warnings.warn(
                f"{released} releases are on record and {drawn} batches were drawn for them: this "
                f"epsilon is that of sampler={plan.sampler!r}, and holds for no batches "
                "that are drawn otherwise or used again. Expected the loader's batches for every "
                "step that is run.",
                stacklevel=3,
            )
