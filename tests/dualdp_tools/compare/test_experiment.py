# SPDX-License-Identifier: Apache-2.0
"""`dualdp compare`: agrees where the stacks agree, and says where they do not."""

import json
import subprocess
import sys

import pytest

from dualdp_tools.compare.torch_side import TorchRun


def data_of(folder):
    return json.loads((folder / "out" / "compare.json").read_text())


@pytest.mark.slow
def test_a_run_that_changes_stacks_stays_with_both(compare, tmp_path):
    code, words = compare("--steps", "6", "--switch-at", "2")
    assert code == 0, words
    data = data_of(tmp_path)
    assert data["settings"]["switch_at"] == 2
    before, after = data["training"][0], data["training"][2:]
    assert before["switched"] is None
    assert set(before["epsilon"]) == {"torch", "jax"}
    for point in after:
        assert 0 < point["switched"] < 1e-5
        assert point["epsilon"]["switched"] == point["epsilon"]["torch"] == point["epsilon"]["jax"]
        assert abs(point["accuracy"]["switched"] - point["accuracy"]["jax"]) < 0.01


@pytest.mark.slow
def test_a_broken_hand_over_is_found(compare, monkeypatch):
    """With weights in place of the optimizer's momentum the third run goes elsewhere."""
    monkeypatch.setattr(TorchRun, "momentum", TorchRun.parameters)
    code, words = compare("--steps", "4", "--switch-at", "2")
    assert code == 1
    assert "after step 3 the run that changed stacks differs by" in words


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "model", "tolerance"), [("float32", "cnn", 1e-5), ("float64", "mlp", 1e-8)]
)
def test_400_steps_stay_together_and_learn(tmp_path, dtype, model, tolerance):
    """The figures that README states: the drift, and 92 % held-out accuracy at epsilon <= 8."""
    code = "from dualdp_tools.cli import main; main()"  # a process of its own: float64 and all
    command = [sys.executable, "-c", code, "compare", "--out", tmp_path / "out"]
    command += ["--dtype", dtype, "--model", model]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    last = data_of(tmp_path)["training"][-1]
    assert last["step"] == 400
    assert last["difference"] < tolerance
    assert last["epsilon"]["torch"] == last["epsilon"]["jax"] <= 8
    assert min(last["accuracy"].values()) >= 0.92
