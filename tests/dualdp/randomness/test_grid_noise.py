# SPDX-License-Identifier: Apache-2.0
"""Secure randomness: the cipher's known answers, its normals, and the grid."""

import sys

import numpy as np
import pytest
from scipy import stats

from dualdp.randomness import fresh_bits, grid_noise

KEY = bytes(range(32))
FINE = 2.0**47  # cells so small that rounding to them does not show


def normals(size, **options):
    """Secure noise before it is rounded, nearly."""
    return grid_noise.grid_noise(KEY, cells=FINE, size=size, **options) / FINE


# ---------------------------------------------------------------------- the stream


def test_the_stream_gives_the_known_answers():
    """GCM's published values of AES-256 on the counters 0, 1, 2; SP 800-38A, F.5.5."""
    zero_key = (
        "dc95c078a2408989ad48a21492842087"  # H of test case 13, McGrew & Viega 2005
        "530f8afbc74536b9a963b4f1c4cb738b"  # its tag, which is the cipher of counter 1
        "cea7403d4d606b6e074ec5d3baf39d18"  # ciphertext of test case 14, on counter 2
    )
    assert grid_noise.words(bytes(32), 6).tobytes().hex() == zero_key
    nist = bytes.fromhex("603deb1015ca71be2b73aef0857d77811f352c073b6108d72d9810a30914dff4")
    first = int.from_bytes(bytes(range(0xF0, 0x100)), "big")
    expected = "0bdf7df1591716335e9a8b15c860c5025a6e699d536119065433863c8f657b94"
    assert grid_noise.keystream(nist, first, 32).hex() == expected


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers", None)
    with pytest.raises(ModuleNotFoundError, match=r"noise='secure' needs .*dualdp\[secure\]"):
        grid_noise.words(KEY, 4)
    with pytest.raises(ModuleNotFoundError, match="needs the package cryptography"):
        normals(100_000, threads=2)  # and not only in its thread


# ---------------------------------------------------------------------- normals


def test_secure_normals_are_normal():
    """Chi-square on the variance, KS on the shape, tails; a twin two per cent off is rejected."""
    draws = normals(1 << 21)

    def accepted(x):
        spread = stats.chi2.cdf((x**2).sum(), x.size)
        far = stats.binomtest(int((abs(x) > 3.5).sum()), x.size, 2 * stats.norm.sf(3.5)).pvalue
        return stats.kstest(x, "norm").pvalue > 1e-3 and 1e-3 < spread < 0.999 and far > 1e-3

    assert accepted(draws)
    assert not accepted(draws * 0.98)
    assert not accepted(draws * 1.02)
    assert np.unique(draws).size == draws.size


def test_secure_normals_are_independent():
    """Over lags, the two numbers of one pair (half a block apart) and blocks; squares too."""
    draws = normals(1 << 20)
    limit = 5 / np.sqrt(draws.size)
    for lag in (1, 2, 16, grid_noise.BLOCK // 2, grid_noise.BLOCK):
        for x in (draws, draws**2 - 1):
            assert abs(np.corrcoef(x[:-lag], x[lag:])[0, 1]) < limit
    twin = draws.copy()
    twin[1:] += 0.02 * draws[:-1]  # the test sees a correlation of two per cent
    assert abs(np.corrcoef(twin[:-1], twin[1:])[0, 1]) > limit


def test_normals_do_not_depend_on_threads():
    """Nor on how many are drawn after them."""
    size = 3 * grid_noise.BLOCK + 101
    one = normals(size, threads=1)
    for threads in (2, 3, 7, None):
        np.testing.assert_array_equal(normals(size, threads=threads), one)
    np.testing.assert_array_equal(normals(50_000), one[:50_000])
    assert normals(0).shape == (0,)


# ---------------------------------------------------------------------- the grid


@pytest.mark.parametrize("num_parameters", [0, 1, 1000, 10**12])
@pytest.mark.parametrize("norm", [1e-6, 0.3, 1024.0])
def test_the_pitch_is_public_and_its_cost_is_bounded(norm, num_parameters):
    pitch = grid_noise.pitch(norm, num_parameters)
    assert np.frexp(pitch)[0] == 0.5  # a power of two
    cost = pitch * np.sqrt(max(num_parameters, 1)) / norm
    assert grid_noise.GRID_MARGIN / 2 < cost <= grid_noise.GRID_MARGIN


def test_rounding_moves_neighbors_apart_by_at_most_the_margin():
    """Also where every coordinate is at the edge of its cell, and the bound is nearly met."""
    rng = np.random.default_rng(0)
    size, norm = 10_000, 0.7
    pitch = grid_noise.pitch(norm, size)
    for near in (rng.normal(size=size), np.full(size, (7.5 - 1e-9) * pitch)):
        step = rng.normal(size=size)
        far = near + norm * step / np.linalg.norm(step)
        if near[0] == near[1]:
            far = near + 2e-9 * pitch
        moved = np.linalg.norm(pitch * (np.rint(far / pitch) - np.rint(near / pitch)))
        assert moved <= np.linalg.norm(far - near) + grid_noise.GRID_MARGIN * norm
    assert moved > grid_noise.GRID_MARGIN * norm / 2


def test_the_accounted_multiplier_pays_for_grid_and_clipping():
    accounted = grid_noise.accounted_noise_multiplier(1.5)
    assert accounted == pytest.approx(1.5 / (1 + grid_noise.GRID_MARGIN + 1e-4), rel=1e-15)
    assert 0.999 * 1.5 < accounted < 1.5


def test_grid_noise_is_a_rounded_gaussian():
    """Whole numbers with the probabilities of the Gaussian's cells."""
    cells = 2.5
    noise = grid_noise.grid_noise(fresh_bits(), cells=cells, size=1 << 20)
    np.testing.assert_array_equal(noise, np.rint(noise))
    edges = np.arange(-8, 10) - 0.5
    expected = np.diff(np.concatenate([[0], stats.norm.cdf(edges / cells), [1]]))
    found = np.bincount(np.digitize(noise, edges), minlength=expected.size)
    chance = 1e-9  # of failing; the bits differ in every run
    assert stats.chisquare(found, expected * noise.size).pvalue > chance
    wrong = np.diff(np.concatenate([[0], stats.norm.cdf(edges / (1.01 * cells)), [1]]))
    assert stats.chisquare(found, wrong * noise.size).pvalue < chance


def test_noise_beyond_the_whole_numbers_is_refused():
    with pytest.raises(ValueError, match=r"grid cells is too wide .* lower noise_multiplier"):
        grid_noise.grid_noise(KEY, cells=2.0**49, size=3)
    with pytest.raises(ValueError, match=r"max_grad_norm=1e-40 is too small for noise='secure'"):
        grid_noise.pitch(1e-40, 10)


def test_the_key_is_the_end_of_the_bits():
    """The first 8 bytes are the key of the other generators, which an attacker may learn."""
    other = bytes(8) + KEY[8:] + KEY
    np.testing.assert_array_equal(grid_noise.words(other, 10), grid_noise.words(KEY, 10))


def test_secure_parts_are_those_of_the_whole():
    size, sizes = 100_003, {"cells": 1e6, "size": 100_003}  # ends inside a block
    whole = grid_noise.grid_noise(KEY, **sizes)
    np.testing.assert_array_equal(whole, np.rint(normals(size) * 1e6))
    for start, stop in [(0, size), (0, 10), (40_000, 40_000), (32_760, 32_780), (99_990, size)]:
        part = grid_noise.grid_noise(KEY, start=start, stop=stop, **sizes)
        np.testing.assert_array_equal(part, whole[start:stop])


def test_secure_sums_lie_on_the_grid():
    """Sums that are no multiple of the pitch are rounded before the noise is added."""
    sums = np.random.default_rng(0).normal(size=70_001)
    noise = grid_noise.grid_noise(KEY, cells=1e4, size=sums.size)
    noisy = grid_noise.noisy_sum(sums, noise, 2.0**-10)
    np.testing.assert_array_equal(noisy, (np.rint(sums * 2.0**10) + noise) * 2.0**-10)
    np.testing.assert_array_equal(noisy * 2.0**10, np.rint(noisy * 2.0**10))


def test_the_tail_reaches_as_far_as_said():
    """The extreme words: the largest radius, no radius, half a turn; all finite."""
    words = np.array([0, 0, 2**64 - 1, 0, 2**63, 5], np.uint64)
    out = np.empty(6)
    grid_noise.box_muller(words, out)
    longest = np.sqrt(2 * 64 * np.log(2))
    assert longest > 9.4
    assert 2 * stats.norm.sf(longest) < 5e-21
    np.testing.assert_allclose(out, [longest, -longest, 0, 0, 0, 0], atol=1e-8)
