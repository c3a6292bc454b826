# SPDX-License-Identifier: Apache-2.0
"""`dualdp calibrate --advise`: the table, its JSON, and what is missing."""

import json

import pytest
from typer.testing import CliRunner

from dualdp_tools.cli import app

RUN = ["--target-epsilon", "8", "--delta", "1e-5", "--batch-size", "2000", "--epochs", "4"]


def call(*options):
    return CliRunner().invoke(app, ["calibrate", "--advise", *RUN, *options])


@pytest.mark.slow
def test_the_table_ends_with_a_verdict():
    found = call("--num-examples", "200000")
    assert found.exit_code == 0
    assert "band of 8" in found.output
    assert "less noise in the model than DP-SGD" in found.output


@pytest.mark.slow
def test_json_has_the_same_options():
    found = json.loads(call("--num-examples", "200000", "--json").stdout)
    assert found["options"][0]["relative_error"] < 1
    assert {"name", "sampler", "noise_multiplier", "error"} <= set(found["options"][0])


@pytest.mark.parametrize("options", [(), ("--num-examples", "200000", "--noise-multiplier", "1")])
def test_what_is_missing_is_named(options):
    found = call(*options)
    assert found.exit_code == 2
    assert "Give --num-examples, --batch-size" in found.output
