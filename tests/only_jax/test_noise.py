# SPDX-License-Identifier: Apache-2.0
"""Noise on JAX: keyed by the plan, planned size, the same through optax."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dualdp_jax as dpj
from dualdp import AccountingError
from dualdp.plan import NOISE, PrivacyPlan
from dualdp.randomness import counter
from dualdp.schedules import AdaptiveNorm
from dualdp_jax.noise import noised_mean, release_at


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


@pytest.mark.parametrize("noise", ["fast", "portable"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_noise_is_the_counter_generator(noise, dtype):
    plan = make_plan(noise=noise)
    with jax.enable_x64(dtype == "float64"):
        grads = {"b": jnp.ones((3, 2), dtype), "a": None, "c": jnp.zeros((), dtype)}
        noisy = dpj.noisy_mean(grads, plan, 1)
    key, kind = plan.step_key("noise", 1), getattr(np, dtype)
    for index, name in enumerate("bc"):
        normal = counter.normal(counter.fold_in(key, index), grads[name].shape, dtype=kind)
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
    plan = make_plan(noise=noise, seed=None)
    tx = optax.chain(dpj.add_noise(plan), optax.sgd(1.0))
    sums = {"a": jnp.arange(4.0), "b": jnp.ones((2, 3))}
    update = jax.jit(tx.update) if jit else tx.update
    state = tx.init(sums)
    for step in range(3):
        updates, state = update(sums, state)
        expected = jax.tree.map(jnp.negative, dpj.noisy_mean(sums, plan, step))
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
    tx = dpj.add_noise(make_plan(seed=None))
    sums, update = {"a": jnp.ones(3)}, jax.jit(tx.update) if jit else tx.update
    first = tx.init(sums)
    _, second = update(sums, first)
    for state in (first, tx.init(sums)):
        with pytest.raises(Exception, match="The noise of step=0 was handed out before"):
            jax.block_until_ready(update(sums, state))
    jax.block_until_ready(update(sums, second))


def test_add_noise_in_two_places_is_refused_when_it_runs():
    tx = dpj.add_noise(make_plan(seed=None))
    both = optax.multi_transform({"a": tx, "b": tx}, {"a": "a", "b": "b"})
    sums = {"a": jnp.ones(3), "b": jnp.ones(3)}
    with pytest.raises(Exception, match="The noise of step=0 was handed out before"):
        jax.block_until_ready(jax.jit(both.update)(sums, both.init(sums), sums))


def test_one_add_noise_serves_many_optimizers_in_a_scan():
    plan = make_plan(seed=None, num_steps=50)
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
    assert len(np.unique(updates["x"])) == 150
    assert (moved["y"] != 0).all()


def test_add_noise_keeps_the_key_on_the_host():
    plan = make_plan()
    tx = dpj.add_noise(plan)
    state = tx.init({"a": jnp.zeros(3)})
    assert [leaf.dtype for leaf in jax.tree.leaves(state)] == [jnp.int32]
    text = jax.jit(tx.update).lower({"a": jnp.zeros(3)}, state).as_text()
    for step in range(3):
        assert all(str(word) not in text for word in plan.step_key("noise", step))


def test_noisy_mean_refuses_a_traced_step_and_steps_past_the_plan():
    plan, grads = make_plan(), {"a": jnp.zeros(3)}
    with pytest.raises(TypeError, match="step is traced.*add_noise"):
        jax.jit(lambda step: dpj.noisy_mean(grads, plan, step))(1)
    for step in (3, -1):
        with pytest.raises(AccountingError, match=f"step={step} is past the plan's num_steps=3"):
            dpj.noisy_mean(grads, plan, step)


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
        expected = dpj.noisy_mean(sums, plan, step)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), mean, expected)
    assert update._cache_size() == 1
    assert mean["b"].dtype == jnp.float32
    assert mean["e"].shape == (0,)
    assert dpj.noisy_mean({}, plan, 0) == {}


def test_the_old_counter_layout_is_refused():
    with jax.threefry_partitionable(False):
        with pytest.raises(ValueError, match="jax_threefry_partitionable=False"):
            dpj.noisy_mean({"a": jnp.zeros(3)}, make_plan(), 0)
