# SPDX-License-Identifier: Apache-2.0
"""The numbers of 300 settings are those of tests/fixtures/accounting.json."""

import json
import random

import pytest

from dualdp.mechanisms import RELATIONS
from dualdp.plan.samplers import SAMPLERS
from tests.fixtures import accounting

ROWS = json.loads(accounting.PATH.read_text(encoding="utf-8"))
#: A third, drawn once, is looked at by every run of the tests.
DRAWN = set(random.Random(39).sample(range(len(ROWS)), len(ROWS) // 3))


def cases():
    """Tens of rows, so that a test does more than its overhead."""
    for is_drawn in (True, False):
        rows = [i for i in range(len(ROWS)) if (i in DRAWN) == is_drawn]
        for start in range(0, len(rows), 20):
            marks = () if is_drawn else pytest.mark.slow
            yield pytest.param(rows[start : start + 20], id=f"from {rows[start]}", marks=marks)


@pytest.mark.parametrize("rows", list(cases()))
def test_no_number_has_changed(rows):
    for i in rows:
        row = ROWS[i]
        found = accounting.numbers(row["kind"], row["given"])
        assert found == pytest.approx(row["numbers"], rel=1e-9, abs=1e-300), (i, row["given"])


def test_the_table_has_every_kind_of_setting():
    plans = [row["given"] for row in ROWS if row["kind"] == "plan"]
    assert (len(ROWS), len(plans)) == (300, 127)
    assert {plan.get("sampler", "poisson") for plan in plans} == set(SAMPLERS)
    assert {plan.get("neighboring_relation", "add_or_remove") for plan in plans} == set(RELATIONS)
    assert {name for plan in plans for name in plan} >= {"correlation", "unit", "max_grad_norm"}
    assert {row["kind"] for row in ROWS} == {
        *("steps", "get_noise_multiplier", "get_num_steps", "get_sample_rate"),
        *("get_schedule_scale", "history", "plan", "gdp"),
    }
