# SPDX-License-Identifier: Apache-2.0
"""Runs with correlated noise: the noise of the plan, after a resume or a restart too."""

import io
import pickle

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import dualdp_torch as dpt
from dualdp import AccountingError
from dualdp.plan.correlated import filters, strategies
from dualdp.plan.correlated import noise as core_noise
from dualdp_torch.noise import recursion
from dualdp_torch.noise.noise import noised_mean
from tests.only_torch.checkpoint.test_checkpoint import assert_bitwise, begin, go, load, parts
from tests.only_torch.loop import plan as small

STRATEGIES = {
    "window": strategies.window([1.0, -0.6, 0.3]),
    "band": strategies.band([1.0, 0.7, 0.2]),
    "blt": strategies.blt(decays=[0.8], scales=[0.5]),
}
each = pytest.mark.parametrize("name", STRATEGIES)
STEPS, SIZE = 6, 12


def plan(name, **changes):
    settings = {"sampler": "fixed_order", "num_steps": STEPS}
    return small(**{"correlation": STRATEGIES.get(name), **settings, **changes})


def noises(engine, model, optimizer, loader, path=None, save_at=None):
    """Step -> the noise that was in its sum, one array; saves after `save_at` steps."""
    found = {}
    for x, y, _ in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        stages, step = engine.stages(), engine.ledger.position
        found[step - 1] = torch.cat(
            [
                (SIZE * stages.noisy_mean[name].double() - total).flatten()
                for name, total in stages.unprotected_sum.items()
            ]
        ).numpy()
        if step == save_at:
            dpt.save_checkpoint(path, model=model, optimizer=optimizer, engine=engine)
    return found


def expected(name, branches, like, **changes):
    """(steps, numbers) C^-1 z in float64, of the z that independent noise has."""
    free = plan(None, **changes)
    sums = {key: torch.zeros_like(p) for key, p in like.named_parameters()}
    drawn = [noised_mean(sums, free, t, branch=b) for t, b in enumerate(branches)]
    drawn = [SIZE * np.concatenate([v.double().flatten() for v in d.values()]) for d in drawn]
    scale = plan(name).sensitivity / free.sensitivity
    return scale * filters.matrix(STRATEGIES[name].inverse(len(branches))) @ np.stack(drawn)


def assert_noise(found, wanted):
    """To the rounding of float32 sums and means."""
    for step, noise in found.items():
        np.testing.assert_allclose(noise, wanted[step], rtol=0, atol=3e-5)


@each
def test_the_noise_of_a_run_is_that_of_its_strategy(name):
    model, optimizer, loader = parts("sgd")
    engine, _, _, loader = begin(plan(name), (model, optimizer, loader))
    found = noises(engine, model, optimizer, loader.remaining())
    assert list(found) == list(range(STEPS))
    assert_noise(found, expected(name, STEPS * [0], model))
    assert engine.get_epsilon() == pytest.approx(plan(name).epsilon())


@each
@pytest.mark.parametrize("mode", ["fast", "portable"])
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(name, mode, tmp_path):
    """Steps 3 to 5 are released, then run again from a checkpoint that holds no noise."""
    path = tmp_path / "run.safetensors"
    run = plan(name, noise=mode, physical_batch_size=5 if mode == "fast" else None)
    torch.manual_seed(7)
    whole = begin(run, parts("momentum"))
    go(*whole, save_at=3, path=path)
    whole[0].detach()
    again = load(path, parts("momentum"))
    go(*again)
    assert_bitwise(whole, again)
    assert len(again[0].ledger) == STEPS
    assert again[0].get_epsilon() == whole[0].get_epsilon()


@each
def test_a_restart_has_old_normals_before_and_new_ones_after(name, tmp_path):
    """A step that is run again with other gradients: another z for it and for all later steps."""
    path, model = tmp_path / "run.safetensors", parts("sgd")[0]
    whole = begin(plan(name), parts("sgd"))
    first = noises(*whole[:3], whole[3].remaining(), path, save_at=2)
    assert_noise(first, expected(name, STEPS * [0], model))
    whole[0].detach()
    again = load(path, parts("sgd"))
    with torch.no_grad():
        again[1][0].weight += 0.1
    second = noises(*again[:3], again[3].remaining(), path, save_at=4)
    assert list(second) == [2, 3, 4, 5]
    assert_noise(second, expected(name, [0, 0, 1, 1, 1, 1], model))
    assert again[0].get_epsilon() > whole[0].get_epsilon()
    again[0].detach()
    third = load(path, parts("sgd"))
    with torch.no_grad():
        third[1][0].weight += 0.1
    assert_noise(
        noises(*third[:3], third[3].remaining()), expected(name, [0, 0, 1, 1, 2, 2], model)
    )


@each
def test_noise_that_was_drawn_is_in_nothing_that_is_saved_or_shown(name, tmp_path):
    """The rows of a recursion and the z of a step, in files, states, pickles and reprs."""
    path, run = tmp_path / "run.safetensors", plan(name, seed=None)
    engine, model, optimizer, loader = begin(run, parts("sgd"))
    noises(engine, model, optimizer, loader.remaining(), path, save_at=STEPS - 1)
    sums = {key: torch.zeros_like(p) for key, p in model.named_parameters()}
    whole = {"noise_multiplier": run.draw_stddev(0, 1.0), "expected_batch_size": 1}
    free = small(seed=None, key=run.root, **whole)
    secrets = [noised_mean(sums, free, t)["0.weight"].flatten() for t in range(STEPS)]
    noised_mean(sums, run, STEPS - 2)
    kept = recursion._kept.get(id(run))
    assert (kept is None) == (name == "window")
    secrets += [row for rows in kept[1]._rows.values() for row in rows] if kept else []
    buffer = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], buffer)
    shown = [path.read_bytes(), (tmp_path / "run.safetensors.ledger").read_bytes()]
    shown += [buffer.getvalue(), pickle.dumps([engine.stages(), run])]
    for secret in secrets:
        assert secret.abs().max() > 0
        assert not any(secret[:3].numpy().tobytes() in text for text in shown)
    assert "Rows" not in f"{engine!r} {vars(engine)} {run!r} {vars(run)} {vars(engine._step)}"


def test_a_run_whose_noise_takes_too_long_to_draw_again_is_refused_at_once(tmp_path, monkeypatch):
    path, run = tmp_path / "run.safetensors", plan("band", seed=None)
    whole = begin(run, parts("sgd"))
    go(*whole, until=3)
    dpt.save_checkpoint(path, model=whole[1], optimizer=whole[2], engine=whole[0])
    whole[0].detach()
    size, made = sum(p.numel() for p in whole[1].parameters()), parts("sgd")
    monkeypatch.setattr(core_noise, "_MOST_DRAWS", 3 * size - 1)
    before = {name: p.clone() for name, p in made[0].state_dict().items()}
    with pytest.raises(AccountingError, match=f"draw 3 times {size} normals again would take days"):
        load(path, made)
    assert all(torch.equal(p, before[name]) for name, p in made[0].state_dict().items())
    monkeypatch.setattr(core_noise, "_MOST_DRAWS", 3 * size)
    assert load(path, made)[0].ledger.position == 3


def test_runs_that_take_turns_keep_their_own_rows():
    """Two engines in one process, of two plans or of one."""
    one = plan("band", seed=1)
    for plans in ([one, plan("band", seed=2)], [one, one]):
        runs = [begin(run, parts("sgd")) for run in plans]
        wanted = [expected("band", STEPS * [0], run[1], seed=run[0].plan.seed) for run in runs]
        passes = [iter(loader.remaining()) for *_, loader in runs]
        for _ in range(STEPS):
            for run, batches, noise in zip(runs, passes, wanted, strict=True):
                assert_noise(noises(*run[:3], [next(batches)]), noise)


def test_rows_are_freed_when_the_engine_is_detached():
    run = plan("band")
    engine, model, optimizer, loader = begin(run, parts("sgd"))
    batches = iter(loader)
    noises(engine, model, optimizer, [next(batches)])
    assert id(run) in recursion._kept
    engine.detach()
    assert id(run) not in recursion._kept


@each
def test_a_loop_of_ones_own_gets_the_noise_of_its_record(name):
    """With a secret key: `noisy_mean` for each step on record, once."""
    run = plan(name, seed=None)
    engine = dpt.PrivacyEngine()
    engine.make_loader(data_loader=parts()[2], plan=run)
    zeros, found = {"w": torch.zeros(20)}, []
    for step in range(STEPS):
        engine.record()
        found.append(SIZE * dpt.noisy_mean(zeros, run, step)["w"].double().numpy())
        with pytest.raises(AccountingError, match="was handed out before"):
            dpt.noisy_mean(zeros, run, step)
    free = plan(None, key=run.root, seed=None)
    z = np.stack([SIZE * noised_mean(zeros, free, t)["w"].double().numpy() for t in range(STEPS)])
    wanted = filters.matrix(STRATEGIES[name].inverse(STEPS)) @ z * run.sensitivity
    np.testing.assert_allclose(np.stack(found), wanted / free.sensitivity, rtol=0, atol=1e-5)
