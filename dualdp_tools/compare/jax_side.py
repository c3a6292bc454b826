# SPDX-License-Identifier: Apache-2.0
"""JAX side of the experiment (Flax, optax); `torch_side.py` mirrors it line by line."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

import dualdp.jax as dpj
from dualdp import PrivacyPlan
from dualdp_tools.compare import digits
from dualdp_tools.compare.options import ExperimentOptions


class MLP(nn.Module):
    """Network 64 - 64 - 10."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """(8, 8) -> (10,) logits of one example."""
        x = jnp.tanh(nn.Dense(64, name="hidden")(x.reshape(-1)))
        return nn.Dense(10, name="head")(x)


class CNN(nn.Module):
    """Two convolutions with average pooling (kinks would amplify rounding) and a linear layer."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """(8, 8) -> (10,) logits of one example."""
        x = x[:, :, None]
        for features, name in ((16, "conv1"), (32, "conv2")):
            x = jnp.tanh(nn.Conv(features, (3, 3), padding=1, name=name)(x))
            x = nn.avg_pool(x, (2, 2), strides=(2, 2))
        x = x.transpose(2, 0, 1).reshape(-1)  # (2, 2, 32) -> torch's order of channels and pixels
        return nn.Dense(10, name="head")(x)


MODELS = {"mlp": MLP, "cnn": CNN}


class JaxRun:
    """Parameters, data and optimizer of one run."""

    name = "jax"

    def __init__(self, settings: ExperimentOptions) -> None:
        train, held_out = digits.load()
        if settings.dtype == "float64":
            jax.config.update("jax_enable_x64", True)
        self.dtype = jnp.dtype(settings.dtype)
        model: Any = MODELS[settings.model]()

        def loss_fn(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
            """Loss of one example."""
            logits = model.apply(params, x)
            return optax.softmax_cross_entropy_with_integer_labels(logits, y)

        self.loss_fn, self._apply = loss_fn, jax.jit(jax.vmap(model.apply, (None, 0)))
        self.train = jnp.asarray(train.x, self.dtype), jnp.asarray(train.y, jnp.int32)
        self.held_out = jnp.asarray(held_out.x, self.dtype)
        self.optimizer = optax.sgd(settings.learning_rate, momentum=settings.momentum)
        self.start(model.init(jax.random.key(settings.seed), self.train[0][0]))
        self._plain = jax.jit(self._plain_update)

    def start(self, params: Any) -> None:
        """Set the parameters, in the run's dtype, and reset the optimizer."""
        self.params = jax.tree.map(lambda leaf: jnp.asarray(leaf, self.dtype), params)
        self.optimizer_state = self.optimizer.init(self.params)

    def follow(self, plan: PrivacyPlan) -> None:
        """Start a private run with this plan."""
        self.engine = dpj.PrivacyEngine()
        self._step, self.state, self.loader = self.engine.make_private(
            loss_fn=self.loss_fn,
            params=self.params,
            optimizer=self.optimizer,
            data=self.train,
            plan=plan,
        )
        self.ledger = self.engine.ledger

    def take_over(self, params: Any, momentum: Any, plan: PrivacyPlan, steps: int) -> None:
        """Continue a run of the other stack: its state, its plan and its releases so far."""
        self.start(params)
        self.follow(plan)
        self.engine.record(num_steps=steps)
        trace = optax.TraceState(dpj.weights.from_named(params, momentum))
        state = trace, *self.state.opt_state[1:]
        self.state = self.state._replace(opt_state=state, step=steps)

    def private_step(self, step: int) -> None:
        """Take one step of DP-SGD (Abadi et al. 2016, Algorithm 1)."""
        self.state, _ = self._step(self.state, self.loader.batch(step))
        self.params = self.state.params

    def plain_step(self, step: int) -> None:
        """Take the same step without privacy, for timing."""
        plan = self.engine.plan
        # Of one static shape; JAX would compile a step for each size of a drawn batch.
        rows = np.resize(plan.batch_indices(step), round(plan.expected_batch_size_at(step)))
        batch = (array[rows] for array in self.train)
        self.params, self.optimizer_state = self._plain(self.params, self.optimizer_state, *batch)

    def _plain_update(self, params: Any, state: Any, x: jax.Array, y: jax.Array) -> tuple[Any, Any]:
        """Gradient of the mean loss and the optimizer's update."""
        losses = jax.vmap(self.loss_fn, (None, 0, 0))
        grads = jax.grad(lambda params: losses(params, x, y).mean())(params)
        updates, state = self.optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def per_sample_grads(self, rows: slice) -> dict[str, np.ndarray[Any, Any]]:
        """Return path -> (n, *shape), for a slice of the training examples."""
        batch = (array[rows] for array in self.train)
        return dpj.weights.to_numpy(dpj.per_sample_grads(self.loss_fn, self.params, *batch))

    def parameters(self) -> dict[str, np.ndarray[Any, Any]]:
        """Return path -> array."""
        return dpj.weights.to_numpy(self.params)

    def logits(self) -> np.ndarray[Any, Any]:
        """Return (n, classes) of the held-out digits."""
        return np.asarray(self._apply(self.params, self.held_out))

    def synchronize(self) -> None:
        """Wait for the device."""
        jax.block_until_ready(self.params)
