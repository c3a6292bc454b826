# SPDX-License-Identifier: Apache-2.0
"""Workloads: errors by their matrices, for momentum and learning rates."""

import numpy as np
import pytest

from dualdp import correlated
from tests.dualdp.plan.correlated.test_strategies import each, lower


@each
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_errors_are_those_of_the_matrices(strategy, momentum):
    n = 30
    inverse = np.linalg.inv(lower(strategy.strategy(n)))
    velocity = momentum ** np.arange(n)
    rates = np.linspace(2, 0.1, n)
    by_hand = np.zeros((n, n))
    for s in range(n):  # the parameters' move at t by a gradient at s
        for t in range(s, n):
            by_hand[t, s] = sum(rates[i] * velocity[i - s] for i in range(s, t + 1))
    for workload, a in (
        (correlated.workload(n, momentum=momentum), lower(np.cumsum(velocity))),
        (correlated.workload(n, momentum=momentum, learning_rates=rates), by_hand),
        (np.tri(n), np.tri(n)),
        (None, np.tri(n)),
    ):
        rows = ((a @ inverse) ** 2).sum(axis=1)
        np.testing.assert_allclose(strategy.mean_error(n, workload), rows.mean(), rtol=1e-12)
        np.testing.assert_allclose(strategy.max_error(n, workload), rows.max(), rtol=1e-12)


@pytest.mark.parametrize(
    ("n", "workload", "message"),
    [
        (4, [1, 1], r"workload has shape \(2,\). Expected \(4,\), its first column, or \(4, 4\)"),
        (2, np.ones((2, 2)), "workload is not lower triangular"),
    ],
)
def test_other_matrices_are_refused(n, workload, message):
    with pytest.raises(ValueError, match=message):
        correlated.identity().mean_error(n, workload)


def test_bad_settings_are_refused():
    with pytest.raises(ValueError, match="learning_rates of 5000 steps needs a matrix"):
        correlated.workload(5000, learning_rates=np.ones(5000))
    with pytest.raises(ValueError, match="momentum=1 is out of range"):
        correlated.workload(4, momentum=1)
    with pytest.raises(ValueError, match=r"has shape \(2,\). Expected \(4,\), a rate for"):
        correlated.workload(4, learning_rates=[1, 1])
