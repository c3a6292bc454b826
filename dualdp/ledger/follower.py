# SPDX-License-Identifier: Apache-2.0
"""Ledger of a process that follows the ledger written by rank 0.

Of several processes that train one model, one writes the record and broadcasts the new lines. Each
of the others accounts these lines independently and compares the result.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Self

from dualdp._validate import AccountingError
from dualdp.ledger.hash_chain import Chain, Record
from dualdp.ledger.ledger import Ledger, Recorded
from dualdp.ledger.release_record import Seal
from dualdp.plan.plan import PrivacyPlan
from dualdp.randomness import run_registry

Message = Mapping[str, Any]
_AGAIN = "Start all processes again from the last checkpoint."
_OTHER_LINES = f"The ledger of this process has other lines than the one that is written. {_AGAIN}"


def seal_message(ledger: Ledger, num_known: int, seal: Seal) -> Message:
    """Return the message about a sealed step, for a follower ledger of `num_known` lines."""
    return {"lines": [link.line for link in ledger.chain.links[num_known:]], "seal": tuple(seal)}


def secret_of(plan: PrivacyPlan) -> tuple[bytes, int | None]:
    """Return secret and seed of the plan's key, which rank 0 broadcasts to the others."""
    root = plan.root.require_secret()
    return root.secret, root.seed


class FollowerLedger(Ledger):
    """Ledger in memory that follows the ledger written by another process.

    `record` checks that the step may run and writes nothing; `follow` applies the broadcast lines
    before noise is drawn. Both ledgers then have the same text.

    Guarantees:
        A line that this process would not have written is refused, whichever it is.
            [test_a_follower_refuses_what_it_would_not_write]
        Both ledgers have the same text and epsilon.  [test_a_follower_has_the_text_of_the_ledger]
    """

    @classmethod
    def of_resumed(cls, plan: PrivacyPlan, text: str, state: Message) -> Self:
        """Return the follower of a ledger that was just resumed, from its `to_json` and `state`."""
        records = Ledger.read(text)
        if records[-1].get("kind") != "resume":
            raise AccountingError(_OTHER_LINES)
        return cls._resumed(plan, state, Chain(records))

    def _require_run(self) -> None:
        """Join the run that the writing process has begun."""
        if not run_registry.is_known(self):
            self.plan.claim(self, recorder="Ledger", source="", follows=True)

    def _release(self, step: int, branch: int) -> Record:
        """Do nothing: the writing process records the release."""
        return {}

    def note(self, **facts: Any) -> None:
        """Keep the note in memory; the writing process writes it to the file."""
        self._read().add({"kind": "note", **facts})

    def follow(self, message: Message) -> Seal:
        """Apply the lines of a sealed step; raise if this process would have written others."""
        seal = Seal(*message["seal"])
        for line in message["lines"]:
            self._apply(line)
        sealed = self._read().seals.get((seal.step, seal.branch))
        state = self._state
        if not isinstance(state, Recorded) or state.step != seal.step or sealed is None:
            raise AccountingError(
                f"Step {seal.step}, branch {seal.branch}, was sealed by the process that writes "
                f"the ledger, but this one stands at step {self.position}. {_AGAIN}"
            )
        own = self._seal_of(sealed, is_replay=seal.is_replay)
        ours, theirs = own[2:5], tuple(seal[2:5])
        if ours != theirs:
            raise AccountingError(
                "(max_grad_norm, noise_stddev, expected_batch_size) of step "
                f"{seal.step} are {ours} here and {theirs} in the process that writes "
                f"the ledger. {_AGAIN}"
            )
        self._advance(sealed)
        return own

    def _apply(self, line: str) -> None:
        """Account one line and append it; refuse what this process would not have written."""
        record = json.loads(line)
        del record["hash"]
        if record["kind"] == "release":
            entry = {name: value for name, value in record.items() if name != "kind"}
            expected = self._entry(int(entry["step"]), entry["branch"])
            if entry != expected:
                raise AccountingError(
                    f"The process that writes the ledger recorded {entry}. Expected {expected}. "
                    f"{_AGAIN}"
                )
        self._append(record)
        if self.chain.links[-1].line != line:  # another hash here: earlier lines differ
            raise AccountingError(_OTHER_LINES)
