# SPDX-License-Identifier: Apache-2.0
"""`dualdp audit`: a step of ones own, and our engines."""

import json

import pytest
from typer.testing import CliRunner

from dualdp_tools.cli import app


def call(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


@pytest.mark.slow
def test_an_audit_of_a_step_of_ones_own():
    done = call("audit", "--step", "tests.numpy_step:NumpyStep", "--seed", 1, "--steps", 40)
    assert done.exit_code == 0, done.output
    assert "Not refuted" in done.output
    assert "At most one correct step in 1,000,000 is refuted." in done.output
    assert "with 95% confidence\n" in done.output
    refuted = ("audit", "--step", "tests.dualdp_tools.cli.test_audit:broken", "--seed", 1)
    assert "REFUTED: the releases show more than epsilon = " in call(*refuted).output
    done = call(*refuted, "--json")
    assert (done.exit_code, json.loads(done.output)["is_refuted"]) == (1, True)


def broken():
    """A step that forgets to clip."""
    from tests.numpy_step import NumpyStep

    return NumpyStep("clipping off", noise_multiplier=4.0)


@pytest.mark.slow
@pytest.mark.parametrize("stack", ["torch", "jax"])
def test_an_audit_of_our_engine(stack):
    words = ("--steps", 30, "--canaries", 300, "--seed", 2, "--check")
    done = call("audit", "--stack", stack, *words)
    assert done.exit_code == 0, done.output
    assert "claimed: epsilon = " in done.output
    assert "All checks passed" in done.output
