# SPDX-License-Identifier: Apache-2.0
"""Runs with correlated noise: the noise of the plan, in each segment anew."""

import gc
import io
import pickle

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import dualdp_torch as dpt
from dualdp.plan.correlated import strategies
from dualdp_torch.noise.noise import NoiseSource
from tests.closeness import lower_toeplitz
from tests.dualdp_torch.checkpoint.test_single_file import begin, load, parts
from tests.dualdp_torch.loop import plan as small

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


def expected(name, like, start=0, **changes):
    """(steps, numbers) C^-1 z in float64 of a segment, of the z that independent noise has."""
    free = plan(None, **changes)
    sums = {key: torch.zeros_like(p) for key, p in like.named_parameters()}
    drawn = [dpt.noisy_mean(sums, free, step) for step in range(start, STEPS)]
    drawn = [SIZE * np.concatenate([v.double().flatten() for v in d.values()]) for d in drawn]
    scale = plan(name).sensitivity / free.sensitivity
    noise = scale * lower_toeplitz(STRATEGIES[name].inverse(STEPS - start)) @ np.stack(drawn)
    return dict(enumerate(noise, start))


def assert_noise(found, wanted):
    """To the rounding of float32 sums and means."""
    for step, noise in found.items():
        np.testing.assert_allclose(noise, wanted[step], rtol=0, atol=3e-5)


@each
def test_the_noise_of_a_run_is_that_of_its_strategy(name, tmp_path):
    """And after a resume that of the strategy from its beginning."""
    path, (model, *_) = tmp_path / "run.safetensors", parts("sgd")
    whole = begin(plan(name), parts("sgd"))
    found = noises(*whole[:3], whole[3].remaining(), path, save_at=2)
    assert list(found) == list(range(STEPS))
    assert_noise(found, expected(name, model))
    assert whole[0].get_epsilon() == pytest.approx(plan(name).epsilon())
    whole[0].detach()
    again = load(path, parts("sgd"))
    found = noises(*again[:3], again[3].remaining())
    assert list(found) == [2, 3, 4, 5]
    assert_noise(found, expected(name, model, start=2))


@each
def test_noise_that_was_drawn_is_in_nothing_saved_or_shown(name, tmp_path):
    """The rows of a recursion and the z of a step, in files, states, pickles and reprs."""
    path, run = tmp_path / "run.safetensors", plan(name, seed=None)
    engine, model, optimizer, loader = begin(run, parts("sgd"))
    noises(engine, model, optimizer, loader.remaining(), path, save_at=STEPS - 1)
    sources = [source for source in gc.get_objects() if type(source) is NoiseSource]
    secrets = [
        row for source in sources if source.held for kept in source.held.kept for row in kept
    ]
    assert secrets
    buffer = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], buffer)
    shown = [path.read_bytes(), (tmp_path / "run.safetensors.ledger").read_bytes()]
    shown += [buffer.getvalue(), pickle.dumps([engine.stages(), run, model])]
    for secret in secrets:
        assert secret.abs().max() > 0
        assert not any(secret[:3].numpy().tobytes() in text for text in shown)
    assert "Held" not in f"{engine!r} {vars(engine)} {run!r} {vars(run)}"
