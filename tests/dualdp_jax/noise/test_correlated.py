# SPDX-License-Identifier: Apache-2.0
"""Correlated noise on JAX: the filter of the strategy over the normals of a segment, bit for bit
the same however it is reached, and what is kept of it nowhere to be read."""

import copy
import os
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dualdp_jax as dpj
from dualdp import AccountingError, correlated
from dualdp.ledger.ledger import Release
from dualdp.randomness import fresh_bits, key_of, noise_bits, seeded_bits, threefry
from dualdp_jax.noise.noise import NoiseSource
from tests.closeness import lower_toeplitz
from tests.dualdp_jax import runs

STEPS = 7
STRATEGIES = {
    "window": correlated.window([1.0, -0.6, 0.2]),
    "wide window": correlated.bisr(bands=12),  # wider than the run
    "band": correlated.band([2.0, 0.9, -0.5, 0.3]),
    "blt": correlated.blt(decays=[0.9, 0.4, 0.0], scales=[0.2, 0.3, 0.1]),
    "square root": correlated.square_root(),
}
SUMS = {"b": np.zeros((3, 5)), "a": None, "c": np.zeros(())}
families = pytest.mark.parametrize(
    "name", ["band", *(pytest.param(n, marks=pytest.mark.slow) for n in ("window", "blt"))]
)


def make_plan(strategy, **changes):
    given = {"expected_batch_size": 20, "num_steps": STEPS, "seed": 5, "noise": "portable"}
    given |= {"noise_multiplier": 1.5, "max_grad_norm": 2.0, "correlation": strategy}
    order = {"sampler": "fixed_order", "neighboring_relation": "zero_out"}
    return runs.make_plan(**given | order | changes)


def zeros(dtype="float32", sums=SUMS):
    return jax.tree.map(lambda total: jnp.asarray(total, dtype), sums)


def normals(plan, leaf, shape, dtype):
    """(steps, *shape) z of a leaf by NumPy, in float64."""
    keys = [key_of(seeded_bits(plan.seed, "noise", t)) for t in range(STEPS)]
    kind = np.dtype(dtype).type
    drawn = [threefry.normal(threefry.fold_in(key, leaf), shape, dtype=kind) for key in keys]
    return np.stack(drawn).astype(np.float64)


def by_definition(plan, start=0, dtype="float32", sums=SUMS):
    """Per leaf (steps, *shape) stddev C^-1 z of a segment, in float64, from C alone."""
    matrix = np.linalg.inv(lower_toeplitz(plan.correlation.strategy(STEPS - start)))
    stddev = plan.draw_stddev(0, 2.0)
    shapes = [np.shape(leaf) for leaf in jax.tree.leaves(sums)]
    drawn = [normals(plan, leaf, shape, dtype)[start:] for leaf, shape in enumerate(shapes)]
    return [stddev * np.einsum("ts,s...->t...", matrix, z) for z in drawn]


def release(plan, step, segment=0, start=0):
    """Release of a step of a segment."""
    bound = plan.max_grad_norm_at(step)
    sigma, stddev = plan.noise_multiplier_at(step), plan.draw_stddev(step, bound)
    return Release(step, segment, start, bound, sigma, stddev, plan.expected_batch_size_at(step))


def drawn(source, plan, steps, sums=SUMS, **segment):
    """Leaves of the noisy means of these steps, in this order."""
    means = []
    for step in steps:
        bits = noise_bits(plan.seed, step)
        mean = source.noisy_mean(zeros(sums=sums), release(plan, step, **segment), bits)
        means.append([np.asarray(leaf) for leaf in jax.tree.leaves(mean)])
    return means


def noises(means):
    """Per leaf (steps, ...) noise in the sum, from the noisy means of the steps."""
    return [np.stack(leaves).astype(np.float64) * 20 for leaves in zip(*means, strict=True)]


def assert_close(found, expected, rtol):
    """Up to rounding of the largest number, since noise cancels."""
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=rtol * np.abs(theirs).max())


# ---------------------------------------------------------------------- what the noise is


@pytest.mark.parametrize(
    ("name", "dtype"), [*((n, "float32") for n in STRATEGIES), ("blt", "float64")]
)
def test_noise_is_the_filter_of_the_normals(name, dtype):
    plan = make_plan(STRATEGIES[name])
    with jax.enable_x64(dtype == "float64"):
        means = [jax.tree.leaves(dpj.noisy_mean(zeros(dtype), plan, step)) for step in range(STEPS)]
    assert {leaf.dtype for leaf in means[0]} == {jnp.dtype(dtype)}
    rtol = 1e-6 if dtype == "float32" else 1e-11
    assert_close(noises(means), by_definition(plan, dtype=dtype), rtol)


@families
def test_covariance_over_the_steps_is_that_of_the_strategy(name):
    """Over 10^5 numbers each entry is within five standard errors of that of C^-1 C^-T."""
    plan, size = make_plan(STRATEGIES[name]), 100_000
    means = [dpj.noisy_mean({"a": jnp.zeros(size)}, plan, step)["a"] for step in range(STEPS)]
    found = np.stack(means).astype(np.float64) * 20 / plan.draw_stddev(0, 2.0)
    matrix = lower_toeplitz(plan.correlation.inverse(STEPS))
    expected = matrix @ matrix.T
    spread = np.sqrt((np.outer(*[np.diag(expected)] * 2) + expected**2) / size)
    assert (np.abs(found @ found.T / size - expected) < 5 * spread).all()


def test_weight_one_is_the_noise_without_a_correlation():
    """Bit for bit, for sums in low precision, too."""
    plans = [make_plan(s, sampler="poisson") for s in (None, correlated.identity())]
    for dtype in ("float32", "bfloat16"):
        means = [dpj.noisy_mean(zeros(dtype), plan, STEPS - 1) for plan in plans]
        jax.tree.map(np.testing.assert_array_equal, *means)
        z = normals(plans[0], 0, (3, 5), "float32")[-1]
        np.testing.assert_allclose(means[0]["b"], 3.0 * z / 20, rtol=1e-6, atol=1e-7)


# ---------------------------------------------------------------------- however it is reached


@families
def test_any_order_of_the_steps_gives_the_same_noise(name):
    """Of a plan with a seed."""
    plan = make_plan(STRATEGIES[name])
    expected, source = drawn(NoiseSource(plan), plan, range(STEPS)), NoiseSource(plan)
    for step in (3, 4, 4, 1, 0, 6, 5):
        (found,) = drawn(source, plan, [step])
        jax.tree.map(np.testing.assert_array_equal, found, expected[step])


def test_a_fork_begins_anew(monkeypatch):
    """What the parent kept is not the child's, whose ledger begins a segment too."""
    plan = make_plan(STRATEGIES["band"], seed=None)
    source = NoiseSource(plan)
    drawn(source, plan, range(3))
    monkeypatch.setattr(os, "getpid", lambda: 1)
    (noisy,) = drawn(source, plan, [3], segment=1, start=3)
    assert all(np.any(leaf) for leaf in noisy)


def test_a_step_whose_release_failed_leaves_its_place():
    """Step 1 is on record and drew nothing: step 2 takes normals of its own in its place."""
    plan = make_plan(STRATEGIES["band"], seed=None)
    source, sums, found = NoiseSource(plan), {"a": jnp.zeros(2000)}, {}
    for step in (0, 2):
        mean = source.noisy_mean(sums, release(plan, step), fresh_bits())["a"]
        found[step] = np.asarray(mean, np.float64) * 20 / plan.draw_stddev(0, 2.0)
    weights = plan.correlation.inverse(3)
    assert found[2].std() == pytest.approx(np.sqrt(weights @ weights), rel=0.1)
    assert found[0] @ found[2] / 2000 == pytest.approx(weights[0] * weights[2], abs=0.2)


def test_what_correlated_noise_can_not_be_added_to_is_refused():
    plan = make_plan(STRATEGIES["band"])
    source, other = NoiseSource(plan), {"b": np.zeros((5, 3)), "c": np.zeros(2)}
    drawn(source, plan, [0])
    with pytest.raises(ValueError, match="other shapes, dtypes or shardings than at the step befo"):
        drawn(source, plan, [1], sums=other)
    with pytest.raises(ValueError, match=r"max_grad_norm=1.0 with correlated noise, which holds t"):
        dpj.noisy_mean(zeros(), plan, 1, max_grad_norm=1.0)
    mean = jax.jit(lambda key: dpj.noisy_mean(zeros(), plan, 0, key=key))
    with pytest.raises(ValueError, match="correlated noise.*Expected noisy_mean outs"):
        mean(np.zeros(2, np.uint32))


# ---------------------------------------------------------------------- the engine


SETTINGS = {
    "loss_fn": lambda p, x: 0.0 * (p["b"].sum() + p["c"]) * x,
    "params": zeros(sums={"b": np.zeros((3, 5)), "c": np.zeros(())}),
    "optimizer": runs.keeper(),
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
    engine, *begun = runs.private(plan=plan, **SETTINGS, **changes)
    return engine, means_of(engine, *begun, stop, save)


@families
def test_a_resumed_run_begins_a_segment(name, tmp_path):
    """With a seed: the same z, of which the strategy takes back those of its segment alone."""
    plan, path = make_plan(STRATEGIES[name]), tmp_path / "run.safetensors"
    engine, before = run(plan, stop=4, save=(4, path))
    engine.detach()
    assert_close(noises(before), [noise[:4] for noise in by_definition(plan)], 1e-6)
    spent = engine.get_epsilon()
    like = dpj.TrainState.create(SETTINGS["params"], SETTINGS["optimizer"])
    for count in range(2):
        _, engine = dpj.load_checkpoint(path, like=like)
        after = means_of(engine, *engine.resume(**SETTINGS))
        engine.detach()
        assert_close(noises(after), by_definition(plan, start=4), 1e-6)
        assert len(engine.ledger) == STEPS + count * (STEPS - 4)
        assert engine.get_epsilon() > spent
        spent = engine.get_epsilon()


def test_a_loop_of_ones_own_gets_the_noise_of_its_record():
    """With a seed, the noise of a run; each step that is on record, once."""
    plan, engine = make_plan(STRATEGIES["blt"]), dpj.PrivacyEngine()
    engine.make_loader(data=(np.ones(60, np.float32),), plan=plan)
    means = []
    for step in range(STEPS):
        engine.record()
        means.append(jax.tree.leaves(dpj.noisy_mean(zeros(), plan, step)))
        with pytest.raises(AccountingError, match="no release on record whose noise is still"):
            dpj.noisy_mean(zeros(), plan, step)
    assert_close(noises(means), by_definition(plan), 1e-6)


def test_a_source_is_in_no_pickle_and_no_repr(tmp_path, monkeypatch):
    plan, sources = make_plan(STRATEGIES["window"], seed=None), []

    def watched(*arguments):
        sources.append(NoiseSource(*arguments))
        return sources[-1]

    monkeypatch.setattr("dualdp_jax.training.step.NoiseSource", watched)
    path = tmp_path / "run.safetensors"
    engine, _ = run(plan, save=(STEPS - 1, path), ledger=tmp_path / "ledger")
    (source,) = sources
    held = [leaf for leaf in jax.tree.leaves(list(vars(source).values())) if np.size(leaf) > 4]
    kept = [np.asarray(leaf) for leaf in held if isinstance(leaf, jax.Array)]
    assert kept
    assert all(secret.all() for secret in kept)
    files = [path.read_bytes(), (tmp_path / "ledger").read_bytes()]
    shown = repr((source, engine, plan, engine.ledger))
    for secret in kept:
        for part in secret.reshape(-1, secret.shape[-1]):
            assert all(part.tobytes() not in content for content in files)
            assert all(f"{number:.6g}" not in shown for number in part)
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="A noise source can't be copied"):
            copied(source)
