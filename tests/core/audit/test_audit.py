# SPDX-License-Identifier: Apache-2.0
"""Empirical lower bounds on epsilon: sound, not idle, and silent about the right mechanism."""

import math

import numpy as np
import pytest
from scipy import stats

from dualdp.audit.canaries import Audit, Bound, audit
from dualdp.audit.lower_bounds import (
    Guesses,
    clopper_pearson,
    curve_inverse,
    f_dp_p_value,
    gaussian_inverse,
    guesses_at,
    one_run_p_value,
)
from tests.numpy_step import NumpyStep


@pytest.mark.parametrize(("r", "v", "epsilon"), [(100, 70, 0.5), (40, 40, 2.0), (200, 90, 0.1)])
def test_pure_one_run_is_a_binomial_tail(r, v, epsilon):
    """Steinke et al. 2023, theorem 5.2 at delta = 0: guesses are randomised responses."""
    rate = math.exp(epsilon) / (1 + math.exp(epsilon))
    expected = sum(math.comb(r, k) * rate**k * (1 - rate) ** (r - k) for k in range(v, r + 1))
    assert one_run_p_value(Guesses(r, r, v), epsilon, 0.0) == pytest.approx(expected, rel=1e-9)


def test_delta_costs_what_the_theorem_says():
    """The second term by a plain loop over i."""
    guesses, epsilon, delta = Guesses(60, 30, 22), 0.4, 1e-3
    w = stats.binom(30, 1 / (1 + math.exp(-epsilon)))
    alpha = max(2 / i * sum(w.pmf(k) for k in range(22 - i, 22)) for i in range(1, 23))
    expected = sum(w.pmf(k) for k in range(22, 31)) + alpha * 60 * delta
    assert one_run_p_value(guesses, epsilon, delta) == pytest.approx(expected, rel=1e-9)


def test_p_values_grow_with_epsilon_and_shrink_with_success():
    for p in (
        lambda g, e: one_run_p_value(g, e, 1e-5),
        lambda g, e: f_dp_p_value(g, gaussian_inverse(e)),
    ):
        by_epsilon = [p(Guesses(300, 200, 150), e) for e in (0.1, 0.5, 1.0, 1.5, 3.0)]
        assert by_epsilon == sorted(by_epsilon)
        by_success = [p(Guesses(300, 200, v), 0.8) for v in (100, 120, 140, 160, 190)]
        assert by_success == sorted(by_success, reverse=True)
        assert p(Guesses(300, 200, 0), 0.8) == 1


@pytest.mark.parametrize("mu", [0.3, 1.0])
def test_f_dp_p_values_of_the_gaussian_mechanism_are_rarely_small(mu):
    """The tightest case: every canary by itself is a Gaussian mechanism."""
    rng, small = np.random.default_rng(0), 0
    for _ in range(150):
        included = rng.random(300) < 0.5
        scores = mu * included + rng.normal(size=300)
        p = f_dp_p_value(guesses_at(scores, included, 200), gaussian_inverse(mu))
        small += p < 0.05
    assert stats.binom.sf(small - 1, 150, 0.05) > 1e-4


def test_f_dp_sees_more_than_epsilon_delta():
    """Why it is there (Mahloujifar et al. 2024, figure 1)."""
    guesses = Guesses(1000, 1000, 750)
    mu = 0.4  # epsilon 1.56 at 1e-5
    assert f_dp_p_value(guesses, gaussian_inverse(mu)) < 0.05
    assert one_run_p_value(guesses, 1.56, 1e-5) > 0.9


def test_a_curve_of_epsilons_is_the_trade_off_function():
    """Against the Gaussian's closed form, from its exact (epsilon, delta) curve."""
    mu, epsilons = 1.2, np.linspace(0, 12, 400)
    a, b = mu / 2 - epsilons / mu, -mu / 2 - epsilons / mu
    deltas = stats.norm.cdf(a) - np.exp(epsilons) * stats.norm.cdf(b)
    curve, exact = curve_inverse(epsilons, deltas), gaussian_inverse(mu)
    for y in (0.0, 0.01, 0.2, 0.5, 0.9, 0.999, 1.0):
        assert curve(y) <= exact(y) + 1e-12, "fewer points claim less, never more"
        assert curve(y) == pytest.approx(exact(y), abs=2e-3)


def test_clopper_pearson_is_sound_and_not_idle():
    """The Gaussian mechanism mu = 1: epsilon at 1e-5 is 4.38; a bound above it is rare."""
    rng = np.random.default_rng(1)
    bounds = [
        clopper_pearson(rng.normal(size=500) + 1, rng.normal(size=500), 1e-5, 0.05)
        for _ in range(20)
    ]
    assert 0.2 < np.median(bounds)
    assert max(bounds) < 4.38
    assert clopper_pearson(np.ones(400), np.zeros(400), 1e-5, 0.05) > 3
    low = np.where(np.arange(400) % 4 < 2, -1.0, 0.0)
    assert clopper_pearson(np.zeros(400), low, 1e-5, 0.05) > 3, "either direction"
    assert clopper_pearson(np.zeros(1), np.ones(1), 1e-5, 0.05) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sigma", "seeds"), [(1.0, range(3)), pytest.param(4.0, range(10), marks=pytest.mark.slow)]
)
def test_the_right_mechanism_is_never_accused(sigma, seeds):
    for seed in seeds:
        found = audit(NumpyStep(noise_multiplier=sigma), seed=seed, num_steps=60)
        assert not found.is_refuted, found
        assert found.verdict.startswith("Not refuted")


@pytest.mark.slow
def test_bounds_stay_below_the_truth():
    """At 95 % each, of 20 bounds at most a few may fail; in fact none does."""
    above, largest = 0, 0.0
    for seed in range(10):
        found = audit(NumpyStep(noise_multiplier=2.0), seed=seed, num_steps=40, runs=0)
        above += sum(bound.epsilon > found.claimed_epsilon for bound in found.bounds)
        largest = max(largest, *(bound.epsilon for bound in found.bounds))
    assert stats.binom.sf(above - 1, 20, 0.05) > 1e-3
    assert largest > 0.3, "and they are not idle"


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["clipping off", "noise divided twice"])
def test_gross_faults_are_refuted(fault):
    found = audit(NumpyStep(fault, noise_multiplier=4.0), seed=0, num_steps=60)
    assert found.is_refuted
    assert found.verdict.startswith("REFUTED: the releases show more than epsilon = ")
    assert all(bound.epsilon > found.claimed_epsilon for bound in found.bounds)


@pytest.mark.slow
def test_repeated_runs_refute_too():
    found = audit(NumpyStep("clipping off", noise_multiplier=20.0), seed=0, num_steps=60, runs=300)
    assert [bound.method for bound in found.bounds] == [
        "one run",
        "one run, f-DP",
        "Clopper-Pearson",
    ]
    assert found.bounds[2].epsilon > found.claimed_epsilon
    assert found.bounds[2].p_value == 0
    right = audit(NumpyStep(noise_multiplier=2.0), seed=0, num_steps=60, runs=60)
    assert right.bounds[2].epsilon < right.claimed_epsilon
    assert not right.is_refuted


@pytest.mark.parametrize("rate", [0.004, 0.08, 0.5, 0.9])
def test_repeated_runs_sample_no_more_often_than_the_claim(rate):
    """Runs with 32 others drew one in 33 at least, whatever was asked, and accused the right."""
    rates = []

    class Noted(NumpyStep):
        def releases(self, num_steps, *, rows, expected_batch_size, **others):
            rates.append((expected_batch_size / len(rows), 0 in rows))
            size = {"expected_batch_size": expected_batch_size}
            return super().releases(num_steps, rows=rows, **size, **others)

    audit(Noted(noise_multiplier=1.0), seed=0, num_steps=2, runs=8, sample_rate=rate)
    (claimed, _), *repeated = rates
    assert claimed == pytest.approx(rate, rel=0.1)
    assert len({rate for rate, _ in repeated}) == 1
    assert 0.6 * claimed < repeated[0][0] <= claimed
    assert {has_canary for _, has_canary in repeated} == {True, False}


def test_a_refuted_claim_needs_all_its_methods():
    """Bonferroni over the methods: one p-value just below the rate does not accuse."""
    bounds = (Bound("a", 1.0, 6e-7), Bound("b", 0.0, 1.0))
    assert not Audit(2.0, 1e-5, bounds, 0.95, 1e-6, 10).is_refuted
    assert Audit(2.0, 1e-5, bounds, 0.95, 2e-6, 10).is_refuted


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_steps": 0}, "num_steps=0 is out of range"),
        ({"num_canaries": 3}, "num_canaries=3 is out of range"),
        ({"runs": -1}, "runs=-1 is out of range"),
        ({"sample_rate": 1.5}, "sample_rate=1.5 is out of range"),
        ({"delta": 0.0}, "delta=0.0 is out of range"),
        ({"confidence": 1.0}, "confidence=1.0 is out of range"),
        ({"false_alarm": 0.0}, "false_alarm=0.0 is out of range"),
    ],
)
def test_bad_arguments_are_one_sentence(arguments, message):
    with pytest.raises(ValueError, match=message):
        audit(NumpyStep(), **arguments)
