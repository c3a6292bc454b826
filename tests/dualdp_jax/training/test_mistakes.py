# SPDX-License-Identifier: Apache-2.0
"""Usual mistakes with the engine on JAX are refused by a sentence that names the fix."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training import train_state

import dualdp_jax as dpj

X = np.random.default_rng(0).normal(size=(12, 3)).astype(np.float32)
Y = np.arange(12) % 3
PARAMS = {"w": jnp.zeros((3, 3))}
SGD = optax.sgd(0.1)
NUMBERS = {"expected_batch_size": 4, "noise_multiplier": 1.0, "max_grad_norm": 1.0}
net = nnx.Linear(3, 3, rngs=nnx.Rngs(0))


def loss_fn(params, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(x @ params["w"], y)


def of_a_batch(params, x, y):
    return -jax.nn.log_softmax(x @ params["w"])[jnp.arange(y.shape[0]), y].mean(axis=0)


def private(engine=None, **arguments):
    run = {"loss_fn": loss_fn, "params": PARAMS, "optimizer": SGD, "data": (X, Y), **NUMBERS}
    run = {name: value for name, value in {**run, **arguments}.items() if value is not None}
    return (engine or dpj.PrivacyEngine()).make_private(**run)


flax_state = train_state.TrainState.create(apply_fn=None, params=PARAMS, tx=SGD)
MISTAKES = {
    "a Flax state": ({"params": flax_state}, TypeError, r"TrainState.*: say state\.params\."),
    "a state": (
        {"params": dpj.TrainState.create(PARAMS, SGD)},
        TypeError,
        r"TrainState, which holds an optimizer's state too\. .*: say state\.params\.",
    ),
    "a model with its optimizer": (
        {"params": nnx.ModelAndOptimizer(net, SGD)},
        TypeError,
        r"ModelAndOptimizer.*: say state\.model\.",
    ),
    "nnx.Optimizer": (
        {"params": net, "optimizer": nnx.Optimizer(net, SGD, wrt=nnx.Param)},
        TypeError,
        r"optimizer\.Optimizer\. Expected its optax transformation: say optimizer\.tx\.",
    ),
    "a loss of a batch": (
        {"loss_fn": of_a_batch},
        ValueError,
        r"gets ONE example.*int32\[\], and failed: tuple index out of range\. .*keep_batch_dim=T",
    ),
    "no batch size": (
        {"expected_batch_size": None},
        TypeError,
        "misses expected_batch_size. Expected plan=, or.* epochs,.* target_delta,",
    ),
    "num_epochs": ({"num_epochs": 3}, TypeError, "'num_epochs'. num_epochs is epochs here. Exp"),
    "batch_size": ({"batch_size": 3}, TypeError, "batch_size is expected_batch_size here"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_refused_by_its_fix(name, tmp_path):
    arguments, kind, said = MISTAKES[name]
    engine = dpj.PrivacyEngine()
    with pytest.raises(kind, match=said):
        private(engine, ledger=tmp_path / "ledger", **arguments)
    assert not (tmp_path / "ledger").exists()
    private(engine)  # the engine is not used up


def test_calls_refuse_the_same_mistakes():
    with pytest.raises(TypeError, match=r"TrainState.*: say state\.params\."):
        dpj.per_sample_norms(loss_fn, flax_state, X, Y)
    with pytest.raises(ValueError, match="gets ONE example.*keep_batch_dim=True"):
        dpj.clipped_grad_sum(of_a_batch, PARAMS, X, Y, max_grad_norm=1.0)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda step, state, batch: jax.jit(step)(state, batch), "called inside jit"),
        (
            lambda step, state, batch: jax.jit(step, donate_argnums=0)(state, batch),
            "called inside jit",
        ),
        (lambda step, state, batch: jax.jit(lambda s: step(s, batch))(state), "called inside jit"),
        (
            lambda step, state, batch: jax.lax.scan(lambda s, _: step(s, batch), state, None, 2),
            "step was called inside jit, scan",
        ),
    ],
    ids=["jit", "donated", "closure", "scan"],
)
def test_a_step_inside_a_program_is_refused_by_its_fix(call, said):
    engine = dpj.PrivacyEngine()
    step, state, loader = private(engine)
    with pytest.raises(TypeError, match=said + r".*engine\.record\(num_steps=k"):
        call(step, state, next(iter(loader)))
    assert engine.ledger.position == 0


def test_a_list_is_the_arguments_of_a_loss_that_takes_them():
    """known_failures 88: "loss() missing 1 required positional argument"."""
    losses = {
        2: lambda p, x, y: loss_fn(p, x, y),
        3: lambda p, x, y, key: loss_fn(p, x, y),
        1: lambda p, batch: loss_fn(p, *batch),
    }
    for count, loss in losses.items():
        _, _, loader = private(loss_fn=loss, data=[X, Y], needs_key=count == 3, seed=1)
        (chunk, *_) = next(iter(loader)).chunks
        assert len(chunk.args) == (1 if count == 1 else 2)
        for given, whole in zip(jax.tree.leaves(chunk.args), (X, Y), strict=True):
            np.testing.assert_array_equal(given, whole[chunk.indices])
    with pytest.raises(TypeError, match=r"loss_fn takes \(p, x, y, z\), but is called with"):
        private(loss_fn=lambda p, x, y, z: loss_fn(p, x, y), data=[X, Y])


def test_only_a_module_has_a_model():
    engine = dpj.PrivacyEngine()
    _, state, _ = private(engine)
    with pytest.raises(TypeError, match=r"params was no nnx.Module. Expected state\.params"):
        engine.model(state)


@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("make_private", {"target_epsilon": 50.0, "target_delta": 1e-3}),
        ("make_private", {"delta": 1e-3, "num_steps": 3}),
        ("make_private_with_epsilon", {"target_epsilon": 3.0, "target_delta": 1e-3, "epochs": 2}),
    ],
)
def test_epsilon_needs_no_delta_that_was_named(method, more):
    engine = dpj.PrivacyEngine(accountant="rdp")
    run = {"loss_fn": loss_fn, "params": PARAMS, "optimizer": SGD, "data": (X, Y), **NUMBERS}
    if method != "make_private":
        del run["noise_multiplier"]
    getattr(engine, method)(**run, **more)
    engine.record(2)
    assert engine.get_epsilon() == engine.get_epsilon(delta=1e-3) > 0
    assert inspect.signature(engine.get_epsilon).parameters["delta"].default is None
