# SPDX-License-Identifier: Apache-2.0
"""`dualdp calibrate --compare-batch-sizes`: the table, its JSON, its picture, and refusals."""

import json

import pytest
from typer.testing import CliRunner

import dualdp
from dualdp_tools.cli import app

RUN = "--target-epsilon 2 --delta 1e-5 --accountant rdp --num-examples 16".split()


def call(*options):
    return CliRunner().invoke(app, ["calibrate", *RUN, *options], env={"COLUMNS": "200"})


def test_the_table_names_the_unit_and_ends_with_a_verdict():
    found = call("--compare-batch-sizes", "1,100", "--unit", "user")
    assert found.exit_code == 0
    assert "epsilon = 2 of one user with all rows" in found.output
    assert "Smallest batch size with at most 1.25 times the noise" in found.output


def test_json_is_the_function_and_the_picture_is_drawn(tmp_path):
    path = tmp_path / "noise.png"
    found = json.loads(call("--compare-batch-sizes", "1,4", "--json", "--plot", str(path)).stdout)
    expected = dualdp.compare_batch_sizes(
        target_epsilon=2, target_delta=1e-5, num_examples=16, epochs=[1, 4], accountant="rdp"
    )
    assert found["options"] == [option._asdict() for option in expected.options]
    assert found["verdict"] == expected.verdict
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["1,x"], "'1,x' is no list of numbers"),
        (["1", "--epochs", "2"], "came with --epochs"),
        (["1", "--advise"], "came with --advise"),
        (["-1"], "epochs=-1.0 is out of range"),
        (["1", "--plot", "/nowhere/noise.png"], "lies in no existing folder"),
    ],
)
def test_what_can_not_be_compared_is_refused(options, words):
    found = call("--compare-batch-sizes", *options)
    assert found.exit_code == 2
    assert words in found.output


def test_the_number_of_examples_is_asked_for():
    options = ["--compare-batch-sizes", "1", "--target-epsilon", "2", "--delta", "1e-5"]
    found = CliRunner().invoke(app, ["calibrate", *options])
    assert found.exit_code == 2
    assert "came alone. Expected --num-examples beside it" in found.output
