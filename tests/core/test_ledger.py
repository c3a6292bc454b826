# SPDX-License-Identifier: Apache-2.0
"""The ledger: every release once, in order, accounted before it happens."""

import json

import pytest

import dualdp
from tests.core.test_plan import make


def test_a_ledger_spends_what_the_plan_says():
    plan = make(num_steps=10, noise_multiplier=lambda step: 1.0 + step / 10)
    ledger = dualdp.Ledger(plan)
    assert ledger.get_epsilon() == 0
    for step in range(10):
        ledger.record(step)
        assert ledger.get_epsilon() == pytest.approx(plan.epsilon(step + 1), rel=1e-12)
    assert len(ledger) == len(ledger.accountant) == 10
    assert ledger.get_epsilon(1e-3) < ledger.get_epsilon()


def test_an_entry_says_what_was_released():
    plan = make(max_grad_norm=lambda step: 1.0 + step, seed=1)
    ledger = dualdp.Ledger(plan)
    ledger.record(0)
    assert ledger.record(1) == {
        "step": 1,
        "sampler": "poisson",
        "noise_multiplier": 1.1,
        "max_grad_norm": 2.0,
        "sample_rate": 0.05,
    }
    text = ledger.to_json()
    assert json.loads(text)["releases"] == ledger.entries
    assert plan.root.secret.hex() not in text


def test_a_step_is_recorded_once():
    ledger = dualdp.Ledger(make())
    ledger.record(0)
    for step in (0, 2):
        with pytest.raises(dualdp.AccountingError, match=f"step={step} came after 1 recorded"):
            ledger.record(step)


def test_refused_step_changes_nothing():
    ledger = dualdp.Ledger(make(num_steps=1))
    ledger.record(0)
    before = (list(ledger.entries), ledger.get_epsilon(), len(ledger.accountant))
    with pytest.raises(dualdp.AccountingError, match="step=1 is past the plan's num_steps=1"):
        ledger.record(1)
    assert (ledger.entries, ledger.get_epsilon(), len(ledger.accountant)) == before
