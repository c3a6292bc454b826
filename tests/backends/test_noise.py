# SPDX-License-Identifier: Apache-2.0
"""Noise on both stacks: the declared scale, never repeated, the same numbers where promised."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from scipy import stats

import dualdp.jax as dpj
import dualdp.torch as dpt
from dualdp import correlated
from dualdp._validate import positive
from dualdp.ledger.ledger import Release
from dualdp.plan.plan import NOISE, checked_step
from dualdp.porting import matching
from dualdp.randomness import (
    fresh_bits,
    grid_noise,
    key_of,
    noise_bits,
    normal,
    seeded_bits,
    threefry,
)
from dualdp_jax.noise.noise import NoiseSource as JaxNoise
from dualdp_torch.noise.noise import NoiseSource as TorchNoise
from tests.backends.runs import FACES, make_plan, stacks
from tests.conftest import DEVICE

SHAPES = {"a.weight": (60, 50), "a.bias": (60,), "b.weight": (3, 4, 5, 5)}
KINDS = {"a.weight": "linear", "a.bias": "linear", "b.weight": "conv"}
modes = pytest.mark.parametrize("mode", NOISE)
#: Of a test's failing by chance: secure keys differ in every run.
CHANCE = 1e-9


def plan(**changes):
    sizes = {"num_examples": 1000, "expected_batch_size": 50, "num_steps": 40}
    numbers = {"noise_multiplier": 1.5, "max_grad_norm": 0.5}
    seed = None if changes.get("noise") == "secure" else 3
    return make_plan(**{**sizes, **numbers, "seed": seed, **changes})


def noisy_mean(stack, sums, plan, step, *, x64=True, bits=None, **more):
    """NumPy in, NumPy out; without a seed from bits of the step that both stacks are given."""
    if stack == "torch":
        given = {name: torch.as_tensor(total, device=DEVICE) for name, total in sums.items()}
    with jax.enable_x64(x64):
        if stack == "jax":
            given = {name: jnp.asarray(total) for name, total in sums.items()}
        if plan.seed is not None and bits is None:
            means = FACES[stack].noisy_mean(given, plan, step, **more)
        else:
            bits = bits or seeded_bits(11, "noise", checked_step(plan, step))
            source = {"torch": TorchNoise, "jax": JaxNoise}[stack](plan)
            means = source.noisy_mean(given, release(plan, step, **more), bits)
        return {name: np.asarray(mean) for name, mean in means.items()}


def release(plan, step, max_grad_norm=None):
    """The release of a step, as a ledger puts it on record."""
    bound = plan.max_grad_norm_at(step) if max_grad_norm is None else max_grad_norm
    return Release(
        *(step, 0, 0, positive("max_grad_norm", bound), plan.noise_multiplier_at(step)),
        *(plan.draw_stddev(step, bound), plan.expected_batch_size_at(step)),
    )


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
        for seed in range(2):
            key = key_of(seeded_bits(seed, "noise", seed))
            wrapped = jax.random.wrap_key_data(jnp.asarray(key), impl="threefry2x32")
            theirs = np.asarray(jax.random.normal(wrapped, (1 << 18,), dtype))
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
    # in the order of jax.tree, which sorts dictionary keys
    leaves = {"a/bias": (60,), "a/kernel": (50, 60), "b/kernel": (5, 5, 4, 3)}
    pairs = matching.Matcher(SHAPES, KINDS, leaves).parameter_maps()
    run = plan()
    for step in (0, 17):
        tensors = {
            name: torch.as_tensor(total, device=DEVICE) for name, total in zeros(dtype).items()
        }
        ours = dpt.noisy_mean(tensors, run, step, layout=pairs)
        with jax.enable_x64(True):
            tree = {"a": {}, "b": {}}
            for path, shape in leaves.items():
                module, kind = path.split("/")
                tree[module][kind] = jnp.zeros(shape, dtype)
            theirs = dpj.weights.to_numpy(dpj.noisy_mean(tree, run, step))
            for pair in pairs:
                a = ours[pair.torch_name].cpu().numpy()
                b = pair.to_torch(theirs)
                assert a.dtype == b.dtype == np.dtype(dtype)
                np.testing.assert_allclose(a, b, rtol=1e-6 if dtype == "float32" else 1e-11)


CORRELATED = {
    "window": correlated.window([1.0, -0.5, 0.25]),
    "band": correlated.band([2.0, 0.8, 0.3]),
    "blt": correlated.blt(decays=[0.9, 0.3], scales=[0.2, 0.4]),
    "square_root": correlated.square_root(),
}


@pytest.mark.parametrize(
    ("name", "dtype"), [*((n, "float32") for n in CORRELATED), ("band", "float64")]
)
def test_portable_correlated_noise_is_the_same_on_both_stacks(name, dtype):
    """At most 3 ulp of each normal, and the rounding of their products and sums on each stack."""
    run = plan(sampler="fixed_order", num_steps=8, correlation=CORRELATED[name])
    zeros = {key: np.zeros(40, dtype) for key in "ab"}
    for step in (0, 3, 7):
        ours, theirs = (noisy_mean(stack, zeros, run, step) for stack in ("torch", "jax"))
        for key in zeros:
            assert ours[key].dtype == theirs[key].dtype == dtype
            scale = run.noise_stddev(step) / 50
            limit = {"float32": 2e-6, "float64": 1e-11}[dtype] * scale
            np.testing.assert_allclose(ours[key], theirs[key], rtol=0, atol=limit)


def accepted(x):
    """Whether numbers pass for standard normals, by their shape and their variance."""
    is_normal = stats.kstest(x, "norm").pvalue > CHANCE
    return is_normal and CHANCE < stats.chi2.cdf((x**2).sum(), len(x)) < 1 - CHANCE


@stacks
@modes
def test_noise_has_the_declared_scale(stack, mode):
    """Chi-square on the variance and KS on the shape; a twin two per cent off is rejected."""
    run = plan(noise=mode)
    draws = np.concatenate([noise_in_sum(stack, run, step) for step in range(40)])
    assert accepted(draws)
    assert not accepted(draws * 0.98)
    assert not accepted(draws * 1.02)


@stacks
@modes
def test_noise_never_repeats(stack, mode):
    """Not over steps, not over the parameters of a step, not over seeds or bits."""
    run = plan(noise=mode)
    draws = [noise_in_sum(stack, run, step) for step in range(40)]
    correlations = np.corrcoef(draws) - np.eye(len(draws))
    assert np.abs(correlations).max() < 0.1
    again = noise_in_sum(stack, run, 5)
    np.testing.assert_array_equal(again, draws[5])
    if mode != "secure":
        other = noise_in_sum(stack, plan(noise=mode, seed=4), 5)
        assert abs(np.corrcoef(other, draws[5])[0, 1]) < 0.1
    sums = {"a": np.zeros(4000), "b": np.zeros(4000)}
    means, others = (noisy_mean(stack, sums, run, 0, bits=fresh_bits()) for _ in range(2))
    pairs = np.corrcoef([means["a"], means["b"], others["a"], others["b"]]) - np.eye(4)
    assert np.abs(pairs).max() < 0.1


@stacks
def test_the_mean_divides_by_the_expected_size_and_keeps_the_sum(stack):
    run = plan(noise_multiplier=0.0)
    sums = {name: np.full(shape, 3.0, np.float32) for name, shape in SHAPES.items()}
    for name, mean in noisy_mean(stack, sums, run, 0).items():
        np.testing.assert_allclose(mean, 3.0 / 50, rtol=1e-6)
        assert mean.dtype == np.float32, name


@stacks
@modes
def test_noise_follows_the_schedules(stack, mode):
    """One value is read by clipper and noiser (known_failures 5), also where it is learned."""
    scheduled = {"noise_multiplier": lambda t: 1.0 + t, "max_grad_norm": lambda t: 2.0 + t}
    run, sums = plan(noise=mode, **scheduled), {"w": np.zeros(100_000)}
    assert np.std(noisy_mean(stack, sums, run, 3)["w"]) == pytest.approx(4 * 5 / 50, rel=0.02)
    learned = noisy_mean(stack, sums, run, 3, max_grad_norm=0.1)["w"]
    assert np.std(learned) == pytest.approx(4 * 0.1 / 50, rel=0.02)
    for bound in (0.0, float("nan")):
        with pytest.raises(ValueError, match="max_grad_norm"):
            noisy_mean(stack, sums, run, 3, max_grad_norm=bound)


@stacks
def test_a_users_seed_does_not_reach_the_noise(stack):
    """known_failures 16."""
    draws = []
    for _ in range(2):
        np.random.seed(0)  # noqa: NPY002
        torch.manual_seed(0)
        run = plan(noise="fast", seed=None)
        means = noisy_mean(stack, zeros(), run, 0, bits=noise_bits(None, 0))
        draws.append(np.concatenate([mean.ravel() for mean in means.values()]))
    assert abs(np.corrcoef(*draws)[0, 1]) < 0.1


# ---------------------------------------------------------------------- secure


@stacks
@pytest.mark.parametrize(("dtype", "x64"), [("float32", False), ("float64", True)])
def test_secure_sums_lie_on_the_grid(stack, dtype, x64):
    """Whatever the sum was; and the other modes do not lie there."""
    rng = np.random.default_rng(0)
    sums = {"w": rng.normal(size=5000).astype(dtype), "b": np.full((3, 5), 1e-9, dtype)}
    one = {"expected_batch_size": 1}  # so that the mean is the sum
    pitch = grid_noise.pitch(0.5, 5015)
    for mode in NOISE:
        means = noisy_mean(stack, sums, plan(noise=mode, **one), 0, x64=x64)
        cells = np.concatenate([means[n].ravel().astype(np.float64) / pitch for n in sums])
        assert (cells == np.rint(cells)).all() == (mode == "secure")


def test_secure_noise_is_exact_and_the_same_on_both_stacks():
    """Integers of 32 bits in JAX, float64 in torch: bit for bit, from nothing to 2^50 cells."""
    rng = np.random.default_rng(1)
    sizes = 10.0 ** rng.uniform(-12, 8, 20_000)
    sums = {"w": (sizes * rng.choice([-1, 1], sizes.size)).astype(np.float32)}
    sums["w"][:3] = 0, -0.0, 1e-40
    for noise_multiplier in (0.0, 0.3, 200.0):
        run = plan(noise="secure", noise_multiplier=noise_multiplier, expected_batch_size=1)
        ours = noisy_mean("torch", sums, run, 0)["w"]
        for x64 in (False, True):
            theirs = noisy_mean("jax", sums, run, 0, x64=x64)["w"]
            np.testing.assert_array_equal(ours, theirs)
    pitch = grid_noise.pitch(0.5, sizes.size)
    bits = seeded_bits(11, "noise", 0)
    noise = grid_noise.grid_noise(bits, cells=100 / pitch, size=sizes.size)
    expected = (np.rint(sums["w"].astype(np.float64) / pitch) + noise) * pitch
    np.testing.assert_array_equal(ours, expected.astype(np.float32))


def normals_of_jax(stack):
    """Every value that a float32 normal of JAX can take, as this stack computes it."""
    words = np.arange(1 << 23, dtype=np.uint32) << np.uint32(9)
    uniform = threefry._symmetric_uniform(words)
    if stack == "torch":
        return np.unique(np.float32(np.sqrt(2)) * threefry._erfinv32(uniform))
    return np.unique(np.sqrt(2).astype(np.float32) * jax.jit(jax.lax.erf_inv)(uniform))


def guesses(released, table, shift):
    """For each coordinate: 0 or 1 where only that sum can have given the number, else nan."""
    explained = []
    for total in (0.0, shift):
        reachable = np.unique(np.float32(total) + table)
        place = np.searchsorted(reachable, released).clip(0, reachable.size - 1)
        explained.append(reachable[place] == released)
    guess = np.where(explained[0], 0.0, 1.0)
    return np.where(explained[0] == explained[1], np.nan, guess)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stack", "mode"),
    [
        ("torch", "portable"),  # torch's "fast" has 2^48 pairs of words, too many to list here
        ("torch", "secure"),
        ("jax", "fast"),
        ("jax", "portable"),
        ("jax", "secure"),
    ],
)
def test_one_coordinate_betrays_ordinary_noise(stack, mode):
    """The enumeration attack: is a sum 0 or a thousandth of its noise? No epsilon allows to tell.

    The adversary sees one released number, and lists what the generator can return.
    """
    run = plan(noise=mode, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=1)
    table, shift, share = normals_of_jax(stack), 1e-3, []
    for truth, total in enumerate((0.0, shift)):
        sums = {"w": np.full(1 << 17, total, np.float32)}
        guess = guesses(noisy_mean(stack, sums, run, truth, x64=False)["w"], table, shift)
        share.append([np.mean(guess == truth), np.mean(guess == 1 - truth)])
    right, wrong = np.mean(share, axis=0)
    if mode == "secure":
        assert abs(right - wrong) < 0.01
    else:
        assert right > 0.85
        assert wrong == 0
