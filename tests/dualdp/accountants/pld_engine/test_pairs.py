# SPDX-License-Identifier: Apache-2.0
"""Dominating pairs against their definitions: groups, replacements, atoms, fixed sizes."""

import math

import numpy as np
import pytest

from dualdp import accountants
from dualdp.accountants.pld import single_step_log_delta
from dualdp.accountants.pld_engine import pairs
from dualdp.accountants.pld_engine.composition import Window
from dualdp.accountants.pld_engine.pairs import Subsampled, Term
from tests.dualdp.accountants.lower import lower, lower_curve
from tests.dualdp.accountants.pld_engine.test_composition import upper_curve

#: (noise multiplier, sample rate, steps, delta) -> group size -> epsilon of dp-accounting 0.6.0, an
#: upper bound: `from_mixture_gaussian_mechanism(s, range(G + 1), Binomial(G, q))` at interval 1e-3.
MIXTURES = {
    (2.0, 0.01, 200, 1e-5): {2: 0.575339, 16: 5.954105, 64: 34.717164},
    (0.7, 0.001, 3000, 1e-5): {2: 1.686822, 16: 13.724024, 64: 75.711558},
    (8.0, 0.3, 100, 1e-5): {2: 3.214075, 16: 44.064578, 64: 402.723305},
}


def group(size, sigma, rate, steps):
    made = accountants.create("pld", group_size=size)
    made.step(noise_multiplier=sigma, sample_rate=rate, num_steps=steps)
    return made


@pytest.mark.parametrize(
    "size", [2, *(pytest.param(size, marks=pytest.mark.slow) for size in (16, 64))]
)
@pytest.mark.parametrize("run", MIXTURES)
def test_bounds_of_a_group_meet(run, size):
    *settings, delta = run
    made = group(size, *settings)
    below, upper = lower(made, delta, 2e-4), made.epsilon_bounds(delta=delta, rtol=5e-4)[2]
    assert below <= MIXTURES[run][size] <= 1.003 * upper  # 0.003: the width of the peer's lattice
    assert below <= upper <= 1.001 * below
    assert upper <= made.get_epsilon(delta=delta) <= 1.0015 * below


def _family_delta(family, epsilon, flipped, below=False):
    setting = 2048, 1e-13, Window(0.7, 1.4, 0.002, 1 << 14)
    terms = [Term(family, np.array([1.0]), flipped)]
    return (lower_curve if below else upper_curve)(terms, *setting).delta(epsilon)


def _densities_delta(p, q, epsilon):
    """Delta of two densities on a fine grid of x."""
    return float(np.maximum(p - math.exp(epsilon) * q, 0).sum())


def _normals(*weights_and_means, sigma):
    x = np.linspace(-12 * sigma - 3, 12 * sigma + 8, 400_001)
    step = x[1] - x[0]
    return step * sum(
        w * np.exp(-0.5 * ((x - m) / sigma) ** 2) / (sigma * math.sqrt(2 * math.pi))
        for w, m in weights_and_means
    )


@pytest.mark.parametrize("flipped", [False, True])
@pytest.mark.parametrize("epsilon", [0.05, 0.4, 1.0])
def test_pairs_of_groups_and_replacements_are_exact(epsilon, flipped):
    sigma, rate = 0.9, 0.1
    base = _normals((1, 0), sigma=sigma)
    group = _normals(
        *((math.comb(3, i) * rate**i * (1 - rate) ** (3 - i), i) for i in range(4)), sigma=sigma
    )
    right = _normals((1 - rate, 0), (rate, 1), sigma=sigma)
    left = _normals((1 - rate, 0), (rate, -1), sigma=sigma)
    for family, p, q in (
        (pairs.mixture(sigma, rate, 3), group, base),
        (pairs.substitution(sigma, rate), right, left),
    ):
        truth = _densities_delta(*((q, p) if flipped else (p, q)), epsilon)
        assert _family_delta(family, epsilon, flipped) == pytest.approx(truth, rel=2e-4, abs=1e-8)
        assert _family_delta(family, epsilon, flipped) >= truth * (1 - 1e-6)
        assert _family_delta(family, epsilon, flipped, below=True) <= truth * (1 + 1e-6)


@pytest.mark.parametrize("flipped", [False, True])
def test_sampling_without_replacement_takes_the_worse_order(flipped):
    sigma, rate = 1.0, 0.1
    family = pairs.FixedSize(Subsampled(np.array([sigma / 2]), np.array([rate])))
    for epsilon in (0.0, 0.2, 1.0, 3.0):
        truth = math.exp(max(single_step_log_delta(sigma / 2, rate, epsilon)))
        assert _family_delta(family, epsilon, flipped) == pytest.approx(truth, rel=1e-3)
        assert _family_delta(family, epsilon, flipped) >= truth * (1 - 1e-9)


@pytest.mark.parametrize("flipped", [False, True])
def test_mechanisms_given_by_atoms_are_exact(flipped):
    for family, p, q in (
        (pairs.randomized_response(0.5, 4), [0.625, 0.125, 0.25], [0.125, 0.625, 0.25]),
        (
            pairs.table((0.5, 0.3, 0.2), (0.2, 0.3, 0.5)),
            [0.5, 0.3, 0.2],
            [0.2, 0.3, 0.5],
        ),
        (pairs.table((0.5, 0.5), (1.0, 0.0)), [0.5, 0.5], [1.0, 0.0]),
    ):
        p, q = np.array(p), np.array(q)
        for epsilon in (0.0, 0.3, 0.7):
            truth = _densities_delta(*((q, p) if flipped else (p, q)), epsilon)
            assert _family_delta(family, epsilon, flipped) == pytest.approx(truth, abs=2e-3)
            assert _family_delta(family, epsilon, flipped) >= truth - 1e-12
            assert _family_delta(family, epsilon, flipped, below=True) <= truth + 1e-12
