# SPDX-License-Identifier: Apache-2.0
"""Balls-in-bins: above exact deltas, for every size of noise, and close to them."""

import math

import mpmath as mp
import numpy as np
import pytest
from scipy.special import ndtr

from dualdp import accountants, get_epsilon
from dualdp.accountants.pld_engine import balls_in_bins
from tests.dualdp.accountants.pld_engine.test_composition import quadrature_nodes


def hockey_stick(family, epsilon, flipped):
    """Delta of the atoms, without a lattice; unresolved mass has infinite loss."""
    mass, sign = (family.q, -1) if flipped else (family.p, 1)
    with np.errstate(over="ignore"):
        return float(mass @ np.maximum(-np.expm1(epsilon - sign * family.loss), 0))


def gaussian(sigma, epsilon):
    """Delta of one Gaussian release: Balle & Wang 2018, theorem 8."""
    shift, place = 0.5 / sigma, epsilon * sigma
    return ndtr(shift - place) - math.exp(epsilon) * ndtr(-shift - place)


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


@pytest.mark.parametrize(
    ("sigma", "bins", "epochs"), [(0.447, 100, 1), (1.0, 100, 5), (0.447, 10, 1), (0.2, 30, 1)]
)
def test_little_noise_agrees_with_monte_carlo(sigma, bins, epochs):
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


@pytest.mark.parametrize("tail", [1e-9, 1e-3])
@pytest.mark.parametrize("sigma", [0.1, 0.35, 0.7, 2.5, 12.0, 50.0, 5000.0])
def test_one_and_two_bins_are_bounded_by_exact_deltas(sigma, tail):
    """On both grids, also on grids that are far too short; and closely, where they are not."""
    for bins in (1, 2):
        family = balls_in_bins.one_epoch(sigma, bins, tail)
        for epsilon in (0.02, 0.1, 0.5, 1.5, 4.0, 9.0, 0.1 / sigma, 3 / sigma):
            exactly = two_bins(sigma, epsilon) if bins == 2 else (gaussian(sigma, epsilon),) * 2
            for flipped, truth in zip((False, True), exactly, strict=True):
                if truth < 1e-9 or (bins == 2 and not 0.3 < sigma < 100):
                    continue  # beyond the quadrature
                ours = hockey_stick(family, epsilon, flipped)
                assert ours >= truth * (1 - 1e-5), (bins, epsilon, flipped)
                if tail == 1e-9 and epsilon <= 0.5:
                    assert ours <= truth * 1.01 + 1e-7, (bins, epsilon, flipped)


def test_what_underflows_is_not_amplified():
    run = {"noise_multiplier": 0.032, "sample_rate": 0.01, "num_steps": 200, "delta": 1e-5}
    bins = get_epsilon(**run, sampler="balls_in_bins")
    assert bins == get_epsilon(**run, sampler="shuffle")


@pytest.mark.parametrize("sigma", [0.7, 5000.0])
def test_points_are_thinned_and_bounded(sigma):
    """A hundred million steps have few points, of which none is taken for its neighbour."""
    atoms = balls_in_bins.one_epoch(sigma, 10**8, 1e-20)
    assert atoms.q.size < 1 << 21
    assert abs(float(atoms.q.sum()) - 1) < 1e-3


@pytest.mark.parametrize(
    ("sigma", "step", "low"),
    [(0.1, 1e45, 0.0), (0.6, 2.28, 0.0), (1.0, 0.04, 0.0), (2.0, 0.016, 0.0), (5.0, 6e-3, 0.0)]
    + [(5.0, 6e-3, 0.02), (50.0, 6e-4, 0.88), (1e4, 3e-6, 0.9993), (30.0, 0.3, 0.31)],
)
@mp.workdps(400)
def test_the_masses_of_one_step_are_exact(sigma, step, low):
    """Where two cells meet, against their closed form in 400 digits."""
    # far masses are differences of numbers near 1, hence the digits
    highest = math.exp((1 + 13 * sigma) / (2 * sigma**2))
    one = balls_in_bins.coordinate(sigma, step, low, highest)
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
