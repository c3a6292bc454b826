# SPDX-License-Identifier: Apache-2.0
"""When something breaks: nothing is released that is not accounted, and nothing is lost."""

import errno
import os

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import dualdp.jax as dpj
import dualdp.torch as dpt
from dualdp import PrivacyPlan, UnsupportedLayerError
from dualdp.ledger import chain
from dualdp.ledger.ledger import Ledger
from dualdp.ledger.verify import verify
from dualdp.randomness import fold_in, key_of, normal, seeded_bits
from tests.conftest import BACKENDS

stacks = pytest.mark.parametrize("stack", BACKENDS)
RNG = np.random.default_rng(3)
X = RNG.normal(size=(40, 3)).astype(np.float32)
Y = RNG.normal(size=40).astype(np.float32)
RATE = 0.1


class Broken:
    """Stands in for a loss that runs out of memory at a chosen call."""

    def __init__(self, at):
        self.calls, self.at = 0, at

    def __call__(self):
        self.calls += 1
        if self.calls == self.at:
            raise MemoryError("no memory left")


class Run:
    """One run on either stack: `step()` trains on one batch, `weights` are what it released."""

    def __init__(self, stack, path=None, x=X, y=Y, start=(0.5, -0.5, 1.0), before=None):
        self.stack, self.before = stack, before or (lambda: None)
        plan = PrivacyPlan(
            num_examples=len(x),
            expected_batch_size=10,
            num_steps=6,
            noise_multiplier=0.8,
            max_grad_norm=1.0,
            delta=1e-5,
            noise="portable",
            seed=4,
        )
        start = np.asarray(start, np.float32)
        getattr(self, f"_{stack}")(plan, path, x, y, start)

    def _torch(self, plan, path, x, y, start):
        self.model = torch.nn.Linear(3, 1, bias=False)
        self.model.weight.data = torch.tensor(start)[None]
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE)
        data = torch.utils.data.TensorDataset(torch.tensor(x), torch.tensor(y))
        self.engine = dpt.PrivacyEngine()
        _, _, loader = self.engine.make_private(
            module=self.model,
            optimizer=self.optimizer,
            data_loader=torch.utils.data.DataLoader(data, batch_size=10),
            plan=plan,
            ledger=path,
        )
        self.batches = iter(loader.remaining())

    def _jax(self, plan, path, x, y, start):
        self.engine = dpj.PrivacyEngine()
        self._step, self.state, loader = self.engine.make_private(
            loss_fn=lambda w, x, y: 0.5 * (x @ w - y) ** 2,
            params=jnp.asarray(start),
            optimizer=optax.sgd(RATE),
            data=(x, y),
            plan=plan,
            ledger=path,
        )
        self.batches = iter(loader.remaining())

    @property
    def weights(self):
        if self.stack == "torch":
            return self.model.weight.detach().numpy()[0].copy()
        return np.asarray(self.state.params)

    @weights.setter
    def weights(self, values):
        if self.stack == "torch":
            self.model.weight.data = torch.tensor(values)[None]
        else:
            self.state = self.state._replace(params=jnp.asarray(values))

    def step(self):
        batch = next(self.batches)
        self.before()
        if self.stack == "jax":
            self.state, _ = self._step(self.state, batch)
            return
        x, y = batch
        self.optimizer.zero_grad()
        (0.5 * (self.model(x)[:, 0] - y) ** 2).mean().backward()
        self.optimizer.step()


def full_disk(monkeypatch):
    """Every write fails, half done."""
    right = os.pwrite

    def write(file, data, offset):
        right(file, data[: len(data) // 2], offset)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(chain.os, "pwrite", write)


@stacks
def test_a_full_disk_releases_nothing(stack, tmp_path, monkeypatch):
    """Where the release can't be recorded no noise is drawn, and the step may run again."""
    path = tmp_path / "run.ledger"
    run = Run(stack, path)
    run.step()
    before, spent = run.weights, run.engine.get_epsilon(1e-5)
    with monkeypatch.context() as patch:
        full_disk(patch)
        with pytest.raises(OSError, match="No space left on device"):
            run.step()
    np.testing.assert_array_equal(run.weights, before)
    assert releases(path) == 1
    assert run.engine.get_epsilon(1e-5) == spent == pytest.approx(verify(path).epsilon)
    run.engine.detach()  # the error's traceback holds the run


def releases(path):
    """Number of releases on record."""
    return sum("r" in record for record in Ledger.read(path))


@stacks
def test_a_run_on_a_full_disk_releases_nothing(stack, tmp_path, monkeypatch):
    """The ledger's file is made with the first release, which fails before there is any noise."""
    run = Run(stack, tmp_path / "run.ledger")
    before = run.weights
    with monkeypatch.context() as patch:
        full_disk(patch)
        with pytest.raises(OSError, match="No space left on device"):
            run.step()
    np.testing.assert_array_equal(run.weights, before)
    assert not run.engine.ledger.entries
    run.engine.detach()
    Run(stack, tmp_path / "run.ledger").step()
    assert releases(tmp_path / "run.ledger") == 1


@stacks
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38])
@pytest.mark.parametrize("where", ["data", "labels"])
def test_broken_data_neither_spread_nor_escape_the_account(stack, value, where):
    """One broken example in four: the others train, every release is finite and accounted."""
    x, y = X.copy(), Y.copy()
    (x if where == "data" else y)[::4] = value
    run = Run(stack, x=x, y=y)
    for done in range(1, 7):
        run.step()
        assert np.isfinite(run.weights).all()
        assert len(run.engine.accountant) == done
    assert len(run.engine.ledger.entries) == 6


@stacks
def test_broken_weights_release_noise_only_and_are_accounted(stack):
    """No example has a finite gradient; the step is noise, and costs what every step costs."""
    run = Run(stack)
    run.step()
    run.weights = before = np.array([np.nan, 1.0, 1.0], np.float32)
    run.step()
    assert len(run.engine.accountant) == 2
    plan = run.engine.plan
    key = key_of(seeded_bits(plan.seed, "noise", 1))
    noise = normal(fold_in(key, 0), 3) * plan.noise_stddev(1)
    expected = before - RATE * noise / plan.expected_batch_size_at(1)
    np.testing.assert_allclose(run.weights[1:], expected[1:], rtol=1e-5)


@stacks
def test_a_model_that_starts_broken_releases_nothing_unaccounted(stack):
    run = Run(stack, start=(np.nan, 1.0, 1.0))
    before = run.weights
    try:
        run.step()
    except UnsupportedLayerError:
        np.testing.assert_array_equal(run.weights, before)
    else:
        assert len(run.engine.accountant) == 1


@stacks
def test_no_memory_in_a_step_releases_nothing(stack, tmp_path):
    path = tmp_path / "run.ledger"
    run = Run(stack, path, before=Broken(at=2))
    run.step()
    before = run.weights
    with pytest.raises(MemoryError, match="no memory left"):
        run.step()
    np.testing.assert_array_equal(run.weights, before)
    assert releases(path) == 1
