# SPDX-License-Identifier: Apache-2.0
"""A run with dropout, a schedule and a state of its optimizer, saved and loaded."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dualdp_jax as dpj
from tests.dualdp_jax import runs
from tests.dualdp_jax.runs import N, train

RNG = np.random.default_rng(2)
X = RNG.normal(size=(N, 3)).astype(np.float32)
Y = np.tanh(X @ np.array([1.0, -2.0, 0.5], np.float32))
STEPS = 6


def loss_fn(params, x, y, key):
    x = x * jax.random.bernoulli(key, 0.8, x.shape)
    return (jnp.tanh(x @ params["w"]) @ params["v"] + params["b"] - y) ** 2


def params():
    rng = np.random.default_rng(1)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    return {"w": draw(3, 4), "v": draw(4), "b": jnp.zeros(())}


def make_plan(**changes):
    given = {"noise_multiplier": lambda step: 1.0 + step / 10, "physical_batch_size": 5}
    return runs.make_plan(**given | {"max_grad_norm": lambda step: 0.5 + step / 10} | changes)


def arguments(**changes):
    optimizer = optax.chain(optax.trace(0.9), optax.adam(optax.cosine_decay_schedule(0.1, STEPS)))
    defaults = {"loss_fn": loss_fn, "params": params(), "optimizer": optimizer, "needs_key": True}
    return {**defaults, "data": (X, Y), **changes}


def start(plan=None, **changes):
    return runs.private(plan=plan or make_plan(), **arguments(**changes))


def loaded(path, ledger=None, **changes):
    """Engine of a checkpoint, and the arguments with which it goes on."""
    given = arguments(**changes)
    like = dpj.TrainState.create(given["params"], given["optimizer"])
    return dpj.load_checkpoint(path, like=like, ledger=ledger)[1], given


def load(path, ledger=None, **changes):
    engine, given = loaded(path, ledger, **changes)
    return engine, *engine.resume(**given)


def assert_same(ours, theirs):
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for mine, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert jnp.asarray(mine).dtype == jnp.asarray(other).dtype
        np.testing.assert_array_equal(mine, other)


def saved(tmp_path, num_steps=1, **changes):
    """Path of the checkpoint of a run that ends after some steps."""
    path = tmp_path / "run.ckpt"
    engine, step, state, loader = start(**changes)
    dpj.save_checkpoint(path, state=train(step, state, loader, num_steps), engine=engine)
    engine.detach()
    return path


def interrupted(path, run):
    """State at the end of a run that was saved after two steps."""
    engine, step, state, loader = runs.private(plan=make_plan(), **run)
    state = train(step, state, loader, 2)
    dpj.save_checkpoint(path, state=state, engine=engine)
    end = train(step, state, loader)
    engine.detach()
    return end
