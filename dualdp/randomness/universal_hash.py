# SPDX-License-Identifier: Apache-2.0
"""Keyed universal hash of arrays, 32 bytes, with the same value on every device.

The bits of all arrays, one array after the other, are a sequence of signed 16-bit integers (8-bit
ones for dtypes of one byte). A level of the hash cuts its input into blocks of `BLOCK` integers x,
padded with zeros, and replaces each by `ROWS` numbers modulo 2^32,

    sum_j key[j + r] x[j],  r = 0 .. ROWS - 1,

whose 16-bit halves, the low one first, are the input of the next level, until one block is left.

Keys have 17 bits, so products and sums are exact in float64 and in 32-bit integers alike: a device
multiplies matrices of what it has. This module is the definition, in NumPy.

Guarantees:
    Two sequences of one length that differ have the same hash for at most a share 2^-133 of the
    keys (docs/threat_model.md has the proof), if they do not depend on the key.
        [test_every_bit_word_and_place_changes_the_hash]

Source: Carter & Wegman 1979, linear hash functions; Krovetz 2000, "UMAC", for the shifted keys of
the rows and the levels with a key each.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

BLOCK = 1024  # 16-bit integers of a block
ROWS = 8  # numbers of 32 bits that replace a block
_KEY_BITS = 17
_CHUNK = 1024  # blocks that are multiplied at once: keeps the working set in the cache
#: Dtype, shape and, of a shard, first index of each array; hash of all (no bytes if all are empty).
Hashed: TypeAlias = tuple[list[tuple[Any, ...]], bytes]


def num_levels(length: int) -> int:
    """Return the number of levels for a sequence of `length` integers, at least 1."""
    levels = 1
    while length > BLOCK:
        length, levels = 2 * ROWS * -(-length // BLOCK), levels + 1
    return levels


def level_keys(secret: bytes, length: int) -> NDArray[np.int32]:
    """Return (levels, BLOCK + ROWS - 1) int32 keys, uniform in [0, 2^17), for `length` integers.

    Source: FIPS 202 (SHAKE-128).
    """
    shape = num_levels(length), BLOCK + ROWS - 1
    stream = hashlib.shake_128(secret).digest(4 * shape[0] * shape[1])
    words = np.frombuffer(stream, "<u4") >> np.uint32(32 - _KEY_BITS)
    return words.astype(np.int32).reshape(shape)


def num_integers(size: int, itemsize: int) -> int:
    """Return how many integers an array of `size` numbers of `itemsize` bytes becomes."""
    return size * max(itemsize // 2, 1)


def _integers(array: NDArray[Any]) -> NDArray[Any]:
    """Bits of an array, in C order, as 16-bit integers; as 8-bit ones for dtypes of one byte."""
    return array.reshape(-1).view("<i2" if array.itemsize > 1 else np.int8)


def hash_arrays(secret: bytes, arrays: Iterable[Any]) -> Hashed:
    """Return the hash of arrays of fixed-width dtypes under a secret of 16 bytes or more."""
    arrays = [np.asarray(array, order="C") for array in arrays]
    numbers = np.concatenate([np.empty(0, "<i2"), *map(_integers, arrays)], dtype="<i2")
    for key in level_keys(secret, len(numbers)):
        matrix = np.lib.stride_tricks.sliding_window_view(key, ROWS).astype(np.float64)
        blocks = np.pad(numbers, (0, -len(numbers) % BLOCK)).reshape(-1, BLOCK)
        sums = np.empty((len(blocks), ROWS), "<i8")
        for first in range(0, len(blocks), _CHUNK):  # exact: below 2^42
            sums[first : first + _CHUNK] = blocks[first : first + _CHUNK].astype(float) @ matrix
        numbers = sums.view("<i2").reshape(-1, 4)[:, :2].reshape(-1)  # modulo 2^32
    return [(array.dtype.name, array.shape) for array in arrays], numbers.tobytes()
