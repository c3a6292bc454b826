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
from dualdp import Ledger, PrivacyPlan, correlated, port
from tests.cases import twins

STEPS = 12
TWINS = {twin.name: twin for twin in twins.TWINS}
OPTIMIZERS = {
    "sgd": (lambda p: torch.optim.SGD(p, lr=0.5), lambda: optax.sgd(0.5)),
    "momentum": (
        lambda p: torch.optim.SGD(p, lr=0.2, momentum=0.9),
        lambda: optax.sgd(0.2, momentum=0.9),
    ),
    "adam": (lambda p: torch.optim.Adam(p, lr=0.02), lambda: optax.adam(0.02)),
    "adam_bc": (
        lambda p: dpt.AdamBC(p, lr=0.02, weight_decay=0.1),
        lambda: dpj.adam_bc(0.02, weight_decay=0.1),
    ),
}


class Run:
    """One experiment and its files."""

    def __init__(self, twin, optimizer, folder, **plan):
        self.twin, self.make_optimizers, self.folder = twin, OPTIMIZERS[optimizer], folder
        self.plan = PrivacyPlan(
            num_examples=twins.N,
            expected_batch_size=8,
            num_steps=STEPS,
            noise_multiplier=0.7,
            max_grad_norm=0.8,
            delta=1e-3,
            noise="portable",
            seed=5,
            **plan,
        )
        self.model = self.torch_model()
        self.net = twin.flax()
        shapes = jax.eval_shape(self.net.init, jax.random.key(0), twin.x[0])
        self.params = jax.tree.map(lambda leaf: np.zeros(leaf.shape), shapes)

    def torch_model(self):
        torch.manual_seed(0)
        return self.twin.torch().double()

    def loader(self):
        tensors = (torch.as_tensor(array) for array in (self.twin.x, self.twin.y))
        return DataLoader(TensorDataset(*tensors), batch_size=8)

    def on_torch(self, stop, load=None, save=None):
        """Steps on torch up to `stop`: (model, engine)."""
        model = self.torch_model() if load is None else self.twin.torch().double()
        optimizer = self.make_optimizers[0]([p for p in model.parameters() if p.requires_grad])
        if load is None:
            engine = dpt.PrivacyEngine()
            _, _, loader = engine.make_private(
                module=model, optimizer=optimizer, data_loader=self.loader(), plan=self.plan
            )
            engine.noise_layout = port.match(model, self.params)
        else:
            engine = dpt.load_checkpoint(load, model=model, optimizer=optimizer)
            _, _, loader = engine.resume(data_loader=self.loader())
        for x, y in loader.remaining():
            optimizer.zero_grad()
            logits = model(x)
            F.cross_entropy(logits.flatten(0, -2), y.flatten()).backward()
            optimizer.step()
            if engine.ledger.position == stop:
                break
        assert engine.ledger.position == stop
        if save is not None:
            dpt.save_checkpoint(save, model=model, optimizer=optimizer, engine=engine)
        return model, engine

    def on_jax(self, stop, load=None, save=None):
        """Steps on JAX up to `stop`: (parameters, engine)."""

        def loss_fn(params, x, y):
            logits = self.net.apply(params, x)
            return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

        run = {"optimizer": self.make_optimizers[1](), "loss_fn": loss_fn}
        run["data"] = (self.twin.x, self.twin.y)
        if load is None:
            engine = dpj.PrivacyEngine()
            params = port.to_jax(self.torch_model(), like=self.params)
            step, state, loader = engine.make_private(params=params, plan=self.plan, **run)
        else:
            like = dpj.TrainState.create(self.params, run["optimizer"])
            state, engine = dpj.load_checkpoint(load, like=like)
            step, state, loader = engine.resume(params=self.params, **run)
        for batch in loader.remaining():
            state, _ = step(state, batch)
            if engine.ledger.position == stop:
                break
        assert engine.ledger.position == stop
        if save is not None:
            dpj.save_checkpoint(save, state=state, engine=engine)
        return state.params, engine


def assert_same_end(model, params, other):
    """Relative difference of each parameter, in float64."""
    back = port.to_torch(params, like=model) if params is not None else model.state_dict()
    for name, value in other.state_dict().items():
        if value.is_floating_point() and value.any():
            apart = (back[name] - value).norm() / value.norm()
            assert apart < 1e-8, (name, float(apart))


CORRELATED = {
    "sampler": "balls_in_bins",
    "correlation": correlated.blt(decays=(0.9, 0.5), scales=(0.2, 0.1)),
}


@pytest.mark.slow
def test_a_run_with_correlated_noise_switches_too(tmp_path):
    """Each segment begins its noise anew, on the other stack as on the same one."""
    ends = []
    for other in ("jax", "torch"):
        (folder := tmp_path / other).mkdir()
        with jax.enable_x64(True):
            run = Run(TWINS["mlp"], "sgd", folder, **CORRELATED)
            one, two = folder / "1", folder / "2"
            run.on_torch(2, save=one)[1].detach()
            getattr(run, f"on_{other}")(5, load=one, save=two)[1].detach()
            ends.append(run.on_torch(STEPS, load=two))
    assert_same_end(ends[0][0], None, ends[1][0])
    assert ends[0][1].get_epsilon() == ends[1][1].get_epsilon()


@pytest.mark.parametrize(
    ("twin", "optimizer"),
    [
        ("mlp", "adam"),
        pytest.param("cnn", "momentum", marks=pytest.mark.slow),
        pytest.param("lstm", "sgd", marks=pytest.mark.slow),
        pytest.param("gpt", "adam_bc", marks=pytest.mark.slow),
    ],
)
def test_a_run_that_switches_twice_ends_where_one_alone(twin, optimizer, tmp_path):
    """torch, then JAX from a random step, then torch again; against torch alone and JAX alone."""
    seed = [*twin.encode(), *optimizer.encode()]
    first, second = sorted(np.random.default_rng(seed).choice(STEPS - 1, 2, replace=False) + 1)
    with jax.enable_x64(True):
        run = Run(TWINS[twin], optimizer, tmp_path)
        alone, engine = run.on_torch(STEPS)
        params, jax_engine = run.on_jax(STEPS)
        assert_same_end(alone, params, alone)
        one, two = tmp_path / "one.ckpt", tmp_path / "two.ckpt"
        run.on_torch(first, save=one)[1].detach()
        run.on_jax(second, load=one, save=two)[1].detach()
        switched, last = run.on_torch(STEPS, load=two)
    assert_same_end(switched, None, alone)
    moved = run.torch_model().state_dict()
    assert any(not torch.equal(moved[name], v) for name, v in switched.state_dict().items())
    for delta in (1e-3, 1e-6):
        spent = {e.get_epsilon(delta=delta) for e in (engine, jax_engine, last)}
        assert len(spent) == 1
    assert engine.ledger.entries == jax_engine.ledger.entries == last.ledger.entries
    assert len(last.ledger) == STEPS
    assert Ledger.read(last.ledger.path)
