# SPDX-License-Identifier: Apache-2.0
"""Loops of the user's own: the way from a plan to the ledger that records its releases.

    open_loop(ledger).source = NoiseSource(plan)          # engine.make_loader
    ledger.record(step)                                   # engine.record
    loop_of(plan).take(step)                              # noisy_mean(grads, plan, step)

`noisy_mean` and `add_noise` are given nothing but the plan, which leads to its open loop here.
"""

from __future__ import annotations

import weakref

from dualdp._validate import AccountingError
from dualdp.ledger.ledger import Ledger, Release
from dualdp.plan.plan import PrivacyPlan

_OPEN: weakref.WeakValueDictionary[int, Ledger] = weakref.WeakValueDictionary()


def open_loop(ledger: Ledger) -> Ledger:
    """Return the ledger, to which its plan leads until it is closed."""
    ledger.unused = {}
    _OPEN[id(ledger.plan)] = ledger  # it holds the plan, so that no other one has its id
    return ledger


def loop_of(plan: PrivacyPlan) -> Ledger | None:
    """Return the loop that was opened last for this plan, or None if it is closed or gone."""
    ledger = _OPEN.get(id(plan))
    return None if ledger is None or ledger.unused is None else ledger


def take_any(num_releases: int) -> list[tuple[int | None, Release]]:
    """Return (seed, release) of the next releases of all open loops, each release once.

    Raises:
        AccountingError: there are fewer whose noise was not drawn.
    """
    loops = [loop for loop in _OPEN.values() if loop.unused]
    waiting = [(loop, step) for loop in loops for step in sorted(loop.waiting)]
    if len(waiting) < num_releases:
        raise AccountingError(
            f"Noise of {num_releases} releases was asked for, and {len(waiting)} are on record "
            "whose noise was not drawn. Expected engine.record(num_steps=...) before."
        )
    return [(loop.plan.seed, loop.take(step)) for loop, step in waiting[:num_releases]]
