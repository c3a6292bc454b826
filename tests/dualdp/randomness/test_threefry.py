# SPDX-License-Identifier: Apache-2.0
"""Counter-based streams against published vectors, and their normals."""

import numpy as np
import pytest
from scipy import stats

from dualdp.randomness.threefry import bits, fold_in, normal, threefry2x32

KEY = np.array([7, 11], np.uint32)


@pytest.mark.parametrize(
    ("key", "counter", "expected"),
    [
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((0xFFFFFFFF,) * 2, (0xFFFFFFFF,) * 2, (0x1CB996FC, 0xBB002BE7)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_threefry_gives_the_known_answers(key, counter, expected):
    """The vectors that Salmon et al. publish with Random123 (kat_vectors, threefry2x32, 20)."""
    words = [np.array([word], np.uint32) for word in counter]
    x, y = threefry2x32(np.array(key, np.uint32), *words)
    assert (int(x[0]), int(y[0])) == expected


@pytest.mark.parametrize("width", [32, 64])
def test_a_stream_is_a_function_of_position(width):
    """Longer than one chunk; the beginning does not depend on the length."""
    long = bits(KEY, (3, 20_001), width=width).reshape(-1)
    np.testing.assert_array_equal(bits(KEY, 1000, width=width), long[:1000])
    assert np.unique(long).size > 0.999 * long.size
    assert bits(KEY, (0, 4), width=width).shape == (0, 4)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_normals_are_normal(dtype):
    draws = normal(KEY, 200_000, dtype=dtype)
    assert draws.dtype == dtype
    assert stats.kstest(draws, "norm").pvalue > 1e-3
    assert stats.kstest(draws * 1.02, "norm").pvalue < 1e-3  # the test sees two per cent
    assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 0.01


def test_fold_in_derives_distinct_keys():
    keys = {tuple(fold_in(KEY, index)) for index in range(1000)}
    assert len(keys) == 1000
    with pytest.raises(OverflowError, match="4294967296 out of bounds for uint32"):
        fold_in(KEY, 1 << 32)
