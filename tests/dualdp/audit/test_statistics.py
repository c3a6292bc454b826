# SPDX-License-Identifier: Apache-2.0
"""Statistics of releases against the distributions that they test."""

import numpy as np

from dualdp.audit import statistics


def test_the_statistics_know_their_distributions():
    rng = np.random.default_rng(0)
    z = rng.normal(size=(20, 500))
    for p in (statistics.chi_square, statistics.normality, statistics.repetition):
        assert p(z) > 1e-3
    for wrong in (np.full((20, 500), np.nan), z + np.inf, np.where(z > 3, np.nan, z)):
        assert not statistics.smallest([0.5, statistics.chi_square(wrong), 0.7]) >= 1e-6
    assert statistics.chi_square(z * 1.1) < 1e-6
    assert statistics.normality(z + 0.1) < 1e-6
    assert statistics.repetition(np.repeat(z[:10], 2, axis=0)) < 1e-6
    shifted = z.copy()
    shifted[:, 300:400] = shifted[:, :100]
    assert statistics.autocorrelation(shifted) < 1e-6 < statistics.autocorrelation(z)
    assert statistics.total(50, 100, 0.5) > 0.9 > 1e-6 > statistics.total(90, 100, 0.5)
    assert statistics.dispersion(rng.binomial(50, 0.3, 200), 50, 0.3) > 1e-3
    assert statistics.dispersion(np.full(200, 15), 50, 0.3) < 1e-6
    assert statistics.smallest([]) == 1.0
