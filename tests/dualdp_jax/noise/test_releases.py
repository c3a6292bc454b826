# SPDX-License-Identifier: Apache-2.0
"""Noise of thousands of releases: of the planned deviation, and independent of each other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dualdp_jax as dpj
from dualdp.ledger.ledger import Release
from dualdp.randomness import noise_bits
from dualdp_jax.noise.noise import NoiseSource, noised_mean
from tests.dualdp_jax import runs

SUMS = {"w": jnp.zeros(2), "v": jnp.zeros(1)}


def make_plan(**changes):
    given = {"num_examples": 1000, "expected_batch_size": 50, "num_steps": 10, "seed": None}
    return runs.make_plan(**given | {"noise_multiplier": 1.3, "max_grad_norm": 0.7} | changes)


def declared(stddev, numbers):
    """True if the deviation of normals is the declared one, within 5 standard errors."""
    return abs(numbers.std() / stddev - 1) < 5 / np.sqrt(2 * numbers.size)


def independent(one, other):
    """True if two arrays of normals have no correlation, within 5 standard errors."""
    return abs(np.corrcoef(one, other)[0, 1]) < 5 / np.sqrt(one.size)


def assert_independent(drawn):
    """Noise (releases, numbers), between releases, halves and numbers."""
    half = len(drawn) // 2
    for column in range(drawn.shape[1]):
        assert independent(drawn[:-1, column], drawn[1:, column])
        assert independent(drawn[:half, column], drawn[half:, column])
        assert independent(drawn[:, column], drawn[:, (column + 1) % drawn.shape[1]])


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fast", "portable", "secure"])
def test_releases_share_no_noise(mode):
    """Without a seed: between steps, leaves and segments, whose steps have the same numbers."""
    count = 10_000 if mode == "fast" else 2000
    plan, mean, half, found = make_plan(noise=mode), jax.jit(noised_mean), count // 2, []
    source, stddev = NoiseSource(plan), 1.3 * 0.7
    for number in range(count):
        step = number % half  # the second segment runs all steps again
        release = Release(step, number // half, 0, 0.7, 1.3, stddev, 50.0)
        drawn = source.drawn(jax.tree.leaves(SUMS), release, noise_bits(None, step))
        found.append(mean(SUMS, drawn))
    leaves = [np.stack(leaf) for leaf in zip(*map(jax.tree.leaves, found), strict=True)]
    drawn = 50 * np.concatenate(leaves, axis=1).astype(np.float64)  # (releases, 3)
    assert declared(stddev, drawn)
    assert_independent(drawn)


def test_keys_inside_jit_share_no_noise():
    """10^4 releases of one scan."""
    count = 10_000
    plan, engine = make_plan(num_steps=count), dpj.PrivacyEngine()
    engine.make_loader(data=np.zeros((1000, 1), "f"), plan=plan)
    engine.record(num_steps=count)

    def body(step, key):
        return step + 1, dpj.noisy_mean(SUMS, plan, step, key=key)

    _, means = jax.jit(lambda keys: jax.lax.scan(body, 0, keys))(dpj.noise_keys(count))
    drawn = 50 * np.concatenate([np.asarray(leaf, np.float64) for leaf in means.values()], axis=1)
    assert declared(1.3 * 0.7, drawn)
    assert_independent(drawn)
    engine.detach()
