# SPDX-License-Identifier: Apache-2.0
"""Optimizers that do not fit the parameters are refused before anything is recorded."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dualdp_jax as dpj

X = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)


def make_private(optimizer, params=None, ledger=None, **changes):
    params = {"w": jnp.ones((3, 2)), "b": jnp.ones(2)} if params is None else params
    return dpj.PrivacyEngine().make_private(
        loss_fn=lambda p, x: sum(jnp.sum(leaf * x[0]) ** 2 for leaf in jax.tree.leaves(p)),
        params=params,
        optimizer=optimizer,
        data=(X,),
        expected_batch_size=8,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        num_steps=2,
        delta=1e-3,
        accountant="rdp",
        ledger=ledger,
        **changes,
    )


def stateless(update):
    return optax.stateless(lambda updates, params: update(updates))


INSTEAD = r"instead of optax.contrib.dpsgd or differentially_private_aggregate.*optax.sgd\(0.1\)"
WRONG = {
    "dpsgd": (
        lambda: optax.contrib.dpsgd(0.1, 1.0, 1.0, 0),
        INSTEAD,
    ),
    "aggregate": (
        lambda: optax.contrib.differentially_private_aggregate(1.0, 1.0, key=0),
        INSTEAD,
    ),
    "shape": (
        stateless(lambda g: jax.tree.map(lambda x: x.sum(0), g)),
        r"update of 'b' is float32\[\], and the parameter float32\[2\]",
    ),
    "dtype": (
        stateless(lambda g: jax.tree.map(lambda x: x.astype(jnp.int32), g)),
        r"update of 'b' is int32\[2\]",
    ),
    "structure": (stateless(lambda g: g["w"]), "have the structure PyTreeDef.*for each of them"),
    "a leaf less": (stateless(lambda g: {**g, "b": None}), "have the structure PyTreeDef"),
    "error": (
        stateless(lambda g: jax.tree.map(lambda x: x @ x, g)),
        "optimizer.update failed on the noisy gradients, its state and params: .*L-BFGS",
    ),
    "value": (optax.lbfgs(0.1), "optimizer.update failed.*would look at the data again"),
}


@pytest.mark.filterwarnings('ignore:"seed" is deprecated:DeprecationWarning')
@pytest.mark.parametrize("name", WRONG)
def test_updates_that_are_not_like_the_parameters_are_refused(name, tmp_path):
    """known_failures 94: they broadcast, and collapse every weight without a word."""
    optimizer, match = WRONG[name]
    optimizer = optimizer if isinstance(optimizer, tuple) else optimizer()
    with pytest.raises(TypeError, match=match):
        make_private(optimizer, ledger=tmp_path / "ledger")
    assert not (tmp_path / "ledger").exists()


FROZEN = {
    "partition": optax.partition(
        {"t": optax.adam(0.1), "f": optax.set_to_zero()}, {"w": "f", "b": "t"}
    ),
    "masked": optax.chain(
        optax.sgd(0.1, momentum=0.9), optax.masked(optax.set_to_zero(), {"w": True, "b": False})
    ),
    "decay alone": optax.partition(
        {
            "t": optax.sgd(0.1),
            "f": optax.chain(optax.set_to_zero(), optax.add_decayed_weights(0.1), optax.scale(-1)),
        },
        {"w": "f", "b": "t"},
    ),
}


@pytest.mark.parametrize("name", FROZEN)
def test_leaves_that_the_optimizer_freezes_are_refused(name, tmp_path):
    """known_failures 95: their gradients would enter the clipping."""
    with pytest.raises(ValueError, match=r"update of \['w'\] is the same whatever.*trainable="):
        make_private(FROZEN[name], ledger=tmp_path / "ledger")
    assert not (tmp_path / "ledger").exists()


RIGHT = {
    "momentum": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adamw": optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, 4)),
    "every": optax.MultiSteps(optax.sgd(0.1), 3),
    "skip": optax.apply_if_finite(optax.adam(0.1), 3),
    "clipped": optax.chain(optax.clip_by_global_norm(1.0), optax.lion(0.1)),
    "noise of its own": optax.chain(optax.add_noise(1.0, 0.0, key=0), optax.sgd(0.1)),
    "average": optax.chain(optax.ema(0.9), optax.sgd(0.1)),
    "two": optax.partition({"a": optax.adam(0.1), "b": optax.sgd(0.1)}, {"w": "a", "b": "b"}),
    "factored": optax.adafactor(0.1),
    "late": optax.chain(optax.sgd(0.1), optax.trace(0.5)),
}


@pytest.mark.parametrize("name", RIGHT)
def test_usual_optimizers_are_taken(name):
    step, state, loader = make_private(RIGHT[name], checks=0)
    for batch in loader.remaining():
        state, _ = step(state, batch)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.params))


def test_frozen_leaves_need_no_updates():
    trainable = {"w": False, "b": True}
    step, state, loader = make_private(optax.sgd(0.1), trainable=trainable, checks=0)
    state, _ = step(state, next(iter(loader)))
    np.testing.assert_array_equal(state.params["w"], 1)
    assert (np.asarray(state.params["b"]) != 1).all()
