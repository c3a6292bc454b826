# SPDX-License-Identifier: Apache-2.0
"""Standard normals of one release, leaf by leaf or all leaves in one flat program.

Both give the numbers of `jax.random.normal(jax.random.fold_in(key, i), shape)`. On a CPU jax runs
each of Threefry's five blocks as a separate pass over each leaf; here one operation does all twenty
rounds for rows of all leaves, a few rows at a time, so that they stay in the cache.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dualdp_jax import compat

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_ROW = 512  # elements of one leaf per row
_ROWS = 64  # rows at a time, 128 KiB


def draw(key: Any, leaves: Sequence[Any]) -> list[Any]:
    """Return independent standard normals in the shapes and dtypes, float32 or float64, of leaves.

    Item i is `jax.random.normal` with the key `jax.random.fold_in(key, i)`; key is (2,) uint32.

    Guarantees:
        The numbers of `jax.random`, bit for bit.  [test_normals_are_those_of_jax]
    """
    return _drawn(key, tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves))


@partial(jax.jit, static_argnums=1)  # outside of a jitted function it is compiled once
def _drawn(key: Any, leaves: Sequence[Any]) -> list[Any]:
    """Normals of leaves that are shapes and dtypes."""
    numbers = sum(leaf.size for leaf in leaves)
    fits = all(leaf.dtype == jnp.float32 for leaf in leaves) and 0 < numbers < 2**32
    if not fits or jax.device_count() > 1:
        return _one_by_one(key, leaves)
    return list(
        jax.lax.platform_dependent(
            key,
            cpu=lambda key: _all_at_once(key, leaves),
            default=lambda key: _one_by_one(key, leaves),
        )
    )


def _one_by_one(key: Any, leaves: Sequence[Any]) -> list[Any]:
    """Normals leaf by leaf, which a compiler can spread over devices."""
    key = compat.wrap_key(key)
    return [
        jax.random.normal(jax.random.fold_in(key, index), leaf.shape, leaf.dtype)
        for index, leaf in enumerate(leaves)
    ]


def _all_at_once(key: Any, leaves: Sequence[Any]) -> list[Any]:
    """Normals of all leaves, cut into rows, each with the key and first counter of its leaf."""
    rows = [-(-leaf.size // _ROW) for leaf in leaves]
    first = np.cumsum([0, *rows], dtype=np.uint32)
    half = min(_ROWS, int(first[-1]) + 1) // 2
    parts = -(-int(first[-1]) // (2 * half))
    row = jnp.arange(parts * 2 * half, dtype=jnp.uint32)
    leaf = (row[:, None] >= first[1:-1]).sum(1)
    start = (row - jnp.asarray(first)[leaf]) * _ROW
    keys = _threefry(key, jnp.uint32(0), jnp.arange(len(leaves), dtype=jnp.uint32))
    cut = [v.reshape(parts, 2, half) for v in (keys[0][leaf], keys[1][leaf], start)]
    # XLA would fuse the words with their normals, which is slow: a loop of two steps keeps them
    # apart.
    flat = jax.lax.map(lambda part: _normals(jax.lax.map(_words, part)), cut).reshape(-1, _ROW)
    return [
        flat[begin : begin + count].reshape(-1)[: leaf.size].reshape(leaf.shape)
        for begin, count, leaf in zip(first[:-1], rows, leaves, strict=True)
    ]


def _threefry(key: Sequence[Any], x: Any, y: Any) -> tuple[Any, Any]:
    """Twenty rounds on counters of two words (Salmon et al. 2011, section 4.2)."""
    words = (key[0], key[1], key[0] ^ key[1] ^ np.uint32(0x1BD11BDA))
    x, y = x + words[0], y + words[1]
    for block in range(5):
        for shift in _ROTATIONS[block % 2]:
            x = x + y
            y = x ^ (y << np.uint32(shift) | y >> np.uint32(32 - shift))
        x = x + words[(block + 1) % 3]
        y = y + words[(block + 2) % 3] + np.uint32(block + 1)
    return x, y


def _words(part: Any) -> Any:
    """Random words (r, _ROW) from the keys and first counters of some rows, (r,) each."""
    *key, start = (values[:, None] for values in part)
    x, y = _threefry(key, jnp.uint32(0), start + jnp.arange(_ROW, dtype=jnp.uint32))
    return x ^ y


def _normals(words: Any) -> Any:
    """float32 normals from words, with the rounding of `jax.random.normal`."""
    one = np.float32(1)
    low = np.nextafter(-one, np.float32(0))
    unit = jax.lax.bitcast_convert_type(words >> 9 | 0x3F800000, jnp.float32) - one
    uniform = jnp.maximum(low, unit * (one - low) + low)
    return np.float32(math.sqrt(2)) * jax.lax.erf_inv(uniform)
