# SPDX-License-Identifier: Apache-2.0
"""Renyi curves against quadrature in 30 digits."""

import mpmath as mp
import numpy as np
import pytest

from dualdp.accountants import renyi


def moment(sigma, rate, order, substitute):
    """log E_Q (P/Q)^a by quadrature in 30 digits."""
    mp.mp.dps = 30
    s, q, a = mp.mpf(sigma), mp.mpf(rate), mp.mpf(order)

    def excess(x):
        below = 1 - q + q * mp.e ** ((-2 * x - 1) / (2 * s * s)) if substitute else 1
        ratio = (1 - q + q * mp.e ** ((2 * x - 1) / (2 * s * s))) / below
        return mp.npdf(x, 0, s) * below * (ratio**a - 1 - a * (ratio - 1))

    knots = [-1 - 12 * s + (2 + a + 24 * s) * i / mp.mpf(16) for i in range(17)]
    return float(mp.log1p(mp.quad(excess, knots, maxdegree=5)))


def test_many_rows_are_one_by_one():
    rng = np.random.default_rng(0)
    sigma, rate = rng.uniform(0.05, 5, 90), rng.uniform(0, 1, 90) ** 3
    sigma[3], rate[5], rate[7] = 0.0, 0.0, 1.0
    orders = np.array([1.25, 3.0, 7.5, 64.0, 4096.0])
    together = renyi.subsampled_gaussian(sigma, rate, orders)
    for i in range(90):
        alone = renyi.subsampled_gaussian(sigma[i : i + 1], rate[i : i + 1], orders)[0]
        assert together[i] == pytest.approx(alone, rel=1e-9)
    assert np.all(together[3] == np.inf)
    assert np.all(together[5] == 0)
    assert together[7] == pytest.approx(orders / (2 * sigma[7] ** 2), rel=1e-9)


@pytest.mark.parametrize(
    ("sigma", "rate"), [(1.5, 0.04), (10.0, 1e-8), pytest.param(0.4, 0.3, marks=pytest.mark.slow)]
)
def test_curves_are_exact(sigma, rate):
    """Above the truth by at most the margin that the curve states, at whole and broken orders."""
    orders = np.array([1.5, 2.0, 6.3])
    row = (np.array([sigma]), np.array([rate]), orders)
    ours = renyi.subsampled_gaussian(*row)[0] * (orders - 1)
    doubled = renyi.subsampled_gaussian(*row, substitute=True)[0] * (orders - 1)
    for value, twice, order in zip(ours, doubled, orders, strict=True):
        truth = moment(sigma, rate, order, False)
        assert truth * (1 - 1e-9) <= value <= truth * (1 + 1e-9)
        truth = max(moment(sigma / 2, rate, order, False), moment(sigma, rate, order, True))
        assert truth * (1 - 1e-9) <= twice <= truth * (1 + 1e-9)
