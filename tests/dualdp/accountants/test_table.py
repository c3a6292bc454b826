# SPDX-License-Identifier: Apache-2.0
"""The numbers of 300 settings are those of tests/fixtures/accounting.json."""

import json
import random

import pytest

from tests.fixtures import accounting

ROWS = json.loads(accounting.PATH.read_text(encoding="utf-8"))
#: Drawn once: tens of rows a test, so that it does more than its overhead.
ORDER = random.Random(39).sample(range(len(ROWS)), len(ROWS))
TENS = [ORDER[start : start + 20] for start in range(0, len(ROWS), 20)]


@pytest.mark.parametrize(
    "rows", [pytest.param(t, marks=() if k < 5 else pytest.mark.slow) for k, t in enumerate(TENS)]
)
def test_no_number_has_changed(rows):
    for i in rows:
        row = ROWS[i]
        found = accounting.numbers(row["kind"], row["given"])
        assert found == pytest.approx(row["numbers"], rel=1e-9, abs=1e-300), (i, row["given"])
