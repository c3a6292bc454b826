# SPDX-License-Identifier: Apache-2.0
"""Commands say whom their epsilon protects."""

import json

import pytest
from typer.testing import CliRunner

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
