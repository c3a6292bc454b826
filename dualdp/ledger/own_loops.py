# SPDX-License-Identifier: Apache-2.0
"""Loops of the user's own: the releases on record whose noise was not drawn yet.

    open_loop(plan, ledger).source = NoiseSource(plan)    # engine.make_loader
    ledger.record(step)                                   # engine.record
    loop_of(plan).take(step)                              # noisy_mean(grads, plan, step)

`noisy_mean` and `add_noise` are given nothing but the plan, which leads to its open loop here.
"""

from __future__ import annotations

import weakref

from dualdp import _validate
from dualdp._validate import AccountingError
from dualdp.ledger.ledger import Ledger, Release
from dualdp.plan.plan import PrivacyPlan


class OwnLoop:
    """Releases of a loop of one's own whose noise was not drawn yet.

    Attributes:
        plan: `PrivacyPlan` of the run.
        source: noise source of the backend, or None.
    """

    def __init__(self, plan: PrivacyPlan, ledger: Ledger) -> None:
        self.plan, self.source = plan, object()
        self._ledger = weakref.ref(ledger)
        ledger.unused = {}

    @property
    def waiting(self) -> dict[int, Release]:
        """Releases on record whose noise was not drawn, by step; none from before a fork.

        Raises:
            AccountingError: the run has ended, or belongs to another process.
        """
        ledger = self._ledger()
        if ledger is None:
            raise AccountingError(
                "The run of this loop has ended with its engine. Expected the engine to live as "
                "long as its noise is asked for."
            )
        ledger.require_process()
        return ledger.unused or {}

    def note(self, **facts: str) -> None:
        """Record public facts about the run in its ledger, if the run goes on."""
        ledger = self._ledger()
        if ledger is not None:
            ledger.note(**facts)

    def take(self, step: int) -> Release:
        """Return the release of a step for its noise, and take it off `waiting`.

        Raises:
            AccountingError: the step is not on record, or its noise was drawn before.
        """
        release = self.waiting.pop(_validate.integer("step", step), None)
        if release is None:
            raise AccountingError(
                f"step={step} has no release on record whose noise is still to be drawn. Expected "
                "engine.record() before each noisy sum, and the noise of a step once."
            )
        return release


_OPEN: weakref.WeakValueDictionary[int, OwnLoop] = weakref.WeakValueDictionary()


def open_loop(plan: PrivacyPlan, ledger: Ledger) -> OwnLoop:
    """Return the loop of a ledger, to which its plan leads as long as the ledger lives."""
    loop = ledger.own_loop = OwnLoop(plan, ledger)
    _OPEN[id(plan)] = loop  # the loop holds the plan, so that no other one has its id
    return loop


def loop_of(plan: PrivacyPlan) -> OwnLoop | None:
    """Return the loop that was opened last for this plan, or None if its ledger is gone."""
    return _OPEN.get(id(plan))


def take_any(num_releases: int) -> list[tuple[int | None, Release]]:
    """Return (seed, release) of the next releases of all open loops, each release once.

    Raises:
        AccountingError: there are fewer whose noise was not drawn.
    """
    waiting = [(loop, step) for loop in list(_OPEN.values()) for step in sorted(loop.waiting)]
    if len(waiting) < num_releases:
        raise AccountingError(
            f"Noise of {num_releases} releases was asked for, and {len(waiting)} are on record "
            "whose noise was not drawn. Expected engine.record(num_steps=...) before."
        )
    return [(loop.plan.seed, loop.take(step)) for loop, step in waiting[:num_releases]]
