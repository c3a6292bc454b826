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
        ("--group-size 3", "user with at most 3 examples"),
    ],
)
def test_epsilon_says_whom_it_protects(options, protects):
    assert json.loads(run(f"epsilon {RUN} {options} --json").output)["protects"] == protects
    assert f"the data with and without any one {protects}" in run(f"epsilon {RUN} {options}").output
