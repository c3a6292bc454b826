# SPDX-License-Identifier: Apache-2.0
"""Work in fixed blocks: parts of long rows of normals, drawn alone."""

import threading

import numpy as np
import pytest

from dualdp.randomness import parallel, threefry
from dualdp.randomness.parallel import fill_between

KEY = np.array([5, 9], np.uint32)
SIZE = 100_003  # ends inside a block
PARTS = [(0, SIZE), (0, 10), (40_000, 40_000), (32_760, 32_780), (65_536, SIZE), (99_990, SIZE)]


def test_a_part_is_that_of_the_whole():
    whole, drawn = np.arange(23.0), []

    def draw(block, length):
        drawn.append(block)
        return whole[block * 5 :][:length]

    for start, stop in ((0, 23), (4, 6), (5, 10), (21, 23), (7, 7)):
        drawn.clear()
        out = np.full(stop - start, np.nan)
        fill_between(out, start, size=23, block=5, draw=draw)
        assert out.tolist() == whole[start:stop].tolist()
        assert sorted(drawn) == sorted({n // 5 for n in range(start, stop)})


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_portable_parts_are_those_of_the_whole(dtype):
    whole = threefry.normal(KEY, SIZE, dtype=dtype)
    for start, stop in PARTS:
        part = threefry.normal_between(KEY, start, stop, size=SIZE, dtype=dtype)
        assert part.dtype == dtype
        np.testing.assert_array_equal(part, whole[start:stop])


def test_a_block_whose_thread_died_is_filled_by_the_caller():
    """Noise that was not drawn must never be released as zero."""
    filled, caller, died = [], threading.current_thread(), threading.Event()

    def fill(index):
        if threading.current_thread() is not caller:
            died.set()
            raise MemoryError
        assert died.wait(60)
        filled.append(index)

    parallel.fill_blocks(fill, 5, 3)
    assert sorted(filled) == [0, 1, 2, 3, 4]

    def broken(index):
        raise MemoryError("no room")

    with pytest.raises(MemoryError, match="no room"):
        parallel.fill_blocks(broken, 3, 2)
