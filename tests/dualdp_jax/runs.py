# SPDX-License-Identifier: Apache-2.0
"""A small private run: a plan, a linear model of three numbers, and its engine."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dualdp_jax as dpj
from dualdp.plan.plan import PrivacyPlan

N = 60
RNG = np.random.default_rng(2)
X = RNG.normal(size=(N, 3)).astype(np.float32)
Y = X @ np.array([1.0, -2.0, 0.5], np.float32) + 0.3


def loss_fn(params, x, y):
    return (x @ params["w"] + params["b"] - y) ** 2


def make_plan(**changes):
    arguments = {
        "num_examples": N,
        "expected_batch_size": 12,
        "num_steps": 6,
        "noise_multiplier": 0.8,
        "max_grad_norm": 0.5,
        "delta": 1e-3,
        "accountant": "rdp",
        "seed": 9,
    }
    return PrivacyPlan(**{**arguments, **changes})


def params():
    return {"w": jnp.zeros(3), "b": jnp.zeros(())}


def keeper():
    """An optimizer that keeps the noisy mean and moves nothing."""
    return optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params),
        lambda mean, _, params=None: (jax.tree.map(lambda leaf: 0 * leaf, mean), mean),
    )


def private(engine=None, **arguments):
    engine = engine or dpj.PrivacyEngine()
    defaults = {"loss_fn": loss_fn, "params": params(), "optimizer": optax.sgd(0.1)}
    return engine, *engine.make_private(**{**defaults, "data": (X, Y), **arguments})


def train(step, state, loader, num_steps=None):
    """State after so many further steps of the plan, or all."""
    for k, batch in enumerate(loader.remaining()):
        if k == num_steps:
            break
        state, _ = step(state, batch)
    return state
