# SPDX-License-Identifier: Apache-2.0
"""One linear regression behind the engine of either stack: what most tests of a run train."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import dualdp.jax as dpj
import dualdp.torch as dpt
from dualdp import PrivacyPlan
from tests.conftest import BACKENDS, DEVICE

jax.config.update("jax_disable_most_optimizations", True)  # they cost more than they save here
FACES = {"torch": dpt, "jax": dpj}
stacks = pytest.mark.parametrize("stack", BACKENDS)
RNG = np.random.default_rng(0)
X = RNG.normal(size=(60, 5)).astype(np.float32)
Y = RNG.normal(size=60).astype(np.float32)
START = RNG.normal(size=5).astype(np.float32)
RATE = 0.05


def make_plan(**changes):
    sizes = {"num_examples": 60, "expected_batch_size": 12, "num_steps": 8, "delta": 1e-5}
    numbers = {"noise_multiplier": 0.7, "max_grad_norm": 1.3, "noise": "portable"}
    return PrivacyPlan(**{**sizes, **numbers, "accountant": "rdp", "seed": 11, **changes})


class Linear(torch.nn.Module):
    """One weight vector, so that both stacks have one leaf of the same shape."""

    def __init__(self, start):
        super().__init__()
        self.w = torch.nn.Parameter(torch.tensor(start))

    def forward(self, x):
        return torch.nn.functional.linear(x, self.w[None])[:, 0]


def loss_fn(params, x, y):
    return 0.5 * (x @ params["w"] - y) ** 2


class Run:
    """A private run, fresh or from a checkpoint of either stack.

    Args:
        stack: "torch" or "jax".
        x, y, start: data and weights.
        load: path of a checkpoint to go on from.
        engine: settings of the engine.
        method: of the engine, that begins the run.
        drop_last: of PyTorch's loader.
        **arguments: of the method, or of `resume`; in the place of what it would be given.
    """

    def __init__(self, stack, *, x=X, y=Y, start=START, load=None, engine=(),
                 method="make_private", drop_last=False, **arguments):  # fmt: skip
        self.stack, face = stack, FACES[stack]
        if stack == "torch":
            self.model = Linear(start).to(DEVICE)
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE)
            self.parts = {"model": self.model, "optimizer": self.optimizer}
            rows = TensorDataset(torch.tensor(x), torch.tensor(y))
            data = {"data_loader": DataLoader(rows, batch_size=12, drop_last=drop_last)}
            owned = {"module": self.model, "optimizer": self.optimizer}
        else:
            data = {"loss_fn": loss_fn, "data": (x, y)}
            owned = {"params": {"w": jnp.asarray(start)}, "optimizer": optax.sgd(RATE)}
            like = dpj.TrainState.create(**owned)
        if load is None:
            if stack == "jax" and arguments.get("plan") is None:
                owned["expected_batch_size"] = 12
            self.engine, self.given = face.PrivacyEngine(**dict(engine)), {**data, **owned}
            made = getattr(self.engine, method)(**{**self.given, **arguments})
        else:
            if stack == "torch":
                self.engine, owned = dpt.load_checkpoint(load, **self.parts), {}
            else:
                _, self.engine = dpj.load_checkpoint(load, like=like)
            try:
                made = self.engine.resume(**data, **owned, **arguments)
            except ValueError:
                self.engine.ledger.close()  # for another engine
                raise
        self.loader = made[2]
        if stack == "jax":
            self.train_step, self.state, _ = made

    @property
    def weights(self):
        if self.stack == "torch":
            return self.model.w.detach().cpu().numpy().copy()
        return np.asarray(self.state.params["w"])

    @weights.setter
    def weights(self, values):
        if self.stack == "torch":
            self.model.w.data = torch.tensor(values)
        else:
            self.state = self.state._replace(params={"w": jnp.asarray(values)})

    def step(self, batch):
        """Train on a batch, a physical one on PyTorch."""
        if self.stack == "jax":
            self.state, _ = self.train_step(self.state, batch)
            return
        x, y = (part.to(DEVICE) for part in batch)
        self.optimizer.zero_grad()
        (0.5 * (self.model(x) - y) ** 2).mean().backward()
        self.optimizer.step()

    def train(self, batches=None):
        """Yield the weights after each release, of the rest of the plan."""
        for batch in self.loader.remaining() if batches is None else batches:
            released = self.engine.ledger.position
            self.step(batch)
            if self.engine.ledger.position > released:
                yield self.weights

    def save(self, path, call="save_checkpoint", **changes):
        own = self.parts if self.stack == "torch" else {"state": self.state}
        save = getattr(FACES[self.stack], call)
        save(path, **{**own, "engine": self.engine, **changes})
        self.engine.detach()
