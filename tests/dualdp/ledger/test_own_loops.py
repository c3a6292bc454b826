# SPDX-License-Identifier: Apache-2.0
"""Loops of one's own: each release on record gets its noise once."""

import gc

import pytest

import dualdp
from dualdp.ledger.own_loops import loop_of, open_loop, take_any
from dualdp.plan.schedules import AdaptiveNorm
from tests.dualdp.ledger.test_ledger import forks, in_a_fork, release
from tests.dualdp.plan.test_plan import make


def test_a_release_is_taken_once():
    plan = make()
    ledger = dualdp.Ledger(plan)
    release(ledger, 0)
    loop = open_loop(ledger)
    assert loop_of(plan) is loop
    made = [release(ledger, 1), release(ledger, 2)]
    assert loop.take(2) == made[1]
    for step in (0, 2, 3):  # before the loop, taken, not on record
        with pytest.raises(dualdp.AccountingError, match=f"step={step} has no release on record"):
            loop.take(step)
    assert loop.take(1) == made[0]


def test_a_bound_that_adapts_is_that_of_the_line():
    plan = make(max_grad_norm=AdaptiveNorm(0.1))
    ledger = dualdp.Ledger(plan)
    loop = open_loop(ledger)
    made = [release(ledger, step) for step in range(3)]
    assert [loop.take(step) for step in (2, 0, 1)] == [made[2], made[0], made[1]]


@pytest.mark.parametrize("end", ["closed", "gone"])
def test_a_loop_lives_as_long_as_its_ledger(end):
    plan = make()
    ledger = open_loop(dualdp.Ledger(plan))
    release(ledger, 0)
    assert loop_of(plan) is ledger
    if end == "closed":
        ledger.close()
        with pytest.raises(dualdp.AccountingError, match="step=0 has no release on record"):
            ledger.take(0)
    else:
        del ledger
        gc.collect()
    assert loop_of(plan) is None
    with pytest.raises(dualdp.AccountingError, match="Noise of 1 releases was asked for, and 0 ar"):
        take_any(1)


def test_the_loop_opened_last_is_that_of_the_plan():
    """A notebook's cell that was run twice."""
    plan, other = make(), make()
    ledgers = [dualdp.Ledger(plan) for _ in range(2)]
    _, second = map(open_loop, ledgers)
    assert loop_of(plan) is second
    assert loop_of(other) is None


def test_releases_of_all_loops_are_taken_once():
    plans = make(), make(seed=3)
    ledgers = [dualdp.Ledger(plan) for plan in plans]
    for ledger in ledgers:
        open_loop(ledger)
    made = [release(ledger, step) for ledger in ledgers for step in (0, 1)]
    with pytest.raises(dualdp.AccountingError, match="Noise of 5 releases was asked for, and 4 ar"):
        take_any(5)
    taken = take_any(3) + take_any(1)
    assert [found for _, found in taken] == made
    assert [seed for seed, _ in taken] == [None, None, 3, 3]
    with pytest.raises(dualdp.AccountingError, match="Noise of 1 releases was asked for, and 0 ar"):
        take_any(1)


@forks
def test_a_fork_takes_nothing_that_its_parent_recorded():
    """Both would draw noise for one release on record."""
    plan = make()
    ledger = dualdp.Ledger(plan)
    loop = open_loop(ledger)
    made = [release(ledger, 0), release(ledger, 1)]
    assert loop.take(0) == made[0]
    assert "step=1 has no release on record" in in_a_fork(lambda: loop.take(1))

    def child():
        release(ledger, 2)
        return loop.take(2).segment, list(loop.waiting)

    assert in_a_fork(child) == str((1, []))
    assert loop.take(1) == made[1]
