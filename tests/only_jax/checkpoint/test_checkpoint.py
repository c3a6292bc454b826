# SPDX-License-Identifier: Apache-2.0
"""Checkpoints on JAX: what comes back is what was saved, and a resumed run is the same run."""

import os
import stat

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import dualdp_jax as dpj
from dualdp import AccountingError, PrivacyPlan, checkpoint
from dualdp.plan.schedules import AdaptiveNorm

N = 60
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
    arguments = {
        "num_examples": N,
        "expected_batch_size": 12,
        "num_steps": STEPS,
        "noise_multiplier": lambda step: 1.0 + step / 10,
        "max_grad_norm": lambda step: 0.5 + step / 10,
        "delta": 1e-3,
        "accountant": "rdp",
        "physical_batch_size": 5,
        "seed": 9,
    }
    return PrivacyPlan(**{**arguments, **changes})


def arguments(rate=0.1, **changes):
    optimizer = optax.chain(optax.trace(0.9), optax.adam(optax.cosine_decay_schedule(rate, STEPS)))
    defaults = {"loss_fn": loss_fn, "params": params(), "optimizer": optimizer, "needs_key": True}
    return {**defaults, "data": (X, Y), **changes}


def start(plan=None, rate=0.1, **changes):
    engine = dpj.PrivacyEngine()
    return engine, *engine.make_private(plan=plan or make_plan(), **arguments(rate, **changes))


def train(step, state, loader, num_steps=None):
    for k, batch in enumerate(loader.remaining()):
        if k == num_steps:
            break
        state, _ = step(state, batch)
    return state


def load(path, rate=0.1, **changes):
    given = arguments(rate, **changes)
    like = dpj.TrainState.create(given["params"], given["optimizer"])
    engine = dpj.load_checkpoint(path, like=like)[1]
    return engine, *engine.resume(**given)


def assert_same(ours, theirs):
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for mine, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert jnp.asarray(mine).dtype == jnp.asarray(other).dtype
        np.testing.assert_array_equal(mine, other)


@pytest.mark.slow
@pytest.mark.parametrize("noise", ["fast", "portable"])
@pytest.mark.parametrize("adaptive", [False, True])
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path, noise, adaptive):
    path = tmp_path / "run.ckpt"
    changes = {"max_grad_norm": AdaptiveNorm(0.3)} if adaptive else {}
    engine, step, state, loader = start(make_plan(noise=noise, **changes))
    state = train(step, state, loader, 3)
    dpj.save_checkpoint(path, state=state, engine=engine)
    assert engine.ledger.path == f"{path}.ledger"
    bound = engine.ledger.max_grad_norm
    end = train(step, state, loader)
    spent = engine.get_epsilon(delta=1e-3)
    engine.detach()

    again, step, resumed, loader = load(path)
    assert_same(resumed, state)
    assert resumed.step == again.ledger.position == 3
    assert len(loader) == 3
    assert again.ledger.max_grad_norm == bound
    assert_same(train(step, resumed, loader), end)
    assert len(again.ledger) == STEPS
    assert again.get_epsilon(delta=1e-3) == spent == pytest.approx(engine.plan.epsilon())


def test_a_changed_replay_gets_new_noise_and_both_are_accounted(tmp_path):
    """known_failures 17: another learning rate, so that the sums differ one step later."""
    path = tmp_path / "run.ckpt"
    engine, step, state, loader = start()
    state = train(step, state, loader, 3)
    dpj.save_checkpoint(path, state=state, engine=engine)
    train(step, state, loader, 2)  # steps 3 and 4, after the checkpoint
    spent = engine.get_epsilon(delta=1e-3)
    engine.detach()

    again, step, state, loader = load(path, rate=0.2)
    batches = iter(loader)
    state, _ = step(state, next(batches))  # step 3: the same parameters, so the same release
    assert len(again.ledger) == 5
    assert again.get_epsilon(delta=1e-3) == pytest.approx(spent)
    step(state, next(batches))  # step 4: moved by another learning rate
    assert [(e["step"], e["branch"]) for e in again.ledger.entries][4:] == [(4, 0), (4, 1)]
    assert again.get_epsilon(delta=1e-3) > 1.02 * spent

    stages = again.stages()
    same_noise = dpj.noisy_mean(stages.unprotected_sum, again.plan, 4)
    for mine, other in zip(*map(jax.tree.leaves, (stages.noisy_mean, same_noise)), strict=True):
        assert not np.allclose(mine, other, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"data": (X + 1e-3, Y)},
        {"method": "two_pass"},
        {"params": jax.tree.map(jnp.ones_like, params())},
    ],
    ids=["data", "method", "structure only"],
)
def test_what_changes_the_sums_changes_the_branch(tmp_path, changes):
    path = tmp_path / "run.ckpt"
    engine, step, state, loader = start()
    dpj.save_checkpoint(path, state=state, engine=engine)
    train(step, state, loader, 1)
    engine.detach()
    again, step, state, loader = load(path, **changes)
    train(step, state, loader, 1)
    sums_differ = "params" not in changes  # resume takes the loaded numbers, not these
    assert len(again.ledger) == 1 + sums_differ


def test_a_fresh_key_lies_in_its_own_file(tmp_path):
    path = tmp_path / "run.ckpt"
    engine, step, state, loader = start(make_plan(seed=None))
    dpj.save_checkpoint(path, state=train(step, state, loader, 2), engine=engine)
    engine.detach()
    secret = engine.plan.root.secret.hex()
    assert stat.S_IMODE(os.stat(f"{path}.key").st_mode) == 0o600
    assert secret in (tmp_path / "run.ckpt.key").read_text()
    for name in ("run.ckpt", "run.ckpt.ledger"):
        data = (tmp_path / name).read_bytes()
        assert secret.encode() not in data
        assert engine.plan.root.secret not in data
    again, _, _, loader = load(path)
    assert len(loader) == STEPS - 2
    again.detach()
    (tmp_path / "run.ckpt.key").unlink()
    with pytest.raises(FileNotFoundError, match="Expected the key file of the run; pass key="):
        load(path)


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
    engine = dpj.PrivacyEngine()
    step, state, loader = engine.make_private(params=model, plan=make_plan(), **run)
    state = train(step, state, loader, 2)
    dpj.save_checkpoint(path, state=state, engine=engine)
    end = train(step, state, loader)
    engine.detach()
    arrays, document = checkpoint.read(path)
    assert {name for name in arrays if name.startswith("params/")} == {
        "params/layer.bias",
        "params/layer.kernel",
        "params/scale",
    }
    assert "params/layer.kernel" in document["bfloat16"]

    fresh = Net(nnx.Rngs(5))
    like = dpj.TrainState.create(fresh, optimizer)
    state, engine = dpj.load_checkpoint(path, like=like)
    step, state, loader = engine.resume(params=fresh, **run)
    assert state.params["layer"]["kernel"].get_value().dtype == jnp.bfloat16
    assert_same(train(step, state, loader), end)


def test_frozen_leaves_equinox_and_odd_optimizers_come_back(tmp_path):
    path = tmp_path / "run.ckpt"
    model = eqx.nn.MLP(3, 1, 4, 1, key=jax.random.key(0))
    tree = {"net": model, "count": jnp.arange(3), "key": jax.random.key(7)}
    trainable = {"net": jax.tree.map(eqx.is_inexact_array, model), "count": False, "key": False}
    optimizer = optax.inject_hyperparams(optax.adamw)(learning_rate=0.1)
    optimizer = optax.apply_if_finite(optax.chain(optax.ema(0.9), optimizer), 3)
    run = {
        "loss_fn": lambda p, x, y: (p["net"](x)[0] - y) ** 2,
        "optimizer": optimizer,
        "data": (X, Y),
        "trainable": trainable,
        "params": tree,
    }
    engine = dpj.PrivacyEngine()
    step, state, loader = engine.make_private(plan=make_plan(), **run)
    state = train(step, state, loader, 2)
    dpj.save_checkpoint(path, state=state, engine=engine)
    end = train(step, state, loader)
    engine.detach()
    like = dpj.TrainState.create(tree, optimizer, trainable)
    state, engine = dpj.load_checkpoint(path, like=like)
    step, state, loader = engine.resume(**run)
    found = train(step, state, loader)
    assert_same(
        eqx.filter(found.params["net"], eqx.is_array), eqx.filter(end.params["net"], eqx.is_array)
    )
    assert_same(found.opt_state, end.opt_state)
    assert found.params["key"] == tree["key"]
    np.testing.assert_array_equal(found.params["count"], [0, 1, 2])


def saved(tmp_path):
    path = tmp_path / "run.ckpt"
    engine, step, state, loader = start()
    dpj.save_checkpoint(path, state=train(step, state, loader, 1), engine=engine)
    engine.detach()
    return path


def test_another_model_or_optimizer_is_refused_by_name(tmp_path):
    path = saved(tmp_path)
    optimizer = arguments()["optimizer"]
    cases = [
        ({"w": params()["w"], "b": jnp.zeros(())}, optimizer, r"holds \['optimizer/0.trace.v'"),
        (params() | {"new": jnp.ones(1)}, optimizer, "The checkpoint lacks .*'params/new'"),
        (params(), optax.sgd(0.1), "holds .*'optimizer/1.0.mu.w'"),
        (params() | {"w": jnp.zeros((3, 5))}, optimizer, r"float32\[3, 4\] in the checkpoint but"),
        (params() | {"b": jnp.zeros((), jnp.bfloat16)}, optimizer, r"bfloat16\[\] in `like`"),
    ]
    for tree, tx, text in cases:
        with pytest.raises(ValueError, match=text):
            dpj.load_checkpoint(path, like=dpj.TrainState.create(tree, tx))
    state, engine = dpj.load_checkpoint(path, like=dpj.TrainState.create(params(), optimizer))
    with pytest.raises(ValueError, match=r"opt_state has the leaves \[\], .* lacks .*mu"):
        engine.resume(**arguments() | {"optimizer": optax.sgd(0.1)})
    with pytest.raises(ValueError, match=r"\['num_steps'\] came for a run that was loaded"):
        engine.resume(**arguments(), num_steps=3)
    with pytest.raises(ValueError, match="plan came for a run that was loaded"):
        engine.resume(**arguments(), plan=make_plan())


def test_a_loop_of_your_own_goes_on_where_the_ledger_ends(tmp_path):
    path, like = tmp_path / "run.ckpt", dpj.TrainState.create(params(), optax.sgd(0.1))
    engine = dpj.PrivacyEngine()
    engine.make_loader(data=(X, Y), plan=make_plan())
    engine.record(2)
    dpj.save_checkpoint(path, state=like._replace(step=2), engine=engine)
    engine.detach()
    again = dpj.load_checkpoint(path, like=like)[1]
    assert len(again.make_loader(data=(X, Y))) == STEPS - 2
    assert again.record() == range(2, 3)
    again.detach()
    stale = dpj.load_checkpoint(path, like=like)[1]
    stale.make_loader(data=(X, Y))
    with pytest.raises(AccountingError, match="Step 2 was released before, after the checkpoint"):
        stale.record()


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda data: data[:-7], "is truncated or no safetensors file"),
        (lambda data: data[:-3] + b"abc", "was changed after it was written"),
        (lambda data: b"PK\x03\x04" + data, "is truncated or no safetensors file"),
    ],
    ids=["truncated", "edited", "foreign"],
)
def test_broken_files_are_refused_by_what_is_wrong(tmp_path, damage, text):
    path = saved(tmp_path)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=text):
        load(path)


def test_a_broken_ledger_is_refused(tmp_path):
    path = saved(tmp_path)
    file = tmp_path / "run.ckpt.ledger"
    file.write_text(file.read_text().replace('"noise_multiplier": 1.0', '"noise_multiplier": 9.0'))
    with pytest.raises(ValueError, match="is broken at line"):
        load(path)


def test_wrong_arguments_are_refused(tmp_path):
    path = saved(tmp_path)
    engine, _, state, _ = start()
    with pytest.raises(TypeError, match="like is a dict. Expected dpj.TrainState.create"):
        dpj.load_checkpoint(path, like=params())
    with pytest.raises(TypeError, match="state is a dict. Expected the TrainState of a step"):
        dpj.save_checkpoint(path, state=params(), engine=engine)
    with pytest.raises(TypeError, match="The leaf 'params/odd' is an object"):
        dpj.save_checkpoint(path, state=state._replace(params={"odd": object()}), engine=engine)
    twice = {"a.b": jnp.ones(1), "a": {"b": jnp.ones(1)}}
    with pytest.raises(ValueError, match="Two leaves of the state have the name 'params/a.b'"):
        dpj.save_checkpoint(path, state=state._replace(params=twice), engine=engine)
    with pytest.raises(AccountingError, match="There is no loaded run to go on with"):
        engine.resume(**arguments())


def of_view(params, x, y):
    return loss_fn(params, x, y, jax.random.key(0))


def noisy(example, key):
    x, y = example
    return x + jax.random.normal(key, x.shape) / 10, y


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        ({"views": 2, "augment": noisy}, {}, r"views=1, but .* views=2"),
        ({}, {"views": 2, "augment": noisy}, r"views=2, but .* views=1"),
        ({"trainable": {"w": False, "v": True, "b": True}}, {}, r"The leaves \['w'\] are trained"),
        ({}, {"trainable": {"w": True, "v": True, "b": False}}, r"The leaves \['b'\] are trained"),
    ],
)
def test_a_run_goes_on_with_its_views_and_trained_leaves(tmp_path, before, after, text):
    """An optimizer without a state does not show which leaves it trains."""
    path = tmp_path / "run.ckpt"
    usual = {"optimizer": optax.sgd(0.1), "loss_fn": of_view, "needs_key": False}
    engine, step, state, loader = start(**usual, **before)
    state = train(step, state, loader, 2)
    dpj.save_checkpoint(path, state=state, engine=engine)
    engine.detach()
    with pytest.raises(ValueError, match=text):
        load(path, **usual, **after)
    like = dpj.TrainState.create(params(), optax.sgd(0.1))
    state, engine = dpj.load_checkpoint(path, like=like)
    dpj.save_checkpoint(path, state=state, engine=engine)  # before it goes on
    engine.ledger.close()
    engine, step, state, loader = load(path, **usual, **before)
    assert train(step, state, loader).step == STEPS
