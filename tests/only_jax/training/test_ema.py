# SPDX-License-Identifier: Apache-2.0
"""Average of the parameters on JAX: `with_ema` and `engine.ema`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import dualdp_jax as dpj
from dualdp import AccountingError
from tests.only_jax.training.test_views import X, Y, loss_fn, make_plan, params

DECAY = 0.3  # reached at t = 3 of the first decays 1/10, 2/11, 3/12


def start(optimizer, given=None, **changes):
    engine = dpj.PrivacyEngine()
    options = {"loss_fn": loss_fn, "data": (X, Y), "checks": 0, "plan": make_plan(), **changes}
    given = params() if given is None else given
    return engine, *engine.make_private(params=given, optimizer=optimizer, **options)


def assert_close(ours, theirs, **tolerance):
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **tolerance), ours, theirs)


def test_the_average_follows_the_parameters(tmp_path):
    """By hand; with the bits of a run without it; on a resume too."""
    optimizer = dpj.with_ema(optax.adam(0.1), DECAY)
    engine, step, state, loader = start(optimizer)
    _, plain_step, plain, others = start(optax.adam(0.1))
    average = jax.tree.map(lambda p: np.asarray(p, np.float64), params())
    for t, (batch, other) in enumerate(zip(loader.remaining(), others.remaining(), strict=True)):
        if t == 2:
            dpj.save_checkpoint(tmp_path / "run", state=state, engine=engine)
        state, _ = step(state, batch)
        plain, _ = plain_step(plain, other)
        d = min(DECAY, (1 + t) / (10 + t))
        average = jax.tree.map(lambda a, p, d=d: d * a + (1 - d) * p, average, state.params)
        assert_close(engine.ema(state), average, rtol=1e-6, atol=1e-6)
    assert_close(state.params, plain.params, rtol=0)
    engine.detach()
    like = dpj.TrainState.create(params(), optimizer)
    again = dpj.load_checkpoint(tmp_path / "run", like=like)[1]
    given = {"loss_fn": loss_fn, "data": (X, Y), "params": params(), "optimizer": optimizer}
    step, resumed, loader = again.resume(**given)
    for batch in loader.remaining():
        resumed, _ = step(resumed, batch)
    assert_close(again.ema(resumed), state.opt_state.average, rtol=0)


def test_low_precision_frozen_leaves_and_modules():
    """Averages are float32 inside, and come in the parameters' dtype; what is frozen stays."""
    optimizer = dpj.with_ema(optax.sgd(0.1))
    given = {"w": params()["w"].astype(jnp.bfloat16), "v": params()["v"]}
    loss = lambda p, x, y: loss_fn(jax.tree.map(lambda a: a.astype("float32"), p), x, y)  # noqa: E731
    trainable = {"w": True, "v": False}
    engine, step, state, loader = start(optimizer, given, loss_fn=loss, trainable=trainable)
    state, _ = step(state, next(iter(loader)))
    assert state.opt_state.average["w"].dtype == jnp.float32
    found = engine.ema(state)
    assert found["w"].dtype == jnp.bfloat16
    assert_close(found["v"], given["v"], rtol=0)
    wide = lambda a: np.asarray(a, np.float32)  # noqa: E731
    expected = 0.1 * wide(given["w"]) + 0.9 * wide(state.params["w"])
    np.testing.assert_allclose(wide(found["w"]), expected, rtol=5e-3)

    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    squares = lambda m, x, y: jnp.sum((m(x) - y) ** 2)  # noqa: E731
    engine, step, state, loader = start(optimizer, model, loss_fn=squares)
    state, _ = step(state, next(iter(loader)))
    averaged = engine.model(state._replace(params=engine.ema(state)))
    expected = 0.1 * model.kernel[...] + 0.9 * engine.model(state).kernel[...]
    np.testing.assert_allclose(averaged.kernel[...], expected, rtol=1e-5)


def test_wrong_averages_are_refused():
    for decay, text in ((1.0, "would keep the first"), (1.5, "decay=1.5"), (float("nan"), "decay")):
        with pytest.raises(ValueError, match=text):
            dpj.with_ema(optax.sgd(0.1), decay)
    engine, _, state, _ = start(optax.sgd(0.1))
    with pytest.raises(ValueError, match="holds 0 averages"):
        engine.ema(state)
    twice = optax.chain(dpj.with_ema(optax.sgd(0.1)), dpj.with_ema(optax.identity()))
    engine, _, state, _ = start(twice)
    with pytest.raises(ValueError, match="Expected one"):
        engine.ema(state)
    with pytest.raises(ValueError, match=r"update\(grads, state, params\)"):
        twice.update(params(), twice.init(params()))
    with pytest.raises(AccountingError):
        dpj.PrivacyEngine().ema(state)
