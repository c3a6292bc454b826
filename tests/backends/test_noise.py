# SPDX-License-Identifier: Apache-2.0
"""Noise on both stacks: the declared scale, never repeated, portable mode the same numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from scipy import stats

import dualdp.jax as dpj
import dualdp.torch as dpt
from dualdp import PrivacyPlan, layouts
from dualdp.randomness import RootKey, normal
from tests.conftest import BACKENDS

SHAPES = {"a.weight": (60, 50), "a.bias": (60,), "b.weight": (3, 4, 5, 5)}
KINDS = {"a.weight": "linear", "a.bias": "linear", "b.weight": "conv"}
stacks = pytest.mark.parametrize("stack", BACKENDS)


def plan(**changes):
    arguments = {
        "num_examples": 1000,
        "expected_batch_size": 50,
        "num_steps": 40,
        "noise_multiplier": 1.5,
        "max_grad_norm": 0.5,
        "delta": 1e-5,
        "noise": "portable",
        "accountant": "rdp",
        "seed": 3,
    }
    return PrivacyPlan(**{**arguments, **changes})


def noisy_mean(stack, sums, plan, step):
    """NumPy in, NumPy out."""
    if stack == "torch":
        tensors = {name: torch.as_tensor(total) for name, total in sums.items()}
        return {name: t.numpy() for name, t in dpt.noisy_mean(tensors, plan, step).items()}
    with jax.enable_x64(True):
        arrays = {name: jnp.asarray(total) for name, total in sums.items()}
        return {name: np.asarray(a) for name, a in dpj.noisy_mean(arrays, plan, step).items()}


def zeros(dtype="float32"):
    return {name: np.zeros(shape, dtype) for name, shape in SHAPES.items()}


def noise_in_sum(stack, plan, step, dtype="float32"):
    """The noise alone, in units of its declared standard deviation, flattened."""
    means = noisy_mean(stack, zeros(dtype), plan, step)
    unit = plan.noise_stddev(step) / plan.expected_batch_size_at(step)
    return np.concatenate([means[name].ravel() / unit for name in SHAPES])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_normals_are_those_of_jax(dtype):
    with jax.enable_x64(True):
        for seed in range(5):
            key = RootKey.from_seed(seed).step_key("noise", seed)
            theirs = np.asarray(
                jax.random.normal(
                    jax.random.wrap_key_data(jnp.asarray(key), impl="threefry2x32"),
                    (1 << 18,),
                    dtype,
                )
            )
            ours = normal(key, 1 << 18, dtype=np.dtype(dtype).type)
            if dtype == "float32":
                assert ulps(ours, theirs).max() <= 3
            else:
                np.testing.assert_allclose(ours, theirs, rtol=1e-11)


def ulps(a, b):
    """Distance in units of the last place."""
    a, b = (x.view(np.int32).astype(np.int64) for x in (a, b))
    a, b = (np.where(x < 0, -(x & 0x7FFFFFFF), x) for x in (a, b))
    return np.abs(a - b)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_portable_noise_is_the_same_on_both_stacks(dtype):
    """Through the pairing of the two layouts: torch draws in JAX's shapes and leaf order."""
    leaves = [(("b", "kernel"), (5, 5, 4, 3)), (("a", "bias"), (60,)), (("a", "kernel"), (50, 60))]
    # jax.tree sorts dictionary keys: a/bias, a/kernel, b/kernel.
    leaves = sorted(leaves)
    pairs = layouts.match(SHAPES, KINDS, leaves)
    run = plan()
    for step in (0, 17):
        tensors = {name: torch.as_tensor(total) for name, total in zeros(dtype).items()}
        ours = dpt.noisy_mean(tensors, run, step, layout=pairs)
        with jax.enable_x64(True):
            tree = {"a": {}, "b": {}}
            for (module, kind), shape in leaves:
                tree[module][kind] = jnp.zeros(shape, dtype)
            theirs = jax.tree.leaves(dpj.noisy_mean(tree, run, step))
            for pair in pairs:
                a = ours[pair.torch_name].numpy()
                b = pair.to_torch(np.asarray(theirs[pair.jax_index]))
                assert a.dtype == b.dtype == np.dtype(dtype)
                np.testing.assert_allclose(a, b, rtol=1e-6 if dtype == "float32" else 1e-11)


@stacks
@pytest.mark.parametrize("mode", ["fast", "portable"])
def test_noise_has_the_declared_scale(stack, mode):
    """Chi-square on the variance and KS on the shape; a twin two per cent off is rejected."""
    run = plan(noise=mode)
    draws = np.concatenate([noise_in_sum(stack, run, step) for step in range(40)])
    accepted = lambda x: (  # noqa: E731
        stats.kstest(x, "norm").pvalue > 1e-3
        and 1e-3 < stats.chi2.cdf((x**2).sum(), len(x)) < 1 - 1e-3
    )
    assert accepted(draws)
    assert not accepted(draws * 0.98)
    assert not accepted(draws * 1.02)


@stacks
@pytest.mark.parametrize("mode", ["fast", "portable"])
def test_noise_never_repeats(stack, mode):
    """Not over steps, not over the parameters of a step, not over keys."""
    run = plan(noise=mode)
    draws = [noise_in_sum(stack, run, step) for step in range(40)]
    correlations = np.corrcoef(draws) - np.eye(len(draws))
    assert np.abs(correlations).max() < 0.1
    again = noise_in_sum(stack, run, 5)
    np.testing.assert_array_equal(again, draws[5])
    other = noise_in_sum(stack, plan(noise=mode, seed=4), 5)
    assert abs(np.corrcoef(other, draws[5])[0, 1]) < 0.1
    means = noisy_mean(stack, {"a": np.zeros(4000), "b": np.zeros(4000)}, run, 0)
    assert abs(np.corrcoef(means["a"], means["b"])[0, 1]) < 0.1


@stacks
def test_the_mean_divides_by_the_expected_size_and_keeps_the_sum(stack):
    run = plan(noise_multiplier=0.0)
    sums = {name: np.full(shape, 3.0, np.float32) for name, shape in SHAPES.items()}
    for name, mean in noisy_mean(stack, sums, run, 0).items():
        np.testing.assert_allclose(mean, 3.0 / 50, rtol=1e-6)
        assert mean.dtype == np.float32, name


@stacks
def test_noise_follows_the_schedules(stack):
    """One value is read by clipper and noiser (known_failures 5)."""
    run = plan(noise_multiplier=lambda step: 1.0 + step, max_grad_norm=lambda step: 2.0 + step)
    means = noisy_mean(stack, {"w": np.zeros(100_000)}, run, 3)
    assert np.std(means["w"]) == pytest.approx(4.0 * 5.0 / 50, rel=0.02)


@stacks
def test_a_users_seed_does_not_reach_the_noise(stack):
    """known_failures 16."""
    draws = []
    for _ in range(2):
        np.random.seed(0)  # noqa: NPY002
        torch.manual_seed(0)
        draws.append(noise_in_sum(stack, plan(noise="fast", seed=None), 0))
    assert abs(np.corrcoef(*draws)[0, 1]) < 0.1


@stacks
def test_a_step_past_the_plan_is_refused(stack):
    with pytest.raises(ValueError, match="step=40 is past the plan's num_steps=40"):
        noisy_mean(stack, zeros(), plan(), 40)
