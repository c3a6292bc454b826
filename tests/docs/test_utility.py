# SPDX-License-Identifier: Apache-2.0
"""The accuracy table of docs/units.md, and the program that made it."""

import json
import statistics
from pathlib import Path

import pytest

from benchmarks import units_utility

PAGE = (Path(__file__).parents[2] / "docs" / "units.md").read_text()


def test_the_table_of_the_page_is_that_of_the_results():
    rows = json.loads((units_utility.FOLDER / "results.json").read_text())
    assert (
        units_utility.report(rows).split("\n")[4:]
        == ((units_utility.FOLDER / "report.md").read_text().split("\n")[4:])
    )
    for name, setting in units_utility.SETTINGS.items():
        cells = [f"one {setting.protects}", name]
        for row in (row for row in rows if row["setting"] == name):
            for scores in (row[stack]["average"] for stack in units_utility.STACKS):
                error = units_utility.standard_error(scores)
                cells.append(f"{statistics.mean(scores):.3f} ± {error:.3f}")
                assert len(scores) == 10
        assert f"| {' | '.join(cells)} |" in PAGE


@pytest.mark.slow
@pytest.mark.parametrize("name", units_utility.SETTINGS)
def test_both_stacks_train_alike_without_noise(name, monkeypatch):
    monkeypatch.setattr(units_utility, "STEPS", 4)
    monkeypatch.setattr(units_utility, "noise_of", lambda *_: 1e-6)
    setting = units_utility.SETTINGS[name]
    scores = [units_utility.train(s, setting, 8.0, 4.0, 0) for s in units_utility.STACKS]
    assert scores[0] == pytest.approx(scores[1], abs=1 / 360)
    assert 0.3 < scores[0][0] < 0.95
