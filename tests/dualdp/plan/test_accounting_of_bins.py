# SPDX-License-Identifier: Apache-2.0
"""Correlated noise with an assignment to bins that is not told: the bound of section 2.12."""

import itertools
import math

import numpy as np
import pytest

from dualdp import accountants, correlated, mechanisms
from dualdp.plan import accounting
from tests.dualdp.plan import test_accounting
from tests.dualdp.plan.test_accounting import modes

FAMILIES = {
    "identity": correlated.band((1.0,)),
    "root": correlated.square_root(),
    **{name: strategy for name, strategy in test_accounting.FAMILIES.items() if strategy},
}
#: Epsilon by Monte Carlo, and ours, at n = 400, b = 100, delta = 1e-3 and one times the noise.
TABLE = {
    "bisr": (correlated.bisr(bands=4), 0.70, 1.32),
    "lambda": (correlated.lambda_cgd(0.9), 1.30, 1.83),
    "root": (correlated.square_root(), 2.23, 2.58),
}


def make(**changes):
    return test_accounting.make(**{"sampler": "balls_in_bins", "num_steps": 15, **changes})


def deltas(rng, mode, stddev, epsilon, samples):
    """Delta of mean_i N(m_i) against N(0) and of the reverse, each with its standard error."""
    mode = mode / stddev
    # N(0) is seen through the inner products with the modes alone.
    values, vectors = np.linalg.eigh(mode @ mode.T)
    root = vectors * np.sqrt(np.maximum(values, 0.0))
    noise = rng.standard_normal((samples, len(mode))) @ root.T
    half = 0.5 * np.sum(mode**2, axis=1)
    joined = noise + (mode @ mode.T)[rng.integers(0, len(mode), samples)]
    found = []
    for exponent, sign in ((joined, 1), (noise, -1)):
        loss = np.logaddexp.reduce(exponent - half, axis=1) - math.log(len(mode))
        value = np.maximum(-np.expm1(epsilon - sign * loss), 0.0)
        found.append((value.mean(), value.std() / math.sqrt(samples)))
    return found


def one_sensitivity(correlation, delta=1e-3):
    """Plan of 4 passes of 100 steps, with the noise of one Gaussian release of the whole run."""
    arguments = {"num_examples": 1000, "num_steps": 400, "delta": delta, "correlation": correlation}
    told = make(**arguments, sampler="fixed_order", noise_multiplier=1.0)
    drafted = make(**arguments)
    return make(**arguments, noise_multiplier=told.sensitivity / drafted.sensitivity)


@pytest.mark.parametrize("name", TABLE)
def test_no_bound_is_below_monte_carlo(name):
    correlation, estimate, published = TABLE[name]
    plan = one_sensitivity(correlation)
    epsilon = plan.epsilon()
    assert epsilon == pytest.approx(published, abs=0.01)
    mode = modes(correlation.strategy(400), 400, 100)
    stddev = plan.noise_multiplier_at(0) * plan.sensitivity
    rng = np.random.default_rng(0)
    for value, error in deltas(rng, mode, stddev, epsilon, 10_000):
        assert value - 3 * error < plan.delta
    found = deltas(rng, mode, stddev, estimate, 10_000)
    assert max(value for value, _ in found) == pytest.approx(plan.delta, rel=0.4)


@pytest.mark.parametrize("epochs", [1, 3])
def test_independent_noise_is_balls_in_bins(epochs):
    plan = make(num_steps=6 * epochs, correlation=FAMILIES["identity"])
    _, ((event, count),) = accounting.pattern(plan, 6 * epochs)
    assert (event.num_bins, count) == (6, 6)
    assert event.noise_multiplier == pytest.approx(epochs**-0.5, rel=1e-11)
    spent = accountants.create("pld")
    spent.compose(mechanisms.BallsInBinsGaussian(2.0, 6, epochs), 6 * epochs)
    assert plan.epsilon() == pytest.approx(spent.get_epsilon(delta=1e-5), rel=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("gap", [5, 6, 12])
def test_every_inner_product_of_two_bins_is_covered(family, gap):
    """Prefixes and unequal bins, against all bins by plain loops."""
    plan = make(num_examples=10 * gap, correlation=FAMILIES[family])
    column, checked = plan.correlation.strategy(15), 0
    for stop in (1, 4, gap, gap + 1, 15):
        mode = modes(column, min(stop, 15), gap)
        gram, bins = mode @ mode.T, range(len(mode))
        known, *hidden = accounting.pattern(plan, min(stop, 15))
        assert [type(event) for event, _ in known] == [mechanisms.Gaussian]
        checked += len(hidden)
        for releases in hidden:
            *shared, (own, count) = releases
            assert count == own.num_bins
            common = sum((plan.sensitivity / event.noise_multiplier) ** 2 for event, _ in shared)
            top = common + (plan.sensitivity / own.noise_multiplier) ** 2
            assert any(  # some split has that many bins in each class, and is covered
                gap // r == count
                and all(
                    gram[i, k] <= (top if i == k else common) * (1 + 1e-9) + 1e-12
                    for i, k in itertools.product(bins, bins)
                    if i % r == k % r
                )
                for r in range(1, gap + 1)
            )
    assert checked
