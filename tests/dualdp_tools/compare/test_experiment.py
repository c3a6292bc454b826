# SPDX-License-Identifier: Apache-2.0
"""`dualdp compare`: agrees where the stacks agree, says where they do not, leaves whole files."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import dualdp.jax as dpj
import dualdp.torch as dpt
from dualdp_tools.cli import app

QUICK = ["--steps", "3", "--batch-size", "40", "--model", "mlp"]


#: The timing is not what these tests are about.
FEW_TIMED_ROUNDS = """
from dualdp_tools.compare.experiment import Experiment
whole = Experiment.time_steps
Experiment.time_steps = lambda self: whole(self, rounds=2, steps=1)
"""


def compare(out, *options):
    return CliRunner().invoke(app, ["compare", "--out", str(out), *options])


def dualdp(*arguments, timed_as_always=False):
    """The installed command in its own process, float64 and all."""
    code = "from dualdp_tools.cli import main; main()"
    if not timed_as_always:
        code = f"{FEW_TIMED_ROUNDS}\n{code}"
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.fixture(autouse=True)
def few_timed_rounds(monkeypatch):
    """As `FEW_TIMED_ROUNDS`, in this process."""
    from dualdp_tools.compare.experiment import Experiment

    whole = Experiment.time_steps
    monkeypatch.setattr(Experiment, "time_steps", lambda self: whole(self, rounds=2, steps=1))


@pytest.mark.slow
def test_stacks_agree_half_way_too(tmp_path):
    """A third run goes from PyTorch to JAX in the middle."""
    options = [*QUICK, "--steps", "6", "--switch-at", "4"]
    done = compare(tmp_path, *options)
    assert done.exit_code == 0, done.output
    data = json.loads((tmp_path / "compare.json").read_text())
    assert data["training"][-1]["difference"] < 1e-5
    assert data["training"][-1]["switched"] < 1e-5


@pytest.mark.slow
def test_it_writes_both_files_and_three_tables(tmp_path):
    done = compare(tmp_path / "new" / "folder", "--seed", "1", *QUICK)
    assert done.exit_code == 0, done.output
    for title in ("1. Per-sample gradients", "2. One plan, two runs", "3. Time per step"):
        assert title in done.output
    data = json.loads((tmp_path / "new" / "folder" / "compare.json").read_text())
    assert data["agree"] is True
    assert [point["step"] for point in data["training"]] == [1, 2, 3]
    assert {row["torch_name"] for row in data["gradients"]} == {
        "hidden.weight",
        "hidden.bias",
        "head.weight",
        "head.bias",
    }
    assert all(row["excess"] <= 1 for row in data["gradients"])
    assert data["training"][-1]["epsilon"]["torch"] == data["training"][-1]["epsilon"]["jax"] <= 8
    assert {timing["stack"] for timing in data["seconds_per_step"]} == {"torch", "jax"}
    assert (tmp_path / "new" / "folder" / "compare.png").read_bytes()[:4] == b"\x89PNG"
    assert len(list((tmp_path / "new" / "folder").iterdir())) == 2


@pytest.mark.slow
@pytest.mark.parametrize("stack", [dpt, dpj], ids=["torch", "jax"])
def test_a_perturbed_gradient_is_found_and_named(tmp_path, monkeypatch, stack):
    import jax
    from jax.tree_util import keystr

    honest = stack.per_sample_grads

    def perturbed(*arguments, **options):
        grads = honest(*arguments, **options)
        if stack is dpt:
            return {key: grad * (1.001 if key == "head.bias" else 1) for key, grad in grads.items()}
        return jax.tree_util.tree_map_with_path(
            lambda path, grad: grad * (1.001 if "['head']['bias']" in keystr(path) else 1), grads
        )

    monkeypatch.setattr(stack, "per_sample_grads", perturbed)
    done = compare(tmp_path, *QUICK)
    assert done.exit_code == 1
    assert "The stacks disagree: the per-sample gradients of head.bias" in " ".join(
        done.output.split()
    )
    assert json.loads((tmp_path / "compare.json").read_text())["agree"] is False


@pytest.mark.slow
def test_a_perturbed_training_is_found_and_named(tmp_path, monkeypatch):
    from dualdp_tools.compare.torch_side import TorchRun

    honest = TorchRun.private_step

    def perturbed(self, step):
        honest(self, step)
        if step == 1:
            self.model.head.weight.data.mul_(1.0001)

    monkeypatch.setattr(TorchRun, "private_step", perturbed)
    done = compare(tmp_path, *QUICK)
    assert done.exit_code == 1
    words = " ".join(done.output.split())
    assert "after step 2 the parameters differ by" in words
    assert "most at head.weight; tolerated is 1e-05" in words


@pytest.mark.slow
def test_a_run_that_changes_stacks_stays_with_both(tmp_path):
    done = compare(tmp_path, *QUICK, "--steps", "6", "--switch-at", "2")
    assert done.exit_code == 0, done.output
    data = json.loads((tmp_path / "compare.json").read_text())
    assert data["settings"]["switch_at"] == 2
    before, after = data["training"][0], data["training"][2:]
    assert before["switched"] is None
    assert set(before["epsilon"]) == {"torch", "jax"}
    for point in after:
        assert 0 < point["switched"] < 1e-5
        assert point["epsilon"]["switched"] == point["epsilon"]["torch"] == point["epsilon"]["jax"]
        assert abs(point["accuracy"]["switched"] - point["accuracy"]["jax"]) < 0.01


@pytest.mark.slow
def test_a_broken_hand_over_is_found(tmp_path, monkeypatch):
    """Without the optimizer's momentum the third run goes elsewhere."""
    from dualdp import port

    monkeypatch.setattr(port, "optimizer_to_jax", lambda *_, like, **__: like)
    done = compare(tmp_path, *QUICK, "--steps", "4", "--switch-at", "2")
    assert done.exit_code == 1
    assert "after step 3 the run that changed stacks differs by" in " ".join(done.output.split())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--switch-at", "3", "--steps", "3"],
            "switch_at=3 is not within the run. Expected 1 to 2",
        ),
        (["--steps", "0"], "steps=0 is out of range. Expected an integer >= 1"),
        (["--batch-size", "5000"], "expected_batch_size=5000.0 exceeds num_examples=1437"),
        (["--model", "vgg"], "model='vgg' is unknown. Expected one of cnn, mlp"),
        (["--dtype", "float16"], "dtype='float16' is unknown. Expected one of float32, float64"),
        (["--target-epsilon", "-1"], "target_epsilon=-1.0 is out of range"),
    ],
)
def test_bad_options_are_one_sentence_and_leave_nothing(tmp_path, options, message):
    done = compare(tmp_path / "out", *options)
    assert done.exit_code == 2
    assert f"dualdp: {message}" in done.output
    assert not (tmp_path / "out" / "compare.json").exists()


def test_a_folder_that_cannot_be_written_is_found_first(tmp_path):
    (tmp_path / "file").write_text("in the way")
    done = dualdp("compare", "--out", tmp_path / "file" / "out", "--steps", 1)
    assert done.returncode == 2
    assert "can't be written" in done.stderr
    assert "Expected a folder that exists or can be made; choose another." in " ".join(
        done.stderr.split()
    )
    assert "Traceback" not in done.stderr


def test_nothing_half_written_when_the_picture_fails(tmp_path, monkeypatch):
    from dualdp_tools.compare import report

    monkeypatch.setattr(report, "picture", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    done = compare(tmp_path, *QUICK)
    assert (done.exit_code, done.stderr) == (2, "dualdp: disk full\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "model", "tolerance"),
    [("float32", "cnn", 1e-5), ("float64", "mlp", 1e-8)],
)
def test_400_steps_stay_together_and_learn(tmp_path, dtype, model, tolerance):
    """The figures that README states: the drift, and 92 % held-out accuracy at epsilon <= 8."""
    options = ["--out", tmp_path, "--dtype", dtype, "--model", model]
    done = dualdp("compare", *options, timed_as_always=model == "mlp")
    assert done.returncode == 0, done.stdout + done.stderr
    last = json.loads((tmp_path / "compare.json").read_text())["training"][-1]
    assert last["step"] == 400
    assert last["difference"] < tolerance
    assert last["epsilon"]["torch"] == last["epsilon"]["jax"] <= 8
    assert min(last["accuracy"].values()) >= 0.92
