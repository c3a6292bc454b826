# SPDX-License-Identifier: Apache-2.0
"""States of optimizers and models come back as they were, or are refused by name."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import dualdp_jax as dpj
from dualdp import checkpoint
from tests.dualdp_jax.checkpointed import (
    X,
    Y,
    arguments,
    assert_same,
    interrupted,
    make_plan,
    params,
    saved,
    train,
)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.layer = nnx.Linear(3, 1, rngs=rngs, param_dtype=jnp.bfloat16)
        self.scale = nnx.Param(jnp.ones((), jnp.float32))
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.layer(self.dropout(x))[0] * self.scale.get_value()


@pytest.mark.slow
def test_an_nnx_module_in_bfloat16_goes_on_bitwise(tmp_path):
    path, model, optimizer = tmp_path / "run.ckpt", Net(nnx.Rngs(0)), optax.adam(0.1)
    run = {"loss_fn": lambda m, x, y: (m(x) - y) ** 2, "optimizer": optimizer, "data": (X, Y)}
    end = interrupted(path, {**run, "params": model})
    arrays, document = checkpoint.read(path)
    assert {"params/layer.bias", "params/layer.kernel", "params/scale"} < set(arrays)
    assert "params/layer.kernel" in document["bfloat16"]
    fresh = Net(nnx.Rngs(5))
    like = dpj.TrainState.create(fresh, optimizer)
    state, engine = dpj.load_checkpoint(path, like=like)
    step, state, loader = engine.resume(params=fresh, **run)
    assert state.params["layer"]["kernel"].get_value().dtype == jnp.bfloat16
    assert_same(train(step, state, loader), end)


@pytest.mark.slow
def test_frozen_leaves_equinox_and_odd_optimizers_come_back(tmp_path):
    path = tmp_path / "run.ckpt"
    model = eqx.nn.MLP(3, 1, 4, 1, key=jax.random.key(0))
    tree = {"net": model, "count": jnp.arange(3), "key": jax.random.key(7)}
    trainable = {"net": jax.tree.map(eqx.is_inexact_array, model), "count": False, "key": False}
    optimizer = optax.inject_hyperparams(optax.adamw)(learning_rate=0.1)
    optimizer = optax.apply_if_finite(optax.chain(optax.ema(0.9), optimizer), 3)
    loss = lambda p, x, y: (p["net"](x)[0] - y) ** 2  # noqa: E731
    run = {"loss_fn": loss, "optimizer": optimizer, "data": (X, Y), "params": tree}
    end = interrupted(path, {**run, "trainable": trainable})
    like = dpj.TrainState.create(tree, optimizer, trainable)
    _, engine = dpj.load_checkpoint(path, like=like)
    found = train(*engine.resume(**run, trainable=trainable))
    arrays = lambda state: eqx.filter(state.params["net"], eqx.is_array)  # noqa: E731
    assert_same(arrays(found), arrays(end))
    assert_same(found.opt_state, end.opt_state)
    assert found.params["key"] == tree["key"]
    np.testing.assert_array_equal(found.params["count"], [0, 1, 2])


def test_another_model_or_optimizer_is_refused_by_name(tmp_path):
    path = saved(tmp_path)
    optimizer = arguments()["optimizer"]
    cases = [
        (params() | {"new": jnp.ones(1)}, optimizer, "The checkpoint lacks .*'params/new'"),
        (params(), optax.sgd(0.1), "holds .*'optimizer/1.0.mu.w'"),
        (params() | {"w": jnp.zeros((3, 5))}, optimizer, r"float32\[3, 4\] in the checkpoint but"),
        (params() | {"b": jnp.zeros((), jnp.bfloat16)}, optimizer, r"bfloat16\[\] in `like`"),
    ]
    for tree, tx, text in cases:
        with pytest.raises(ValueError, match=text):
            dpj.load_checkpoint(path, like=dpj.TrainState.create(tree, tx))
    state, engine = dpj.load_checkpoint(path, like=dpj.TrainState.create(params(), optimizer))
    with pytest.raises(ValueError, match=r"state lacks the leaves \[\] and has .*mu"):
        engine.resume(**arguments() | {"optimizer": optax.sgd(0.1)})
    with pytest.raises(ValueError, match=r"\['num_steps'\] came for a run that was loaded"):
        engine.resume(**arguments(), num_steps=3)
    with pytest.raises(ValueError, match="plan came for a run that was loaded"):
        engine.resume(**arguments(), plan=make_plan())
