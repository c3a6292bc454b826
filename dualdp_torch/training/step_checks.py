# SPDX-License-Identifier: Apache-2.0
"""Spot checks in the user's own loop: choice of the steps that are checked, and the checks."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from dualdp import exactness
from dualdp.exactness import SpotCheck
from dualdp.ledger.ledger import Ledger
from dualdp.randomness import SegmentBits
from dualdp_torch.per_sample.analysis_cache import AnalysisCache
from dualdp_torch.per_sample.checks.identity import Numbers
from dualdp_torch.per_sample.clip import Terms
from dualdp_torch.per_sample.recorder import Recorder
from dualdp_torch.training.compiled_step import YieldedBatch
from dualdp_torch.training.loader import Draw

_log = logging.getLogger("dualdp")
_SHARDED = (
    "The model lies in pieces over several processes (fully_shard), none of which can run an "
    "example alone: the loop's loss is checked, the gradients are not."
)
_ROWS = 4  # examples that are led through the loop alone on its first batches, then two
_FIRST = 2  # batches of new code that are led
_OFTEN = 2.5  # steps with twins for each step whose gradients are checked: 1 in 20 by default


class StepChecks:
    """Spot checks of the physical batches of a run.

    A share `rate` of the steps is checked, 0 is off; and the first batch for each `purpose`, that
    is (method, clipping).

    Attributes:
        due: `SpotCheck` drawn for the current batch, or None.
        has_passed: bool, True if gradients of the current step were checked and agree.
    """

    def __init__(
        self,
        recorder: Recorder,
        ledger: Ledger,
        bits: SegmentBits,
        rate: float,
        reduction: str,
        purpose: tuple[str, ...],
    ) -> None:
        self._recorder, self._ledger, self._bits, self._rate = recorder, ledger, bits, rate
        self._purpose = ("loop", *purpose)
        self._reduction, self._kinds, self._left = reduction, set[Any](), _FIRST
        self._noted = set[str]()
        self._draw: Draw | None = None
        self.due: SpotCheck | None = None
        self.has_passed = False

    def _drawn(self, step: int, is_first: bool = False) -> SpotCheck | None:
        """Check drawn for a step, or None; always one if `is_first`."""
        return exactness.check_at(self._bits, step, self._rate, is_first=is_first)

    def is_step_checked(self, step: int) -> bool:
        """True if a step is checked; the same on all processes."""
        return bool(self._rate) and (step == 0 or self._drawn(step) is not None)

    def begin(self, draw: Draw, batch: Any) -> None:
        """Draw the check of a batch and start to record the loop, before the batch is yielded."""
        self.due, self._draw = None, draw
        if not self._rate:
            return
        due = self._drawn(draw.step)
        if self._recorder.shards is not None:
            self._note(_SHARDED)
        elif due is not None and draw.chunk == due.draw(draw.num_chunks, 3):
            self.due = due
        if self._recorder.computes_loss:  # what its loop hands over is what the loader yielded
            self._recorder.require_inputs = YieldedBatch(batch).require_in
        self._begin_twins(draw, batch)

    def end(self) -> None:
        """Clear the current batch, which was stepped on or abandoned."""
        self.due = self._draw = None
        self._recorder.twins.clear()

    def leave_loader(self) -> None:
        """Stop at the end of the loader's pass; a batch that it yielded may still be stepped on."""
        self._recorder.twins.leave_loader()

    def _note(self, text: str) -> None:
        """Record and log once what no check could look at."""
        if text not in self._noted:
            self._noted.add(text)
            self._ledger.note(check_impossible=text)
            _log.warning("Not checked, and noted in the ledger: %s", text)

    def _begin_twins(self, draw: Draw, batch: Any) -> None:
        """Lead twins through the loop: on batches of new code, and on steps drawn by number."""
        is_first, period = self._left > 0, max(1, round(1 / min(1.0, _OFTEN * self._rate)))
        drawn = np.random.default_rng([draw.step // period, period])
        is_drawn = draw.step % period == drawn.integers(period)
        is_drawn &= self._rate == 1 or draw.chunk == drawn.integers(draw.num_chunks)
        twins, mask = self._recorder.twins, draw.mask.numpy()
        apart = self._recorder.rows_per_unit // twins.k  # losses of each example
        if not (is_first or is_drawn) or len(mask) * apart < 2 or not mask.any():
            return
        drawn = np.random.default_rng([draw.step, draw.chunk])
        rows = drawn.permutation(np.flatnonzero(mask.repeat(apart * twins.k)))
        count = _ROWS if is_first else 2
        self._left -= is_first
        num_rows = len(mask) * self._recorder.rows_per_unit
        twins.begin(batch, num_rows, rows[:count].tolist(), draw.step, 2 if is_first else 1)

    def criterion(self, draw: Draw) -> None:
        """Compare the loop with its twins, if it had some.

        Raises:
            ValueError: the loop's first batches mix examples, or are reduced otherwise than
                declared.
            ExactnessError: a loop that was found right before does.
        """
        recorder, twins = self._recorder, self._recorder.twins
        if twins.is_on:
            problem = twins.verdict(recorder.cotangents, self._reduction)
            for text in twins.notes:
                self._note(text)
            if problem is not None:
                raise problem.raised(twins.has_passed)
            self.has_passed |= recorder.method == "loop"
        kind = tuple([None if g is None else (g.dim(), g.dtype) for g in recorder.cotangents])
        if kind not in self._kinds:  # other code, whose next batches are led
            self._kinds.add(kind)
            self._left = _FIRST - twins.is_on
        if self.due is None:
            recorder.free_outputs()

    def _may_check(self) -> bool:
        """True if the current batch holds an example that counts."""
        draw = self._draw
        if draw is None or not self._rate or self._recorder.shards is not None:
            return False
        return bool(draw.mask.numpy().any())

    def may_be_due(self, known: AnalysisCache, several: bool = False) -> bool:
        """True if a forward that begins may have to be run again, alone or as one of several."""
        purpose = (*self._purpose, "several") if several else self._purpose
        is_new = purpose not in known.checked or known.by_data
        return self.due is not None or (self._may_check() and is_new)

    def is_due(self) -> bool:
        """True if the gradients of the current batch have to be checked.

        They are where the method and clipping were never checked on the model for such batches. A
        second forward may come where the first is not kept to be run again: the next batch is
        checked then.
        """
        recorder = self._recorder
        if self.due is not None or recorder.start is None or not self._may_check():
            return self.due is not None
        return recorder.analyses.by_data or not recorder.was_checked(self._purpose)

    def model(self, draw: Draw, numbers: Numbers, terms: Terms) -> Numbers:
        """Return checked numbers of a batch: those that the engine computed, or by another way.

        Raises:
            ExactnessError: they are not what the definition says.
        """
        is_first = not self._recorder.was_checked(self._purpose)
        check = self.due or self._drawn(draw.step, is_first=True)
        assert check is not None
        options: dict[str, Any] = {"is_first": is_first, "note": self._note}
        options |= {"seed": check.draw(1 << 30, 3), "what": "the clipped contribution"}
        numbers, compared = self._recorder.checked(numbers, terms, self._purpose, **options)
        self.has_passed |= compared
        return numbers

    def of_compiled(self) -> tuple[str, int | None]:
        """Return when compiled graphs compare the current batch, and the seed of the check."""
        if not self._rate:
            return "off", None
        return ("first", None) if self.due is None else ("always", self.due.draw(1 << 30, 3))
