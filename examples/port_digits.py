# SPDX-License-Identifier: Apache-2.0
"""One private run on handwritten digits that changes from PyTorch to JAX in the middle.

Weights, optimizer, plan, step and ledger go through one checkpoint. From a seed batches and noise
are the same on both stacks, so the run ends where it would have ended on PyTorch alone.
"""

import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from flax import linen
from sklearn.datasets import load_digits
from torch import nn

import dualdp.jax as dpj
import dualdp.torch as dpt
from dualdp import PrivacyPlan, port

STEPS, SWITCH = (6, 3) if "--toy" in sys.argv else (60, 30)
LEARNING_RATE, MOMENTUM = 1.0, 0.9


class FlaxMLP(linen.Module):
    """The twin of `torch_mlp`, with the same names."""

    @linen.compact
    def __call__(self, x):
        """(64,) -> (10,) logits of one image."""
        return linen.Dense(10, name="head")(jnp.tanh(linen.Dense(32, name="hidden")(x)))


class TorchMLP(nn.Module):
    """64 - 32 - 10."""

    def __init__(self):
        super().__init__()
        self.hidden, self.head = nn.Linear(64, 32), nn.Linear(32, 10)

    def forward(self, x):
        """(n, 64) -> (n, 10) logits."""
        return self.head(self.hidden(x).tanh())


def loss_fn(params, x, y):
    """Loss of one image, on JAX."""
    logits = FlaxMLP().apply(params, x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y)


def train_on_torch(x, y, params, steps, path=None):
    """Train so many steps of the plan on PyTorch; leave a checkpoint at `path`."""
    plan = PrivacyPlan(
        num_examples=len(x),
        expected_batch_size=128,
        num_steps=STEPS,
        noise_multiplier=1.5,
        max_grad_norm=0.5,
        delta=1e-4,
        noise="portable",
        seed=0,  # for the comparison; a real run has none
    )
    torch.manual_seed(0)
    model = TorchMLP()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    data = torch.utils.data.TensorDataset(torch.as_tensor(x), torch.as_tensor(y))
    engine = dpt.PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=torch.utils.data.DataLoader(data), plan=plan
    )
    engine.noise_layout = port.match(model, params)  # portable noise in the order of JAX's leaves
    for step, (images, labels) in enumerate(loader.remaining(), 1):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        if step == steps:
            break
    if path is not None:
        dpt.save_checkpoint(path, model=model, optimizer=optimizer, engine=engine)
    return model, engine


def go_on_with_jax(x, y, params, path):
    """Load the other stack's checkpoint and finish its plan."""
    optimizer = optax.sgd(LEARNING_RATE, momentum=MOMENTUM)
    like = dpj.TrainState.create(params, optimizer)
    state, engine = dpj.load_checkpoint(path, like=like)
    step, state, loader = engine.resume(
        loss_fn=loss_fn, params=params, optimizer=optimizer, data=(x, y)
    )
    for batch in loader.remaining():
        state, _ = step(state, batch)
    return state.params, engine


def main():
    images, labels = load_digits(return_X_y=True)
    x, y = (images / 16).astype(np.float32), labels.astype(np.int64)
    params = FlaxMLP().init(jax.random.key(0), x[0])
    alone, engine = train_on_torch(x, y, params, STEPS)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.ckpt"
        _, before = train_on_torch(x, y, params, SWITCH, path)
        before.detach()
        crossed, after = go_on_with_jax(x, y, params, path)

    ends = port.to_jax(alone, like=crossed)
    pairs = zip(jax.tree.leaves(crossed), jax.tree.leaves(ends), strict=True)
    apart = max(float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b)) for a, b in pairs)
    logits = jax.vmap(FlaxMLP().apply, (None, 0))(crossed, x)
    print(f"PyTorch alone {engine.get_epsilon(delta=1e-4):.4f} epsilon")
    print(f"then JAX      {after.get_epsilon(delta=1e-4):.4f} epsilon")
    print(f"parameters differ by less than 1e-5: {apart < 1e-5}")
    print(f"accuracy on the training images {(logits.argmax(-1) == y).mean():.0%}")


if __name__ == "__main__":
    main()
