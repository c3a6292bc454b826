# SPDX-License-Identifier: Apache-2.0
"""Ledger of a new or a resumed run: rank 0 keeps the record, other processes follow in memory."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from typing import Any

from dualdp.ledger.follower import FollowerLedger, secret_of
from dualdp.ledger.ledger import Ledger, claimed
from dualdp.plan.plan import PrivacyPlan
from dualdp.randomness import RootKey, run_registry
from dualdp_torch.parallel.process_group import Group, on_all


def open_ledger(
    group: Group | None,
    plan: PrivacyPlan,
    path: str | os.PathLike[str] | None,
    recorder: str = "PrivacyEngine.make_private",
    source: str = run_registry.OWN_STEP,
) -> Ledger:
    """Return the ledger of a new run on this process, which claims the plan's key."""
    if group is not None and not group.is_first:
        follower = FollowerLedger(plan)
        plan.claim(follower, recorder=recorder, follows=True)
        return follower
    return claimed(Ledger(plan, path=path), recorder=recorder, source=source)


def resume_ledger(
    group: Group | None, plan: Mapping[str, Any], resume: Callable[[], Ledger]
) -> Ledger:
    """Return the ledger of a resumed run on this process; `plan` is the JSON of the run's plan.

    Only rank 0 calls `resume`, which opens key and ledger.
    """
    if group is None:
        return _claimed(resume())
    ledger = on_all(group, "the ledger", lambda: _claimed(resume()) if group.is_first else None)
    message = None
    if ledger is not None:
        message = ledger.to_json(), ledger.state(), secret_of(ledger.plan)
    text, state, secret = group.broadcast("the state of the ledger", message)
    if ledger is not None:
        return ledger
    run = PrivacyPlan.from_json(json.dumps(plan), key=RootKey(*secret))
    return _claimed(FollowerLedger.of_resumed(run, text, state))


def _claimed(ledger: Ledger) -> Ledger:
    """The ledger of a resumed run, after claiming its plan's key; closed if that is refused."""
    follows = isinstance(ledger, FollowerLedger)
    return claimed(ledger, recorder="load_checkpoint", source="", resumed=True, follows=follows)
