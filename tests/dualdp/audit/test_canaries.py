# SPDX-License-Identifier: Apache-2.0
"""Empirical lower bound on epsilon: sound, not idle, and silent about the right mechanism."""

import numpy as np
import pytest
from scipy import stats

from dualdp.audit.canaries import (
    Guesses,
    audit,
    curve_inverse,
    excess,
    gaussian_inverse,
    guesses_at,
)
from tests.numpy_step import NumpyStep


def p_value(guesses, inverse):
    """The largest level at which a claim is not refuted, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        is_refuted = excess(guesses, middle, inverse) > 0
        low, high = (low, middle) if is_refuted else (middle, high)
    return high


def test_p_values_grow_with_the_claim_and_shrink_with_success():
    by_claim = [p_value(Guesses(300, 200, 150), gaussian_inverse(mu)) for mu in (0.1, 0.5, 1, 3)]
    assert by_claim == sorted(by_claim)
    claim = gaussian_inverse(0.8)
    by_success = [p_value(Guesses(300, 200, v), claim) for v in (100, 120, 140, 160, 190)]
    assert by_success == sorted(by_success, reverse=True)
    assert p_value(Guesses(300, 200, 0), claim) == 1
    assert 0 < by_success[-1] < 0.01


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
def test_bounds_stay_below_the_truth():
    """At 95 % each, of 5 bounds at most a few may fail; in fact none does."""
    runs = [NumpyStep(noise_multiplier=2.0) for _ in range(5)]
    found = [audit(step, seed=seed, num_steps=40) for seed, step in enumerate(runs)]
    above = sum(one.epsilon > one.claimed_epsilon for one in found)
    assert stats.binom.sf(above - 1, 5, 0.05) > 1e-3
    assert max(one.epsilon for one in found) > 0.3, "and they are not idle"


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["clipping off", "noise divided twice"])
def test_gross_faults_are_refuted(fault):
    found = audit(NumpyStep(fault, noise_multiplier=4.0), seed=0, num_steps=60)
    assert found.is_refuted
    assert found.verdict.startswith("REFUTED: the releases show more than epsilon = ")
    assert found.epsilon > found.claimed_epsilon


def test_a_claim_is_refuted_at_the_false_alarm_rate():
    """Twenty right guesses are rare, and not as rare as one run in a million."""
    step = NumpyStep("clipping off", noise_multiplier=4.0)
    sizes = {"num_steps": 20, "num_canaries": 20, "sample_rate": 0.1, "seed": 0}
    assert not audit(step, **sizes, false_alarm=1e-6).is_refuted
    assert audit(step, **sizes, false_alarm=0.5).is_refuted


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_steps": 0}, "num_steps=0 is out of range"),
        ({"num_canaries": 3}, "num_canaries=3 is out of range"),
        ({"sample_rate": 1.5}, "sample_rate=1.5 is out of range"),
        ({"delta": 0.0}, "delta=0.0 is out of range"),
        ({"confidence": 1.0}, "confidence=1.0 is out of range"),
        ({"false_alarm": 0.0}, "false_alarm=0.0 is out of range"),
    ],
)
def test_bad_arguments_are_one_sentence(arguments, message):
    with pytest.raises(ValueError, match=message):
        audit(NumpyStep(), **arguments)
