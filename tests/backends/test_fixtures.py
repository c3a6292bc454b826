# SPDX-License-Identifier: Apache-2.0
"""Plans, keys, ledgers and checkpoints of the version before load, go on and verify."""

import json
import shutil
from pathlib import Path

import pytest
import torch

import dualdp
import dualdp.jax as dpj
import dualdp.torch as dpt
from dualdp import checkpoint
from dualdp.ledger.verify import verify
from tests.fixtures import make

FOLDER = Path(make.__file__).parent / "0.1.0"
STACKS = ("torch", "jax")


@pytest.fixture
def old(stack, name, tmp_path, monkeypatch):
    """A copy of one run's files, on a machine that has not seen its key."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return Path(shutil.copytree(FOLDER / stack / name, tmp_path / "run"))


def ledger_of(folder):
    """The ledger: in a file of its own, or the one that lay in memory until the checkpoint."""
    beside = folder / "run.safetensors.ledger"
    return beside if beside.exists() else folder / "run.ledger"


def resumed(stack, folder):
    """Engine of the checkpoint, and a function that runs its remaining steps and saves."""
    path = folder / "run.safetensors"
    key = folder / "run.key"
    if stack == "torch":
        model, optimizer, loader = make.torch_parts()
        engine = dpt.load_checkpoint(path, model=model, optimizer=optimizer, key=key)
        model, optimizer, loader = engine.resume(data_loader=loader)

        def go_on():
            for x, y in loader.remaining():
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
            dpt.save_checkpoint(path, model=model, optimizer=optimizer, engine=engine)

        return engine, go_on
    parts = make.jax_parts()
    like = dpj.TrainState.create(parts["params"], parts["optimizer"])
    state, engine = dpj.load_checkpoint(path, like=like, key=key)
    step, state, loader = engine.resume(**parts)

    def go_on():
        end = state
        for batch in loader.remaining():
            end, _ = step(end, batch)
        dpj.save_checkpoint(path, state=end, engine=engine)

    return engine, go_on


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("name", make.PLANS)
def test_plans_keys_and_ledgers_of_the_version_before_are_read(stack, name, old):
    text = (old / "plan.json").read_text()
    plan = dualdp.PrivacyPlan.from_json(text, key=old / "run.key")
    assert json.loads(plan.to_json()) == json.loads(text)
    found = verify(ledger_of(old), allow_seed=True)
    assert found.passed, found.findings
    assert (found.num_steps, found.covers_the_plan) == (5, False)
    spent = json.loads((old / "epsilon.json").read_text())
    assert found.epsilon == pytest.approx(spent, rel=1e-9)
    if plan.seed is None:  # the key has a mark, and its run can only go on
        with pytest.raises(dualdp.AccountingError, match="was used by a run that left .*key.used"):
            dualdp.Ledger(plan).record(0)


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("name", make.PLANS)
def test_checkpoints_of_the_version_before_go_on(stack, name, old):
    """Clip factors carry a margin now, so the two steps that run again are other releases."""
    spent = json.loads((old / "epsilon.json").read_text())
    engine, go_on = resumed(stack, old)
    assert (engine.ledger.position, len(engine.ledger)) == (3, 5)
    assert engine.get_epsilon(delta=1e-5) == pytest.approx(spent, rel=1e-9)
    if name == "bins":
        with pytest.raises(
            dualdp.AccountingError, match="run 2 times under sampler='balls_in_bins'"
        ):
            go_on()
        return
    go_on()
    entries = [(entry["step"], entry["branch"]) for entry in engine.ledger.entries]
    assert entries == [(0, 0), (1, 0), (2, 0), (3, 0), (4, 0), (3, 1), (4, 1), (5, 1)]
    plan = engine.plan
    assert engine.get_epsilon(delta=1e-5) > plan.epsilon()
    engine.detach()
    found = verify(ledger_of(old), allow_seed=True)
    assert found.passed, found.findings
    assert found.covers_the_plan
    # The checkpoint that was written is of this version: a position and a hash.
    state = checkpoint.read(old / "run.safetensors")[1]["ledger"]
    assert set(state) == {"position", "branch", "max_grad_norm", "num_lines", "hash"}
    again, _ = resumed(stack, old)
    assert again.ledger.position == 6
    again.detach()


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("name", ["poisson"])
def test_a_checkpoint_that_held_the_ledgers_text_is_read_as_one_that_does_not(stack, name, old):
    document = checkpoint.read(old / "run.safetensors")[1]
    assert document["stack"] == stack
    assert document["ledger"]["num_lines"] == 1 + 2 * 3
    assert "text" not in document["ledger"]
