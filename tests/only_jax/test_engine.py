# SPDX-License-Identifier: Apache-2.0
"""The engine on JAX: plan, loader, ledger, step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import dualdp_jax as dpj
from dualdp import AccountingError
from dualdp.plan import PrivacyPlan

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


def private(engine=None, **arguments):
    engine = engine or dpj.PrivacyEngine()
    defaults = {"loss_fn": loss_fn, "params": params(), "optimizer": optax.sgd(0.1)}
    return engine, *engine.make_private(**{**defaults, "data": (X, Y), **arguments})


def test_training_is_the_textbook_loop():
    plan = make_plan(physical_batch_size=5)
    engine, step, state, loader = private(plan=plan)
    tx = optax.sgd(0.1)
    mine, opt_state = params(), tx.init(params())
    assert len(loader) == 6
    for t, batch in enumerate(loader):
        rows = plan.batch_indices(t)
        sums = dpj.clipped_grad_sum(loss_fn, mine, X[rows], Y[rows], max_grad_norm=0.5)
        updates, opt_state = tx.update(dpj.noisy_mean(sums.grads, plan, t), opt_state, mine)
        mine = optax.apply_updates(mine, updates)
        state, metrics = step(state, batch)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), state.params, mine)
        if len(rows):
            expected = float(sums.losses.mean())
            np.testing.assert_allclose(metrics["unprotected_loss"], expected, rtol=1e-5)
    assert state.step == len(engine.ledger) == 6
    assert len(loader) == 0
    assert engine.get_epsilon(delta=1e-3) == pytest.approx(plan.epsilon())
    assert engine.plan is plan


@pytest.mark.parametrize("sampler", ["poisson"])
def test_loader_cuts_no_draw(sampler):
    plan = make_plan(sampler=sampler, physical_batch_size=4, expected_batch_size=1, num_steps=40)
    _, _, _, loader = private(plan=plan)
    sizes = set()
    for t in range(40):
        batch = loader.batch(t)
        indices = np.concatenate([c.indices[c.mask] for c in batch.chunks])
        np.testing.assert_array_equal(indices, plan.batch_indices(t))
        for chunk in batch.chunks:
            assert [arg.shape[0] for arg in chunk.args] == [4, 4]
            np.testing.assert_array_equal(chunk.args[0], X[chunk.indices])
        sizes.add(len(indices))
    assert {0, 1} <= sizes


def test_two_compilations_serve_every_draw():
    events = []
    plan = make_plan(expected_batch_size=3, physical_batch_size=2, num_steps=12)
    _, step, state, loader = private(plan=plan, optimizer=optax.adam(0.1))
    assert len({len(batch.chunks) for batch in loader}) > 2
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, seconds, **kwargs: events.append(name)
    )
    try:
        for batch in loader:
            state, _ = step(state, batch)
    finally:
        jax.monitoring.clear_event_listeners()
    assert sum("backend_compile" in name for name in events) == 2


def test_an_empty_draw_releases_noise():
    plan = make_plan(expected_batch_size=1e-9, num_steps=1)
    engine, step, state, loader = private(plan=plan)
    (batch,) = loader
    assert [chunk.mask.any() for chunk in batch.chunks] == [False]
    state, _ = step(state, batch)
    expected = dpj.noisy_mean(jax.tree.map(jnp.zeros_like, params()), plan, 0)
    np.testing.assert_allclose(state.params["w"], -0.1 * expected["w"], rtol=1e-5)
    assert len(engine.ledger) == 1


def test_step_records_before_it_dispatches():
    def broken(params, x, y):
        raise RuntimeError("no loss today")

    engine, step, state, loader = private(loss_fn=broken, plan=make_plan())
    with pytest.raises(RuntimeError, match="no loss today"):
        step(state, next(iter(loader)))
    assert len(engine.ledger) == 1


def test_a_batch_is_released_once():
    engine, step, state, loader = private(plan=make_plan())
    batch = next(iter(loader))
    step(state, batch)
    with pytest.raises(AccountingError, match="step=0 came after 1 recorded releases"):
        step(state, batch)
    assert next(iter(loader)).step == 1
    assert len(engine.ledger) == 1


def test_step_refuses_to_be_traced():
    engine, step, state, loader = private(plan=make_plan())
    batch = next(iter(loader))
    with pytest.raises(TypeError, match="step was called inside jit"):
        jax.jit(lambda state: step(state, batch))(state)
    with pytest.raises(TypeError, match="step was called inside jit"):
        jax.jit(lambda: step(state, batch)[0].params)()
    assert len(engine.ledger) == 0


def test_foreign_batches_are_refused():
    _, step, state, _ = private(plan=make_plan())
    _, _, _, other = private(plan=make_plan())
    for batch in ((X, Y), next(iter(other))):
        with pytest.raises(TypeError, match="that this engine's loader did not draw"):
            step(state, batch)


def drops(params, x, y, key):
    return loss_fn(params, x * jax.random.bernoulli(key, 0.5, x.shape), y)


def test_dropout_does_not_depend_on_the_chunks():
    runs = []
    for size in (3, 7, None):
        _, step, state, loader = private(
            loss_fn=drops, plan=make_plan(physical_batch_size=size), needs_key=True
        )
        for batch in loader:
            state, _ = step(state, batch)
        runs.append(np.append(state.params["w"], state.params["b"]))
    np.testing.assert_allclose(runs[0], runs[1], rtol=1e-5)
    np.testing.assert_allclose(runs[0], runs[2], rtol=1e-5)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.layer = nnx.Linear(3, 1, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.layer(self.dropout(x))


def test_nnx_module_trains_and_its_dropout_follows_the_plan():
    model = Net(nnx.Rngs(0))
    before = np.asarray(model.layer.kernel.get_value())
    runs = []
    for size in (3, None):
        _, step, state, loader = private(
            loss_fn=lambda m, x, y: (m(x)[0] - y) ** 2,
            params=model,
            plan=make_plan(physical_batch_size=size),
        )
        for batch in loader:
            state, _ = step(state, batch)
        runs.append(np.asarray(state.params["layer"]["kernel"].get_value()))
    np.testing.assert_allclose(runs[0], runs[1], rtol=1e-5)
    np.testing.assert_array_equal(before, model.layer.kernel.get_value())
    nnx.update(model, state.params)
    np.testing.assert_array_equal(runs[1], model.layer.kernel.get_value())


def test_frozen_parameters_stay():
    _, step, state, loader = private(plan=make_plan(), trainable={"w": True, "b": False})
    state, _ = step(state, next(iter(loader)))
    assert state.params["b"] == 0
    assert (state.params["w"] != 0).all()


def test_aux_comes_back_per_chunk():
    with_aux = lambda p, x, y: (loss_fn(p, x, y), y)  # noqa: E731
    _, step, state, loader = private(
        loss_fn=with_aux, plan=make_plan(physical_batch_size=4), has_aux=True
    )
    batch = next(iter(loader))
    _, metrics = step(state, batch)
    for aux, chunk in zip(metrics["unprotected_aux"], batch.chunks, strict=True):
        np.testing.assert_array_equal(aux[chunk.mask], chunk.args[1][chunk.mask])


def test_arguments_make_a_plan():
    engine, _, _, loader = private(
        dpj.PrivacyEngine(accountant="rdp"),
        expected_batch_size=12,
        noise_multiplier=1.0,
        max_grad_norm=0.5,
        epochs=2,
    )
    assert engine.plan.num_steps == len(loader) == 10
    assert engine.plan.num_examples == N
    assert engine.plan.seed is None
    assert type(engine.accountant).__name__ == "RDPAccountant"


def test_an_open_ended_run_goes_by_epochs():
    engine, step, state, loader = private(
        dpj.PrivacyEngine(accountant="rdp"),
        expected_batch_size=20,
        noise_multiplier=1.0,
        max_grad_norm=0.5,
    )
    for _ in range(2):
        assert len(loader) == 3
        for batch in loader:
            state, _ = step(state, batch)
    assert len(engine.ledger) == 6
    assert engine.get_epsilon(delta=1e-3) > 0


def test_make_private_with_epsilon_meets_its_target():
    engine = dpj.PrivacyEngine(accountant="rdp")
    step, state, loader = engine.make_private_with_epsilon(
        target_epsilon=3.0,
        target_delta=1e-3,
        epochs=2,
        loss_fn=loss_fn,
        params=params(),
        optimizer=optax.sgd(0.1),
        data=(X, Y),
        expected_batch_size=12,
        max_grad_norm=0.5,
    )
    assert 2.8 < engine.plan.epsilon() <= 3.0
    for batch in loader:
        state, _ = step(state, batch)
    assert 2.8 < engine.get_epsilon(delta=1e-3) <= 3.0


def test_record_precedes_a_scanned_run():
    engine, _, _, loader = private(plan=make_plan())
    assert engine.record(num_steps=4) == range(4)
    assert next(iter(loader)).step == 4
    with pytest.raises(AccountingError, match="num_steps=3 after 4 recorded releases"):
        engine.record(num_steps=3)
    assert len(engine.ledger) == 4


def test_wrong_arguments_are_refused():
    plan = make_plan()
    cases = [
        ({"plan": plan, "max_grad_norm": 1.0}, TypeError, r"\['max_grad_norm'\] came together"),
        ({"noise": 1.0}, TypeError, r"misses \['expected_batch_size', 'noise_multiplier'"),
        ({"noise_multipler": 1.0}, TypeError, r"unknown arguments \['noise_multipler'\]"),
        ({"plan": plan, "optimizer": 0.1}, TypeError, "optimizer is a float"),
        ({"plan": plan, "data": (X[:5], Y[:5])}, ValueError, "The data has 5 examples but"),
        ({"plan": plan, "trainable": {"w": False, "b": False}}, ValueError, "No leaf of params"),
        ({"plan": plan, "method": "magic"}, ValueError, "method='magic' is unknown"),
        (
            {"expected_batch_size": 12, "noise_multiplier": 1.0, "max_grad_norm": 1.0}
            | {"epochs": 1, "num_steps": 3, "accountant": "rdp"},
            TypeError,
            "num_steps and epochs came together",
        ),
    ]
    for arguments, error, text in cases:
        with pytest.raises(error, match=text):
            private(**arguments)
    with pytest.raises(ValueError, match="secure_mode=True with a plan whose noise='fast'"):
        private(dpj.PrivacyEngine(secure_mode=True), plan=plan)


def test_engine_refuses_a_second_run_and_questions_before_the_first():
    engine = dpj.PrivacyEngine()
    with pytest.raises(AccountingError, match="The engine has no run yet"):
        engine.get_epsilon(delta=1e-3)
    private(engine, plan=make_plan())
    with pytest.raises(AccountingError, match="This engine has a run already"):
        private(engine, plan=make_plan())


def test_a_key_runs_once():
    plan = make_plan(seed=None)
    private(plan=plan)
    with pytest.raises(AccountingError, match="key was used by another run"):
        private(plan=plan)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"delta": 1e-5}, "delta came together with target_delta"),
        ({"plan": None}, "plan came together with target_epsilon"),
    ],
)
def test_make_private_with_epsilon_refuses_contradictions(changes, text):
    with pytest.raises(TypeError, match=text):
        dpj.PrivacyEngine().make_private_with_epsilon(
            target_epsilon=1.0, target_delta=1e-5, num_steps=3, data=(X, Y), **changes
        )
