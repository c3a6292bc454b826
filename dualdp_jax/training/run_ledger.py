# SPDX-License-Identifier: Apache-2.0
"""Ledger of a run of several processes: process 0 writes it, the others follow."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from dualdp.exactness import ExactnessError
from dualdp.ledger.follower import FollowerLedger, seal_message, secret_of
from dualdp.ledger.ledger import Ledger, claimed
from dualdp.ledger.release_record import Seal
from dualdp.plan.plan import PrivacyPlan
from dualdp.randomness import RootKey
from dualdp_jax.parallel.mesh import checksum
from dualdp_jax.parallel.process_group import Group
from dualdp_jax.parallel.sum_hash import hash_sums
from dualdp_jax.training.rank_consistency import check_replicas

LOADED = "load_checkpoint"


class SharedLedger:
    """Ledger of a run of several processes: process 0 writes it, the others follow.

    A step is recorded before its noise is drawn, for which every process waits for the seal that
    process 0 writes and broadcasts. So the file never holds less than was released.

    Guarantees:
        The ledgers of all processes have the same text.  [test_two_processes_are_one_run]
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._num_shared = 1  # ledger lines that all processes have
        self.is_filed = False  # True if process 0 writes to a file, which needs digests of sums

    def opened(
        self,
        plan: PrivacyPlan,
        accountant: str | None,
        path: str | os.PathLike[str] | None,
        **claim: Any,
    ) -> Ledger:
        """Return the ledger of a new run, in memory without a path; see `claimed`.

        Errors, such as that of a key that was used before, are raised on every process.
        """
        self._group.require_same("the accountant", accountant)
        written: list[Ledger] = []

        def begin() -> bool:
            written.append(claimed(Ledger(plan, accountant, path), **claim))
            return path is not None

        self.is_filed = self._group.on_first("the ledger", begin)
        if written:
            return written[0]
        follower = FollowerLedger(plan, accountant)
        plan.claim(follower, follows=True, **claim)
        return follower

    def resumed(self, call: Callable[[], Ledger], plan: Mapping[str, Any]) -> Ledger:
        """Return the ledger of a resumed run: process 0 calls for it. `plan` is the plan's JSON."""
        written: list[Ledger] = []

        def message() -> Any:
            written.append(call())
            return written[0].to_json(), written[0].state(), secret_of(written[0].plan)

        text, state, secret = self._group.on_first("the ledger of the checkpoint", message)
        if written:
            ledger = written[0]
        else:
            run = PrivacyPlan.from_json(json.dumps(plan), key=RootKey(*secret))
            ledger = FollowerLedger.of_resumed(run, text, state)
            run.claim(ledger, recorder=LOADED, source="", follows=True)
        self._num_shared, self.is_filed = ledger.num_lines, True
        return ledger

    def at(self, step: int) -> AbstractContextManager[None]:
        """Context of a step, in which the loss of another process raises a clear error."""
        return self._group.collective(f"step {step}")

    def failure(self, step: int, failed: ExactnessError | None) -> ExactnessError | None:
        """Return a step's failed check on every process: its own, or the first failure."""
        message = b""
        if failed is not None:
            facts = [str(failed), failed.parameters, failed.relative_error]
            message = json.dumps(facts).encode()
        messages = self._group.gather(f"the spot check of step {step}", message)
        if failed is not None or not any(messages):
            return failed
        text, parameters, error = json.loads(next(filter(None, messages)))
        return ExactnessError(text, parameters=parameters, relative_error=error)

    def written(self, name: str, whole: Callable[[], Any], write: Callable[[Any], Any]) -> Any:
        """Write on process 0, return its result on all; the ledger is in a file from here on."""
        with self._group.collective(name):
            content = whole()
        found = self._group.on_first(name, lambda: write(content))
        self.is_filed = True
        return found

    def sealed(
        self,
        ledger: Ledger,
        step: int,
        params: Sequence[Any] | None,
        sums: Sequence[Any] | None,
        facts: Mapping[str, Any],
    ) -> Seal:
        """Return the seal of a recorded step, made by process 0 and verified by the others.

        `params` and `sums` lie on the mesh, and are None if the engine does not know them; `facts`
        are further arguments of `Ledger.seal`.
        """
        point = f"step {step}"
        digests: list[bytes] = []
        if params is not None:  # reduced sums are equal even if parameters differ
            check_replicas(self._group, point, params, checksum(params))
        if self.is_filed and sums is not None:
            root = ledger.plan.root.require_secret()
            hashes = hash_sums(root.step_secret("digest", step), sums)
            digest = root.digest([repr(hashes).encode()])
            digests = check_replicas(self._group, point, sums, digest)

        def message() -> Any:
            sealed = [np.frombuffer(digest, np.uint8) for digest in digests] or None
            return seal_message(ledger, self._num_shared, ledger.seal(step, sealed, **facts))

        found = self._group.on_first(point, message)
        if isinstance(ledger, FollowerLedger):
            seal = ledger.follow(found)
        else:
            seal = Seal(*found["seal"])
        self._num_shared = ledger.num_lines
        return seal
