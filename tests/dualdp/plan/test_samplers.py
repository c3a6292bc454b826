# SPDX-License-Identifier: Apache-2.0
"""Poisson sampling: the declared probability, independence, and the same batches everywhere."""

import functools

import numpy as np
import pytest
from scipy import stats

from dualdp import PrivacyPlan, mechanisms
from dualdp.plan import samplers
from dualdp.plan.accounting import PATTERNED, WHOLE_PASS

NEEDED = {
    "truncated_poisson": {"max_batch_size": 1000},
    "cyclic_poisson": {"min_separation": 1},
    "fixed_size": {"neighboring_relation": "replace"},
}


@functools.cache
def plan(sampler, num_examples, sample_rate, **settings):
    numbers = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "delta": 1e-5, "num_steps": 3000}
    sizes = {"num_examples": num_examples, "expected_batch_size": sample_rate * num_examples}
    needed = NEEDED.get(sampler, {})
    return PrivacyPlan(sampler=sampler, seed=5, **{**numbers, **sizes, **needed, **settings})


def draw(step, sampler="poisson", *, num_examples=1000, sample_rate=0.1, **settings):
    """The seeded batch of a step."""
    return plan(sampler, num_examples, sample_rate, **settings).batch_indices(step)


every_sampler = pytest.mark.parametrize("sampler", sorted(samplers.SAMPLERS))


@every_sampler
def test_every_sampler_has_the_event_of_its_name(sampler):
    assert sampler in mechanisms.SAMPLERS or sampler in PATTERNED
    assert set(samplers.SAMPLERS) == {*mechanisms.SAMPLERS, *PATTERNED}


def test_inclusion_probability():
    """Counts per example and per step are binomial; a rate 20 % off is seen."""
    steps, num_examples, rate = 400, 500, 0.1
    chosen = np.zeros((steps, num_examples), bool)
    for step in range(steps):
        chosen[step, draw(step, num_examples=num_examples, sample_rate=rate)] = True
    p_value = lambda q: stats.binomtest(int(chosen.sum()), chosen.size, q).pvalue  # noqa: E731
    assert p_value(rate) > 1e-4
    assert p_value(rate * 1.2) < 1e-6
    for axis, trials in ((0, steps), (1, num_examples)):
        counts = chosen.sum(axis)
        dispersion = counts.var() / (trials * rate * (1 - rate))
        assert 0.8 < dispersion < 1.25  # fixed-size batches would give 0 along one axis
    assert abs(np.corrcoef(chosen[:-1].ravel(), chosen[1:].ravel())[0, 1]) < 0.01
    assert abs(np.corrcoef(chosen[:, :-1].ravel(), chosen[:, 1:].ravel())[0, 1]) < 0.01


def test_the_draw_of_an_example_does_not_depend_on_the_others():
    small, large = draw(1, num_examples=300), draw(1, num_examples=1000)
    np.testing.assert_array_equal(small, large[large < 300])
    rare, often = draw(1, sample_rate=0.05), draw(1, sample_rate=0.2)
    assert set(rare) <= set(often)


@every_sampler
def test_every_example_is_as_likely_as_every_other(sampler):
    """Each is drawn at the declared rate, to four standard errors of a binomial count."""
    steps, rate = 600, 0.1
    counts = np.zeros(200)
    for step in range(steps):
        counts[draw(step, sampler, num_examples=200, sample_rate=rate)] += 1
    assert abs(counts.mean() / steps - rate) < 0.003
    if sampler in ONCE_A_PASS:
        assert (counts == steps * rate).all()
    else:
        assert np.abs(counts - steps * rate).max() < 4.5 * np.sqrt(steps * rate * (1 - rate))


def test_truncation():
    """The cut keeps a uniformly random part of the Poisson batch, and leaves small ones alone."""
    kept = np.zeros(300)
    for step in range(400):
        whole = draw(step, num_examples=300)
        part = draw(step, "truncated_poisson", num_examples=300, max_batch_size=28)
        assert set(part) <= set(whole)
        assert len(part) == min(len(whole), 28)
        kept[part] += 1
    first, second = kept[:150].sum(), kept[150:].sum()
    assert abs(first - second) / (first + second) < 0.02  # not the first ones


def test_a_fixed_size_is_fixed_and_every_pair_is_possible():
    together = 0
    for step in range(2000):
        indices = draw(step, "fixed_size", num_examples=10, sample_rate=0.3)
        assert len(indices) == 3
        together += {0, 1} <= set(indices)
    assert stats.binomtest(together, 2000, 3 * 2 / (10 * 9)).pvalue > 1e-4


ONCE_A_PASS = sorted(set(WHOLE_PASS) - {"cyclic_poisson"})


@pytest.mark.parametrize("sampler", ONCE_A_PASS)
def test_a_pass_uses_every_example_once(sampler):
    passes = []
    for epoch in range(2):
        steps = [draw(10 * epoch + k, sampler, num_examples=105) for k in range(10)]
        np.testing.assert_array_equal(np.sort(np.concatenate(steps)), np.arange(105))
        passes.append([step.tolist() for step in steps])
    assert (passes[0] != passes[1]) == (sampler != "fixed_order")


def test_classes_of_cyclic_poisson_take_turns():
    """Steps of one example are a multiple of 4 apart; classes are equally likely, draws too."""
    steps, rate, classes = 800, 0.1, 4
    joined = np.zeros((steps, 500), bool)
    for step in range(steps):
        chosen = draw(
            step, "cyclic_poisson", num_examples=500, sample_rate=rate, min_separation=classes
        )
        joined[step, chosen] = True
    by_class = joined.reshape(-1, classes, 500).sum(0)
    assert ((by_class > 0).sum(0) == 1).all()
    sizes = np.bincount(by_class.argmax(0), minlength=classes)
    assert stats.chisquare(sizes).pvalue > 1e-4
    assert stats.binomtest(int(joined.sum()), steps // classes * 500, classes * rate).pvalue > 1e-4
    turns = by_class.max(0) / (steps / classes)
    assert 0.8 < turns.var() / (classes * rate * (1 - classes * rate) / (steps / classes)) < 1.25


def test_balls_fall_independently():
    """Sizes vary as a binomial; equal-sized shuffled batches are another sampler."""
    sizes = [len(draw(step, "balls_in_bins", num_examples=500)) for step in range(300)]
    assert 0.7 < np.var(sizes) / (500 * 0.1 * 0.9) < 1.35
    shuffled = [len(draw(step, "shuffle", num_examples=500)) for step in range(300)]
    assert set(shuffled) == {50}
