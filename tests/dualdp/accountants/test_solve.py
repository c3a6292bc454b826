# SPDX-License-Identifier: Apache-2.0
"""Calibration: never over the target, close to it, for every quantity."""

import math

import pytest

import dualdp
from dualdp import AccountingError
from dualdp.accountants import solve
from dualdp.accountants.search import smallest_scale
from tests.cases import accounting as cases

TARGETS = [
    {"target_epsilon": 1.0, "target_delta": 1e-5, "sample_rate": 0.01, "num_steps": 1000},
    {"target_epsilon": 8.0, "target_delta": 1e-5, "sample_rate": 0.04, "num_steps": 2250},
    {"target_epsilon": 1.0, "target_delta": 1e-6, "sample_rate": 1e-3, "num_steps": 10_000},
    {"target_epsilon": 0.1, "target_delta": 1e-5, "sample_rate": 0.01, "num_steps": 1000},
    {"target_epsilon": 50.0, "target_delta": 1e-5, "sample_rate": 0.01, "num_steps": 1000},
    {"target_epsilon": 1000.0, "target_delta": 1e-5, "sample_rate": 0.1, "num_steps": 1000},
    {"target_epsilon": 3.0, "target_delta": 1e-5, "sample_rate": 1.0, "num_steps": 7},
]


def spent(target, **run):
    names = ("sample_rate", "num_steps", "noise_multiplier")
    known = {k: v for k, v in (target | run).items() if k in names}
    return dualdp.get_epsilon(**known, delta=target["target_delta"])


@pytest.mark.parametrize("target", TARGETS)
def test_calibrated_noise_meets_the_target(target):
    sigma = dualdp.get_noise_multiplier(**target)
    epsilon = spent(target, noise_multiplier=sigma)
    assert 0.998 * target["target_epsilon"] <= epsilon <= target["target_epsilon"]


def test_known_calibrations():
    _, row = cases.PUBLISHED["gaussian"]
    sigma = dualdp.get_noise_multiplier(
        target_epsilon=1, target_delta=1e-5, sample_rate=1.0, num_steps=1
    )
    assert sigma == pytest.approx(row["noise_multiplier"], rel=1e-9)
    assert sigma >= row["noise_multiplier"] * (1 - 1e-11)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS[:4])
def test_steps_and_rate_for_a_budget(target):
    sigma = dualdp.get_noise_multiplier(**target)
    rest = {k: v for k, v in target.items() if k not in ("num_steps", "sample_rate")}
    steps = dualdp.get_num_steps(**rest, noise_multiplier=sigma, sample_rate=target["sample_rate"])
    assert spent(target, noise_multiplier=sigma, num_steps=steps) <= target["target_epsilon"]
    assert steps == pytest.approx(target["num_steps"], rel=2e-3)
    rate = dualdp.get_sample_rate(**rest, noise_multiplier=sigma, num_steps=target["num_steps"])
    assert spent(target, noise_multiplier=sigma, sample_rate=rate) <= target["target_epsilon"]
    assert rate == pytest.approx(target["sample_rate"], rel=2e-3)


def test_steps_and_rate_at_the_ends():
    target = {"target_epsilon": 1.0, "target_delta": 1e-5}
    assert dualdp.get_num_steps(**target, noise_multiplier=0.3, sample_rate=1.0) == 0
    assert dualdp.get_sample_rate(**target, noise_multiplier=100.0, num_steps=1) == 1.0
    with pytest.raises(AccountingError, match="not even a billion steps"):
        dualdp.get_num_steps(**target, noise_multiplier=1.0, sample_rate=0.0)
    with pytest.raises(AccountingError, match="no sampling rate above 1e-9"):
        dualdp.get_sample_rate(**target, noise_multiplier=0.0, num_steps=1)
    bins = dualdp.get_sample_rate(
        **target, noise_multiplier=2.0, num_steps=500, sampler="balls_in_bins"
    )
    assert abs(1 / bins - round(1 / bins)) < 1e-9


def test_a_whole_schedule_is_scaled():
    steps = [(2.0 * 0.9**i, 0.01, 50) for i in range(8)]
    scale = solve.get_schedule_scale(target_epsilon=2.0, target_delta=1e-5, steps=steps)
    made = dualdp.accountants.create("pld")
    for sigma, rate, count in steps:
        made.step(noise_multiplier=sigma * scale, sample_rate=rate, num_steps=count)
    assert 1.99 < made.get_epsilon(delta=1e-5) <= 2.0


@pytest.mark.parametrize("sampler", ["balls_in_bins", "fixed_size", "truncated_poisson", "shuffle"])
def test_every_sampler_is_calibrated(sampler):
    """Noise, steps and rate: within the target, and the next whole step is not."""
    target = {"target_epsilon": 2.0, "target_delta": 1e-5, "sampler": sampler}
    if sampler == "fixed_size":
        target["neighboring_relation"] = "replace"
    if sampler == "truncated_poisson":
        target |= {"num_examples": 10_000, "max_batch_size": 300}
    asked = {k.replace("target_", ""): v for k, v in target.items() if k != "target_epsilon"}
    sigma = dualdp.get_noise_multiplier(**target, sample_rate=0.02, num_steps=200)
    run = {"noise_multiplier": sigma, "sample_rate": 0.02}
    assert 1.9 < dualdp.get_epsilon(**run, num_steps=200, **asked) <= 2
    steps = dualdp.get_num_steps(**target, **run)
    assert dualdp.get_epsilon(**run, num_steps=steps, **asked) <= 2
    assert dualdp.get_epsilon(**run, num_steps=steps + 1, **asked) > 2
    rate = dualdp.get_sample_rate(**target, noise_multiplier=sigma, num_steps=200)
    assert rate == pytest.approx(0.02, rel=0.01)
    assert dualdp.get_epsilon(**(run | {"sample_rate": rate}), num_steps=200, **asked) <= 2


def test_nothing_released_needs_no_noise():
    target = {"target_epsilon": 1.0, "target_delta": 1e-5}
    assert dualdp.get_noise_multiplier(**target, sample_rate=0.1, num_steps=0) == 0
    assert dualdp.get_noise_multiplier(**target, sample_rate=0.0, num_steps=5) == 0


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"target_epsilon": 0.0}, "target_epsilon=0.0 is out of range"),
        ({"target_epsilon": math.inf}, "target_epsilon=inf is out of range"),
        ({"target_epsilon": math.nan}, "target_epsilon=nan is not a number"),
        ({"target_delta": 0.0}, "strictly between 0 and 1"),
        ({"target_delta": 1.0}, "strictly between 0 and 1"),
        ({"sample_rate": 1.2}, "sample_rate=1.2 is not a probability"),
        ({"accountant": "prd"}, "Expected one of pld, prv, rdp"),
        ({"neighboring_relation": "swap"}, "Expected one of add_or_remove"),
        ({"sampler": "uniform"}, "sampler='uniform' is unknown"),
        ({"accountant": "gdp"}, "accountants.gdp_epsilon gives the number of papers"),
        ({"sampler": "balls_in_bins", "sample_rate": 0.3}, "Use 1/3 or 1/4"),
    ],
)
def test_bad_targets(change, text):
    with pytest.raises(ValueError, match=text):
        dualdp.get_noise_multiplier(**(TARGETS[0] | change))


def test_noise_that_no_number_reaches_is_refused():
    with pytest.raises(AccountingError, match="no noise multiplier up to 1e9 decides it"):
        dualdp.get_noise_multiplier(
            target_epsilon=1e-12, target_delta=1e-30, sample_rate=1.0, num_steps=10**6
        )


def test_a_search_evaluates_what_it_returns():
    asked = []

    def spent(noise):
        asked.append(noise)
        return 3 / noise if noise else math.inf

    for target in (1e-3, 0.7, 3.0, 90.0):
        asked.clear()
        found = smallest_scale(spent, target, 1e-5)
        assert found in asked
        assert len(asked) == len(set(asked)) < 25
        assert 3 / found <= target <= 3 / found * (1 + 1e-9)
    assert smallest_scale(lambda noise: 0.0, 1.0, 1e-5) == 0
    assert smallest_scale(lambda noise: 1e-9 / noise if noise else math.inf, 1e9, 0.1) < 1e-8


def test_a_misspelt_word_is_refused():
    with pytest.raises(TypeError, match="no argument 'smapler'"):
        dualdp.get_epsilon(
            noise_multiplier=1.0, sample_rate=0.1, num_steps=1, delta=1e-5, smapler="poisson"
        )
