# SPDX-License-Identifier: Apache-2.0
"""Work in fixed blocks: parts of long rows of normals, drawn alone."""

import numpy as np
import pytest

from dualdp.randomness import parallel, threefry

KEY = np.array([5, 9], np.uint32)
SIZE = 100_003  # ends inside a block
PARTS = [(0, SIZE), (0, 10), (40_000, 40_000), (32_760, 32_780), (65_536, SIZE), (99_990, SIZE)]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_portable_parts_are_those_of_the_whole(dtype):
    whole = threefry.normal(KEY, SIZE, dtype=dtype)
    for start, stop in PARTS:
        part = threefry.normal_between(KEY, start, stop, dtype=dtype)
        assert part.dtype == dtype
        np.testing.assert_array_equal(part, whole[start:stop])


@pytest.mark.parametrize("threads", [1, 2, 3, 9])
def test_every_block_is_filled_once(threads):
    filled = []
    parallel.fill_blocks(filled.append, 7, threads)
    parallel.fill_blocks(filled.append, 0, threads)
    assert sorted(filled) == list(range(7))


@pytest.mark.parametrize("index", range(4))
def test_an_error_in_a_thread_is_raised(index):
    """Noise that was not drawn must never be released as zero."""

    def broken(number):
        if number == index:
            raise MemoryError("no room")

    with pytest.raises(MemoryError, match="no room"):
        parallel.fill_blocks(broken, 4, 3)
