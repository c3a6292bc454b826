# SPDX-License-Identifier: Apache-2.0
"""Noise on JAX: keyed by the plan, planned size, the same through optax."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dualdp_jax as dpj
from dualdp import AccountingError
from dualdp.ledger.ledger import Ledger
from dualdp.plan.plan import NOISE, PrivacyPlan
from dualdp.plan.schedules import AdaptiveNorm
from dualdp.randomness import threefry
from dualdp_jax.noise import noise
from dualdp_jax.noise.noise import noised_mean, release_at


def make_plan(**changes):
    arguments = {
        "num_examples": 100,
        "expected_batch_size": 20,
        "num_steps": 3,
        "noise_multiplier": 1.5,
        "max_grad_norm": 2.0,
        "delta": 1e-3,
        "accountant": "rdp",
        "seed": 5,
    }
    return PrivacyPlan(**{**arguments, **changes})


def on_record(plan, num_steps):
    """The plan and a ledger in which so many steps are on record."""
    ledger = Ledger(plan)
    for step in range(num_steps):
        ledger.record(step)
        ledger.seal(step, None)
    return plan, ledger


def expected_mean(sums, plan, step):
    """What `noisy_mean` gives, without asking who may draw the noise."""
    return noised_mean(sums, release_at(plan, step, like=sums))


@pytest.mark.parametrize("noise", ["fast", "portable"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_noise_is_the_counter_generator(noise, dtype):
    plan = make_plan(noise=noise)
    with jax.enable_x64(dtype == "float64"):
        grads = {"b": jnp.ones((3, 2), dtype), "a": None, "c": jnp.zeros((), dtype)}
        noisy = dpj.noisy_mean(grads, plan, 1)
    key, kind = plan.step_key("noise", 1), getattr(np, dtype)
    for index, name in enumerate("bc"):
        normal = threefry.normal(threefry.fold_in(key, index), grads[name].shape, dtype=kind)
        expected = (np.asarray(grads[name]) + 3.0 * normal) / 20
        rtol = 1e-6 if dtype == "float32" else 1e-11
        np.testing.assert_allclose(noisy[name], expected, rtol=rtol, atol=rtol)
        assert noisy[name].dtype == dtype
    assert noisy["a"] is None


def test_noise_is_wide_for_low_precision_sums():
    noisy = dpj.noisy_mean({"a": jnp.zeros(1000, jnp.bfloat16)}, make_plan(), 0)["a"]
    assert noisy.dtype == jnp.float32
    assert len(np.unique(noisy)) > 990


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("noise", NOISE)
def test_add_noise_is_noisy_mean(noise, jit):
    plan, _ledger = on_record(make_plan(noise=noise, seed=None), 3)
    tx = optax.chain(dpj.add_noise(plan), optax.sgd(1.0))
    sums = {"a": jnp.arange(4.0), "b": jnp.ones((2, 3))}
    update = jax.jit(tx.update) if jit else tx.update
    state = tx.init(sums)
    for step in range(3):
        updates, state = update(sums, state)
        expected = jax.tree.map(jnp.negative, expected_mean(sums, plan, step))
        # Compiled apart, the two may round a sum that nearly cancels in another order.
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), updates, expected
        )


def test_add_noise_runs_in_a_scan_and_stops_at_the_end_of_the_plan():
    plan = make_plan()
    tx = dpj.add_noise(plan)

    def run(length):
        def body(state, _):
            updates, state = tx.update({"a": jnp.zeros(3)}, state)
            return state, updates

        return jax.jit(lambda s: jax.lax.scan(body, s, length=length))(tx.init({"a": jnp.zeros(3)}))

    _, updates = run(3)
    for step in range(3):
        expected = dpj.noisy_mean({"a": jnp.zeros(3)}, plan, step)["a"]
        np.testing.assert_allclose(updates["a"][step], expected, rtol=1e-6)
    with pytest.raises(Exception, match="step=3 is past the plan's num_steps=3"):
        jax.block_until_ready(run(4))


def test_a_plan_gives_its_noise_to_one_add_noise():
    """Two of them, as in optax.multi_transform, would draw the same numbers for their leaves."""
    plan = make_plan(seed=None)
    dpj.add_noise(plan)
    with pytest.raises(AccountingError, match=r"add_noise\(plan\) came twice for one plan"):
        dpj.add_noise(plan)
    dpj.add_noise(make_plan(seed=None))
    assert dpj.add_noise(make_plan()) != dpj.add_noise(make_plan())


@pytest.mark.parametrize("jit", [False, True])
def test_add_noise_hands_out_a_step_once(jit):
    plan, _ledger = on_record(make_plan(seed=None), 2)
    tx = dpj.add_noise(plan)
    sums, update = {"a": jnp.ones(3)}, jax.jit(tx.update) if jit else tx.update
    first = tx.init(sums)
    _, second = update(sums, first)
    for state in (first, tx.init(sums)):
        with pytest.raises(Exception, match="The noise of step=0 was handed out before"):
            jax.block_until_ready(update(sums, state))
    jax.block_until_ready(update(sums, second))


def test_add_noise_in_two_places_is_refused_when_it_runs():
    plan, _ledger = on_record(make_plan(seed=None), 1)
    tx = dpj.add_noise(plan)
    both = optax.multi_transform({"a": tx, "b": tx}, {"a": "a", "b": "b"})
    sums = {"a": jnp.ones(3), "b": jnp.ones(3)}
    with pytest.raises(Exception, match="The noise of step=0 was handed out before"):
        jax.block_until_ready(jax.jit(both.update)(sums, both.init(sums), sums))


def test_one_add_noise_serves_many_optimizers_in_a_scan():
    plan, _ledger = on_record(make_plan(seed=None, num_steps=50), 50)
    groups = optax.multi_transform(
        {"a": optax.sgd(1.0), "b": optax.adam(0.1)}, {"x": "a", "y": "b"}
    )
    tx = optax.chain(dpj.add_noise(plan), groups)
    params = {"x": jnp.zeros(3), "y": jnp.zeros(3)}

    def body(carry, _):
        updates, state = tx.update(jax.tree.map(jnp.ones_like, params), carry[1], carry[0])
        return (optax.apply_updates(carry[0], updates), state), updates

    run = jax.jit(lambda carry: jax.lax.scan(body, carry, length=50))
    (moved, _), updates = run((params, tx.init(params)))
    # Two float32 normals of a secret key may be equal by chance; a step's used twice are three.
    assert len(np.unique(updates["x"])) > 147
    assert (moved["y"] != 0).all()


def test_add_noise_keeps_the_key_on_the_host():
    plan = make_plan()
    tx = dpj.add_noise(plan)
    state = tx.init({"a": jnp.zeros(3)})
    assert [leaf.dtype for leaf in jax.tree.leaves(state)] == [jnp.int32]
    text = jax.jit(tx.update).lower({"a": jnp.zeros(3)}, state).as_text()
    for step in range(3):
        assert all(str(word) not in text for word in plan.step_key("noise", step))


def test_noisy_mean_refuses_steps_past_the_plan():
    plan, grads = make_plan(), {"a": jnp.zeros(3)}
    with pytest.raises(AccountingError, match="step=3 is past the plan's num_steps=3"):
        dpj.noisy_mean(grads, plan, 3)
    for step, error in ((-1, ValueError), ("0", TypeError), (1.5, TypeError)):
        with pytest.raises(error, match=f"step={step!r} is"):
            dpj.noisy_mean(grads, plan, step)


@pytest.mark.parametrize("noise", NOISE)
def test_noisy_mean_takes_a_traced_step(noise):
    """The same numbers as on the host, one program for all steps."""
    plan, _ledger = on_record(make_plan(noise=noise, seed=None), 3)
    sums = {"a": jnp.arange(4.0), "b": None}
    program = jax.jit(lambda sums, step: dpj.noisy_mean(sums, plan, step))
    for step in range(3):
        found = program(sums, step)
        expected = expected_mean(sums, plan, step)
        np.testing.assert_allclose(found["a"], expected["a"], rtol=1e-6, atol=1e-6)
    assert program._cache_size() == 1
    with pytest.raises(Exception, match="The noise of step=1 was handed out before"):
        jax.block_until_ready(program(sums, 1))


CONSTANTS = {
    "jit": lambda plan, sums: jax.jit(lambda s: dpj.noisy_mean(s, plan, 0))(sums),
    "jit without arguments": lambda plan, sums: jax.jit(lambda: dpj.noisy_mean(sums, plan, 0))(),
    "vmap": lambda plan, sums: jax.vmap(lambda s: dpj.noisy_mean(s, plan, 0))(sums),
    "scan": lambda plan, sums: jax.lax.scan(
        lambda carry, s: (carry, dpj.noisy_mean(s, plan, 0)), 0, sums
    ),
    "grad": lambda plan, sums: jax.grad(lambda s: dpj.noisy_mean(s, plan, 0)["a"].sum())(sums),
    "state": lambda plan, sums: _closed_over_state(dpj.add_noise(plan), sums),
}


def _closed_over_state(tx, sums):
    state = tx.init(sums)
    return jax.jit(lambda s: tx.update(s, state)[0])(sums)


@pytest.mark.parametrize("name", CONSTANTS)
@pytest.mark.parametrize("seed", [None, 5])
def test_a_step_that_is_a_constant_of_the_program_is_refused(name, seed):
    """known_failures 79: the same noise at every call, and the key inside the program."""
    plan, sums = make_plan(seed=seed), {"a": jnp.ones((2, 3))}
    with pytest.raises(TypeError, match="as a constant inside jit, scan or vmap"):
        CONSTANTS[name](plan, sums)


def test_a_step_that_the_program_makes_itself_is_handed_out_once():
    """No constant of Python's, so that it shows when the program runs a second time."""
    plan, _ledger = on_record(make_plan(seed=None), 2)
    program = jax.jit(lambda sums: dpj.noisy_mean(sums, plan, jnp.array(0)))
    assert np.isfinite(program({"a": jnp.ones(3)})["a"]).all()
    with pytest.raises(Exception, match="The noise of step=0 was handed out before"):
        jax.block_until_ready(program({"a": jnp.zeros(3)}))


def _members(tx, axis):
    """An update of two members; their states are batched or shared."""
    state = tx.init(None)
    if axis == 0:
        state = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf + 1]), state)
    return lambda sums: jax.vmap(tx.update, in_axes=(0, axis))(sums, state)


@pytest.mark.parametrize("axis", [None, 0])
@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("seed", [None, 5])
def test_noise_inside_vmap_is_refused(axis, jit, seed):
    """known_failures 79: vmap(add_noise) gave one noise to all members."""
    plan, _ledger = on_record(make_plan(seed=seed), 3)
    tx, sums = dpj.add_noise(plan), {"a": jnp.ones((2, 3))}
    if jit:
        state = tx.init(None)
        if axis == 0:
            state = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf + 1]), state)
        program = jax.jit(jax.vmap(tx.update, in_axes=(0, axis)))
        with pytest.raises(TypeError, match="is inside vmap, where all members would get the same"):
            program(sums, state)
        mean = jax.vmap(lambda s, t: dpj.noisy_mean(s, plan, t), in_axes=(0, axis))
        step = jnp.arange(2) if axis == 0 else jnp.array(0)
        with pytest.raises((TypeError, AccountingError), match="inside vmap|already"):
            jax.jit(mean)(sums, step)
    else:
        with pytest.raises(TypeError, match="is inside vmap|as a constant inside"):
            _members(tx, axis)(sums)


def test_noisy_mean_keeps_the_key_on_the_host():
    plan = make_plan()
    program = jax.jit(lambda sums, step: dpj.noisy_mean(sums, plan, step))
    text = program.lower({"a": jnp.zeros(3)}, 1).as_text()
    assert all(str(word) not in text for step in range(3) for word in plan.step_key("noise", step))


@pytest.mark.parametrize("noise", NOISE)
@pytest.mark.parametrize("ledger", ["none", "open"])
def test_a_step_that_is_not_on_record_gets_nan_inside_jit(noise, ledger, caplog):
    """known_failures 79: releases through add_noise that nobody recorded, at epsilon 0.0."""
    plan, book = make_plan(noise=noise, seed=None), None
    if ledger == "open":
        _, book = on_record(plan, 1)
    tx, sums = dpj.add_noise(plan), {"a": jnp.ones(3), "b": jnp.ones((2, 2), jnp.bfloat16)}
    state, update = tx.init(sums), jax.jit(tx.update)
    if book is not None:
        found, state = update(sums, state)
        assert np.isfinite(found["a"]).all()
    for _ in range(2):
        found, state = update(sums, state)
        for leaf in found.values():
            assert np.isnan(np.asarray(leaf, np.float32)).all()
    assert "not on record, so epsilon would not count it. Call engine.record()" in caplog.text
    if book is not None:
        with pytest.raises(AccountingError, match=r"noise of step=1, which is not on record, so"):
            book.get_epsilon()
        for step in (1, 2):
            book.record(step)
            book.seal(step, None)
        assert book.get_epsilon() > 0


def test_a_step_that_is_not_on_record_is_refused_on_the_host():
    """known_failures 79 and 85."""
    plan, ledger = on_record(make_plan(seed=None), 1)
    sums = {"a": jnp.ones(3)}
    dpj.noisy_mean(sums, plan, 0)
    with pytest.raises(AccountingError, match="noisy_mean was asked for the noise of step=1, but"):
        dpj.noisy_mean(sums, plan, 1)
    with pytest.raises(AccountingError, match="noise of step=1, which is not on record"):
        ledger.get_epsilon()
    ledger.record(1)
    ledger.seal(1, None)
    dpj.noisy_mean(sums, plan, 1)
    with pytest.raises(AccountingError, match="The noise of step=1 was handed out before"):
        dpj.noisy_mean({"a": jnp.zeros(3)}, plan, 1)
    assert ledger.get_epsilon() > 0
    other, _ledger = on_record(make_plan(seed=None), 1)
    tx = dpj.add_noise(other)
    _, state = tx.update(sums, tx.init(sums))
    with pytest.raises(
        AccountingError, match=r"add_noise\(plan\) was asked for the noise of step=1"
    ):
        tx.update(sums, state)


def test_a_secret_key_that_nobody_records_for_ends_after_one_step():
    plan, sums = make_plan(seed=None), {"a": jnp.ones(3)}
    dpj.noisy_mean(sums, plan, 0)
    for step in (0, 1):
        with pytest.raises(AccountingError, match="noise of step=0 was drawn by noisy_mean and no"):
            dpj.noisy_mean(sums, plan, step)
    with pytest.raises(AccountingError, match="noise of this plan was given to noisy_mean, and"):
        on_record(plan, 1)


def test_noise_that_can_not_be_made_is_handed_out_again(monkeypatch):
    """An error while it is drawn, such as a full memory, is no release."""
    plan, _ledger = on_record(make_plan(seed=None), 1)
    sums = {"a": jnp.ones(3)}
    with monkeypatch.context() as patch:
        patch.setattr(noise, "release_at", lambda *_, **__: (_ for _ in ()).throw(MemoryError))
        with pytest.raises(MemoryError):
            dpj.noisy_mean(sums, plan, 0)
    dpj.noisy_mean(sums, plan, 0)


def test_add_noise_refuses_a_bound_that_it_cannot_know():
    with pytest.raises(ValueError, match=r"max_grad_norm is adaptive.*noisy_mean"):
        dpj.add_noise(make_plan(max_grad_norm=AdaptiveNorm(1.0)))


def test_secure_noise_compiles_once_and_keeps_its_structure():
    """Noise comes in as data, like the key of the other modes; the shapes may be abstract."""
    plan = make_plan(noise="secure", seed=None)
    sums = {"b": jnp.ones((3, 2), jnp.bfloat16), "a": None, "c": jnp.zeros(()), "e": jnp.zeros(0)}
    like = jax.eval_shape(lambda: sums)
    update = jax.jit(lambda sums, release: noised_mean(sums, release))
    for step in range(3):
        mean = update(sums, release_at(plan, step, like=like))
        expected = expected_mean(sums, plan, step)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), mean, expected)
    assert update._cache_size() == 1
    assert mean["b"].dtype == jnp.float32
    assert mean["e"].shape == (0,)
    assert expected_mean({}, plan, 0) == {}


def test_the_old_counter_layout_is_refused():
    with jax.threefry_partitionable(False):
        with pytest.raises(ValueError, match="jax_threefry_partitionable=False"):
            dpj.noisy_mean({"a": jnp.zeros(3)}, make_plan(), 0)


def test_the_old_counter_layout_is_refused_before_a_ledger_begins(tmp_path):
    plan, path = make_plan(seed=None), tmp_path / "ledger.jsonl"
    data = (np.ones((plan.num_examples, 2), np.float32),)
    run = {
        "loss_fn": lambda w, x: (w * x).sum(),
        "params": jnp.ones(2),
        "optimizer": optax.sgd(0.1),
        "data": data,
    }
    with jax.threefry_partitionable(False):
        with pytest.raises(ValueError, match="jax_threefry_partitionable=False"):
            dpj.PrivacyEngine().make_private(**run, plan=plan, ledger=path)
        with pytest.raises(ValueError, match="jax_threefry_partitionable=False"):
            dpj.PrivacyEngine().make_loader(data=data, plan=plan, ledger=path)
    assert not path.exists()
    dpj.PrivacyEngine().make_private(**run, plan=plan, ledger=path)  # the key was not used
