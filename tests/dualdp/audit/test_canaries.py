# SPDX-License-Identifier: Apache-2.0
"""Empirical lower bound on epsilon: sound, not idle, and silent about the right mechanism."""

import numpy as np
import pytest
from scipy import stats

from dualdp.audit.canaries import (
    audit,
    curve_inverse,
    excess,
    gaussian_inverse,
    guesses_at,
)
from tests.mistakes import refused
from tests.numpy_step import NumpyStep


@pytest.mark.parametrize("mu", [0.3, 1.0])
def test_p_values_of_the_gaussian_mechanism_are_rarely_small(mu):
    """The tightest case: every canary by itself is a Gaussian mechanism."""
    rng, small = np.random.default_rng(0), 0
    for _ in range(150):
        included = rng.random(300) < 0.5
        scores = mu * included + rng.normal(size=300)
        small += excess(guesses_at(scores, included, 100), 0.05, gaussian_inverse(mu)) > 0
    assert stats.binom.sf(small - 1, 150, 0.05) > 1e-4


def test_a_curve_of_epsilons_is_the_trade_off_function():
    """Against the Gaussian's closed form, from its exact (epsilon, delta) curve."""
    mu, epsilons = 1.2, np.linspace(0, 12, 400)
    a, b = mu / 2 - epsilons / mu, -mu / 2 - epsilons / mu
    deltas = stats.norm.cdf(a) - np.exp(epsilons) * stats.norm.cdf(b)
    curve, exact = curve_inverse(epsilons, deltas), gaussian_inverse(mu)
    for y in (0.0, 0.01, 0.2, 0.5, 0.9, 0.999, 1.0):
        assert curve(y) <= exact(y) + 1e-12, "fewer points claim less, never more"
        assert curve(y) == pytest.approx(exact(y), abs=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("sigma", [1.0, 4.0])
def test_the_right_mechanism_is_never_accused(sigma):
    for seed in range(3):
        found = audit(NumpyStep(noise_multiplier=sigma), seed=seed, num_steps=60)
        assert not found.is_refuted, found
        assert found.verdict.startswith("Not refuted")


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["clipping off", "noise divided twice"])
def test_gross_faults_are_refuted(fault):
    found = audit(NumpyStep(fault, noise_multiplier=4.0), seed=0, num_steps=60)
    assert found.is_refuted
    assert found.verdict.startswith("REFUTED: the releases show more than epsilon = ")
    assert found.epsilon > found.claimed_epsilon


@pytest.mark.slow
def test_a_claim_is_refuted_at_the_false_alarm_rate():
    """Twenty right guesses are rare, and not as rare as one run in a million."""
    step = NumpyStep("clipping off", noise_multiplier=4.0)
    sizes = {"num_steps": 20, "num_canaries": 20, "sample_rate": 0.1, "seed": 0}
    assert not audit(step, **sizes, false_alarm=1e-6).is_refuted
    assert audit(step, **sizes, false_alarm=0.5).is_refuted


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("num_steps", 0), ("num_canaries", 3), ("sample_rate", 1.5)),
        *(("delta", 0.0), ("confidence", 1.0), ("false_alarm", 0.0)),
    ],
)
def test_bad_arguments_are_one_sentence(name, value):
    words = f"{name}={value} is out of range"
    refused(lambda: audit(NumpyStep(), **{name: value}), ValueError, words)


@pytest.mark.slow
def test_bounds_stay_below_the_truth():
    """At 95 % each, of 5 bounds at most a few may fail; in fact none does."""
    runs = [NumpyStep(noise_multiplier=2.0) for _ in range(5)]
    found = [audit(step, seed=seed, num_steps=40) for seed, step in enumerate(runs)]
    above = sum(one.epsilon > one.claimed_epsilon for one in found)
    assert stats.binom.sf(above - 1, 5, 0.05) > 1e-3
    assert max(one.epsilon for one in found) > 0.3, "and they are not idle"
