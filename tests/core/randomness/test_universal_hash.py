# SPDX-License-Identifier: Apache-2.0
"""The universal hash against its definition in whole numbers, and what its bound stands on."""

import numpy as np
import pytest

from dualdp.randomness.universal_hash import BLOCK, ROWS, hash_arrays, level_keys, num_levels

SECRET = bytes(range(64))
RNG = np.random.default_rng(0)


def defined(arrays):
    """The hash as the module's docstring says it, in Python's integers."""
    halves = [np.ravel(a).view("<i2" if a.itemsize > 1 else "i1").tolist() for a in arrays]
    numbers = sum(halves, [])
    for key in level_keys(SECRET, len(numbers)).tolist():
        level = []
        for first in range(0, len(numbers), BLOCK):
            block = numbers[first : first + BLOCK]
            for row in range(ROWS):
                total = sum(k * x for k, x in zip(key[row:], block, strict=False)) % 2**32
                level += [total % 2**16, total // 2**16]
        numbers = [x - 2**16 if x >= 2**15 else x for x in level]
    return np.array(numbers, "<i2").tobytes()


@pytest.mark.parametrize(
    "arrays",
    [
        [RNG.normal(size=(3, 5)).astype(np.float32)],
        [RNG.normal(size=n).astype(np.float16) for n in (1, 0, 7)],
        [np.float64(RNG.normal()), RNG.normal(size=BLOCK)],
        [RNG.integers(0, 256, 2 * BLOCK, np.uint8), RNG.normal(size=3).astype(np.complex64)],
        [np.full(70 * BLOCK, -(2**15), np.int16)],  # the largest sums, three levels
    ],
    ids=["float32", "float16", "float64", "bytes", "levels"],
)
def test_the_hash_is_its_definition(arrays):
    layout, found = hash_arrays(SECRET, arrays)
    assert layout == [(str(a.dtype), a.shape) for a in arrays]
    assert found == defined([np.asarray(a) for a in arrays])
    assert len(found) == 4 * ROWS


def test_memory_order_does_not_matter_and_nothing_has_an_empty_hash():
    array = RNG.normal(size=(4, 6))
    assert hash_arrays(SECRET, [np.asfortranarray(array)]) == hash_arrays(SECRET, [array])
    assert hash_arrays(SECRET, [np.empty((0, 3))]) == ([("float64", (0, 3))], b"")


def test_every_bit_word_and_place_changes_the_hash():
    """Where the first level has several blocks, whose sums are hashed again."""
    arrays = [RNG.normal(size=700).astype(np.float32), RNG.normal(size=3)]
    found = {hash_arrays(SECRET, arrays)[1]}
    bits = [(0, b) for b in range(0, 32 * 700, 41)] + [(1, b) for b in range(64 * 3)]
    for which, bit in bits:
        changed = [array.copy() for array in arrays]
        changed[which].view(np.uint8)[bit // 8] ^= 1 << bit % 8
        found.add(hash_arrays(SECRET, changed)[1])
    places = [(0, 1), (0, BLOCK // 2), (3, 600)]  # of two words that are swapped
    for one, other in places:
        swapped = arrays[0].copy()
        swapped[[one, other]] = swapped[[other, one]]
        found.add(hash_arrays(SECRET, [swapped, arrays[1]])[1])
    found.add(hash_arrays(SECRET, arrays[::-1])[1])
    found.add(hash_arrays(SECRET[::-1], arrays)[1])
    assert len(found) == 1 + len(bits) + len(places) + 2


@pytest.mark.parametrize("difference", [1, -1, 3, 2**15, -(2**15), 3 * 2**14, 2**16 - 1])
def test_one_key_at_most_hides_a_difference(difference):
    """k times the difference takes 2^17 values modulo 2^32, so one k at most gives any of them."""
    products = np.arange(2**17, dtype=np.int64) * difference % 2**32
    assert len(np.unique(products)) == 2**17


def test_keys_have_17_bits_and_each_level_has_its_own():
    keys = level_keys(SECRET, 64 * BLOCK + 1)
    assert keys.shape == (num_levels(64 * BLOCK + 1), BLOCK + ROWS - 1) == (3, BLOCK + ROWS - 1)
    assert (keys.min() >= 0, keys.max() < 2**17, keys.max() > 2**16) == (True, True, True)
    assert len(np.unique(keys)) > 0.98 * keys.size
    assert np.array_equal(level_keys(SECRET, 5), keys[:1])
    assert [num_levels(n) for n in (0, 1, BLOCK, BLOCK + 1, 10**12)] == [1, 1, 1, 2, 6]
