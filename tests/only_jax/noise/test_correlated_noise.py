# SPDX-License-Identifier: Apache-2.0
"""Correlated noise on JAX: the filter of the strategy over the normals of all steps, bit for bit
the same however it is reached, and its rows nowhere to be read."""

import copy
import gc
import logging
import pickle
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dualdp_jax as dpj
from dualdp import AccountingError, PrivacyPlan, correlated
from dualdp.plan.correlated import filters
from dualdp.plan.correlated import noise as core_noise
from dualdp.plan.correlated.noise import branch_at
from dualdp.randomness import threefry
from dualdp_jax.noise import noise, recursion
from dualdp_jax.noise.noise import noised_mean, release_at

STEPS = 7
STRATEGIES = {
    "window": correlated.window([1.0, -0.6, 0.2]),
    "wide window": correlated.bisr(bands=12),  # wider than the run
    "band": correlated.band([2.0, 0.9, -0.5, 0.3]),
    "one band": correlated.band([0.5]),
    "blt": correlated.blt(decays=[0.9, 0.4, 0.0], scales=[0.2, 0.3, 0.1]),
    "square root": correlated.square_root(),
}
SUMS = {"b": np.zeros((3, 5)), "a": None, "c": np.zeros(())}
every_strategy = pytest.mark.parametrize("name", STRATEGIES)
families = pytest.mark.parametrize("name", ["window", "band", "blt"])
with_rows = pytest.mark.parametrize("name", ["band", "blt"])


def make_plan(strategy, **changes):
    arguments = {
        "num_examples": 60,
        "expected_batch_size": 20,
        "num_steps": STEPS,
        "noise_multiplier": 1.5,
        "max_grad_norm": 2.0,
        "delta": 1e-3,
        "accountant": "rdp",
        "seed": 5,
        "sampler": "fixed_order",
        "neighboring_relation": "zero_out",
        "correlation": strategy,
    }
    return PrivacyPlan(**{**arguments, **changes})


def zeros(dtype="float32", sums=SUMS):
    return jax.tree.map(lambda total: jnp.asarray(total, dtype), sums)


def normals(plan, path, leaf, shape, dtype):
    """(steps, *shape) z of a leaf by NumPy, in float64."""
    keys = [plan.step_key("noise", t, branch_at(path, t)) for t in range(STEPS)]
    kind = np.dtype(dtype).type
    drawn = [threefry.normal(threefry.fold_in(key, leaf), shape, dtype=kind) for key in keys]
    return np.stack(drawn).astype(np.float64)


def by_definition(plan, path=((0, 0),), dtype="float32", sums=SUMS):
    """Per leaf (steps, *shape) stddev C^-1 z in float64, from C alone."""
    matrix = np.linalg.inv(filters.matrix(plan.correlation.strategy(STEPS)))
    stddev = plan.draw_stddev(0, 2.0)
    shapes = [np.shape(leaf) for leaf in jax.tree.leaves(sums)]
    drawn = [normals(plan, path, leaf, shape, dtype) for leaf, shape in enumerate(shapes)]
    return [stddev * np.einsum("ts,s...->t...", matrix, z) for z in drawn]


def noises(means):
    """Per leaf (steps, ...) noise in the sum, from the noisy means of the steps."""
    return [np.stack(leaves).astype(np.float64) * 20 for leaves in zip(*means, strict=True)]


def assert_close(found, expected, rtol):
    """Up to rounding of the largest number, since noise cancels."""
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=rtol * np.abs(theirs).max())


# ---------------------------------------------------------------------- what the noise is


@every_strategy
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_noise_is_the_filter_of_the_normals(name, dtype):
    plan = make_plan(STRATEGIES[name])
    with jax.enable_x64(dtype == "float64"):
        means = [jax.tree.leaves(dpj.noisy_mean(zeros(dtype), plan, step)) for step in range(STEPS)]
    assert {leaf.dtype for leaf in means[0]} == {jnp.dtype(dtype)}
    rtol = 1e-6 if dtype == "float32" else 1e-11
    assert_close(noises(means), by_definition(plan, dtype=dtype), rtol)


@every_strategy
def test_noise_inside_jit_is_the_filter_of_the_normals(name):
    """One program for all steps, which `add_noise` and a traced `noisy_mean` share."""
    plan = make_plan(STRATEGIES[name])
    tx = dpj.add_noise(plan)
    update = jax.jit(tx.update)
    sums, means = zeros(), []
    state = tx.init(sums)
    for _ in range(STEPS):
        mean, state = update(sums, state)
        means.append(jax.tree.leaves(mean))
    assert update._cache_size() == 1
    assert_close(noises(means), by_definition(plan), 1e-6)
    text = update.lower(sums, state).as_text()
    assert all(str(word) not in text for t in range(STEPS) for word in plan.step_key("noise", t))


def assert_covariance(plan, size):
    """Over `size` numbers each entry is within five standard errors of that of C^-1 C^-T."""
    sums = {"a": jnp.zeros(size)}
    drawn = [dpj.noisy_mean(sums, plan, step)["a"] for step in range(STEPS)]
    found = np.stack(drawn).astype(np.float64) * 20 / plan.draw_stddev(0, 2.0)
    matrix = filters.matrix(plan.correlation.inverse(STEPS))
    expected = matrix @ matrix.T
    spread = np.sqrt((np.outer(*[np.diag(expected)] * 2) + expected**2) / size)
    assert (np.abs(found @ found.T / size - expected) < 5 * spread).all()


@families
def test_covariance_over_the_steps_is_that_of_the_strategy(name):
    assert_covariance(make_plan(STRATEGIES[name]), 100_000)


#: What is wrong with the terms of a window, (place, term) -> term.
WRONG_TERMS = {
    "nothing": lambda i, term: term,
    "one z for all": lambda i, term: term._replace(step=term.step + i),
    "z of another step": lambda i, term: term._replace(step=max(0, term.step - (i == 1))),
    "a shifted window": lambda i, term: term._replace(step=max(0, term.step - 1)),
    "a term less": lambda i, term: term._replace(weight=term.weight * (i != 2)),
    "a sign": lambda i, term: term._replace(weight=abs(term.weight)),
}


@pytest.mark.parametrize("what", WRONG_TERMS)
def test_wrong_terms_are_seen(what, monkeypatch):
    real = noise.window_terms
    wrong = lambda *given: [WRONG_TERMS[what](*each) for each in enumerate(real(*given))]  # noqa: E731
    monkeypatch.setattr(noise, "window_terms", wrong)
    with nullcontext() if what == "nothing" else pytest.raises(AssertionError):
        assert_covariance(make_plan(STRATEGIES["window"]), 10_000)


#: What is wrong with the rows of a band, order of its rows -> order.
WRONG_ORDERS = {
    "nothing": lambda order: order,
    "the oldest first": lambda order: order[::-1].copy(),
    "a row twice": lambda order: order[[0, 0, 2]],
    "two rows swapped": lambda order: order[[1, 0, 2]],
}


@pytest.mark.parametrize("what", WRONG_ORDERS)
def test_wrong_rows_are_seen(what, monkeypatch):
    real = recursion.Rows._order
    wrong = lambda self, step: WRONG_ORDERS[what](real(self, step))  # noqa: E731
    monkeypatch.setattr(recursion.Rows, "_order", wrong)
    with nullcontext() if what == "nothing" else pytest.raises(AssertionError):
        assert_covariance(make_plan(STRATEGIES["band"]), 10_000)


@pytest.mark.parametrize("mode", ["fast", "portable"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weight_one_is_the_noise_without_a_correlation(mode, dtype):
    """Bit for bit, on the host and inside jit."""
    changes = {"sampler": "poisson", "noise": mode}
    plans = [make_plan(s, **changes) for s in (None, correlated.identity())]
    sums = zeros(dtype)
    for step in (0, STEPS - 1):
        key = plans[0].step_key("noise", step)
        words = jax.random.wrap_key_data(jnp.asarray(key), impl="threefry2x32")
        for leaf, total in enumerate(jax.tree.leaves(sums)):
            z = jax.random.normal(jax.random.fold_in(words, leaf), total.shape)
            expected = (total.astype(jnp.float32) + np.float32(3.0) * z) / np.float32(20)
            found = [jax.tree.leaves(dpj.noisy_mean(sums, plan, step))[leaf] for plan in plans]
            np.testing.assert_array_equal(found, [expected] * 2)
        inside = [jax.jit(lambda s, t, p=p: dpj.noisy_mean(s, p, t))(sums, step) for p in plans]
        jax.tree.map(np.testing.assert_array_equal, *inside)


def test_sums_in_low_precision_get_the_noise_of_wide_ones():
    plan = make_plan(STRATEGIES["band"])
    for step in range(2):
        low, wide = (dpj.noisy_mean(zeros(dtype), plan, step) for dtype in ("bfloat16", "float32"))
        jax.tree.map(np.testing.assert_array_equal, low, wide)


# ---------------------------------------------------------------------- however it is reached


def drawn(plan, steps, path=((0, 0),), rows=None, sums=SUMS):
    """Leaves of the noisy means of these steps, in this order."""
    sums, rows = zeros(sums=sums), rows or recursion.rows_for(plan)
    means = {}
    for step in steps:
        release = release_at(plan, step, branch=path, like=sums, rows=rows)
        means[step] = [np.asarray(leaf) for leaf in jax.tree.leaves(noised_mean(sums, release))]
    return means


@families
def test_any_order_of_the_steps_gives_the_same_noise(name):
    plan = make_plan(STRATEGIES[name])
    expected = drawn(plan, range(STEPS))
    sums = zeros()
    for step in (3, 4, 4, 1, 0, 6, 5):  # with the rows of `noisy_mean`
        found = jax.tree.leaves(dpj.noisy_mean(sums, plan, step))
        jax.tree.map(np.testing.assert_array_equal, found, expected[step])


@families
def test_a_restart_takes_back_old_noise_and_adds_new(name):
    """From step 3 on branch 1: z of steps 0 to 2 of the old key, and of 3 on of the new."""
    plan, path = make_plan(STRATEGIES[name]), ((0, 0), (3, 1))
    rows = recursion.rows_for(plan)
    first = drawn(plan, range(STEPS), rows=rows)
    again = drawn(plan, range(STEPS), path, rows=rows)  # the same rows, moved to another path
    alone = drawn(plan, [STEPS - 1], path)
    jax.tree.map(np.testing.assert_array_equal, [first[2], again[6]], [again[2], alone[6]])
    assert all((a != b).all() for a, b in zip(first[3], again[3], strict=True))
    assert_close(noises(again[t] for t in range(STEPS)), by_definition(plan, path), 1e-6)


@with_rows
def test_rows_of_other_shapes_are_not_used(name):
    plan, other = make_plan(STRATEGIES[name]), {"b": np.zeros((5, 3)), "c": np.zeros(2)}
    expected = drawn(plan, [2]), drawn(plan, [2], sums=other)
    rows = recursion.rows_for(plan)
    found = drawn(plan, [1, 2], rows=rows), drawn(plan, [2], rows=rows, sums=other)
    jax.tree.map(
        np.testing.assert_array_equal, (found[0][2], found[1][2]), (expected[0][2], expected[1][2])
    )


@with_rows
def test_rows_that_were_lost_on_the_way_are_drawn_again(name, monkeypatch):
    """The program takes over the memory of the rows, so a call that fails has lost them."""
    plan = make_plan(STRATEGIES[name])
    expected, rows = drawn(plan, [4])[4], recursion.rows_for(plan)
    drawn(plan, [3], rows=rows)
    real = type(plan).step_key
    with monkeypatch.context() as patch:
        patch.setattr(type(plan), "step_key", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            drawn(plan, [4], rows=rows)
    assert type(plan).step_key is real
    jax.tree.map(np.testing.assert_array_equal, drawn(plan, [4], rows=rows)[4], expected)


def test_noise_that_takes_too_long_is_refused_and_what_takes_long_is_told(monkeypatch, caplog):
    plan = make_plan(STRATEGIES["band"])
    rows = recursion.rows_for(plan)
    drawn(plan, [2], rows=rows)
    monkeypatch.setattr(core_noise, "_MOST_DRAWS", 63)
    with pytest.raises(
        AccountingError, match=r"noise of step 4 depends on.*draw 4 times 16 normal"
    ):
        drawn(plan, [4])
    drawn(plan, [3], rows=rows)
    with pytest.raises(AccountingError, match="Expected at most 6e.01: plan long runs of large mo"):
        drawn(plan, [5], ((0, 1),), rows=rows)
    drawn(plan, [4], rows=rows)  # a refusal loses nothing
    monkeypatch.setattr(recursion, "_SECONDS", -1.0)
    with caplog.at_level(logging.WARNING, "dualdp"):
        drawn(plan, [3])
    assert "Correlated noise is drawn again: step 2 of 3." in caplog.text
    assert "step 3 of 3" not in caplog.text


def test_a_bound_that_is_not_the_plans_is_refused():
    plan = make_plan(STRATEGIES["window"])
    dpj.noisy_mean(zeros(), plan, 0, max_grad_norm=2.0)
    with pytest.raises(ValueError, match=r"max_grad_norm=1.0 with correlated noise, which takes b"):
        dpj.noisy_mean(zeros(), plan, 1, max_grad_norm=1.0)


# ---------------------------------------------------------------------- the engine


def settings(slope=0.0):
    """Of a run with constant gradients, whose optimizer keeps the mean: noise alone at slope 0."""
    return {
        "loss_fn": lambda p, x: slope * (p["b"].sum() + p["c"]) * x,
        "params": zeros(sums={"b": np.zeros((3, 5)), "c": np.zeros(())}),
        "optimizer": optax.GradientTransformation(
            lambda p: jax.tree.map(jnp.zeros_like, p),
            lambda mean, _, p=None: (jax.tree.map(jnp.zeros_like, mean), mean),
        ),
        "data": (np.ones(60, np.float32),),
        "checks": 0,
    }


def means_of(engine, step, state, loader, stop=None, save=None):
    """Leaves of the mean of each step until `stop`; `save` is (step, path of a checkpoint)."""
    means = []
    for batch in loader.remaining():
        if save is not None and batch.step == save[0]:
            dpj.save_checkpoint(save[1], state=state, engine=engine)
        if batch.step == stop:
            break
        state, _ = step(state, batch)
        means.append(jax.tree.leaves(state.opt_state))
    return means


def run(plan, stop=None, save=None, **changes):
    """Engine of a new run, and its means."""
    engine = dpj.PrivacyEngine()
    begun = engine.make_private(plan=plan, **settings(), **changes)
    return engine, means_of(engine, *begun, stop, save)


def resumed(path, slope=0.0, save=None):
    """Engine of a resumed run, detached at its end, and its means."""
    given = settings(slope)
    like = dpj.TrainState.create(given["params"], given["optimizer"])
    _, engine = dpj.load_checkpoint(path, like=like)
    try:
        return engine, means_of(engine, *engine.resume(**given), save=save)
    finally:
        engine.detach()


@families
def test_the_step_adds_the_noise_of_its_strategy_by_one_program(name):
    plan = make_plan(STRATEGIES[name])
    engine, means = run(plan)
    assert_close(noises(means), by_definition(plan), 1e-6)
    assert engine._run._jitted["update"]._cache_size() == 1
    shown = jax.tree.leaves(engine.stages().noisy_mean)
    jax.tree.map(np.testing.assert_array_equal, shown, means[-1])


@families
def test_a_resumed_run_has_the_same_noise(name, tmp_path):
    """Of steps that were not released yet, and of all of them once more."""
    plan, path = make_plan(STRATEGIES[name]), tmp_path / "run.safetensors"
    expected = run(plan)[1]
    engine, before = run(plan, stop=4, save=(4, path))
    engine.detach()
    for _ in range(2):
        engine, after = resumed(path)
        jax.tree.map(np.testing.assert_array_equal, before + after, expected)
        assert len(engine.ledger) == STEPS


@families
def test_a_restart_with_other_gradients_takes_back_old_noise_and_adds_new(name, tmp_path):
    plan, slope, path = make_plan(STRATEGIES[name]), 1e-3, tmp_path / "run.safetensors"
    engine, before = run(plan, save=(3, path))
    engine.detach()
    again, after = resumed(path, slope)
    found = noises([*before[:3], *([leaf - slope for leaf in mean] for mean in after)])
    assert_close(found, by_definition(plan, ((0, 0), (3, 1))), 2e-6)
    assert len(again.ledger) == STEPS + 4
    assert again.get_epsilon() > engine.get_epsilon()


def test_a_run_that_can_not_be_resumed_is_told_before_it_goes_on(tmp_path, monkeypatch):
    path = tmp_path / "run.safetensors"
    engine, _ = run(make_plan(STRATEGIES["blt"]), stop=4, save=(4, path))
    engine.detach()
    with monkeypatch.context() as patch:
        patch.setattr(core_noise, "_MOST_DRAWS", 63)
        with pytest.raises(AccountingError, match=r"step 4 depends on.*draw 4 times 16 normals"):
            resumed(path)
    assert len(resumed(path)[1]) == STEPS - 4


def test_runs_of_one_plan_that_take_turns_keep_their_own_rows():
    plan = make_plan(STRATEGIES["band"])
    expected, runs, states = run(plan)[1], [], []
    for _ in range(2):
        step, state, loader = dpj.PrivacyEngine().make_private(plan=plan, **settings())
        runs.append((step, iter(loader.remaining())))
        states.append(state)
    for mean in expected:
        for i, (step, batches) in enumerate(runs):
            states[i], _ = step(states[i], next(batches))
            jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(states[i].opt_state), mean)


@pytest.mark.parametrize("jit", [False, True])
@families
def test_a_loop_of_ones_own_gets_the_noise_of_its_record(name, jit):
    """With a secret key, by `noisy_mean`: each step on record, once."""
    plan, engine = make_plan(STRATEGIES[name], seed=None), dpj.PrivacyEngine()
    engine.make_loader(data=(np.ones(60, np.float32),), plan=plan)
    mean = lambda step: jax.tree.leaves(dpj.noisy_mean(zeros(), plan, step))  # noqa: E731
    mean, means = jax.jit(mean) if jit else mean, []
    for step in range(STEPS):
        engine.record()
        means.append(mean(step))
        with pytest.raises(Exception, match="was handed out before"):
            jax.block_until_ready(mean(step))
    assert_close(noises(means), by_definition(plan), 1e-6)


@with_rows
def test_rows_are_in_nothing_that_is_saved(name, tmp_path):
    plan = make_plan(STRATEGIES[name])
    path = tmp_path / "run.safetensors"
    engine, _ = run(plan, save=(STEPS - 1, path), ledger=tmp_path / "ledger")
    dpj.noisy_mean(zeros(), plan, STEPS - 1)
    rows = engine._run._rows
    kept = rows._kept
    secrets = [np.asarray(leaf) for leaf in [*kept.noise, *kept.rows] if leaf.size > 4]
    assert len(secrets) == 2
    assert all(secret.all() for secret in secrets)
    saved = [path.read_bytes(), (tmp_path / "ledger").read_bytes()]
    shown = [saved, pickle.dumps(rows), pickle.dumps(plan), *map(repr, (rows, kept, engine, plan))]
    shown += [repr(engine._run), repr(vars(engine)), repr(engine.stages())]
    for secret in secrets:
        for part in secret.reshape(-1, secret.shape[-1]):
            assert all(part.tobytes() not in text for text in [*saved, *shown[1:3]])
            assert all(f"{number:.6g}" not in text for text in shown[3:] for number in part)
    for other in (copy.copy(rows), copy.deepcopy(rows), pickle.loads(pickle.dumps(rows))):
        assert other._kept is None
        jax.tree.map(
            np.testing.assert_array_equal, drawn(plan, [6], rows=other), drawn(plan, [6], rows=rows)
        )


@with_rows
def test_no_variable_of_a_failed_call_is_a_row(name, monkeypatch):
    plan = make_plan(STRATEGIES[name])
    rows = recursion.rows_for(plan)
    drawn(plan, [2], rows=rows)
    monkeypatch.setattr(recursion.Rows, "_order", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError) as caught:
        release_at(plan, 3, like=zeros(), rows=rows)
    frames = [entry.frame for entry in caught.traceback if "dualdp_jax" in str(entry.path)]
    values = [value for frame in frames for value in frame.f_locals.values()]
    found = [leaf for leaf in jax.tree.leaves(values) if isinstance(leaf, jax.Array | np.ndarray)]
    assert len(frames) >= 2
    assert all(not np.any(leaf) for leaf in found)  # the sums


def test_rows_go_with_their_plan():
    plan = make_plan(STRATEGIES["blt"])
    dpj.noisy_mean(zeros(), plan, 0)
    assert id(plan) in recursion._of_plan
    gone = id(plan)
    del plan
    gc.collect()
    assert gone not in recursion._of_plan
