# SPDX-License-Identifier: Apache-2.0
"""Checkpoints on JAX: what comes back is what was saved, and a resumed run begins a segment."""

import shutil

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
    assert spent == pytest.approx(engine.plan.epsilon())
    assert len(again.ledger) == STEPS + 3  # steps that ran again were released again
    assert again.get_epsilon(delta=1e-3) > spent


def test_steps_that_run_again_are_further_releases(tmp_path):
    """known_failures 17: with other noise and other batches, and all of them accounted."""
    path = tmp_path / "run.ckpt"
    engine, step, state, loader = start(make_plan(seed=None))
    state = train(step, state, loader, 3)
    dpj.save_checkpoint(path, state=state, engine=engine)
    train(step, state, loader, 2)  # steps 3 and 4, after the checkpoint
    spent = engine.get_epsilon(delta=1e-3)
    engine.detach()
    again, step, state, loader = load(path)
    train(step, state, loader, 2)
    assert [entry["step"] for entry in again.ledger.entries] == [0, 1, 2, 3, 4, 3, 4]
    assert again.get_epsilon(delta=1e-3) > 1.02 * spent


def test_two_resumed_runs_differ(tmp_path):
    """In noise and batches, from copies of one checkpoint, each with a ledger of its own."""
    path = tmp_path / "run.ckpt"
    plan = make_plan(seed=None, noise_multiplier=1.0, max_grad_norm=0.5, expected_batch_size=30)
    engine, step, state, loader = start(plan)
    dpj.save_checkpoint(path, state=train(step, state, loader, 2), engine=engine)
    engine.detach()
    ends, drawn = [], []
    for name in "ab":
        copied = shutil.copy(f"{path}.ledger", tmp_path / f"{name}.ledger")
        given = arguments()
        like = dpj.TrainState.create(given["params"], given["optimizer"])
        _, again = dpj.load_checkpoint(path, like=like, ledger=copied)
        step, state, loader = again.resume(**given)
        batch = next(iter(loader))
        state, _ = step(state, batch)
        ends.append(state.params["w"])
        drawn.append(batch.indices[batch.mask].tolist())
        assert [entry["step"] for entry in again.ledger.entries] == [0, 1, 2]
    assert (ends[0] != ends[1]).all()
    assert drawn[0] != drawn[1]


def test_a_resumed_run_may_be_recalibrated(tmp_path):
    """Two steps ran twice, and all planned steps fit the target all the same."""
    path, plan = tmp_path / "run.ckpt", make_plan(seed=None, noise_multiplier=2.0)
    plan = make_plan(seed=None, noise_multiplier=2.0, target_epsilon=1.05 * plan.epsilon())
    engine, step, state, loader = start(plan)
    dpj.save_checkpoint(path, state=state, engine=engine)
    train(step, state, loader, 2)
    engine.detach()
    given = arguments()
    like = dpj.TrainState.create(given["params"], given["optimizer"])
    _, again = dpj.load_checkpoint(path, like=like)
    step, state, loader = again.resume(**given, recalibrate=True)
    with pytest.raises(AccountingError, match="Expected the engine of load_checkpoint, once"):
        again.resume(**given)
    assert train(step, state, loader).step == STEPS
    assert again.ledger.segments[-1].noise_scale > 1
    assert 0.9 * plan.target_epsilon < again.get_epsilon() <= plan.target_epsilon
    found = again._last.release
    assert found.noise_multiplier == pytest.approx(2.0 * again.ledger.segments[-1].noise_scale)
    assert again._last.noise.source.stddev == pytest.approx(found.draw_stddev)


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
    assert stale.record() == range(2, 3)
    assert [entry["step"] for entry in stale.ledger.entries] == [0, 1, 2, 2]


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
    file.write_text(file.read_text().replace('{"r":[0,1.0', '{"r":[0,9.0'))
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
