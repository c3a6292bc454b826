# SPDX-License-Identifier: Apache-2.0
"""The spot checks of a run in the user's own loop: which steps are checked, and what follows."""

from __future__ import annotations

from typing import Any

import numpy as np

from dualdp import exactness
from dualdp.exactness import Check, ExactnessError
from dualdp.ledger import Ledger

from .criterion_check import CarriedNumberError, CriterionCheck, Finding
from .data import Draw
from .record import sum_of_squares
from .recorder import Recorder

_ROWS = 4  # examples that a whole check of the criterion looks at
_ADVICE = (
    "Nothing was released for this batch. Correct the loop and begin a new run; the releases "
    "before are not vouched for."
)


class StepChecks:
    """Decides for each physical batch what is checked, and checks it.

    Args:
        recorder: listens to the model; its tape is opened with each batch.
        ledger: of the run.
        rate: share of steps that are checked; 0 is off.
        reduction: "mean" or "sum".
    """

    def __init__(self, recorder: Recorder, ledger: Ledger, rate: float, reduction: str) -> None:
        self._recorder, self._ledger, self._rate = recorder, ledger, rate
        self._criterion = CriterionCheck(reduction)
        self.due: Check | None = None

    def begin(self, draw: Draw, batch: Any) -> None:
        """A batch is handed out.

        Args:
            draw: which rows it holds.
            batch: as the loop gets it.
        """
        self.due = None
        if not self._rate:
            return
        due = exactness.check_at(self._ledger.plan, draw.step, self._rate)
        if due is not None and draw.part == due.draw(draw.parts, 3):
            self.due = due
        self._recorder.tape.begin(batch, len(draw.mask))

    def end(self) -> None:
        """The batch was stepped on, or is given up."""
        self.due = None
        self._recorder.tape.clear()

    def criterion(self, draw: Draw) -> None:
        """Check what the loop computes outside of the model, if that is due.

        Raises:
            ValueError: code that is met for the first time mixes examples, or is reduced otherwise
                than declared.
            ExactnessError: code that was found right before does.
        """
        tape = self._recorder.tape
        if not tape.is_open:
            return
        tape.end()
        n, rows = len(draw.mask), draw.mask.nonzero().flatten().tolist()
        if n < 2 or not rows:
            return
        try:
            is_known = self._criterion.knows(tape)
        except CarriedNumberError as error:
            raise _failed(Finding(str(error))) from None
        if is_known and self.due is None:
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
        if finding is not None and is_known:
            raise _failed(finding)
        if finding is not None:
            raise ValueError(finding.text)

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


def _failed(finding: Finding) -> ExactnessError:
    """The error of a check of code that was found right before."""
    size = exactness.power_of_ten(finding.error)
    return ExactnessError(
        f"A spot check failed: {finding.text} {_ADVICE}",
        relative_error=size,
        unprotected_details={"error": finding.error},
    )
