# SPDX-License-Identifier: Apache-2.0
"""Comparisons in this process, which take few of the rounds that are timed."""

import pytest
from typer.testing import CliRunner

from dualdp_tools.cli import app
from dualdp_tools.compare.experiment import Experiment

QUICK = ("--steps", "3", "--batch-size", "40", "--model", "mlp")


@pytest.fixture
def compare(tmp_path, monkeypatch):
    """`dualdp compare` into `tmp_path / "out"`: (exit code, words of the output)."""
    timed = Experiment.time_steps
    monkeypatch.setattr(Experiment, "time_steps", lambda self: timed(self, rounds=2, steps=1))

    def compare(*options):
        command = ["compare", "--out", str(tmp_path / "out"), *QUICK, *options]
        done = CliRunner().invoke(app, command)
        return done.exit_code, " ".join(done.output.split())

    return compare
