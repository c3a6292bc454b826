# SPDX-License-Identifier: Apache-2.0
"""Renyi accountant, and the central limit: published numbers, 40-digit truth, bounds, refusals."""

import math

import mpmath as mp
import numpy as np
import pytest

from dualdp import AccountingError, accountants, mechanisms
from dualdp.accountants import gdp_epsilon, rdp
from dualdp.accountants.rdp import rdp_to_epsilon
from dualdp.accountants.solve import get_epsilon, get_noise_multiplier
from tests.cases import accounting as cases
from tests.dualdp.accountants.lower import lower
from tests.dualdp.accountants.test_pld import account

RUN = {"noise_multiplier": 1.0, "sample_rate": 0.01, "num_steps": 1000, "delta": 1e-5}


@pytest.mark.parametrize("row", cases.PUBLISHED["dp_sgd"], ids=lambda row: row["source"])
def test_published_runs(row):
    epsilon = get_epsilon(**cases.run_of(row), accountant="rdp")
    if "rdp_cks" in row:
        assert epsilon == pytest.approx(row["rdp_cks"], abs=6e-5)
    if "opacus_rdp" in row:
        assert epsilon == pytest.approx(row["opacus_rdp"], abs=1e-9)
    assert epsilon >= row["bracket"][0]


def test_published_curves(monkeypatch):
    """At the others the published digits are too large, as docs/accounting.md says."""
    row = cases.PUBLISHED["rdp_vector"]
    monkeypatch.setattr(rdp, "ORDERS", np.array(row["orders"]))
    made = account((2.5, 0.01, 50), name="rdp")
    assert made.rdp()[2:] == pytest.approx(row["rdp"][2:], rel=1e-5)
    assert np.all(made.rdp()[:2] < row["rdp"][:2])


def test_published_order(monkeypatch):
    row = cases.PUBLISHED["opacus_rdp_doctest"]
    monkeypatch.setattr(rdp, "ORDERS", np.arange(2.0, 33.0))
    made = account(*((sigma, rate, steps) for rate, sigma, steps in row["history"]), name="rdp")
    assert made.get_epsilon(delta=1e-5) == pytest.approx(row["epsilon"], abs=5e-4)
    best = int(np.flatnonzero(rdp.ORDERS == row["order"])[0])
    alone = rdp_to_epsilon(rdp.ORDERS[[best]], made.rdp()[[best]], 1e-5)
    assert alone == made.get_epsilon(delta=1e-5)


def test_published_calibration():
    row = cases.PUBLISHED["opacus_get_noise_multiplier_eps8_delta1e-5_q0.04"]
    target = {"target_epsilon": 8, "target_delta": 1e-5, "sample_rate": 0.04, "accountant": "rdp"}
    assert get_noise_multiplier(**target, num_steps=2250) == pytest.approx(
        row["rdp_90_epochs"], abs=5e-4
    )
    assert get_noise_multiplier(**target, num_steps=2000) == pytest.approx(
        row["rdp_2000_steps"], abs=2e-4
    )


def test_small_epsilons_have_their_orders():
    run = {"noise_multiplier": 9.8, "sample_rate": 0.01, "num_steps": 1000, "delta": 1e-5}
    assert get_epsilon(**run, accountant="rdp") < 0.12  # no floor of 0.13
    assert get_epsilon(**(run | {"noise_multiplier": 1e3}), accountant="rdp") < 0.002


def test_other_curves():
    made = accountants.create("rdp")
    made.compose(mechanisms.Laplace(1.0), 20)
    assert made.get_epsilon(delta=1e-4) == pytest.approx(18.5465, rel=2e-3)  # dp-accounting 0.6.0
    orders = np.arange(2.0, 33.0)
    assert rdp_to_epsilon(orders, np.full(31, 1.1), 1e-5) == pytest.approx(1.32783806176, abs=1e-9)
    for event in (mechanisms.RandomizedResponse(0.5, 3), mechanisms.DiscreteGaussian(2.0)):
        by_rdp, by_pld = accountants.create("rdp"), accountants.create("pld")
        by_rdp.compose(event, 10)
        by_pld.compose(event, 10)
        below = lower(by_pld, 1e-5)
        assert below <= by_rdp.get_epsilon(delta=1e-5) <= 1.4 * below
    with pytest.raises(AccountingError, match="Use accountant='pld'"):
        made.compose(mechanisms.ApproximateDP(1.0))
    with pytest.raises(AccountingError, match="Use accountant='pld', or group_size=1"):
        accountants.create("rdp", group_size=2).step(noise_multiplier=1.0, sample_rate=0.1)


def test_bounds_and_their_inverse():
    made = account((1.0, 0.1, 3), name="rdp")
    epsilon = made.get_epsilon(delta=1e-5)
    assert made.epsilon_bounds(delta=1e-5) == (0.0, epsilon, epsilon)
    assert made.get_delta(epsilon=epsilon) == pytest.approx(1e-5, rel=1e-6)
    once = made.rdp()
    made.merge(made)
    assert made.rdp() == pytest.approx(2 * once, rel=1e-12)


def test_limits():
    made = accountants.create("rdp")
    assert made.get_epsilon(delta=1e-5) == 0
    assert made.get_delta(epsilon=1.0) == 0
    made.step(noise_multiplier=1.0, sample_rate=0.1)
    assert made.get_epsilon(delta=0) == math.inf
    assert made.get_epsilon(delta=1) == 0
    made.step(noise_multiplier=0.0, sample_rate=0.1)
    assert made.get_epsilon(delta=1e-5) == math.inf


def test_gdp_is_a_function_and_no_accountant():
    assert gdp_epsilon(**RUN) == pytest.approx(1.618, abs=1e-3)
    whole = {"noise_multiplier": 1.0, "sample_rate": 1.0, "num_steps": 1, "delta": 1e-5}
    assert gdp_epsilon(**whole) == pytest.approx(4.377178095681)
    assert gdp_epsilon(**(whole | {"noise_multiplier": 0.0})) == math.inf
    assert gdp_epsilon(**(whole | {"num_steps": 0})) == 0
    with pytest.raises(ValueError, match="accountant='gdp' is unknown. Expected one of pld, prv"):
        get_epsilon(**RUN, accountant="gdp")
    with pytest.raises(TypeError, match="accountant=.* is a NumPy array. Expected one of"):
        accountants.require_bound(np.ones(2))
    with pytest.raises(ValueError, match="delta=2 is not a probability"):
        gdp_epsilon(**(RUN | {"delta": 2}))


def test_gdp_of_full_batches_is_exact():
    run = {"noise_multiplier": 8.0, "sample_rate": 1.0, "num_steps": 9, "delta": 1e-5}
    assert gdp_epsilon(**run) == pytest.approx(get_epsilon(**run), rel=1e-9)


def test_the_central_limit_is_below_the_truth():
    run = {"noise_multiplier": 0.7, "sample_rate": 1e-3, "num_steps": 1000}
    made = account(tuple(run.values()))
    assert lower(made, 1e-5) > 2.2 * gdp_epsilon(**run, delta=1e-5)


def test_a_subclass_is_not_taken_for_its_parent():
    class Wider(mechanisms.Laplace):
        """Another mechanism, of which nothing is known here."""

    with pytest.raises(AccountingError, match="Wider with group_size=1 has no Renyi bound"):
        accountants.create("rdp").compose(Wider(1.0))


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
    together = rdp.subsampled_gaussian(sigma, rate, orders)
    for i in range(90):
        alone = rdp.subsampled_gaussian(sigma[i : i + 1], rate[i : i + 1], orders)[0]
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
    ours = rdp.subsampled_gaussian(*row)[0] * (orders - 1)
    doubled = rdp.subsampled_gaussian(*row, substitute=True)[0] * (orders - 1)
    for value, twice, order in zip(ours, doubled, orders, strict=True):
        truth = moment(sigma, rate, order, False)
        assert truth * (1 - 1e-9) <= value <= truth * (1 + 1e-9)
        truth = max(moment(sigma / 2, rate, order, False), moment(sigma, rate, order, True))
        assert truth * (1 - 1e-9) <= twice <= truth * (1 + 1e-9)
