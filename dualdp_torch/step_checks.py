# SPDX-License-Identifier: Apache-2.0
"""The spot checks of a run in the user's own loop: which steps are checked, and what follows."""

from __future__ import annotations

from typing import Any

import numpy as np

from dualdp import exactness
from dualdp.exactness import Check
from dualdp.ledger import Ledger

from .criterion_check import (
    CarriedNumberError,
    CriterionCheck,
    Finding,
    error_of,
    sum_of_squares,
)
from .data import Draw
from .model_check import IMPOSSIBLE, ModelCheck, WholeStepCheck
from .recorder import Recorder
from .remembered import Remembered
from .sharded import Terms
from .spot_check import Engine

IN_PIECES = (
    "The model lies in pieces over several processes (fully_shard), none of which can run an "
    "example alone: the loop's loss is checked, the gradients are not."
)
_ROWS = 4  # examples that a whole check of the criterion looks at


class StepChecks:
    """Decides for each physical batch what is checked, and checks it.

    Args:
        ledger: of the run.
        rate: share of steps that are checked; 0 is off.
        reduction: "mean" or "sum".
        purpose: method and clipping: a first call of each is checked.

    Attributes:
        due: the check that was drawn for the batch at hand, or None.
        has_passed: gradients of the step at hand were compared, and agree.
    """

    def __init__(
        self, ledger: Ledger, rate: float, reduction: str, purpose: tuple[str, ...]
    ) -> None:
        self._ledger, self._rate, self._purpose = ledger, rate, ("loop", *purpose)
        self._criterion = CriterionCheck(reduction)
        self._draw: Draw | None = None
        self.due: Check | None = None
        self.has_passed = False

    def attach(self, recorder: Recorder) -> None:
        """Check what this recorder records; its tape is opened with each batch."""
        self._recorder = recorder

    def of_step(self, step: int) -> bool:
        """Whether something of a step is checked; the same on all processes."""
        if not self._rate:
            return False
        is_first = step == 0
        return (
            exactness.check_at(self._ledger.plan, step, self._rate, is_first=is_first) is not None
        )

    def begin(self, draw: Draw, batch: Any) -> None:
        """A batch is handed out.

        Args:
            draw: which rows it holds.
            batch: as the loop gets it.
        """
        self.due, self._draw = None, draw
        if not self._rate:
            return
        if self._recorder.shards is not None:
            self._ledger.check_impossible(IN_PIECES)
        due = exactness.check_at(self._ledger.plan, draw.step, self._rate)
        if due is not None and draw.part == due.draw(draw.parts, 3):
            self.due = due
        if not self._recorder.computes_loss:
            self._recorder.tape.begin(batch, len(draw.mask))

    def end(self) -> None:
        """The batch was stepped on, or is given up."""
        self.due = self._draw = None
        self._recorder.tape.clear()

    def leave_loader(self) -> None:
        """The loader is gone; a batch that it handed out may still be stepped on."""
        if self._draw is None:
            self.end()
        else:
            self._recorder.tape.leave_loader()

    def criterion(self, draw: Draw) -> None:
        """Check what the loop computes outside of the model, if that is due.

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
        n, rows = len(draw.mask), draw.mask.nonzero().flatten().tolist()
        if n < 2 or not rows:
            return
        try:
            is_known = self._criterion.knows(tape)
        except CarriedNumberError as error:
            raise error_of(Finding(str(error)), is_known=True) from None
        if is_known and self.due is None:
            self._recorder.free_outputs()
            return
        check = self.due or exactness.check_at(
            self._ledger.plan, draw.step, self._rate, is_first=True
        )
        assert check is not None
        is_whole = not is_known or check.is_whole
        chosen = self._chosen(check, rows, _ROWS if is_whole else 2)
        finding = self._criterion.check(
            tape,
            self._recorder.cotangents,
            chosen,
            self._recorder.model,
            seed=check.draw(1 << 30, 2),
            is_whole=is_whole,
        )
        if finding is not None:
            raise error_of(finding, is_known)

    def is_first(self, known: Remembered) -> bool:
        """Whether the model is run in a way in which it was never checked.

        Args:
            known: what is remembered of the model on such batches.
        """
        draw = self._draw
        if draw is None or not self._rate or len(draw.mask) < 2 or not bool(draw.mask.any()):
            return False
        return self._purpose not in known.checked

    def is_due(self, known: Remembered) -> bool:
        """Whether the gradients of the batch at hand are to be checked."""
        if self._recorder.shards is not None:
            return False
        return self.due is not None or self.is_first(known)

    def model(self, draw: Draw, numbers: Engine, terms: Terms) -> None:
        """Check the gradients of a batch.

        Args:
            draw: which rows it holds.
            numbers: what came out for it.
            terms: what it was clipped with.

        Raises:
            ExactnessError: they are not what the definition says.
        """
        known = self._recorder.known
        is_first = self.is_first(known)
        plan = self._ledger.plan
        check = self.due or exactness.check_at(plan, draw.step, self._rate, is_first=True)
        assert check is not None
        whole = self._recorder.computes_loss
        trial = (WholeStepCheck if whole else ModelCheck)(self._recorder, numbers, terms)
        if trial.run(check, is_first=is_first):
            known.checked.add(self._purpose)
            self.has_passed = True
        if trial.is_impossible:
            self._ledger.check_impossible(IMPOSSIBLE)

    def _chosen(self, check: Check, rows: list[int], count: int) -> list[int]:
        """So many examples: drawn ones, and the one whose outputs received the largest gradient."""
        sizes = sum_of_squares(self._recorder.cotangents, self._recorder.n or 0)[rows]
        rest = [row for row in rows if row != rows[int(np.argmax(sizes))]]
        first = check.draw(len(rest)) if rest else 0
        drawn = (
            [rest[(first + i * (1 + len(rest) // count)) % len(rest)] for i in range(count - 1)]
            if rest
            else []
        )
        return list(dict.fromkeys((rows[int(np.argmax(sizes))], *drawn)))
