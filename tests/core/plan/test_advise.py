# SPDX-License-Identifier: Apache-2.0
"""Advice on the noise: one epsilon, errors that a simulation confirms, an honest verdict."""

import numpy as np
import pytest

import dualdp
from dualdp import correlated

RUN = {
    **{"num_examples": 50_000, "expected_batch_size": 2000, "num_steps": 100},
    **{"max_grad_norm": 1.0, "delta": 1e-5, "seed": 1},
}


#: A third of the time: ten batches, in which a band of 16 does not fit.
SHORT = {**RUN, "num_examples": 2000, "expected_batch_size": 200, "num_steps": 200}


@pytest.fixture(
    scope="module",
    params=[pytest.param(RUN, marks=pytest.mark.slow), SHORT],
    ids=["whole", "short"],
)
def advice(request):
    return correlated.advise(dualdp.PrivacyPlan.calibrate(target_epsilon=8.0, **request.param))


@pytest.mark.slow
def test_advice_is_at_one_epsilon(advice):
    for option in advice.options:
        assert 7.9 < option.plan.epsilon() <= 8.0
        size = {50_000: 2000, 2000: 200}[option.plan.num_examples]
        assert option.plan.expected_batch_size_at(0) == size
    assert [o.error for o in advice.options] == sorted(o.error for o in advice.options)


def test_the_error_is_that_of_the_noise_in_the_model(advice):
    """Root mean square of the prefix sums of simulated noise, within 2 %."""
    generator = np.random.default_rng(0)
    for option in advice.options:
        plan, n = option.plan, option.plan.num_steps
        column = (plan.correlation or correlated.identity()).inverse(n)
        z = (
            generator.standard_normal((n, 4000))
            * plan.draw_stddev(0, 1.0)
            / plan.expected_batch_size
        )
        noise = np.array([column[: t + 1][::-1] @ z[: t + 1] for t in range(n)])
        drift = np.sqrt((np.cumsum(noise, axis=0) ** 2).mean())
        assert option.error == pytest.approx(drift, rel=0.02)


def test_a_large_epsilon_favours_correlated_noise(advice):
    assert advice.options[0].plan.is_correlated
    assert "less noise in the model than DP-SGD" in advice.verdict
    assert advice.options[0].name in str(advice)


@pytest.mark.slow
def test_few_examples_and_a_small_epsilon_favour_dp_sgd():
    advice = correlated.advise(dualdp.PrivacyPlan.calibrate(target_epsilon=0.5, **SHORT))
    assert advice.options[0].name == "independent"
    assert advice.verdict.startswith("Independent noise")


@pytest.mark.parametrize(
    "changes",
    [
        {"num_steps": None, "noise_multiplier": 1.0},
        {"noise_multiplier": dualdp.schedules.Linear(1.0, 2.0, 10)},
        {"noise_multiplier": 0.0},
        {"noise_multiplier": 1.0, "max_grad_norm": dualdp.schedules.AdaptiveNorm(initial=1.0)},
    ],
)
def test_what_can_not_be_compared_is_refused(changes):
    with pytest.raises(ValueError, match="Expected"):
        correlated.advise(dualdp.PrivacyPlan(**{**RUN, **changes}))
