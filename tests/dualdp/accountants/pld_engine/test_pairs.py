# SPDX-License-Identifier: Apache-2.0
"""Groups of examples under Poisson sampling: narrow brackets, another library, the definition."""

import math

import numpy as np
import pytest
from scipy.stats import binom

from dualdp import accountants
from dualdp.accountants.solve import get_epsilon
from tests.dualdp.accountants.lower import lower

#: (noise multiplier, sample rate, steps, delta) -> group size -> epsilon of dp-accounting 0.6.0, an
#: upper bound: `from_mixture_gaussian_mechanism(s, range(G + 1), Binomial(G, q))` at interval 1e-3.
MIXTURES = {
    (2.0, 0.01, 200, 1e-5): {2: 0.575339, 4: 1.233170, 16: 5.954105, 64: 34.717164},
    (0.7, 0.001, 3000, 1e-5): {2: 1.686822, 4: 3.293554, 16: 13.724024, 64: 75.711558},
    (8.0, 0.3, 100, 1e-5): {2: 3.214075, 4: 7.214590, 16: 44.064578, 64: 402.723305},
}


def group(size, sigma, rate, steps):
    made = accountants.create("pld", group_size=size)
    made.step(noise_multiplier=sigma, sample_rate=rate, num_steps=steps)
    return made


@pytest.mark.parametrize("size", [2, 4, 16, 64])
@pytest.mark.parametrize(
    "run", [pytest.param(run, marks=[pytest.mark.slow] * (run[0] != 2.0)) for run in MIXTURES]
)
def test_bounds_of_a_group_meet(run, size):
    *settings, delta = run
    made = group(size, *settings)
    below, upper = lower(made, delta, 2e-4), made.epsilon_bounds(delta=delta, rtol=5e-4)[2]
    assert below <= MIXTURES[run][size] <= 1.003 * upper  # 0.003: the width of the peer's lattice
    assert below <= upper <= 1.001 * below
    assert upper <= made.get_epsilon(delta=delta) <= 1.0015 * below


def mixture(x, sigma, rate, size):
    """Likelihood ratio of a group of `size` against none, at outcomes x."""
    hits = np.arange(size + 1)
    terms = binom.pmf(hits, size, rate) * np.exp((2 * np.outer(x, hits) - hits**2) / 2 / sigma**2)
    return terms.sum(axis=1)


def delta_of(epsilon, sigma, rate, size, steps):
    """Delta of both directions of one or two releases, summed over the outcomes themselves."""
    x, step = np.linspace(-9 * sigma, size + 9 * sigma, 3001, retstep=True)
    ratio = mixture(x, sigma, rate, size)
    without = np.exp(-0.5 * (x / sigma) ** 2) * step / (sigma * math.sqrt(2 * math.pi))
    if steps == 2:
        ratio = np.outer(ratio, ratio)
        without = np.outer(without, without)
    grow = math.exp(epsilon)
    removed = (without * np.maximum(ratio - grow, 0)).sum()
    added = (without * np.maximum(1 - grow * ratio, 0)).sum()
    return max(removed, added)


@pytest.mark.parametrize(("size", "steps"), [(3, 1), (3, 2), (16, 1), (16, 2)])
@pytest.mark.parametrize(("sigma", "rate", "epsilon"), [(2.0, 0.05, 0.3), (1.0, 0.05, 2.0)])
def test_a_group_costs_what_the_definition_says(size, steps, sigma, rate, epsilon):
    made = group(size, sigma, rate, steps)
    truth = delta_of(epsilon, sigma, rate, size, steps)
    assert truth * (1 - 1e-4) <= made.get_delta(epsilon=epsilon) <= 1.005 * truth
    assert lower(made, truth) <= epsilon * (1 + 1e-4)
    assert made.get_epsilon(delta=truth) >= epsilon * (1 - 1e-4)


def test_a_group_of_one_is_an_example():
    run = {"noise_multiplier": 2.0, "sample_rate": 0.01, "num_steps": 200, "delta": 1e-5}
    assert get_epsilon(**run, group_size=1) == get_epsilon(**run) == 0.26914727923322523
