# SPDX-License-Identifier: Apache-2.0
"""Poisson sampling: the declared probability, independence, and the same batches everywhere."""

import numpy as np
import pytest
from scipy import stats

from dualdp import samplers
from dualdp.randomness import RootKey

ROOT = RootKey.from_seed(5)


def draw(step, *, num_examples=1000, sample_rate=0.1):
    key = ROOT.step_key("sampling", step)
    return samplers.poisson(key, num_examples=num_examples, sample_rate=sample_rate)


def test_known_batches():
    """Pinned, so that a change of the draw is seen: two stacks and two versions must agree."""
    assert draw(0, num_examples=60).tolist() == KNOWN


KNOWN = [7, 28, 33, 37]


def test_indices_are_increasing_int64():
    indices = draw(3)
    assert indices.dtype == np.int64
    assert (np.diff(indices) > 0).all()


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


def test_the_ends_are_exact():
    assert draw(0, sample_rate=0).size == 0
    np.testing.assert_array_equal(draw(0, sample_rate=1), np.arange(1000))


def test_the_draw_of_an_example_does_not_depend_on_the_others():
    small, large = draw(1, num_examples=300), draw(1, num_examples=1000)
    np.testing.assert_array_equal(small, large[large < 300])
    rare, often = draw(1, sample_rate=0.05), draw(1, sample_rate=0.2)
    assert set(rare) <= set(often)


@pytest.mark.parametrize("rate", [-0.1, 1.5, np.nan])
def test_bad_rates_are_refused(rate):
    with pytest.raises(ValueError, match="sample_rate="):
        draw(0, sample_rate=rate)
