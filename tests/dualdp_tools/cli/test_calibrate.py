# SPDX-License-Identifier: Apache-2.0
"""`dualdp calibrate`: noise, steps or rate, each within the target and close to it."""

import json

import pytest
from typer.testing import CliRunner

import dualdp
from dualdp_tools.cli import app


def calibrate(options):
    done = CliRunner().invoke(
        app, f"calibrate --target-epsilon 2 --delta 1e-5 --accountant rdp {options}".split()
    )
    return done.exit_code, done.output


@pytest.mark.parametrize(
    "known",
    [
        "--sample-rate 0.02 --steps 200",
        "--num-examples 5000 --batch-size 100 --epochs 4",
        "--noise-multiplier 1.2 --sample-rate 0.02",
        "--noise-multiplier 1.2 --steps 200",
    ],
)
def test_what_is_left_out_is_found(known):
    code, text = calibrate(f"{known} --json")
    assert code == 0, text
    found = json.loads(text)
    names = ("noise_multiplier", "sample_rate", "num_steps", "delta")
    run = {name: found[name] for name in names}
    assert 1.95 < dualdp.get_epsilon(**run, accountant="rdp") <= 2
    if "epochs" in known:
        assert (run["sample_rate"], run["num_steps"]) == (0.02, 200)


def test_nothing_left_to_find_is_refused():
    code, text = calibrate("--noise-multiplier 1.2 --sample-rate 0.02 --steps 200")
    assert code == 2
    assert "Nothing is left to look for. Leave out one of" in " ".join(text.split())
