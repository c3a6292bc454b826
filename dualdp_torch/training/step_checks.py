# SPDX-License-Identifier: Apache-2.0
"""Spot checks in the user's own loop: choice of the steps that are checked, and the checks."""

from __future__ import annotations

from typing import Any

import numpy as np

from dualdp import exactness
from dualdp.exactness import SpotCheck
from dualdp.ledger.ledger import Ledger
from dualdp.randomness import SegmentBits
from dualdp_torch.per_sample.analysis_cache import AnalysisCache
from dualdp_torch.per_sample.checks.criterion_check import (
    CarriedNumberError,
    CriterionCheck,
    Problem,
    error_of,
    sum_of_squares,
)
from dualdp_torch.per_sample.checks.model_check import IMPOSSIBLE, ModelCheck
from dualdp_torch.per_sample.checks.spot_check import BatchNumbers
from dualdp_torch.per_sample.clip import Terms
from dualdp_torch.per_sample.recorder import Recorder
from dualdp_torch.training.compiled_step import YieldedValues
from dualdp_torch.training.loader import Draw

_SHARDED = (
    "The model lies in pieces over several processes (fully_shard), none of which can run an "
    "example alone: the loop's loss is checked, the gradients are not."
)
_ROWS = 4  # examples in a whole check of the criterion


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
        self._criterion = CriterionCheck(reduction)
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
        if self._recorder.shards is not None:
            self._ledger.note(check_impossible=_SHARDED)
        due = self._drawn(draw.step)
        if due is not None and draw.chunk == due.draw(draw.num_chunks, 3):
            self.due = due
        if self._recorder.computes_loss:  # its loop may do nothing else
            self._recorder.require_inputs = YieldedValues(batch).require_in
        self._recorder.tape.begin(batch, len(draw.mask) * self._recorder.rows_per_unit)

    def end(self) -> None:
        """Clear the current batch, which was stepped on or abandoned."""
        self.due = self._draw = None
        self._recorder.tape.clear()

    def leave_loader(self) -> None:
        """Stop at the end of the loader's pass; a batch that it yielded may still be stepped on."""
        if self._draw is None:
            self.end()
        else:
            self._recorder.tape.leave_loader()

    def criterion(self, draw: Draw) -> None:
        """Check the part of the loop outside the model, if a check is due.

        Raises:
            RuntimeError: the loop was not seen.
            ValueError: code that is met for the first time mixes examples, or is reduced otherwise
                than declared.
            ExactnessError: code that was found right before does.
        """
        if not self._rate or self._recorder.computes_loss:
            self._recorder.free_outputs()
            return
        tape = self._recorder.tape
        tape.end()
        if not tape.backwards:
            raise RuntimeError(
                "The loop was left before its backward, so the loss of this batch was not seen. "
                "Call model, backward() and optimizer.step() in the loop that takes the batches, "
                "in one thread."
            )
        apart = self._recorder.rows_per_unit // tape.rows_per_unit  # losses of each example
        mask = draw.mask.numpy()
        if len(mask) * apart < 2 or not mask.any():
            return
        try:
            is_known = self._criterion.knows(tape)
        except CarriedNumberError as error:
            raise error_of(Problem(str(error)), is_known=True) from None
        if is_known and self.due is None:
            self._recorder.free_outputs()
            return
        check = self.due or self._drawn(draw.step, is_first=True)
        assert check is not None
        is_whole = not is_known or check.is_whole
        rows = np.flatnonzero(mask.repeat(apart)).tolist()
        problem = self._criterion.check(
            tape,
            self._recorder.cotangents,
            self._chosen(check, rows, _ROWS if is_whole else 2),
            self._recorder.model,
            seed=check.draw(1 << 30, 2),
            is_whole=is_whole,
        )
        if problem is not None:
            raise error_of(problem, is_known)
        self.has_passed |= self._recorder.method == "loop"

    def _may_check(self) -> bool:
        """True if the current batch holds two examples, one of which counts."""
        draw = self._draw
        if draw is None or not self._rate or self._recorder.shards is not None:
            return False
        return len(draw.mask) > 1 and bool(draw.mask.numpy().any())

    def may_be_due(self, known: AnalysisCache, several: bool = False) -> bool:
        """True if a forward that begins may have to be run again, alone or as one of several."""
        if self._recorder.shards is not None:
            return False
        purpose = (*self._purpose, "several") if several else self._purpose
        return self.due is not None or (self._may_check() and purpose not in known.checked)

    def _is_first(self) -> bool:
        """True if this method and clipping were never checked on the model for such batches.

        A second forward may come where the first is not kept to be run again: the next batch is
        checked then.
        """
        recorder = self._recorder
        is_kept = recorder.start is not None
        return is_kept and self._may_check() and not recorder.was_checked(self._purpose)

    def is_due(self) -> bool:
        """True if the gradients of the current batch have to be checked."""
        if self._recorder.shards is not None or self._recorder.method == "loop":
            return False  # the loop is what a check would compare with
        return self.due is not None or self._is_first()

    def model(self, draw: Draw, numbers: BatchNumbers, terms: Terms) -> None:
        """Check the gradients of a batch, given the numbers that the engine computed for it.

        Raises:
            ExactnessError: they are not what the definition says.
        """
        recorder, is_first = self._recorder, self._is_first()
        check = self.due or self._drawn(draw.step, is_first=True)
        assert check is not None
        trial = ModelCheck(recorder, numbers, terms)
        if trial.run(check, is_first=is_first):
            recorder.note_checked(self._purpose)
            self.has_passed = True
        if trial.is_impossible:
            self._ledger.note(check_impossible=IMPOSSIBLE)

    def of_compiled(self) -> tuple[str, float | None]:
        """Return when compiled graphs compare the current batch, and which example, in [0, 1)."""
        if not self._rate:
            return "off", None
        return ("first", None) if self.due is None else ("always", self.due.fractions[0])

    def _chosen(self, check: SpotCheck, rows: list[int], count: int) -> list[int]:
        """At most `count` rows: the one whose outputs have the largest gradient, and drawn ones.

        Where the loss joins the rows of a unit, they count as one.
        """
        tape = self._recorder.tape
        sizes = sum_of_squares(self._recorder.cotangents, self._recorder.num_rows)
        sizes = sizes.reshape(-1, tape.rows_per_unit).sum(1)[rows]
        largest = rows[int(np.argmax(sizes))]
        rest = [row for row in rows if row != largest]
        if not rest:
            return [largest]
        first, apart = check.draw(len(rest)), 1 + len(rest) // count
        drawn = [rest[(first + i * apart) % len(rest)] for i in range(count - 1)]
        return list(dict.fromkeys((largest, *drawn)))
