# SPDX-License-Identifier: Apache-2.0
"""Loops of one's own: each release on record gets its noise once."""

import gc

import pytest

from dualdp import AccountingError, Ledger
from dualdp.ledger.own_loops import loop_of, open_loop, take_any
from dualdp.plan.schedules import AdaptiveNorm
from tests.dualdp.ledger.test_ledger import forks, in_a_fork, release
from tests.dualdp.plan.test_plan import make
from tests.mistakes import refused


@pytest.mark.parametrize("bound", [0.5, AdaptiveNorm(0.1)])
def test_a_release_is_taken_once(bound):
    ledger = Ledger(make(max_grad_norm=bound))
    release(ledger, 0)
    loop = open_loop(ledger)
    made = [release(ledger, step) for step in (1, 2)]  # an adaptive bound is that of the line
    assert loop_of(ledger.plan) is loop
    assert loop.take(2) == made[1]
    for step in (0, 2, 3):  # before the loop, taken, not on record
        words = f"step={step} has no release on record"
        refused(lambda: loop.take(step), AccountingError, words)  # noqa: B023
    assert loop.take(1) == made[0]


@pytest.mark.parametrize("end", ["closed", "gone"])
def test_a_loop_lives_as_long_as_its_ledger(end):
    plan = make()
    ledger = open_loop(Ledger(plan))
    release(ledger, 0)
    assert loop_of(plan) is ledger
    if end == "closed":
        ledger.close()
        refused(lambda: ledger.take(0), AccountingError, "step=0 has no release on record")
    else:
        del ledger
        gc.collect()
    assert loop_of(plan) is None
    refused(lambda: take_any(1), AccountingError, "Noise of 1 releases was asked for, and 0 ar")


def test_the_loop_opened_last_is_that_of_the_plan():
    """A notebook's cell that was run twice."""
    plan = make()
    loops = [open_loop(Ledger(plan)) for _ in range(2)]
    assert loop_of(plan) is loops[1]
    assert loop_of(make()) is None


def test_releases_of_all_loops_are_taken_once():
    ledgers = [open_loop(Ledger(make(seed=seed))) for seed in (None, 3)]
    made = [release(ledger, step) for ledger in ledgers for step in (0, 1)]
    refused(lambda: take_any(5), AccountingError, "Noise of 5 releases was asked for, and 4 ar")
    seeds, taken = zip(*take_any(3), *take_any(1), strict=True)
    assert (list(taken), list(seeds)) == (made, [None, None, 3, 3])
    refused(lambda: take_any(1), AccountingError, "Noise of 1 releases was asked for, and 0 ar")


@forks
def test_a_fork_takes_nothing_that_its_parent_recorded():
    """Both would draw noise for one release on record."""
    loop = open_loop(Ledger(make()))
    made = [release(loop, 0), release(loop, 1)]
    assert loop.take(0) == made[0]
    assert "step=1 has no release on record" in in_a_fork(lambda: loop.take(1))
    assert in_a_fork(lambda: (release(loop, 2), loop.take(2).segment)[1]) == "1"
    assert loop.take(1) == made[1]
