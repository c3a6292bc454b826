# SPDX-License-Identifier: Apache-2.0
"""Balls-in-bins: above exact deltas, for every size of noise, and every mutant is caught."""

import dataclasses
import math

import numpy as np
import pytest
from scipy.special import ndtr

from dualdp import accountants, get_epsilon
from dualdp.accountants.pld_engine import balls_in_bins
from dualdp.accountants.pld_engine.certified import Curve
from dualdp.accountants.pld_engine.composition import Grid, Window
from dualdp.accountants.pld_engine.pairs import Term, U
from tests import exact
from tests.dualdp.accountants.pld_engine.test_composition import composed, quadrature_nodes

EPSILONS = (0.02, 0.1, 0.5, 1.5, 4.0, 9.0)


def hockey_stick(family, epsilon, flipped):
    """Delta of the atoms, without a lattice; unresolved mass counts as infinite loss."""
    mass, sign = (family.q, -1) if flipped else (family.p, 1)
    left = family.left_q if flipped else family.left_p
    with np.errstate(over="ignore"):
        return left + float(mass @ np.maximum(-np.expm1(epsilon - sign * family.loss), 0))


def lattice_delta(family, epsilon, flipped):
    """Certified delta of one epoch on a fine lattice."""
    terms = [Term(family, np.array([1.0]), flipped)]
    window = Window(0.7, 0, 1 << 14, 1.4)
    return Curve(composed(terms, Grid(0.002, octave=2048), 1e-13, window)).delta(epsilon)


def two_bins(sigma, epsilon):
    """Exact (remove, add) deltas of an epoch of two steps: the second in closed form."""
    x, weight = quadrature_nodes(-9 * sigma, 1 + 9 * sigma)
    mass = weight * np.exp(-0.5 * (x / sigma) ** 2) / (sigma * math.sqrt(2 * math.pi))
    first, grow = np.exp((2 * x - 1) / (2 * sigma**2)), math.exp(epsilon)

    def place(ratio):
        return sigma * np.log(np.maximum(ratio, 1e-300)) + 0.5 / sigma

    above, below = place(2 * grow - first), place(2 / grow - first)
    remove = 0.5 * ndtr(1 / sigma - above) - (grow - 0.5 * first) * ndtr(-above)
    add = (1 - 0.5 * grow * first) * ndtr(below) - 0.5 * grow * ndtr(below - 1 / sigma)
    return float(mass @ remove), float(mass @ add)


def failures(monkeypatch):
    """Settings in which an epoch of two steps is below the exact delta, on any grid."""
    found = _failures(1e-9)
    with monkeypatch.context() as patch:
        patch.setattr(balls_in_bins, "quantile", lambda tail: 1.2)  # grids that are far too short
        return found + _failures(1e-8)


def _failures(tail):
    found = []
    for sigma in (0.35, 0.7, 2.5, 12.0):  # the first on the geometric grid
        family = balls_in_bins.one_epoch(sigma, 2, tail)
        for epsilon in EPSILONS:
            for flipped, truth in zip((False, True), two_bins(sigma, epsilon), strict=True):
                if truth < 1e-9:
                    continue  # beyond the quadrature
                if hockey_stick(family, epsilon, flipped) < truth * (1 - 1e-5):
                    found.append((sigma, epsilon, flipped))
    return found


def test_two_bins_are_bounded_by_quadrature(monkeypatch):
    assert failures(monkeypatch) == []
    for sigma in (0.35, 0.7, 2.5):
        family = balls_in_bins.one_epoch(sigma, 2, 1e-9)
        for flipped, truth in zip((False, True), two_bins(sigma, 0.1), strict=True):
            ours = lattice_delta(family, 0.1, flipped)
            assert truth * (1 - 1e-6) <= ours <= truth * 1.01 + 1e-7


def points_moved_down(monkeypatch):
    def lower(p, q, first, step):
        kept = balls_in_bins._kept(p, np.arange(first, first + p.size), step)
        return kept, *(np.add.reduceat(mass, kept - first) for mass in (p, q))

    monkeypatch.setattr(balls_in_bins, "_SPREAD", 1e-3)
    monkeypatch.setattr(balls_in_bins, "_thinned", lower)


def changed_coordinate(monkeypatch, change):
    coordinate = balls_in_bins._coordinate

    def changed(*args):
        one = coordinate(*args)
        return dataclasses.replace(one, **change(one))

    monkeypatch.setattr(balls_in_bins, "_coordinate", changed)


def cut_mass_forgotten(monkeypatch):
    changed_coordinate(monkeypatch, lambda one: {"lost_q": 0.0, "lost_p": 0.0})


def grid_one_cell_down(monkeypatch):
    changed_coordinate(monkeypatch, lambda one: {"first": max(one.first - 1, 0)})


def cells_rounded_down(monkeypatch):
    means = balls_in_bins._cell_means

    def lower(*args):
        up, stay = means(*args)
        return np.zeros_like(up), up + stay

    monkeypatch.setattr(balls_in_bins, "_cell_means", lower)


def one_step_too_few(monkeypatch):
    powers = balls_in_bins._powers
    monkeypatch.setattr(balls_in_bins, "_powers", lambda a, b, n, size: powers(b, b, n, size))


def means_moved_down(monkeypatch):
    mean = balls_in_bins._mean

    def lower(*args):
        found = mean(*args)
        return np.concatenate([found[:1] + found[1:2], found[2:], [0.0]])

    monkeypatch.setattr(balls_in_bins, "_mean", lower)


@pytest.mark.parametrize(
    "mutant",
    [
        points_moved_down,
        means_moved_down,
        cut_mass_forgotten,
        grid_one_cell_down,
        cells_rounded_down,
        one_step_too_few,
    ],
    ids=lambda mutant: mutant.__name__,
)
def test_every_mutant_of_the_bound_is_caught(monkeypatch, mutant):
    mutant(monkeypatch)
    assert failures(monkeypatch) != []


@pytest.mark.parametrize(
    ("sigma", "step", "low"),
    [(0.1, 1e45, 0.0), (0.6, 2.28, 0.0), (1.0, 0.04, 0.0), (2.0, 0.016, 0.0), (5.0, 6e-3, 0.0)]
    + [(5.0, 6e-3, 0.02), (50.0, 6e-4, 0.88), (1e4, 3e-6, 0.9993)],
)
@exact.mp.workdps(400)
def test_the_masses_of_one_step_are_exact(sigma, step, low):
    """Where two cells meet, against their closed form in 400 digits."""
    mp = exact.mp  # far masses are differences of numbers near 1, hence the digits
    highest = math.exp((1 + 13 * sigma) / (2 * sigma**2))
    one = balls_in_bins._coordinate(sigma, step, low, highest)
    size = one.q.size
    s, h = mp.mpf(sigma), mp.mpf(step)

    def place(j):
        return s * mp.log(j * h) + 1 / (2 * s)

    def below(j, shift):
        return mp.erfc((shift - place(j)) / mp.sqrt(2)) / 2 if j else mp.mpf(0)

    def cell(j):
        mass, mean = (below(j + 1, shift) - below(j, shift) for shift in (0, 1 / s))
        up = (mean - j * h * mass) / h
        return up, mass - up

    checked = 0
    edges = [int(sigma / width) - one.first + 2 for width in (2**-6, 2**-12)]
    for i in {1, 2, 3, 7, 40, 300, 3000, 50_000, 200_000, size - 2, *edges}:
        if not 0 < i < size - 1:
            continue
        truth = cell(one.first + i - 1)[0] + cell(one.first + i)[1]
        if truth > 1e-250:
            assert abs(one.q[i] / truth - 1) < one.error
            checked += 1
    if one.first == 0 and cell(0)[1] > 1e-25:
        assert abs(one.q[0] / cell(0)[1] - 1) < one.error
    assert checked >= 3
    assert one.error < 2e-10


@pytest.mark.parametrize(
    ("sigma", "step", "index"), [(5000.0, 0.11, 9), (90.0, 0.3, 3), (9.0, 0.7, 1)]
)
@exact.mp.workdps(60)
def test_a_wide_cell_is_integrated_in_pieces(sigma, step, index):
    """Cells of more than 4 standard deviations, against their closed form."""
    mp = exact.mp
    s, h = mp.mpf(sigma), mp.mpf(step)
    place = [s * mp.log(j * h) + 1 / (2 * s) for j in (index, index + 1)]
    assert place[1] - place[0] > 4
    mass, mean = (mp.ncdf(place[1] - x) - mp.ncdf(place[0] - x) for x in (0, 1 / s))
    up, stay = balls_in_bins._cell_means(sigma, np.array([index]), np.array([float(place[0])]))
    truth = (mean - index * h * mass) / h
    assert abs(up[0] / truth - 1) < balls_in_bins._CELL_ERROR + 64 * sigma * U
    assert abs(stay[0] / (mass - truth) - 1) < balls_in_bins._CELL_ERROR + 64 * sigma * U


@pytest.mark.parametrize(("sigma", "bins"), [(0.8, 3), (0.8, 39)])
def test_both_grids_agree(monkeypatch, sigma, bins):
    """Two ways to one pair; the geometric grid takes the means of any number of steps."""
    monkeypatch.setattr(balls_in_bins, "_LARGEST", 0.0)
    linear = balls_in_bins.one_epoch(sigma, bins, 1e-11)
    geometric = balls_in_bins._doubled(sigma, bins, 1e-11)
    assert geometric.q @ np.exp(geometric.loss) == pytest.approx(1, abs=1e-9)
    assert geometric.p.sum() + geometric.left_p == pytest.approx(1, abs=1e-9)
    assert geometric.q.sum() + geometric.left_q == pytest.approx(1, abs=1e-9)
    square = 1 + math.expm1(sigma**-2) / bins  # E X^2, of which a spread has more
    assert 1 - 1e-6 < geometric.p @ np.exp(geometric.loss) / square < 1.01
    for epsilon in EPSILONS:
        one, other = (hockey_stick(pair, epsilon, False) for pair in (linear, geometric))
        assert other == pytest.approx(one, rel=0.02, abs=1e-9)
        one, other = (hockey_stick(pair, epsilon, True) for pair in (linear, geometric))
        assert other <= one * 1.02 + 1e-9  # the linear grid is too coarse for small X


@pytest.mark.parametrize(
    ("sigma", "bins", "epochs"), [(0.447, 100, 1), (1.0, 100, 5), (0.447, 10, 1), (0.2, 30, 1)]
)
def test_little_noise_is_amplified_and_agrees_with_monte_carlo(sigma, bins, epochs):
    """Delta at our epsilon by importance sampling: the joined step is drawn `shift` farther out."""
    run = {"noise_multiplier": sigma, "epochs_per_assignment": epochs}
    spent = accountants.create("pld")
    spent.step(**run, sample_rate=1 / bins, num_steps=bins * epochs, sampler="balls_in_bins")
    epsilon = spent.get_epsilon(delta=1e-5)
    rng, samples, shift, s = np.random.default_rng(0), 20_000, 3.0, sigma / math.sqrt(epochs)
    joined = rng.standard_normal(samples) + shift
    weight = np.exp(-shift * joined + shift**2 / 2)
    x = rng.standard_normal((samples, bins)) * s
    x[:, 0] = 1 + s * joined
    ratio = np.exp((2 * x - 1) / (2 * s**2) - epsilon).mean(axis=1)
    values = weight * np.maximum(1 - 1 / ratio, 0)
    error = values.std() / math.sqrt(samples)
    assert values.mean() - 3 * error < 1e-5 < 1.06 * values.mean() + 3 * error


@pytest.mark.slow
def test_what_underflows_is_lost():
    run = {"sample_rate": 0.01, "num_steps": 200, "delta": 1e-5}
    for sigma in (0.02, 0.032):
        family = balls_in_bins.one_epoch(sigma, 100, 1e-10)
        assert family.left_p == pytest.approx(1)
        bins = get_epsilon(noise_multiplier=sigma, **run, sampler="balls_in_bins")
        assert bins == get_epsilon(noise_multiplier=sigma, **run, sampler="shuffle")


@pytest.mark.parametrize(("sigma", "bins"), [(0.8, 100), (1.0, 50), (50.0, 1000)])
def test_thinning_is_one_more_spread(monkeypatch, sigma, bins):
    thin = balls_in_bins.one_epoch(sigma, bins, 1e-9)
    monkeypatch.setattr(balls_in_bins, "_SPREAD", 0.0)
    full = balls_in_bins.one_epoch(sigma, bins, 1e-9)
    assert thin.p.size < 0.51 * full.p.size
    for mass in ("p", "q", "p_error", "q_error"):
        assert getattr(thin, mass).sum() == pytest.approx(getattr(full, mass).sum(), rel=1e-2)
    assert (thin.p.sum(), thin.q.sum()) == pytest.approx((full.p.sum(), full.q.sum()), rel=1e-12)
    for epsilon in EPSILONS:
        for flipped in (False, True):
            fine = hockey_stick(full, epsilon, flipped)
            coarse = hockey_stick(thin, epsilon, flipped)
            assert fine * (1 - 1e-9) - 1e-14 <= coarse <= fine * 1.001 + 1e-10


def test_a_coarser_epoch_only_costs_more(monkeypatch):
    fine = lattice_delta(balls_in_bins.one_epoch(1.0, 50, 1e-9), 0.5, False)
    monkeypatch.setattr(balls_in_bins, "_MAX_POINTS", 1 << 12)
    assert fine < lattice_delta(balls_in_bins.one_epoch(1.0, 50, 1e-9), 0.5, False)


def test_epsilon_falls_with_the_noise():
    run = {"sample_rate": 1e-3, "num_steps": 10_000, "delta": 1e-5, "sampler": "balls_in_bins"}
    last = math.inf
    for sigma in (0.01, 0.1, 0.6, 1.0, 5.0, 30.0, 1e3, 1e6):
        epsilon = get_epsilon(noise_multiplier=sigma, **run)
        assert epsilon < last
        last = epsilon
    assert get_epsilon(noise_multiplier=0.6, **run) == pytest.approx(2.4072, abs=1e-4)


def test_many_epochs_of_their_own_noise_fit_in_memory():
    made = accountants.create("pld")
    for epoch in range(12):
        made.step(
            noise_multiplier=0.8 + 0.1 * epoch,
            sample_rate=0.01,
            num_steps=100,
            sampler="balls_in_bins",
        )
    terms = made._directions(made._units(), 1e-5)[0].terms
    assert sum(term.pairs.p.nbytes for term in terms) < 12 << 20
    assert 0 < made.get_epsilon(delta=1e-5) < 5


@pytest.mark.parametrize("sigma", [0.7, 90.0, 5000.0])
def test_a_hundred_million_steps_fit_the_memory(sigma, monkeypatch):
    """Their grid has few points, of which none may be taken for its neighbour."""
    sizes = []
    powers = balls_in_bins._powers

    def watched(tilted, single, power, size):
        sizes.append(size)
        return powers(tilted, single, power, size)

    monkeypatch.setattr(balls_in_bins, "_powers", watched)
    atoms = balls_in_bins.one_epoch(sigma, 10**8, 1e-20)
    assert max(sizes) <= balls_in_bins._MAX_POINTS
    assert abs(float(atoms.q.sum()) - 1) < 1e-3
