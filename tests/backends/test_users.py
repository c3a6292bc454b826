# SPDX-License-Identifier: Apache-2.0
"""A run on users is one run: on either stack, and on both after a change in the middle."""

import jax
import numpy as np
import optax
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import dualdp.jax as dpj
import dualdp.torch as dpt
from dualdp import PrivacyPlan

N, USERS, K = 60, 25, 3
RNG = np.random.default_rng(3)
OWNERS = RNG.permutation([*range(USERS), *range(15), *([4] * 8), *([7] * 12)])
X = RNG.normal(size=(N, 5))
Y = X @ RNG.normal(size=5)
START = RNG.normal(size=5)


def plan():
    return PrivacyPlan(
        num_examples=USERS,
        unit="user",
        rows_per_unit=K,
        expected_batch_size=8,
        num_steps=6,
        noise_multiplier=0.7,
        max_grad_norm=0.5,
        delta=1e-3,
        noise="portable",
        accountant="rdp",
        seed=11,
    )


class Model(torch.nn.Module):
    """One weight vector, so that both stacks have one leaf of the same shape."""

    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.tensor(START))

    def forward(self, x):
        return torch.tanh(x @ self.w)


def loss_fn(params, x, y):
    return (jax.numpy.tanh(x @ params["w"]) - y) ** 2


def resumed(engine, **arguments):
    """What `resume` returns; a ledger that is refused is closed, for another engine."""
    try:
        return engine.resume(**arguments)
    except ValueError:
        engine.ledger.close()
        raise


def on_torch(steps, save=None, load=None, users=OWNERS):
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data_loader = DataLoader(TensorDataset(torch.tensor(X), torch.tensor(Y)), batch_size=8)
    if load is None:
        engine = dpt.PrivacyEngine()
        given = {"module": model, "optimizer": optimizer, "plan": plan()}
        *_, loader = engine.make_private(data_loader=data_loader, users=users, **given)
    else:
        engine = dpt.load_checkpoint(load, model=model, optimizer=optimizer)
        *_, loader = resumed(engine, data_loader=data_loader, users=users)
    batches = iter(loader.remaining())
    for _ in range(steps):
        x, y = next(batches)
        optimizer.zero_grad()
        ((model(x) - y) ** 2).mean().backward()
        optimizer.step()
    if save is not None:
        dpt.save_checkpoint(save, model=model, optimizer=optimizer, engine=engine)
    engine.detach()
    return model.w.detach().numpy(), engine.get_epsilon()


def on_jax(steps, save=None, load=None, users=OWNERS):
    given = {"loss_fn": loss_fn, "optimizer": optax.sgd(0.1), "data": (X, Y), "checks": 0}
    given |= {"params": {"w": jax.numpy.asarray(START)}, "users": users}
    if load is None:
        engine = dpj.PrivacyEngine()
        step, state, loader = engine.make_private(plan=plan(), **given)
    else:
        like = dpj.TrainState.create(given["params"], given["optimizer"])
        engine = dpj.load_checkpoint(load, like=like)[1]
        step, state, loader = resumed(engine, **given)
    batches = iter(loader.remaining())
    for _ in range(steps):
        state, _ = step(state, next(batches))
    if save is not None:
        dpj.save_checkpoint(save, state=state, engine=engine)
    engine.detach()
    return np.asarray(state.params["w"]), engine.get_epsilon()


def test_both_stacks_end_alike():
    with jax.enable_x64(True):
        (ours, spent), (theirs, same) = on_torch(6), on_jax(6)
    assert spent == same == plan().epsilon()
    np.testing.assert_allclose(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("stacks", [(on_torch, on_jax), (on_jax, on_torch)], ids=["to jax", "back"])
def test_a_run_that_changes_stacks_keeps_its_users(stacks, tmp_path):
    first, second = stacks
    with jax.enable_x64(True):
        first(3, save=tmp_path / "run")
        with pytest.raises(ValueError, match="users is missing"):
            second(3, load=tmp_path / "run", users=None)
        found, spent = second(3, load=tmp_path / "run")
        expected, same = first(6)
    assert spent == same
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)
