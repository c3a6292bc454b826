# SPDX-License-Identifier: Apache-2.0
"""Batch sizes at one budget: what they spend, how the noise falls, and what is refused."""

import math

import numpy as np
import pytest

import dualdp

RUN = {"target_epsilon": 2.0, "target_delta": 1e-5, "num_examples": 10_000}
SIZES = [16, 128, 1024, 10_000]


@pytest.fixture(scope="module")
def found():
    return dualdp.compare_batch_sizes(**RUN, epochs=[3, 30], batch_sizes=SIZES, max_grad_norm=0.5)


def of(found, epochs):
    return [option for option in found.options if option.epochs == epochs]


def test_every_batch_size_spends_at_most_the_budget(found):
    assert len(found.options) == 8
    for option in found.options:
        plan = dualdp.PrivacyPlan(
            num_examples=10_000,
            expected_batch_size=option.batch_size,
            num_steps=option.num_steps,
            noise_multiplier=option.noise_multiplier,
            max_grad_norm=0.5,
            delta=1e-5,
        )
        assert 1.99 < plan.epsilon() <= 2.0
        assert option.sample_rate == plan.sample_rate
        noise = plan.noise_stddev(0) / option.batch_size
        assert option.noise == pytest.approx(noise)
        assert option.noise_of_sum == pytest.approx(noise * math.sqrt(option.num_steps))
        assert option.gradients == option.batch_size * option.num_steps
        assert option.num_steps == option.epochs * math.ceil(10_000 / option.batch_size)


@pytest.mark.parametrize(
    ("epsilon", "num_examples", "size", "epochs", "noise_multiplier"),
    [(0.9468, 50_000, 500, 100, 4.0), (6.7678, 1000, 40, 90, 1.5)],
)
def test_published_runs_are_found(epsilon, num_examples, size, epochs, noise_multiplier):
    """Runs of Abadi et al. 2016 and of Opacus' tests, at the epsilon of cases/accounting.json."""
    (option,) = dualdp.compare_batch_sizes(
        target_epsilon=epsilon,
        target_delta=1e-5,
        num_examples=num_examples,
        epochs=epochs,
        batch_sizes=size,
    ).options
    assert option.num_steps == epochs * num_examples // size
    assert option.noise_multiplier == pytest.approx(noise_multiplier, rel=1e-3)


def test_noise_falls_with_the_batch_and_rises_with_the_epochs(found):
    for epochs in (3, 30):
        options = of(found, epochs)
        for small, large in zip(options, options[1:], strict=False):
            assert small.noise_multiplier < large.noise_multiplier
            assert small.noise > large.noise
            assert small.noise_of_sum > large.noise_of_sum
            assert small.relative_noise > large.relative_noise
    for few, many in zip(of(found, 3)[:-1], of(found, 30), strict=False):
        assert few.noise_multiplier < many.noise_multiplier
        assert few.noise < many.noise
        assert few.relative_noise > many.relative_noise


def test_relative_noise_is_that_to_full_batches_for_as_many_steps(found):
    """Full batches of as many steps, calibrated by themselves; 1 for the full batches."""
    for option in found.options:
        full = dualdp.get_noise_multiplier(
            target_epsilon=2.0, target_delta=1e-5, sample_rate=1.0, num_steps=option.num_steps
        )
        expected = option.noise / (full * 0.5 / 10_000)
        assert option.relative_noise == pytest.approx(expected, rel=1e-3)
    assert [of(found, e)[-1].relative_noise for e in (3, 30)] == pytest.approx([1, 1], rel=1e-3)


def test_without_amplification_only_the_number_of_examples_counts():
    """Shuffled passes cost the same at every batch size: noise goes as 1 / batch size."""
    shuffled = dualdp.compare_batch_sizes(
        **RUN, epochs=2, batch_sizes=[10, 100, 1000], sampler="shuffle"
    )
    noises = [option.noise for option in shuffled.options]
    assert noises == pytest.approx([noises[0], noises[0] / 10, noises[0] / 100])


def test_the_verdict_names_the_smallest_batch_that_is_large_enough(found):
    assert found.smallest_enough[3].batch_size == 10_000
    assert found.smallest_enough[30].batch_size == 128
    assert "128 at epochs=30 (num_steps=2370)" in found.verdict
    assert str(found).endswith(found.verdict)
    assert str(found).count("\n") == 9
    small = dualdp.compare_batch_sizes(**RUN, epochs=1, batch_sizes=16)
    assert small.smallest_enough == {1.0: None}
    assert "none of these at epochs=1." in small.verdict


def test_the_grid_is_made_of_the_number_of_examples():
    few = dualdp.compare_batch_sizes(**RUN | {"num_examples": 20}, epochs=1, accountant="rdp")
    assert [option.batch_size for option in few.options] == [1, 2, 4, 8, 16, 20]
    assert few.options[-1].num_steps == 1


def test_arrays_and_groups_are_taken():
    plain, groups = (
        dualdp.compare_batch_sizes(
            **RUN, epochs=np.array([2.0]), batch_sizes=np.array([512]), group_size=size
        ).options[0]
        for size in (1, 4)
    )
    assert plain.batch_size == groups.batch_size == 512
    assert groups.noise > 2 * plain.noise
    assert groups.noise_multiplier == dualdp.get_noise_multiplier(
        target_epsilon=2.0, target_delta=1e-5, sample_rate=0.0512, num_steps=40, group_size=4
    )


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"epochs": 0}, ValueError, "epochs=0 is out of range. Expected a finite number > 0"),
        ({"epochs": "10"}, TypeError, "epochs='10' is a str. Expected a number"),
        ({"epochs": []}, ValueError, "epochs is empty. Expected at least one number"),
        ({"epochs": {1: 2}}, TypeError, "Expected a number"),
        ({"epochs": math.nan}, ValueError, "epochs=nan is not a number"),
        ({"batch_sizes": ()}, ValueError, "batch_sizes is empty"),
        ({"batch_sizes": [16, 0]}, ValueError, "batch_sizes=0 is out of range"),
        ({"batch_sizes": [16.5]}, TypeError, "batch_sizes=16.5 is a float. Expected an integer"),
        ({"batch_sizes": [20_000]}, ValueError, "holds 20000, but num_examples=10000"),
        ({"num_examples": 0}, ValueError, "num_examples=0 is out of range"),
        ({"target_epsilon": 0}, ValueError, "target_epsilon=0 is out of range"),
        ({"target_delta": 0}, ValueError, "target_delta=0 is out of range"),
        ({"target_delta": 1e-4}, ValueError, "not below 1 / num_examples = 0.0001"),
        ({"max_grad_norm": -1}, ValueError, "max_grad_norm=-1 is out of range"),
        ({"sampler": "balls_in_bins"}, ValueError, "Expected one of fixed_size, poisson, shuffle"),
        ({"sampler": "fixed_size"}, dualdp.AccountingError, "neighboring_relation='replace'"),
        ({"accountant": "gdp"}, dualdp.AccountingError, "Expected 'pld' or 'rdp'"),
        ({"noise": 1.0}, TypeError, "no argument 'noise'. Expected target_epsilon"),
    ],
)
def test_what_can_not_be_compared_is_refused(changes, error, words):
    with pytest.raises(error, match=words.replace("(", r"\(")):
        dualdp.compare_batch_sizes(**{**RUN, "epochs": 1, "batch_sizes": [16], **changes})
