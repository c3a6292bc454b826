# SPDX-License-Identifier: Apache-2.0
"""The hash of sums on a device is that of the same bits in NumPy, on both stacks."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

from dualdp.randomness.universal_hash import BLOCK, hash_arrays
from dualdp_jax.parallel.sum_hash import hash_sums as jax_hash
from dualdp_torch.parallel.sum_hash import hash_sums as torch_hash
from tests.conftest import DEVICE

SECRET = bytes(range(64))
RNG = np.random.default_rng(0)
SHAPES = {
    "bfloat16": (3, 5),
    "float16": (),
    "float32": (2 * BLOCK + 1,),
    "float64": (40 * BLOCK,),
    "complex64": (7,),
    "uint8": (5,),
}


def torch_arrays(arrays):
    """Tensors with the bits of some arrays."""
    return [
        torch.from_numpy(a.view(np.int16)).to(DEVICE).view(torch.bfloat16)
        if a.dtype == ml_dtypes.bfloat16
        else torch.from_numpy(a).to(DEVICE)
        for a in arrays
    ]


def jax_arrays(arrays):
    """The same arrays on JAX's device."""
    return [jnp.asarray(a) for a in arrays]


STACKS = {"torch": (torch_arrays, torch_hash), "jax": (jax_arrays, jax_hash)}


@pytest.mark.parametrize("stack", STACKS)
def test_hashes_of_devices_are_those_of_numpy(stack):
    """Three levels, all dtypes, numbers of any bits, no axis, no number, another memory order."""
    drawn = [(RNG.normal(size=shape) * 50).astype(dtype) for dtype, shape in SHAPES.items()]
    bits = RNG.integers(0, 2**32, 3000, np.uint32).view(np.float32)
    put, found = STACKS[stack]
    with jax.enable_x64(True):
        arrays = [*map(np.asarray, drawn), bits, np.zeros((0, 3), np.float32)]
        assert found(SECRET, [*put(arrays), put(arrays)[0].T]) == [
            hash_arrays(SECRET, [*arrays, arrays[0].T])
        ]
        assert found(SECRET, put(arrays[-1:])) == [([("float32", (0, 3))], b"")]
        assert found(SECRET, []) in ([], [([], b"")])
