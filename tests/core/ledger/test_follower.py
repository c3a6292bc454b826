# SPDX-License-Identifier: Apache-2.0
"""Ledger of a process that follows rank 0: it refuses what it would not have written."""

import json

import numpy as np
import pytest

from dualdp import AccountingError, PrivacyPlan
from dualdp.ledger.follower import FollowerLedger, seal_message
from dualdp.ledger.ledger import Ledger
from dualdp.plan import schedules

SUMS = [np.arange(3.0)]


def plan(**changes):
    arguments = {
        "num_examples": 100,
        "expected_batch_size": 10,
        "num_steps": 6,
        "noise_multiplier": 1.0,
        "max_grad_norm": 1.0,
        "delta": 1e-5,
        "accountant": "rdp",
        "seed": 3,
    }
    return PrivacyPlan(**{**arguments, **changes})


def step(ledger, follower, sums=SUMS, counts=None, message=lambda message: message):
    """One step of both, what is said passing through `message`."""
    number = ledger.position
    ledger.record(number)
    follower.record(number)
    seal = ledger.seal(number, sums, **(counts or {}))
    said = json.loads(json.dumps(seal_message(ledger, follower.num_lines, seal)))
    assert follower.follow(message(said)) == seal


def same(ledger, follower):
    """Whether both say the same."""
    return (
        ledger.to_json() == follower.to_json()
        and ledger.get_epsilon() == follower.get_epsilon()
        and ledger.position == follower.position
        and ledger.max_grad_norm == follower.max_grad_norm
        and (ledger.end, len(ledger)) == (follower.end, len(follower))
    )


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"max_grad_norm": schedules.AdaptiveNorm(1.0)},
        {"noise_multiplier": schedules.Linear(1.0, 2.0, 6)},
        {"target_epsilon": 50.0, "num_steps": None},
    ],
    ids=["plain", "adaptive", "schedule", "target"],
)
def test_a_follower_has_the_text_of_the_ledger(changes, tmp_path):
    """Notes, which only the writer makes, included."""
    run = plan(**changes)
    counts = {"num_below": 4, "num_rows": 9} if run.is_adaptive else None
    ledger, follower = Ledger(run, path=tmp_path / "ledger"), FollowerLedger(run)
    for number in range(4):
        step(ledger, follower, counts=counts)
        assert same(ledger, follower)
        if number == 1:
            ledger.note(logged="loss")
            follower.note(logged="loss")


def test_a_follower_goes_on_from_a_checkpoint(tmp_path):
    """A step that is run again: with the same sum it is free, with another it is paid twice."""
    run, path = plan(), tmp_path / "ledger"
    ledger, follower = Ledger(run, path=path), FollowerLedger(run)
    step(ledger, follower)
    state = ledger.state()
    step(ledger, follower)
    step(ledger, follower)
    ledger.close()
    resumed = Ledger.resume(run, state, path)
    follower = FollowerLedger.of_resumed(run, resumed.to_json(), resumed.state())
    assert same(resumed, follower)
    step(resumed, follower)
    assert len(resumed) == 3
    step(resumed, follower, sums=[np.ones(2)])
    assert len(resumed) == 4
    assert same(resumed, follower)


def test_a_follower_refuses_the_steps_that_the_ledger_refuses():
    run = plan(num_steps=1)
    ledger, follower = Ledger(run), FollowerLedger(run)
    for book in (ledger, follower):
        with pytest.raises(AccountingError, match="step=1 came after 0 recorded releases"):
            book.record(1)
    step(ledger, follower)
    for book in (ledger, follower):
        with pytest.raises(AccountingError, match="step=1 is past the plan's num_steps=1"):
            book.record(1)


def test_a_failed_step_may_be_asked_for_again():
    """After the record and before the seal, on all processes."""
    run = plan()
    ledger, follower = Ledger(run), FollowerLedger(run)
    for book in (ledger, follower):
        book.record(0)
    step(ledger, follower)
    assert same(ledger, follower)
    assert len(ledger) == 1


def edited(**changes):
    """Words whose first line has other values."""

    def edit(message):
        record = json.loads(message["lines"][0])
        return {**message, "lines": [json.dumps({**record, **changes}), *message["lines"][1:]]}

    return edit


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (edited(noise_multiplier=2.0), r"recorded \{.*\}\. Expected \{"),
        (edited(max_grad_norm=0.5), r"recorded \{.*\}\. Expected \{"),
        (edited(hash="0" * 64), "other lines than the one that is written"),
        (lambda message: {**message, "lines": message["lines"][:1]}, "was sealed by the process"),
        (lambda message: {**message, "lines": message["lines"][1:]}, "other lines than the one"),
        (lambda w: {**w, "seal": [*w["seal"][:3], 0.9, *w["seal"][4:]]}, r"are \(1.0, 1.0, 10.0\)"),
        (lambda w: {**w, "seal": [1, *w["seal"][1:]]}, "Step 1, branch 0, was sealed by the"),
    ],
)
def test_a_follower_refuses_what_it_would_not_write(message, text):
    run = plan()
    with pytest.raises(AccountingError, match=text):
        step(Ledger(run), FollowerLedger(run), message=message)


def test_a_follower_of_another_ledger_is_refused():
    run = plan()
    ledger, follower = Ledger(run), FollowerLedger(run)
    step(ledger, follower)
    with pytest.raises(AccountingError, match="other lines than the one that is written"):
        FollowerLedger.of_resumed(
            run, ledger.to_json(), ledger.state()
        )  # its last line is no resume
