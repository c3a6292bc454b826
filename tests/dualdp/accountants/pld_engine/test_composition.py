# SPDX-License-Identifier: Apache-2.0
"""Bounds are bounds, on good grids and on bad ones; they are monotone; parts make the whole.

Epsilon grows with steps and rate and falls with noise and delta to one part in 1e9, in ordinary
settings and in the corners; the one corner with a larger tolerance is `CORNER`, as
docs/accounting.md says in section 8.
"""

import itertools
import math

import mpmath as mp
import numpy as np
import pytest
from scipy.special import ndtr

from dualdp.accountants.pld import single_step_log_delta
from dualdp.accountants.pld_engine import composition, pairs
from dualdp.accountants.pld_engine.composition import Curve, Grid, Sum, Window
from dualdp.accountants.pld_engine.pairs import Subsampled, Term
from dualdp.accountants.solve import get_epsilon
from tests.cases import accounting as cases
from tests.dualdp.accountants.lower import lower, lower_curve
from tests.dualdp.accountants.test_pld import account

SIGMA_RATE = [(1.0, 0.05), (0.6, 0.01), (2.0, 0.3), (0.8, 0.5), (4.0, 0.01), (0.5, 1e-3)]


def upper_curve(terms, octave, tail, window):
    """The composed pmf of terms on any grid, good or bad, from 0 on."""
    total = Sum(window)
    total.add(composition.discretize(terms, Grid(window.spacing, octave), tail))
    return Curve(total, 0)


def step(sigma, rate, count=1, flipped=False):
    """`count` equal Poisson steps, as one term."""
    family = Subsampled(np.array([sigma]), np.array([rate]))
    return [Term(family, np.array([float(count)]), flipped)]


def one_step_delta(sigma, rate, epsilon, flipped):
    """Exact delta of one step."""
    return math.exp(single_step_log_delta(sigma, rate, epsilon)[int(flipped)])


def quadrature_nodes(low, high):
    """(nodes, weights) of a fine Gauss rule on [low, high]."""
    nodes, weights = np.polynomial.legendre.leggauss(40)
    knots = np.linspace(low, high, 60)
    half = 0.5 * np.diff(knots)[:, None]
    x = (half * nodes + 0.5 * (knots[1:] + knots[:-1])[:, None]).ravel()
    return x, (half * weights).ravel()


def two_step_delta(sigma, rate, epsilon, flipped):
    """Delta of two equal steps by a fine quadrature in float64, good to about 1e-9 relative."""
    x, w = quadrature_nodes(-9 * sigma, 1 + 9 * sigma)
    base = np.exp(-0.5 * (x / sigma) ** 2) / (sigma * math.sqrt(2 * math.pi))
    ratio = 1 - rate + rate * np.exp((2 * x - 1) / (2 * sigma**2))
    total = 0.0
    for density, e in zip(
        w * base * (1 if flipped else ratio),
        epsilon + (np.log(ratio) if flipped else -np.log(ratio)),
        strict=True,
    ):
        total += density * _any_delta(sigma, rate, e, flipped)
    return total


def _any_delta(sigma, rate, epsilon, flipped):
    """One step's delta at any real epsilon."""
    grow = math.exp(epsilon)
    if flipped:
        u = 1 + math.expm1(-epsilon) / rate
        if u <= 0:
            return 0.0
        z = sigma * math.log(u) + 0.5 / sigma
        return ndtr(z) - grow * ((1 - rate) * ndtr(z) + rate * ndtr(z - 1 / sigma))
    u = 1 + math.expm1(epsilon) / rate
    if u <= 0:
        return 1 - grow
    z = sigma * math.log(u) + 0.5 / sigma
    return (1 - rate) * ndtr(-z) + rate * ndtr(1 / sigma - z) - grow * ndtr(-z)


#: Octaves, tails and windows from good to hopeless: the bounds must hold on all of them.
PLANS = [
    (32, 1e-12, Window(4.0, 9.0, 0.01, 4096)),
    (2, 1e-12, Window(2.0, 5.0, 0.11, 512)),
    (32, 3e-2, Window(4.0, 9.0, 0.01, 4096)),  # a large tail must count as infinite loss
    (32, 1e-12, Window(3.0, 6.0, 0.02, 16)),  # far too short: truncation and wraps
    (32, 1e-12, Window(0.3, 2.0, 0.02, 32)),  # hardly tilted: left wraps
    (32, 1e-12, Window(0.02, 3.0, 0.05, 1024)),  # not tilted: rounding shows in far tails
]


@pytest.mark.parametrize("setting", PLANS)
def test_bounds_hold_on_every_grid(setting):
    """Of one step and of two, in both directions, above and below the exact deltas."""
    for (sigma, rate), flipped in itertools.product(SIGMA_RATE, (False, True)):
        for count, truth, slack in ((1, one_step_delta, 1e-10), (2, two_step_delta, 1e-7)):
            if count == 2 and (sigma, rate) not in SIGMA_RATE[:2]:
                continue
            terms = step(sigma, rate, count, flipped)
            high = upper_curve(terms, *setting)
            low = lower_curve(terms, *setting)
            for epsilon in (0.03, 0.13, 0.5, 1.1, 2.3):
                exactly = truth(sigma, rate, epsilon, flipped)
                if exactly > 1e-13 or count == 1:  # else beyond the quadrature
                    assert high.delta(epsilon) >= exactly * (1 - slack), (sigma, rate, flipped)
                    assert low.delta(epsilon) <= exactly * (1 + slack), (sigma, rate, flipped)


def test_ndtr_is_as_accurate_as_assumed():
    rng = np.random.default_rng(0)
    for z in rng.uniform(0, 37, 400):
        truth = mp.erfc(mp.mpf(z) / mp.sqrt(2)) / 2
        assert abs(float(mp.mpf(float(ndtr(-z))) / truth - 1)) < pairs.NDTR_ERROR


@pytest.mark.parametrize("extreme", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_upper_is_above_every_lower_bound(extreme):
    """The lower bound is below the upper one, which is what get_epsilon says; halves compose."""
    for run in cases.settings(8, seed=30, extreme=extreme):
        sizes, delta = (run["noise_multiplier"], run["sample_rate"], run["num_steps"]), run["delta"]
        _, estimate, upper = account(sizes).epsilon_bounds(delta=delta)
        assert 0 <= lower(account(sizes), delta) <= estimate == upper == get_epsilon(**run)
        half = sizes[2] // 2
        parts = (*sizes[:2], half), (*sizes[:2], sizes[2] - half)
        both = account(parts[0])
        both.merge(account(parts[1]))
        assert both.get_epsilon(delta=delta) == account(*parts).get_epsilon(delta=delta) == upper


@pytest.mark.parametrize("scale", [-1e4, 1e4, math.inf])
def test_nothing_is_claimed_where_numbers_overflow(scale):
    curve = upper_curve(step(1.0, 0.05), *PLANS[0])
    assert curve.epsilon(1e-5)[0] < 2
    curve.total.log_mgf = scale
    broken = Curve(curve.total, 0)
    assert broken.epsilon(1e-5)[0] == math.inf
    assert broken.delta(0.1) == 1


#: Rare, huge losses decide a tiny delta: no tilt lifts them above rounding everywhere.
CORNER = 0.03


@pytest.mark.parametrize(
    ("count", "seed", "extreme", "options"),
    [
        (20, 1, False, {}),
        (12, 50, False, {"neighboring_relation": "replace"}),
        (12, 51, False, {"accountant": "rdp"}),
        pytest.param(20, 2, True, {}, marks=pytest.mark.slow),
    ],
)
def test_epsilon_is_monotone(count, seed, extreme, options):
    """Random settings, each made easier by a factor from 1 + 1e-6 to 2, in one of four ways."""
    factors = 1 + 10 ** np.random.default_rng(seed).uniform(-6, 0, count)
    runs = cases.settings(count, seed, extreme=extreme)
    for run, factor in zip(runs, factors.tolist(), strict=True):
        base = get_epsilon(**run, **options)
        is_corner = run["delta"] < 1e-13 * run["num_steps"] and run["sample_rate"] < 0.01
        most = (1 + (CORNER if is_corner else 1e-9 if base < 2e3 else 1e-4)) * base + 1e-10
        for easier in (
            {"noise_multiplier": run["noise_multiplier"] * factor},
            {"sample_rate": run["sample_rate"] / factor},
            {"num_steps": int(run["num_steps"] / factor)},
            {"delta": min(0.9, run["delta"] * factor)},
        ):
            assert 0 <= get_epsilon(**(run | easier), **options) <= most, (run, easier)


@pytest.mark.parametrize(
    ("sigma", "rate", "steps", "delta", "factor", "power"),
    [
        (0.690496038701488, 8.743603263749174e-06, 5002235, 4.8135517946900376e-26, 1.001, 1),
        (0.08523210626780636, 0.30501521208173554, 843791, 1.1729827073254217e-07, 1, 0.7),
    ],
)
def test_monotone_where_a_window_fails(sigma, rate, steps, delta, factor, power):
    """Rounding above delta; a direction with no window, but with a largest loss."""
    run = {"num_steps": steps, "delta": delta}
    easier = get_epsilon(noise_multiplier=sigma * factor, sample_rate=rate * power, **run)
    assert easier <= get_epsilon(noise_multiplier=sigma, sample_rate=rate, **run)


def test_the_largest_losses_are_cut_off_where_rounding_decides():
    """A bound of 0.03, not 0.44: above the lower bound, and no step of another kind lowers it."""
    made, delta = account((0.8542574816215336, 8.99521260045251e-08, 1601)), 1.098510275e-27
    upper = made.get_epsilon(delta=delta)
    assert 0 <= lower(made, delta) <= upper < 0.04
    made.step(noise_multiplier=5.175876836163716, sample_rate=0.02223640330579644, num_steps=2)
    assert made.get_epsilon(delta=delta) >= upper * (1 - CORNER)


def test_asking_after_every_step_reads_the_new_step_only(monkeypatch):
    """And gives the same; a mechanism that had no release at first stands in the middle later."""
    read, right = [], composition.PrefixMemo.total

    def total(self, key, terms, empty, pmfs):
        def counted(rest):
            read.append(sum(term.counts.size for term in rest))
            return pmfs(rest)

        return right(self, key, terms, empty, counted)

    monkeypatch.setattr(composition.PrefixMemo, "total", total)
    grown, steps = account(), [(2.0 * 0.995**i, 0.02, int(i != 3)) for i in range(90)]
    for i, (sigma, rate, count) in enumerate(steps):
        grown.step(noise_multiplier=sigma, sample_rate=rate, num_steps=count)
        if i > 68:
            grown.get_epsilon(delta=1e-5)
    assert len(read) >= 20
    assert np.median(read) <= 1
    for more in (steps[3], steps[0]):
        grown.step(noise_multiplier=more[0], sample_rate=0.02)
        steps.append((*more[:2], 1))
        whole = account(*steps).get_epsilon(delta=1e-5)
        assert grown.get_epsilon(delta=1e-5) == pytest.approx(whole, rel=1e-8)
