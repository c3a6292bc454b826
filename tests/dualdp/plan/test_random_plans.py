# SPDX-License-Identifier: Apache-2.0
"""Random plans that are accounted as a whole: epsilon is never below the truth of some unit."""

import math

import numpy as np
import pytest
from scipy.stats import norm

import dualdp
from dualdp import correlated
from tests.dualdp.plan.test_accounting_of_bins import deltas


def strategy(rng, bands):
    kind = rng.integers(0, 4)
    weights = np.cumprod(rng.uniform(0.2, 0.95, bands))
    if kind == 0:
        return correlated.band(tuple(weights))
    if kind == 1:
        return correlated.window((1.0, *(-0.5 * weights[1:])))
    if kind == 2:
        return correlated.blt(decays=(rng.uniform(0.1, 0.95),), scales=(rng.uniform(0.05, 0.5),))
    return correlated.window((1.0, *rng.uniform(-0.3, 0.3, bands - 1)))


def random_plan(rng, sampler):
    gap, n = int(rng.integers(2, 7)), int(rng.integers(3, 13))
    bands = int(rng.integers(2, gap + 1))
    changes = {"correlation": strategy(rng, bands)}
    if sampler == "cyclic_poisson":
        band = correlated.band(tuple(np.cumprod(rng.uniform(0.2, 0.95, bands))))
        changes = {"correlation": band, "min_separation": gap}
    size = 12 if sampler != "cyclic_poisson" else 12 * float(rng.uniform(0.3, 1.0))
    return dualdp.PrivacyPlan(
        num_examples=12 * gap,
        expected_batch_size=size,
        num_steps=n,
        noise_multiplier=float(rng.uniform(0.7, 4.0)),
        max_grad_norm=1.0,
        delta=10.0 ** rng.uniform(-3, -2),
        sampler=sampler,
        seed=1,
        **changes,
    )


def gaussian_delta(mu, epsilon):
    """Delta of N(mu, 1) against N(0, 1)."""
    return norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu)


def lower_fixed(rng, plan, gap, stddev, epsilon):
    """Exact: the unit of the worst batch, all gradients equal."""
    n = plan.num_steps
    column = plan.correlation.strategy(n)
    norms = []
    for first in range(gap):
        joined = np.zeros(n)
        joined[first::gap] = 1
        norms.append(np.linalg.norm(np.convolve(column, joined)[:n]))
    return gaussian_delta(max(norms) / stddev, epsilon), 0.0


def lower_cyclic(rng, plan, gap, stddev, epsilon):
    """Monte Carlo: a unit of the first class, each draw seen in all rows that hold it."""
    n, samples = plan.num_steps, 20_000
    column, rate = plan.correlation.strategy(n), gap * plan.sample_rate_at(0)
    losses = np.zeros((2, samples))
    for start in range(0, n, gap):
        size = np.linalg.norm(column[: n - start]) / stddev
        for row, joined in zip(losses, (rate, 0.0), strict=True):
            x = rng.standard_normal(samples) + size * (rng.random(samples) < joined)
            row += np.log1p(rate * np.expm1(size * x - size**2 / 2))
    found = [np.maximum(-np.expm1(epsilon - loss), 0) for loss in (losses[0], -losses[1])]
    return max((v.mean(), v.std() / math.sqrt(samples)) for v in found)


def lower_bins(rng, plan, gap, stddev, epsilon):
    """Monte Carlo: all gradients equal, or each with the sign of its pass."""
    n = plan.num_steps
    column = plan.correlation.strategy(n)
    signs = np.array([np.ones(n), (-1.0) ** (np.arange(n) // gap)])
    found = []
    for sign in signs:
        mode = np.zeros((gap, n))
        for i in range(min(gap, n)):
            mode[i] = sum(
                sign[j] * np.concatenate([np.zeros(j), column[: n - j]]) for j in range(i, n, gap)
            )
        found += deltas(rng, mode, stddev, epsilon, 5_000)
    return max(found)


LOWER = {
    "fixed_order": (lower_fixed, 200),
    "cyclic_poisson": (lower_cyclic, 150),
    "balls_in_bins": (lower_bins, 150),
}


@pytest.mark.slow
@pytest.mark.parametrize("sampler", LOWER)
def test_500_random_plans_are_not_below_the_truth(sampler):
    rng, (lower, count) = np.random.default_rng(7), LOWER[sampler]
    ratios = []
    for _ in range(count):
        plan = random_plan(rng, sampler)
        stddev, epsilon = plan.noise_multiplier_at(0) * plan.sensitivity, plan.epsilon()
        value, error = lower(rng, plan, plan.num_examples // 12, stddev, epsilon)
        assert value - 4.5 * error <= plan.delta * (1 + 1e-6), plan
        ratios.append(value / plan.delta)
    assert max(ratios) > 0.5  # near the truth for some, or this could not fail


@pytest.mark.parametrize("sampler", LOWER)
def test_a_plan_with_less_noise_than_it_says_is_below_the_truth(sampler):
    """The comparison can fail: with 0.7 of the noise some plan is found out."""
    rng, (lower, _) = np.random.default_rng(7), LOWER[sampler]
    for _ in range(8):
        plan = random_plan(rng, sampler)
        stddev = 0.7 * plan.noise_multiplier_at(0) * plan.sensitivity
        value, error = lower(rng, plan, plan.num_examples // 12, stddev, plan.epsilon())
        if value - 4.5 * error > plan.delta:
            return
    raise AssertionError("no plan was found out")
