# SPDX-License-Identifier: Apache-2.0
"""Normals of torch's own generators, seeded by our keys, in blocks that can be drawn separately."""

from __future__ import annotations

import hashlib
import math
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from dualdp.randomness import threefry
from dualdp.randomness.parallel import Blocks, fill_between
from dualdp_torch.rules.base import Tensor

_STATE_WORDS = 624  # words of the Mersenne Twister behind torch's CPU generator
_STATE_OFFSET = 24  # bytes before these words in the saved state
_BLOCK = 1 << 16  # numbers that one keyed generator draws on the CPU
_FEW = 16  # blocks up to which one thread draws them all
_DEVICE_BLOCK = 1 << 20  # numbers per block on other devices, where each draw costs a launch
#: Version of the fast noise's stream; a run resumed with another version releases its steps anew.
STREAM = 2


def add_normal(sums: Tensor, key: Any, stddev: float) -> Tensor:
    """Return a flat array plus normals that depend on all 64 bits of the key.

    Each block has a generator of its own, so that any part can be drawn separately. On the CPU,
    where torch draws on one core, blocks are drawn in parallel; the numbers do not depend on the
    number of threads.
    """
    out = torch.empty_like(sums)
    if sums.device.type != "cpu":
        for block, part in enumerate(out.split(_DEVICE_BLOCK)):
            part.normal_(0.0, stddev, generator=_block_generator(key, block, sums.device))
        return out.add_(sums)
    noisy, total = out.numpy(), sums.numpy()

    def fill(block: int) -> None:
        part = slice(block * _BLOCK, (block + 1) * _BLOCK)
        out[part].normal_(0.0, stddev, generator=_block_generator(key, block, sums.device))
        # NumPy, because torch's addition would start threads of its own inside this thread.
        np.add(noisy[part], total[part], out=noisy[part])

    blocks = math.ceil(sums.numel() / _BLOCK)
    # A few blocks take less time than a thread needs to start while torch's own threads spin.
    Blocks(fill, blocks).finish(torch.get_num_threads() if blocks > _FEW else 1)
    return out


def _block_generator(key: Any, block: int, device: torch.device) -> torch.Generator:
    """Generator of one block of a key's normals."""
    if device.type == "cpu":
        return _twister(key, block)
    return keyed_generator(threefry.fold_in(key, block), device)


def keyed_generator(key: Any, device: torch.device) -> torch.Generator:
    """Return a generator that depends on all 64 bits of the key."""
    if device.type == "cpu":
        return _twister(key, 0)
    generator = torch.Generator(device)
    generator.manual_seed((int(key[0]) << 32) | int(key[1]))
    return generator


def _twister(key: Any, block: int) -> torch.Generator:
    """CPU generator whose whole state is derived from (key, block).

    Torch's own seeding keeps 32 bits of a seed, so that keys of different steps would soon collide.
    """
    secret = np.array([*key, block], "<u8").tobytes()
    words = np.frombuffer(hashlib.shake_128(secret).digest(4 * _STATE_WORDS), "<u4")
    generator = torch.Generator()
    state = generator.get_state().numpy()
    state[_STATE_OFFSET : _STATE_OFFSET + 8 * _STATE_WORDS].view(np.uint64)[:] = words
    generator.set_state(torch.from_numpy(state))
    return generator


class Normals:
    """Normals that `add_normal` would add to a flat array, drawn part by part.

    The array has `size` numbers, of the dtype and device of `like`.
    """

    def __init__(self, key: Any, size: int, stddev: float, like: Tensor) -> None:
        self._size, self._on_host = size, like.device.type == "cpu"
        self._draw = lru_cache(2)(self._block)  # consecutive small parameters share a block
        self._key, self._stddev, self._like = key, stddev, like.new_empty(0)

    def _block(self, block: int, length: int) -> Any:
        """All normals of one block."""
        drawn = self._like.new_empty(length)
        generator = _block_generator(self._key, block, drawn.device)
        drawn.normal_(0.0, self._stddev, generator=generator)
        return drawn.numpy() if self._on_host else drawn

    def add_at(self, start: int, total: Tensor) -> Tensor:
        """Return (k,) numbers, the array's from `start` on, plus their normals."""
        noise = torch.empty_like(total)
        fill_between(
            noise.numpy() if self._on_host else noise,
            start,
            size=self._size,
            block=_BLOCK if self._on_host else _DEVICE_BLOCK,
            draw=self._draw,
            threads=torch.get_num_threads() if self._on_host else 1,
        )
        return noise.add_(total)
