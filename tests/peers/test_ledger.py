# SPDX-License-Identifier: Apache-2.0
"""Epsilon of a ledger by dp-accounting, from the numbers of its lines alone."""

import json
from collections import Counter

import pytest

from dualdp.ledger.ledger import Ledger
from dualdp.ledger.verify import verify
from tests.dualdp.ledger.test_ledger import release
from tests.dualdp.plan.test_plan import make


def test_epsilon_of_the_lines_is_that_of_dp_accounting():
    accounting = pytest.importorskip("dp_accounting")
    from dp_accounting import pld

    plan = make(noise_multiplier=lambda step: 1.0 + step / 100, num_steps=40)
    ledger = Ledger(plan)
    for step in range(40):
        release(ledger, step)
    again = Ledger.resume(ledger.to_json(), plan=plan, step=25)
    for step in range(25, 40):
        release(again, step)
    lines = (json.loads(line) for line in again.to_json().splitlines())
    theirs = pld.PLDAccountant()
    for (noise, rate), count in Counter(
        tuple(line["r"][1:]) for line in lines if "r" in line
    ).items():
        event = accounting.PoissonSampledDpEvent(rate, accounting.GaussianDpEvent(noise))
        theirs.compose(event, count)
    found = verify(again.to_json())
    assert found.epsilons["pld"] == pytest.approx(theirs.get_epsilon(plan.delta), rel=0.02)
    assert found.epsilons["rdp"] > theirs.get_epsilon(plan.delta) * 0.98
