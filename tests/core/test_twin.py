# SPDX-License-Identifier: Apache-2.0
"""The ledger of a process that does not write: it follows, and refuses what it would not write."""

import json

import numpy as np
import pytest

from dualdp import AccountingError, PrivacyPlan, schedules
from dualdp.ledger import Ledger
from dualdp.twin import Twin, news, num_lines

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


def step(ledger, twin, sums=SUMS, counts=None, words=lambda words: words):
    """One step of both, what is said passing through `words`."""
    number = ledger.position
    ledger.record(number)
    twin.record(number)
    seal = ledger.seal(number, sums, **(counts or {}))
    said = json.loads(json.dumps(news(ledger, num_lines(twin), seal)))
    assert twin.follow(words(said)) == seal


def same(ledger, twin):
    """Whether both say the same."""
    return (
        ledger.to_json() == twin.to_json()
        and ledger.get_epsilon() == twin.get_epsilon()
        and ledger.position == twin.position
        and ledger.max_grad_norm == twin.max_grad_norm
        and (ledger.end, len(ledger)) == (twin.end, len(twin))
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
def test_a_twin_says_what_the_ledger_says(changes, tmp_path):
    """Notes, which only the writer makes, included."""
    run = plan(**changes)
    counts = {"num_below": 4, "num_rows": 9} if run.is_adaptive else None
    ledger, twin = Ledger(run, path=tmp_path / "ledger"), Twin(run)
    for number in range(4):
        step(ledger, twin, counts=counts)
        assert same(ledger, twin)
        if number == 1:
            ledger.note(logged="loss")
            twin.note(logged="loss")


def test_a_twin_goes_on_from_a_checkpoint(tmp_path):
    """A step that is run again: with the same sum it is free, with another it is paid twice."""
    run, path = plan(), tmp_path / "ledger"
    ledger, twin = Ledger(run, path=path), Twin(run)
    step(ledger, twin)
    state = ledger.state()
    step(ledger, twin)
    step(ledger, twin)
    ledger.close()
    resumed = Ledger.resume(run, state, path)
    twin = Twin.of(run, resumed.to_json(), resumed.state())
    assert same(resumed, twin)
    step(resumed, twin)
    assert len(resumed) == 3
    step(resumed, twin, sums=[np.ones(2)])
    assert len(resumed) == 4
    assert same(resumed, twin)


def test_a_twin_refuses_the_steps_that_the_ledger_refuses():
    run = plan(num_steps=1)
    ledger, twin = Ledger(run), Twin(run)
    for book in (ledger, twin):
        with pytest.raises(AccountingError, match="step=1 came after 0 recorded releases"):
            book.record(1)
    step(ledger, twin)
    for book in (ledger, twin):
        with pytest.raises(AccountingError, match="step=1 is past the plan's num_steps=1"):
            book.record(1)


def test_a_failed_step_may_be_asked_for_again():
    """After the record and before the seal, on all processes."""
    run = plan()
    ledger, twin = Ledger(run), Twin(run)
    for book in (ledger, twin):
        book.record(0)
    step(ledger, twin)
    assert same(ledger, twin)
    assert len(ledger) == 1


def edited(**changes):
    """Words whose first line has other values."""

    def edit(words):
        record = json.loads(words["lines"][0])
        return {**words, "lines": [json.dumps({**record, **changes}), *words["lines"][1:]]}

    return edit


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (edited(noise_multiplier=2.0), r"recorded \{.*\}\. Expected \{"),
        (edited(max_grad_norm=0.5), r"recorded \{.*\}\. Expected \{"),
        (edited(hash="0" * 64), "other lines than the one that is written"),
        (lambda words: {**words, "lines": words["lines"][:1]}, "was sealed by the process"),
        (lambda words: {**words, "lines": words["lines"][1:]}, "other lines than the one"),
        (lambda w: {**w, "seal": [*w["seal"][:3], 0.9, *w["seal"][4:]]}, r"are \(1.0, 1.0, 10.0\)"),
        (lambda w: {**w, "seal": [1, *w["seal"][1:]]}, "Step 1, branch 0, was sealed by the"),
    ],
)
def test_a_twin_refuses_what_it_would_not_write(words, text):
    run = plan()
    with pytest.raises(AccountingError, match=text):
        step(Ledger(run), Twin(run), words=words)


def test_a_twin_of_another_ledger_is_refused():
    run = plan()
    ledger, twin = Ledger(run), Twin(run)
    step(ledger, twin)
    with pytest.raises(AccountingError, match="other lines than the one that is written"):
        Twin.of(run, ledger.to_json(), ledger.state())  # its last line is no resume
