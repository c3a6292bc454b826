# SPDX-License-Identifier: Apache-2.0
"""Universal hash of clipped sums on the devices where they lie; 32 bytes of each reach the host."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dualdp.randomness.universal_hash import BLOCK, ROWS, Hashed, level_keys, num_integers


def hash_sums(secret: bytes, sums: Sequence[Any]) -> list[Hashed]:
    """Return the hashes of some arrays, one for each set of shards that a device here holds.

    Shards are told apart by where they begin; devices with equal shards count once.

    Guarantees:
        On one device, the hash of `dualdp.randomness.universal_hash`.
            [test_hashes_of_devices_are_those_of_numpy]
    """
    sharding = sums[0].sharding if sums else None
    if not isinstance(sharding, NamedSharding):
        layout = [(x.dtype.name, x.shape) for x in sums]
        return [(layout, np.asarray(_hashed(_keys(secret, layout), *sums)).tobytes())]
    specs = tuple(x.sharding.spec for x in sums)
    local = [(x.dtype.name, x.sharding.shard_shape(x.shape)) for x in sums]
    found = _hashed_on_mesh(sharding.mesh, specs)(_keys(secret, local), *sums)
    starts = [x.sharding.addressable_devices_indices_map(x.shape) for x in sums]
    parts = set()
    for shard in found.addressable_shards:
        firsts = [tuple(part.start or 0 for part in each[shard.device]) for each in starts]
        place = tuple((*kind, first) for kind, first in zip(local, firsts, strict=True))
        parts.add((place, np.asarray(shard.data).tobytes()))
    return [(list(place), part) for place, part in sorted(parts)]


def _keys(secret: bytes, layout: Sequence[tuple[Any, ...]]) -> np.ndarray[Any, Any]:
    """Keys for arrays of these dtypes and shapes, (levels, BLOCK + ROWS - 1) uint32."""
    sizes = [(int(np.prod(shape)), jnp.dtype(name).itemsize) for name, shape in layout]
    length = sum(num_integers(size, itemsize) for size, itemsize in sizes)
    return level_keys(secret, length).astype(np.uint32)


def device_hash(keys: Any, *arrays: Any) -> Any:
    """Return (ROWS,) uint32, (0,) if there is no number; `keys` (levels, ...) uint32."""
    numbers = [_integers(x) for x in arrays]
    for key in keys:
        missing = -sum(map(len, numbers)) % BLOCK
        blocks = jnp.concatenate([*numbers, jnp.zeros(missing, jnp.int16)]).reshape(-1, BLOCK)
        blocks = jax.lax.bitcast_convert_type(blocks.astype(jnp.int32), jnp.uint32)
        matrix = jnp.stack([key[row : row + BLOCK] for row in range(ROWS)], axis=1)
        sums = jax.lax.dot(blocks, matrix, preferred_element_type=jnp.uint32)  # modulo 2^32
        numbers = [_integers(sums)]
    return sums.reshape(-1)


def _integers(array: Any) -> Any:
    """Bits of an array, in C order, as 16-bit integers; as 8-bit ones for dtypes of one byte."""
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        array = jnp.stack([array.real, array.imag], axis=-1)
    if array.dtype.itemsize == 1:
        return jax.lax.bitcast_convert_type(array, jnp.int8).reshape(-1).astype(jnp.int16)
    return jax.lax.bitcast_convert_type(array, jnp.int16).reshape(-1)


_hashed = jax.jit(device_hash)


@cache
def _hashed_on_mesh(mesh: Mesh, specs: tuple[P, ...]) -> Any:
    """Program from keys and arrays to the hash of each device's shards, (devices * ROWS,)."""
    out = P(mesh.axis_names)
    of_each = jax.shard_map(
        device_hash, mesh=mesh, in_specs=(P(), *specs), out_specs=out, check_vma=False
    )
    return jax.jit(of_each)
