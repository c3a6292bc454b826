# SPDX-License-Identifier: Apache-2.0
"""Results files are read back; reports and the README's table say what they hold."""

import json
import subprocess
import sys
from dataclasses import asdict, replace

import pytest

from benchmarks import accounting, reports, results
from benchmarks.results import Row
from benchmarks.systems import NON_PRIVATE, OURS

ROW = Row(suite="speed", stack="torch", workload="mlp", options={"width": 9}, batch=4, system=OURS)


def rows():
    numbers = {"seconds": 2e-3, "step_seconds": 4e-3, "memory": 2**21, "plain_memory": 2**20}
    plain = {**asdict(ROW), **numbers, "system": NON_PRIVATE, "sum": 1.0, "first": 0.5}
    ours = {**asdict(ROW), **numbers, "sum": 1.25, "step": 1.5, "first": 1.0, "plain_first": 0.5}
    other = {**ours, "system": "peer", "sum": 2.5}
    failed = {**asdict(ROW), "system": "broken", "error": "ValueError: no"}
    return [Row(**fields) for fields in (plain, ours, other, failed)]


@pytest.fixture
def found(tmp_path):
    made = results.collect("speed", rows(), device="A CPU", threads=2, command="python -m x")
    return results.read(results.write(made, tmp_path))


def test_a_file_is_read_back(found, tmp_path):
    assert found.rows == rows()
    assert [path.name for path in tmp_path.iterdir()] == ["speed-torch-a-cpu.json"]


@pytest.mark.parametrize("text", ["{", "[]", '{"suite": "speed"}', '{"rows": 3}'])
def test_another_file_is_refused(text, tmp_path):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ValueError, match="is no results file"):
        results.read(tmp_path / "x.json")


def test_a_report_has_every_row(found):
    text = reports.markdown(found)
    assert "| dualdp | 1.25 ± 0.00 | 1.50 ± 0.00 | 2.00 | 1 s (500 ms) |  |" in text
    assert "| non-private | 2 ms | 4 ms | 2 MiB | 500 ms |  |" in text
    assert "ValueError: no" in text


def test_the_readme_gets_its_table(found, tmp_path):
    page = tmp_path / "README.md"
    page.write_text("before\n<!-- speed -->\nold\n<!-- /speed -->\nafter\n")
    on_jax = [replace(row, stack="jax", system=OURS, sum=1.0, step=None) for row in rows()[1:2]]
    reports.update(page, [found, replace(found, rows=on_jax)])
    assert "| mlp, 4 | 1.25 | 2.50 (peer) | 1.50 | 1.00 |  |  |" in page.read_text()
    assert "old" not in page.read_text()
    page.write_text("nothing")
    with pytest.raises(ValueError, match="has no place for the table"):
        reports.update(page, [found])


@pytest.mark.slow
def test_a_row_of_its_own_process(monkeypatch):
    """A system that fails is a row with its reason; one whose process dies, too."""
    from benchmarks import commands

    row = Row(**{**asdict(ROW), "system": "opacus:nothing"})
    assert "ValueError: system='opacus:nothing'" in commands.in_own_process(row, []).error
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert "the process ended with 1" in commands.in_own_process(row, []).error

    def hang(*args, **kwargs):
        raise subprocess.TimeoutExpired("x", 1)

    monkeypatch.setattr(subprocess, "run", hang)
    assert commands.in_own_process(row, []).error == "not measured: more than 900 s"


@pytest.mark.slow
def test_accounting_rows_have_the_answers_of_dualdp():
    import dualdp

    found = [row for row in accounting.rows(quick=True) if row.system == "dualdp"]
    assert json.dumps([asdict(row) for row in found])
    (calibrated,) = [row for row in found if row.workload.startswith("calibrate")]
    assert calibrated.value == dualdp.get_noise_multiplier(
        target_epsilon=1.0, target_delta=1e-5, sample_rate=0.01, num_steps=1_000
    )
