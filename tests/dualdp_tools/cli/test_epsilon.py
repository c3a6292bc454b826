# SPDX-License-Identifier: Apache-2.0
"""Commands say whom their epsilon protects."""

import json

import pytest
from typer.testing import CliRunner

from dualdp import Ledger, PrivacyPlan
from dualdp_tools.cli import app

RUN = "--noise-multiplier 2 --sample-rate 0.01 --steps 20 --delta 1e-5"


def run(command):
    return CliRunner().invoke(app, command.split(), env={"COLUMNS": "200"})


@pytest.mark.parametrize(
    ("options", "protects"),
    [
        ("", "example"),
        ("--unit user", "user with all rows"),
        ("--group-size 3", "user with at most 3 examples"),
    ],
)
def test_epsilon_says_whom_it_protects(options, protects):
    assert json.loads(run(f"epsilon {RUN} {options} --json").output)["protects"] == protects
    assert f"the data with and without any one {protects}" in run(f"epsilon {RUN} {options}").output


def test_contradictory_units_are_refused():
    done = run(f"epsilon {RUN} --unit user --group-size 3")
    assert done.exit_code == 2
    assert "group_size=3 came with unit='user'. Expected one of the two" in done.output
    done = run("calibrate --target-epsilon 1 --delta 1e-5 --sample-rate 0.1 --steps 1 --unit you")
    assert "unit='you' is unknown. Expected one of example, user" in done.output


@pytest.mark.parametrize(
    ("unit", "words"), [("example", "example"), ("user", "user with all rows")]
)
def test_verify_and_its_report_say_whom_epsilon_protects(tmp_path, unit, words):
    plan = PrivacyPlan(
        unit=unit,
        rows_per_unit=None if unit == "example" else 5,
        num_examples=200,
        expected_batch_size=10,
        num_steps=2,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        delta=1e-5,
    )
    ledger = Ledger(plan, path=tmp_path / "run.jsonl")
    for step in range(2):
        ledger.record(step)
    page = tmp_path / "page.md"
    said = run(f"verify {tmp_path / 'run.jsonl'} --report {page}").output
    assert f"It protects any one {words}." in said
    assert f"of one {unit} at delta = 1e-05" in said
    assert f"any one {words}. Whatever is done" in said
    text = page.read_text()
    assert f"{unit.capitalize()}s: 200; one {words} is what is protected" in text
    assert f"A person with several {unit}s has less protection" in text
