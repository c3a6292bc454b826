# SPDX-License-Identifier: Apache-2.0
"""Keyed counter-based randomness: Threefry-2x32, bit for bit the generator of `jax.random`.

A stream is a pure function of (key, position), so a batch or a noise vector can be drawn again, in
parts, and in both backends. Keys are `(2,)` uint32 arrays, accepted by `jax.random.wrap_key_data`.
The generator is statistical, not cryptographic; `noise="secure"` uses another one.

Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"; the counter layout is
that of `jax_threefry_partitionable=True`, the default of JAX.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dualdp.randomness.parallel import fill_blocks

UInt32 = NDArray[np.uint32]

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = np.uint32(0x1BD11BDA)
_CHUNK = 1 << 15  # words per pass: keeps the working set in the cache

# Coefficients of Giles 2012, "Approximating the erfinv function", single precision, highest first:
# (centre, tail).
_ERFINV = (
    (2.81022636e-08, -0.000200214257),
    (3.43273939e-07, 0.000100950558),
    (-3.5233877e-06, 0.00134934322),
    (-4.39150654e-06, -0.00367342844),
    (0.00021858087, 0.00573950773),
    (-0.00125372503, -0.0076224613),
    (-0.00417768164, 0.00943887047),
    (0.246640727, 1.00167406),
    (1.50140941, 2.83297682),
)


def threefry2x32(key: UInt32, high: UInt32, low: UInt32) -> tuple[UInt32, UInt32]:
    """Apply twenty rounds of Threefry-2x32 to counters of two words, each (m,) uint32.

    Source: Salmon et al. 2011, section 4.2.
    """
    words = (key[0], key[1], key[0] ^ key[1] ^ _PARITY)
    with np.errstate(over="ignore"):  # arithmetic modulo 2^32 is the definition
        x, y = high + words[0], low + words[1]
        spare = np.empty_like(y)
        for block in range(5):
            for shift in _ROTATIONS[block % 2]:
                x += y
                np.left_shift(y, np.uint32(shift), out=spare)
                np.right_shift(y, np.uint32(32 - shift), out=y)
                y |= spare
                y ^= x
            x += words[(block + 1) % 3]
            y += words[(block + 2) % 3] + np.uint32(block + 1)
    return x, y


def fold_in(key: UInt32, data: int) -> UInt32:
    """Return a key derived from a key and an integer below 2^32; equals `jax.random.fold_in`."""
    x, y = threefry2x32(key, np.zeros(1, np.uint32), np.array([data], np.uint32))
    return np.concatenate([x, y])


def bits(key: UInt32, shape: int | Sequence[int], *, width: int = 32) -> NDArray[Any]:
    """Return uniform unsigned integers of 32 or 64 bits; equals `jax.random.bits`.

    Element i in row-major order depends on (key, i) alone.
    """
    out = np.empty(shape, np.uint32 if width == 32 else np.uint64)
    _fill(out.reshape(-1), 0, partial(bits_at, key, width=width))
    return out


def bits_at(key: UInt32, index: NDArray[Any], *, width: int = 64) -> NDArray[Any]:
    """Return elements of `bits(key, size, width=width)`, at (m,) integers below its size."""
    count = index.astype(np.uint64)
    high, low = (count >> np.uint64(32)).astype(np.uint32), count.astype(np.uint32)
    x, y = threefry2x32(key, high, low)
    return x ^ y if width == 32 else (x.astype(np.uint64) << np.uint64(32)) | y.astype(np.uint64)


def _fill(out: NDArray[Any], start: int, draw: Callable[[NDArray[Any]], NDArray[Any]]) -> None:
    """Fill `out` with what `draw` gives for the positions from `start` on."""

    def fill(chunk: int) -> None:
        part = out[chunk * _CHUNK : (chunk + 1) * _CHUNK]
        low = start + chunk * _CHUNK
        part[:] = draw(np.arange(low, low + len(part), dtype=np.uint64))

    fill_blocks(fill, -(-len(out) // _CHUNK))


def _symmetric_uniform(words: NDArray[Any]) -> NDArray[Any]:
    """Uniform on (-1, 1) from raw words, with the rounding of `jax.random.normal`."""
    if words.dtype == np.uint32:
        unit = ((words >> np.uint32(9)) | np.uint32(0x3F800000)).view(np.float32)
    else:
        unit = ((words >> np.uint64(12)) | np.uint64(0x3FF0000000000000)).view(np.float64)
    kind = unit.dtype.type
    # `unit` has random bits as significand, so it lies in [1, 2); -1 is left out, where erfinv is
    # -inf.
    low = np.nextafter(kind(-1), kind(0))
    spread: NDArray[Any] = np.maximum(low, (unit - kind(1)) * (kind(1) - low) + low)
    return spread


def _erfinv32(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Inverse error function in single precision, by XLA's polynomial."""
    w = -np.log1p(-x * x)
    centre = w < np.float32(5)
    t = np.where(centre, w - np.float32(2.5), np.sqrt(w) - np.float32(3))
    result = np.float32(0)
    for a, b in _ERFINV:
        result = np.where(centre, np.float32(a), np.float32(b)) + result * t
    return result * x


def normal(
    key: UInt32, shape: int | Sequence[int], *, dtype: type[np.floating[Any]] = np.float32
) -> NDArray[Any]:
    """Return standard normals, those of `jax.random.normal(key, shape, dtype)` up to rounding.

    Guarantees:
        At most 3 ulp from JAX in float32, at most 1e-11 relative in float64.
            [test_normals_are_those_of_jax]
    """
    return normal_between(key, 0, int(np.prod(shape)), dtype=dtype).reshape(shape)


def normal_between(
    key: UInt32, start: int, stop: int, *, dtype: type[np.floating[Any]] = np.float32
) -> NDArray[Any]:
    """Return the numbers start..stop-1 of the normals of a key, drawing only these.

    Guarantees:
        Bit for bit those of the whole array.  [test_portable_parts_are_those_of_the_whole]
    """
    from scipy.special import erfinv

    width, inverse = (32, _erfinv32) if dtype is np.float32 else (64, erfinv)

    def draw(index: NDArray[Any]) -> NDArray[Any]:
        uniform = _symmetric_uniform(bits_at(key, index, width=width))
        normals: NDArray[Any] = dtype(math.sqrt(2)) * inverse(uniform)
        return normals

    out = np.empty(stop - start, dtype)
    _fill(out, start, draw)
    return out
