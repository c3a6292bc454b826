# SPDX-License-Identifier: Apache-2.0
"""A run that changes stacks in the middle is the run that did not, at the same epsilon."""

import jax
import numpy as np
import optax
import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import dualdp.jax as dpj
import dualdp.torch as dpt
from dualdp import PrivacyPlan, correlated, port
from tests.cases import twins

STEPS = 12
TWINS = {twin.name: twin for twin in twins.TWINS}
#: Name -> torch's class, its settings, and optax's transformation.
OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.5}, optax.sgd(0.5)),
    "momentum": (torch.optim.SGD, {"lr": 0.2, "momentum": 0.9}, optax.sgd(0.2, momentum=0.9)),
    "adam": (torch.optim.Adam, {"lr": 0.02}, optax.adam(0.02)),
    "adam_bc": (
        dpt.AdamBC,
        {"lr": 0.02, "weight_decay": 0.1},
        dpj.adam_bc(0.02, weight_decay=0.1),
    ),
}


class Run:
    """One experiment and its files."""

    def __init__(self, twin, optimizer, **plan):
        self.twin, self.optimizer = TWINS[twin], OPTIMIZERS[optimizer]
        sizes = {"num_examples": twins.N, "expected_batch_size": 8, "num_steps": STEPS}
        numbers = {"noise_multiplier": 0.7, "max_grad_norm": 0.8, "delta": 1e-3, "seed": 5}
        self.plan = PrivacyPlan(noise="portable", **sizes, **numbers, **plan)
        self.net = self.twin.flax()
        shapes = jax.eval_shape(self.net.init, jax.random.key(0), self.twin.x[0])
        self.params = jax.tree.map(lambda leaf: np.zeros(leaf.shape), shapes)

    def model(self):
        torch.manual_seed(0)
        return self.twin.torch().double()

    def on_torch(self, stop, load=None, save=None):
        """Steps on torch up to `stop`: (model, engine)."""
        model, (kind, options, _) = self.model(), self.optimizer
        optimizer = kind([p for p in model.parameters() if p.requires_grad], **options)
        tensors = (torch.as_tensor(array) for array in (self.twin.x, self.twin.y))
        data = {"data_loader": DataLoader(TensorDataset(*tensors), batch_size=8)}
        like = {"model": model, "optimizer": optimizer}
        if load is None:
            engine = dpt.PrivacyEngine()
            made = engine.make_private(module=model, optimizer=optimizer, plan=self.plan, **data)
            engine.noise_layout = port.match(model, self.params)
        else:
            engine = dpt.load_checkpoint(load, **like)
            made = engine.resume(**data)
        for x, y in made[2].remaining():
            optimizer.zero_grad()
            F.cross_entropy(model(x).flatten(0, -2), y.flatten()).backward()
            optimizer.step()
            if engine.ledger.position == stop:
                break
        if save is not None:
            dpt.save_checkpoint(save, engine=engine, **like)
            engine.detach()
        return model, engine

    def on_jax(self, stop, load=None, save=None):
        """Steps on JAX up to `stop`: (parameters, engine)."""

        def loss_fn(params, x, y):
            logits = self.net.apply(params, x)
            return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

        optimizer, data = self.optimizer[2], (self.twin.x, self.twin.y)
        run = {"optimizer": optimizer, "loss_fn": loss_fn, "data": data}
        if load is None:
            engine = dpj.PrivacyEngine()
            params = port.to_jax(self.model(), like=self.params)
            step, state, loader = engine.make_private(params=params, plan=self.plan, **run)
        else:
            like = dpj.TrainState.create(self.params, optimizer)
            state, engine = dpj.load_checkpoint(load, like=like)
            step, state, loader = engine.resume(params=self.params, **run)
        for batch in loader.remaining():
            state, _ = step(state, batch)
            if engine.ledger.position == stop:
                break
        if save is not None:
            dpj.save_checkpoint(save, state=state, engine=engine)
            engine.detach()
        return state.params, engine


def assert_same_end(found, model):
    """Relative difference of each parameter, in float64."""
    for name, value in model.state_dict().items():
        if value.is_floating_point() and value.any():
            apart = (found[name] - value).norm() / value.norm()
            assert apart < 1e-8, (name, float(apart))


@pytest.mark.slow
def test_a_run_with_correlated_noise_switches_too(tmp_path):
    """Each segment begins its noise anew, on the other stack as on the same one."""
    blt, ends = correlated.blt(decays=(0.9, 0.5), scales=(0.2, 0.1)), []
    for other in ("jax", "torch"):
        with jax.enable_x64(True):
            run = Run("mlp", "sgd", sampler="balls_in_bins", correlation=blt)
            one, two = tmp_path / f"{other}1", tmp_path / f"{other}2"
            run.on_torch(2, save=one)
            getattr(run, f"on_{other}")(5, load=one, save=two)
            ends.append(run.on_torch(STEPS, load=two))
    assert_same_end(ends[0][0].state_dict(), ends[1][0])
    assert ends[0][1].get_epsilon() == ends[1][1].get_epsilon()


@pytest.mark.parametrize(
    ("twin", "optimizer", "first", "second"),
    [
        ("mlp", "adam", 3, 8),
        pytest.param("lstm", "momentum", 5, 11, marks=pytest.mark.slow),
        pytest.param("gpt", "adam_bc", 2, 4, marks=pytest.mark.slow),
    ],
)
def test_a_run_that_switches_twice_ends_where_one_alone(twin, optimizer, first, second, tmp_path):
    """torch, then JAX, then torch again; against torch alone and JAX alone."""
    one, two = tmp_path / "one.ckpt", tmp_path / "two.ckpt"
    with jax.enable_x64(True):
        run = Run(twin, optimizer)
        alone, engine = run.on_torch(STEPS)
        params, jax_engine = run.on_jax(STEPS)
        assert_same_end(port.to_torch(params, like=alone), alone)
        run.on_torch(first, save=one)
        run.on_jax(second, load=one, save=two)
        switched, last = run.on_torch(STEPS, load=two)
    assert_same_end(switched.state_dict(), alone)
    moved = run.model().state_dict()
    assert any(not torch.equal(moved[name], v) for name, v in switched.state_dict().items())
    assert engine.ledger.entries == jax_engine.ledger.entries == last.ledger.entries
    assert len(last.ledger) == STEPS
    assert len({one.get_epsilon(delta=1e-6) for one in (engine, jax_engine, last)}) == 1
