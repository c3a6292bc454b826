# SPDX-License-Identifier: Apache-2.0
"""Bounds are bounds: against exact deltas, on bad grids, and every mutant of a bound is caught."""

import dataclasses
import math

import numpy as np
import pytest
from scipy.special import ndtr

from dualdp import accountants
from dualdp.accountants.closed_forms import single_step_log_delta
from dualdp.accountants.pld_engine import certified, composition, pairs
from dualdp.accountants.pld_engine.certified import Curve
from dualdp.accountants.pld_engine.composition import Composed, Grid, Sum, Window
from dualdp.accountants.pld_engine.pairs import Subsampled, Term
from tests import exact
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


def soundness_failures():
    """The settings in which a bound is on the wrong side of the exact delta."""
    failures = []
    for sigma, rate in SIGMA_RATE:
        for setting in plans():
            for flipped in (False, True):
                for count, truth in ((1, one_step_delta), (2, two_step_delta)):
                    if count == 2 and (sigma, rate) not in SIGMA_RATE[:2]:
                        continue
                    terms = step(sigma, rate, count, flipped)
                    high = Curve(composed(terms, *setting))
                    low = LowerCurve(lower.composed(terms, *setting))
                    for epsilon in (0.03, 0.13, 0.5, 1.1, 2.3):
                        exactly = truth(sigma, rate, epsilon, flipped)
                        slack = 1e-7 if count == 2 else 1e-10
                        if exactly < 1e-13 and count == 2:
                            continue  # beyond the quadrature
                        is_above = high.delta(epsilon) >= exactly * (1 - slack)
                        if not is_above or low.delta(epsilon) > exactly * (1 + slack):
                            failures.append((sigma, rate, flipped, count, epsilon))
    return failures


def test_bounds_hold_on_every_grid():
    assert soundness_failures() == []


def changed_pmf(monkeypatch, change):
    dots = composition.connect_the_dots
    monkeypatch.setattr(composition, "connect_the_dots", lambda *args: change(dots(*args)))


def changed_table(monkeypatch, change):
    dots = composition.connect_the_dots
    monkeypatch.setattr(
        composition, "connect_the_dots", lambda table, counts: dots(change(table), counts)
    )


def drop_the_tail(monkeypatch):
    changed_pmf(
        monkeypatch, lambda pmf: dataclasses.replace(pmf, infinite=np.zeros_like(pmf.infinite))
    )


def round_down_in_the_upper_bound(monkeypatch):
    def change(table):
        nothing = np.zeros_like(table.p.excess)
        p = dataclasses.replace(table.p, excess=nothing, excess_error=nothing)
        return dataclasses.replace(table, p=p)

    changed_table(monkeypatch, change)


def swap_p_and_q(monkeypatch):
    changed_table(monkeypatch, pairs.flip)


def flip_without_negating(monkeypatch):
    def flip(table):
        p, q = pairs.flip(table).p, pairs.flip(table).q
        sides = {
            "p": dataclasses.replace(p, excess=q.excess),
            "q": dataclasses.replace(q, excess=p.excess),
        }
        return dataclasses.replace(pairs.flip(table), **sides)

    monkeypatch.setattr(composition, "flip", flip)


def window_too_short(monkeypatch):
    monkeypatch.setattr(certified, "above_window", lambda composed: 0.0)


def window_in_the_wrong_place(monkeypatch):
    monkeypatch.setattr(
        Composed,
        "points",
        property(lambda self: (self.window.start - 3 + np.arange(self.mass.size)) * self.spacing),
    )


def rounding_ignored(monkeypatch):
    invert = composition._Product.invert
    monkeypatch.setattr(composition._Product, "invert", lambda self: (invert(self)[0], 0.0))


MUTANTS = [
    drop_the_tail,
    round_down_in_the_upper_bound,
    swap_p_and_q,
    flip_without_negating,
    window_too_short,
    window_in_the_wrong_place,
    rounding_ignored,
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_every_mutant_of_a_bound_is_caught(monkeypatch, mutant):
    mutant(monkeypatch)
    with np.errstate(all="ignore"):
        assert soundness_failures() != []


def test_ndtr_is_as_accurate_as_assumed():
    rng = np.random.default_rng(0)
    for z in rng.uniform(0, 37, 400):
        truth = exact.mp.erfc(exact.mp.mpf(z) / exact.mp.sqrt(2)) / 2
        assert abs(float(exact.mp.mpf(float(ndtr(-z))) / truth - 1)) < pairs.NDTR_ERROR


def test_the_closed_form_of_one_step_is_exact():
    for sigma, rate in [*SIGMA_RATE, (0.1, 0.01), (10.0, 1e-6)]:
        for epsilon in (1e-4, 0.1, 1.0, 5.0):
            for flipped, direction in ((False, "remove"), (True, "add")):
                truth = exact.one_step(sigma, rate, epsilon, direction)
                if truth < 1e-200:
                    continue
                ours = single_step_log_delta(sigma, rate, epsilon)[int(flipped)]
                assert abs(ours - float(exact.mp.log(truth))) < 1e-9


@pytest.mark.parametrize("scale", [-1e4, 1e4, math.inf])
def test_nothing_is_claimed_where_numbers_overflow(scale):
    good = composed(step(1.0, 0.05), Grid(0.01), 1e-12, Window(4.0, 0, 4096, 9.0))
    broken = Curve(dataclasses.replace(good, log_mgf=scale))
    assert Curve(good).epsilon(1e-5)[0] < 2
    assert broken.epsilon(1e-5)[0] == math.inf
    assert broken.delta(0.1) == 1


def test_flip_twice_is_the_identity():
    table = Subsampled(np.array([1.0]), np.array([0.1])).cells(
        np.array([0]), np.arange(-20, 30), 0.05
    )
    again = pairs.flip(pairs.flip(table))
    for part in ("p", "q"):
        ours, theirs = (dataclasses.astuple(getattr(one, part)) for one in (again, table))
        assert all(map(np.array_equal, ours, theirs))
    assert np.array_equal(again.index, table.index)
    assert (again.spacing, again.slack) == (table.spacing, table.slack)


def _family_delta(family, epsilon, flipped, below=False):
    setting = Grid(0.002, octave=2048), 1e-13, Window(0.7, 0, 1 << 14, 1.4)
    terms = [Term(family, np.array([1.0]), flipped)]
    if below:
        return LowerCurve(lower.composed(terms, *setting)).delta(epsilon)
    return Curve(composed(terms, *setting)).delta(epsilon)


def _densities_delta(p, q, epsilon):
    """Delta of two densities on a fine grid of x."""
    return float(np.maximum(p - math.exp(epsilon) * q, 0).sum())


def _normals(*weights_and_means, sigma):
    x = np.linspace(-12 * sigma - 3, 12 * sigma + 8, 400_001)
    step = x[1] - x[0]
    return step * sum(
        w * np.exp(-0.5 * ((x - m) / sigma) ** 2) / (sigma * math.sqrt(2 * math.pi))
        for w, m in weights_and_means
    )


@pytest.mark.parametrize("flipped", [False, True])
@pytest.mark.parametrize("epsilon", [0.05, 0.4, 1.0])
def test_pairs_of_groups_and_replacements_are_exact(epsilon, flipped):
    sigma, rate = 0.9, 0.1
    base = _normals((1, 0), sigma=sigma)
    group = _normals(
        *((math.comb(3, i) * rate**i * (1 - rate) ** (3 - i), i) for i in range(4)), sigma=sigma
    )
    right = _normals((1 - rate, 0), (rate, 1), sigma=sigma)
    left = _normals((1 - rate, 0), (rate, -1), sigma=sigma)
    for family, p, q in (
        (pairs.mixture(sigma, rate, 3), group, base),
        (pairs.substitution(sigma, rate), right, left),
    ):
        truth = _densities_delta(*((q, p) if flipped else (p, q)), epsilon)
        assert _family_delta(family, epsilon, flipped) == pytest.approx(truth, rel=2e-4, abs=1e-8)
        assert _family_delta(family, epsilon, flipped) >= truth * (1 - 1e-6)
        assert _family_delta(family, epsilon, flipped, below=True) <= truth * (1 + 1e-6)


@pytest.mark.parametrize("flipped", [False, True])
def test_sampling_without_replacement_takes_the_worse_order(flipped):
    sigma, rate = 1.0, 0.1
    family = pairs.FixedSize(np.array([sigma / 2]), np.array([rate]))
    for epsilon in (0.0, 0.2, 1.0, 3.0):
        truth = math.exp(max(single_step_log_delta(sigma / 2, rate, epsilon)))
        assert _family_delta(family, epsilon, flipped) == pytest.approx(truth, rel=1e-3)
        assert _family_delta(family, epsilon, flipped) >= truth * (1 - 1e-9)
        assert _family_delta(family, epsilon, flipped, below=True) <= truth * (1 + 1e-9)


@pytest.mark.parametrize("flipped", [False, True])
def test_mechanisms_given_by_atoms_are_exact(flipped):
    for family, p, q in (
        (pairs.randomized_response(0.5, 4), [0.625, 0.125, 0.25], [0.125, 0.625, 0.25]),
        (
            pairs.table((0.5, 0.3, 0.2), (0.2, 0.3, 0.5)),
            [0.5, 0.3, 0.2],
            [0.2, 0.3, 0.5],
        ),
        (pairs.table((0.5, 0.5), (1.0, 0.0)), [0.5, 0.5], [1.0, 0.0]),
    ):
        p, q = np.array(p), np.array(q)
        for epsilon in (0.0, 0.3, 0.7):
            truth = _densities_delta(*((q, p) if flipped else (p, q)), epsilon)
            assert _family_delta(family, epsilon, flipped) == pytest.approx(truth, abs=2e-3)
            assert _family_delta(family, epsilon, flipped) >= truth - 1e-12
            assert _family_delta(family, epsilon, flipped, below=True) <= truth + 1e-12


def _loss_sums(rng, samples, steps):
    """Sampled privacy losses of heterogeneous Poisson steps, under P and (negated) under Q."""
    under_p, under_q = np.zeros(samples), np.zeros(samples)
    for sigma, rate, count in steps:
        for total, joined in ((under_p, rate), (under_q, 0.0)):
            for _ in range(count):
                x = rng.standard_normal(samples) * sigma + (rng.random(samples) < joined)
                total += np.log1p(rate * np.expm1((2 * x - 1) / (2 * sigma**2)))
    return under_p, -under_q


def _epoch_losses(rng, samples, sigma, bins, epochs):
    """Sampled privacy losses of epochs of balls-in-bins, under P and (negated) under Q."""
    totals = []
    for joined in (1.0, 0.0):
        total = np.zeros(samples)
        for _ in range(epochs):
            x = rng.standard_normal((samples, bins)) * sigma
            x[np.arange(samples), rng.integers(0, bins, samples)] += joined
            total += np.log(np.mean(np.exp((2 * x - 1) / (2 * sigma**2)), axis=1))
        totals.append(total)
    return totals[0], -totals[1]


@pytest.mark.parametrize("sampler", ["poisson", "balls_in_bins"])
def test_many_steps_agree_with_monte_carlo(sampler):
    rng, samples = np.random.default_rng(1), 100_000
    made = accountants.create("pld")
    if sampler == "poisson":
        steps = [(1.0, 0.1, 12), (0.7, 0.05, 12)]
        losses = _loss_sums(rng, samples, steps)
    else:
        steps = [(1.0, 1 / 16, 48)]
        losses = _epoch_losses(rng, samples, 1.0, 16, 3)
    for sigma, rate, count in steps:
        made.step(noise_multiplier=sigma, sample_rate=rate, num_steps=count, sampler=sampler)
    for epsilon in (0.3, 1.0):
        ours = made.get_delta(epsilon=epsilon)
        estimates = [np.maximum(0, 1 - np.exp(epsilon - loss)) for loss in losses]
        worst = max(estimates, key=np.mean)
        error = worst.std() / math.sqrt(samples)
        assert worst.mean() - 4 * error < ours < 1.03 * worst.mean() + 4 * error
