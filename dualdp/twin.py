# SPDX-License-Identifier: Apache-2.0
"""The ledger in the processes that do not write it: it says what the written one says.

Of several processes that train one model, one writes the record. It tells the others the lines
that it added, and each of them accounts these by itself and compares.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

from dualdp import run_registry
from dualdp._validate import AccountingError
from dualdp.chain import Chain, Record
from dualdp.ledger import Ledger
from dualdp.sealing import Seal

if TYPE_CHECKING:
    from dualdp.plan import PrivacyPlan

Words = Mapping[str, Any]
_AGAIN = "Start all processes again from the last checkpoint."
_OTHER_LINES = f"The ledger of this process has other lines than the one that is written. {_AGAIN}"


def num_lines(ledger: Ledger) -> int:
    """Lines of a ledger: a twin tells the writer, so that it hears of the others."""
    return ledger.num_lines


def news(ledger: Ledger, told: int, seal: Seal) -> Words:
    """What a twin of `told` lines must hear of a step that was sealed."""
    return {"lines": ledger.lines(told), "seal": tuple(seal)}


class Twin(Ledger):
    """A ledger in memory that follows one which another process writes.

    `record` asks whether the step may run and writes nothing; `follow` takes over what was
    written, before noise is drawn. Both ledgers then have the same text.

    Args:
        plan: the run, with its key.
        accountant: as in `Ledger`.

    Guarantees:
        A line that this process would not have written is refused, whichever it is.
            [test_a_twin_refuses_what_it_would_not_write]
        Both ledgers have the same text and epsilon.  [test_a_twin_says_what_the_ledger_says]
    """

    @classmethod
    def of(cls, plan: PrivacyPlan, text: str, state: Words) -> Self:
        """The twin of a ledger that was resumed from a checkpoint just now.

        Args:
            plan: of the run.
            text: of the written ledger, `Ledger.to_json()`.
            state: of the written ledger, `Ledger.state()`.

        Raises:
            AccountingError: its last line is not that of the resume.
        """
        records = Ledger.read(text)
        if records[-1].get("kind") != "resume":
            raise AccountingError(_OTHER_LINES)
        return cls._resumed(plan, state, Chain(records))

    def record(self, step: int) -> Record:
        """Ask whether a step may run; one whose computation failed may be asked for again."""
        if self._position.is_open and self._position.step == step:
            return {}
        return super().record(step)

    def _require_run(self) -> None:
        """Follow the run that the process which writes has begun."""
        if not run_registry.is_known(self):
            self.plan.claim(self, recorder="Ledger", source="", follows=True)

    def _release(self, step: int, branch: int) -> Record:
        """Nothing: the process that writes does."""
        return {}

    def note(self, **facts: Any) -> None:
        """Note what a spot check found; the process that writes writes it down."""
        self._read().take({"kind": "note", **facts})

    def follow(self, words: Words) -> Seal:
        """Take over the lines of a step that was sealed.

        Args:
            words: of `news`.

        Raises:
            AccountingError: they are not what this process would have written.
        """
        seal = Seal(*words["seal"])
        for line in words["lines"]:
            self._take(line)
        sealed = self._read().seals.get((seal.step, seal.branch))
        place = self._position
        if not place.is_open or place.step != seal.step or sealed is None:
            raise AccountingError(
                f"Step {seal.step}, branch {seal.branch}, was sealed by the process that writes "
                f"the ledger, but this one stands at step {self.position}. {_AGAIN}"
            )
        bound = self.max_grad_norm
        stddev = self.plan.noise_multiplier_at(seal.step) * bound
        ours = bound, stddev, self.plan.expected_batch_size_at(seal.step)
        if ours != tuple(seal[2:5]):
            raise AccountingError(
                "(max_grad_norm, noise_stddev, expected_batch_size) of step "
                f"{seal.step} are {ours} here and {tuple(seal[2:5])} in the process that writes "
                f"the ledger. {_AGAIN}"
            )
        self._advance(sealed)
        return seal

    def _take(self, line: str) -> None:
        """Account one line and append it."""
        record = json.loads(line)
        del record["hash"]
        reading = self._read()
        self._is_current = False
        if record["kind"] == "release":
            entry = {name: value for name, value in record.items() if name != "kind"}
            self._refuse_other(entry)
            spent = reading.spent_with(entry)
            self._chain.append(record)
            reading.add(entry, spent)
        else:
            self._chain.append(record)
            reading.take(record)
        self._is_current = True
        self._compare(line)

    def _refuse_other(self, entry: Record) -> None:
        """Refuse a release that this process would not have recorded.

        Raises:
            AccountingError: it would not.
        """
        step = int(entry["step"])
        place = {"step": step, "branch": entry["branch"], "max_grad_norm": self.max_grad_norm}
        expected = {**place, **self._numbers(step)}
        if entry != expected:
            raise AccountingError(
                f"The process that writes the ledger recorded {entry}. Expected {expected}. "
                f"{_AGAIN}"
            )

    def _compare(self, line: str) -> None:
        """Refuse a line that has another hash here: the lines before it differ.

        Raises:
            AccountingError: it has.
        """
        if self._chain.lines(-1) != [line]:
            raise AccountingError(_OTHER_LINES)
