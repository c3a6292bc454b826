# SPDX-License-Identifier: Apache-2.0
"""Workloads: errors by their matrices, for prefix sums and momentum."""

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
    for workload, a in (
        (correlated.workload(n, momentum=momentum), lower(np.cumsum(velocity))),
        (None, np.tri(n)),
    ):
        rows = ((a @ inverse) ** 2).sum(axis=1)
        np.testing.assert_allclose(strategy.mean_error(n, workload), rows.mean(), rtol=1e-12)
        np.testing.assert_allclose(strategy.max_error(n, workload), rows.max(), rtol=1e-12)


@pytest.mark.parametrize(
    ("n", "workload", "message"),
    [
        (4, [1, 1], r"workload has shape \(2,\). Expected \(4,\), its first column"),
        (2, np.ones((2, 2)), r"workload has shape \(2, 2\)"),
    ],
)
def test_other_matrices_are_refused(n, workload, message):
    with pytest.raises(ValueError, match=message):
        correlated.identity().mean_error(n, workload)


def test_bad_settings_are_refused():
    with pytest.raises(ValueError, match="momentum=1 is out of range"):
        correlated.workload(4, momentum=1)
