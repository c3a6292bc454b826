# SPDX-License-Identifier: Apache-2.0
"""The numbers of 300 settings are those of tests/fixtures/accounting.json."""

import json
import random

import pytest

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


def test_the_table_is_that_of_the_script():
    made = [{"kind": kind, "given": given} for kind, given in accounting.settings()]
    assert json.loads(json.dumps(made)) == [{k: r[k] for k in ("kind", "given")} for r in ROWS]
    assert len(ROWS) == 300
