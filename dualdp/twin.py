# SPDX-License-Identifier: Apache-2.0
"""The ledger in the processes that do not write it: it says what the written one says.

Of several processes that train one model, one writes the record. It tells the others the lines
that it added, and each of them accounts these by itself and compares.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

from dualdp import spending
from dualdp._validate import AccountingError
from dualdp.chain import Chain, Record
from dualdp.ledger import Ledger
from dualdp.sealing import Seal

if TYPE_CHECKING:
    from dualdp.plan import PrivacyPlan

Words = Mapping[str, Any]
_AGAIN = "Start all processes again from the last checkpoint."


def num_lines(ledger: Ledger) -> int:
    """How many lines a ledger has: a twin tells the writer, so that it hears the others."""
    return len(ledger._chain.lines)


def news(ledger: Ledger, told: int, seal: Seal) -> Words:
    """What a twin of `told` lines must hear of a step that was sealed."""
    return {"lines": ledger._chain.lines[told:], "seal": tuple(seal)}


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
    def of(cls, plan: PrivacyPlan, state: Words) -> Self:
        """The twin of a ledger that was resumed from a checkpoint just now.

        Args:
            plan: of the run.
            state: of the written ledger, `Ledger.state()`.

        Raises:
            AccountingError: its last line is not that of the resume.
        """
        records = Ledger.read(str(state["text"]))
        twin = cls.__new__(cls)
        twin._begin(plan, records[0]["accountant"])
        twin._restore(Chain(records[:-1]), state)  # which appends the resume, the last line
        twin._compare(str(state["text"]).splitlines()[-1])
        return twin

    def record(self, step: int) -> Record:
        """Ask whether a step may run; one whose computation failed may be asked for again."""
        if self._open is not None and self._open[0] == step:
            return {}
        return super().record(step)

    def _release(self, step: int, branch: int) -> Record:
        """Nothing: the process that writes does."""
        return {}

    def note(self, **facts: Any) -> None:
        """Nothing: the process that writes does."""

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
        sealed = self._seals.get((seal.step, seal.branch))
        if self._open is None or self._open[0] != seal.step or sealed is None:
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
        entry = {name: value for name, value in record.items() if name != "kind"}
        if record["kind"] == "release":
            self._account(entry)
        elif record["kind"] == "seal":
            self._seals[int(entry["step"]), int(entry["branch"])] = entry
        elif record["kind"] == "note":
            self._read_check(entry)
        self._chain.append(record)
        self._compare(line)

    def _account(self, entry: Record) -> None:
        """Account one release, as `Ledger` does."""
        step = int(entry["step"])
        numbers = spending.release(
            self.plan, self.plan.noise_multiplier_at(step), self.plan.expected_batch_size_at(step)
        )
        place = {"step": step, "branch": entry["branch"], "max_grad_norm": self.max_grad_norm}
        if entry != {**place, **numbers}:
            raise AccountingError(
                f"The process that writes the ledger recorded {entry}. Expected "
                f"{ {**place, **numbers} }. {_AGAIN}"
            )
        again = step in self._of_step
        self._remember(entry)
        if again:
            self.accountant = spending.spent_by(self.plan, self.entries, self.accountant.name)
            self._end = spending.last_affordable(self.plan, self.accountant, len(self._of_step))
        else:
            self.accountant.step(**numbers)

    def _compare(self, line: str) -> None:
        """Refuse a line that has another hash here: the lines before it differ.

        Raises:
            AccountingError: it has.
        """
        if self._chain.lines[-1] != line:
            raise AccountingError(
                "The ledger of this process has other lines than the one that is written. " + _AGAIN
            )
