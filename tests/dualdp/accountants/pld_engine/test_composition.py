# SPDX-License-Identifier: Apache-2.0
"""Bounds are bounds: against exact deltas, on good grids and on bad ones."""

import dataclasses
import itertools
import math

import mpmath as mp
import numpy as np
import pytest
from scipy.special import ndtr

from dualdp.accountants.closed_forms import single_step_log_delta
from dualdp.accountants.pld_engine import composition, pairs
from dualdp.accountants.pld_engine.certified import Curve
from dualdp.accountants.pld_engine.composition import Grid, Sum, Window
from dualdp.accountants.pld_engine.pairs import Subsampled, Term
from tests.dualdp.accountants import lower
from tests.dualdp.accountants.lower import LowerCurve

SIGMA_RATE = [(1.0, 0.05), (0.6, 0.01), (2.0, 0.3), (0.8, 0.5), (4.0, 0.01), (0.5, 1e-3)]


def composed(terms, grid, tail, window):
    """The composed pmf of terms on any grid, good or bad."""
    total = Sum(window, grid.spacing)
    total.add(composition.discretize(terms, grid, tail))
    return total.composed(window.start)


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


def plans():
    """Grids, tails and windows from good to hopeless: the bounds must hold on all of them."""
    good = Window(tilt=4.0, start=0, size=4096, chernoff=9.0)
    yield Grid(0.01), 1e-12, good
    yield Grid(0.11, octave=2), 1e-12, Window(2.0, 0, 512, 5.0)
    yield Grid(0.01), 3e-2, good  # a large tail must count as infinite loss
    yield Grid(0.02), 1e-12, Window(3.0, 0, 16, 6.0)  # far too short: truncation and wraps
    yield Grid(0.02), 1e-12, Window(0.3, 0, 32, 2.0)  # hardly tilted: left wraps
    yield Grid(0.05), 1e-12, Window(0.02, 0, 1024, 3.0)  # not tilted: rounding shows in far tails


@pytest.mark.parametrize("setting", list(plans()))
def test_bounds_hold_on_every_grid(setting):
    """Of one step and of two, in both directions, above and below the exact deltas."""
    for (sigma, rate), flipped in itertools.product(SIGMA_RATE, (False, True)):
        for count, truth, slack in ((1, one_step_delta, 1e-10), (2, two_step_delta, 1e-7)):
            if count == 2 and (sigma, rate) not in SIGMA_RATE[:2]:
                continue
            terms = step(sigma, rate, count, flipped)
            high = Curve(composed(terms, *setting))
            low = LowerCurve(lower.composed(terms, *setting))
            for epsilon in (0.03, 0.13, 0.5, 1.1, 2.3):
                exactly = truth(sigma, rate, epsilon, flipped)
                if exactly > 1e-13 or count == 1:  # else beyond the quadrature
                    assert high.delta(epsilon) >= exactly * (1 - slack), (sigma, rate, flipped)
                    assert low.delta(epsilon) <= exactly * (1 + slack), (sigma, rate, flipped)


def test_coarse_edges_are_edges_of_every_finer_grid():
    for low, high in ((-3, 5), (-17, 1000), (-100, 64), (0, 65), (0, 0)):
        for octave in (4, 32):
            coarse = Grid(1.0, octave).edges(low, high)
            assert coarse[0] <= low
            assert coarse[-1] >= high
            assert set(4 * coarse[1:-1]) <= set(Grid(0.25, 2 * octave).edges(4 * low, 4 * high))


def test_ndtr_is_as_accurate_as_assumed():
    rng = np.random.default_rng(0)
    for z in rng.uniform(0, 37, 400):
        truth = mp.erfc(mp.mpf(z) / mp.sqrt(2)) / 2
        assert abs(float(mp.mpf(float(ndtr(-z))) / truth - 1)) < pairs.NDTR_ERROR


@pytest.mark.parametrize("scale", [-1e4, 1e4, math.inf])
def test_nothing_is_claimed_where_numbers_overflow(scale):
    good = composed(step(1.0, 0.05), Grid(0.01), 1e-12, Window(4.0, 0, 4096, 9.0))
    broken = Curve(dataclasses.replace(good, log_mgf=scale))
    assert Curve(good).epsilon(1e-5)[0] < 2
    assert broken.epsilon(1e-5)[0] == math.inf
    assert broken.delta(0.1) == 1
