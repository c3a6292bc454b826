# SPDX-License-Identifier: Apache-2.0
"""Normals of torch's own generators, seeded by our keys, in blocks that can be drawn separately."""

from __future__ import annotations

import hashlib
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from dualdp.randomness import threefry
from dualdp.randomness.parallel import fill_blocks
from dualdp_torch.rules.base import Tensor, on_host

Key = NDArray[np.uint32]  # (2,)

_STATE_WORDS = 624  # words of the Mersenne Twister behind torch's CPU generator
_STATE_OFFSET = 24  # bytes before these words in the saved state
_BLOCK = 1 << 16  # numbers that one keyed generator draws on the CPU
_FEW = 16  # blocks up to which one thread draws them all
_DEVICE_BLOCK = 1 << 22  # numbers per block on other devices, where each draw costs a launch


def keyed_generator(key: Key, device: torch.device) -> torch.Generator:
    """Return a generator that depends on all 64 bits of the key."""
    if device.type == "cpu":
        return block_generator(key, 0, device)
    generator = torch.Generator(device)
    generator.manual_seed((int(key[0]) << 32) | int(key[1]))
    return generator


def block_generator(key: Key, block: int, device: torch.device) -> torch.Generator:
    """Return the generator of one block of a key's normals.

    On the CPU its whole state is derived from (key, block): torch's own seeding keeps 32 bits of a
    seed, so that keys of different steps would soon collide.
    """
    if device.type != "cpu":
        return keyed_generator(threefry.fold_in(key, block), device)
    secret = np.array([*key, block], "<u8").tobytes()
    words = np.frombuffer(hashlib.shake_128(secret).digest(4 * _STATE_WORDS), "<u4")
    generator = torch.Generator()
    state = generator.get_state().numpy()
    state[_STATE_OFFSET : _STATE_OFFSET + 8 * _STATE_WORDS].view(np.uint64)[:] = words
    generator.set_state(torch.from_numpy(state))
    return generator


class Normals:
    """Flat array of `size` normals of a key, of the dtype and device of `like`, drawn in parts.

    Each block of the array has a generator of its own. On the CPU, where torch draws on one core,
    blocks are drawn in parallel; the numbers do not depend on the number of threads.
    """

    def __init__(self, key: Key, stddev: float, size: int, like: Tensor) -> None:
        self._key, self._stddev, self._size = key, stddev, size
        self._like, self._on_host = like.new_empty(0), on_host(like)
        self._kept = lru_cache(2)(self._drawn)  # consecutive small parameters share a block

    def _drawn(self, block: int, length: int) -> Tensor:
        generator = block_generator(self._key, block, self._like.device)
        return self._like.new_empty(length).normal_(0.0, self._stddev, generator=generator)

    def between(self, start: int, stop: int) -> Tensor:
        """Return (stop - start,) numbers of the array."""
        noise = self._like.new_empty(stop - start)
        size = _BLOCK if self._on_host else _DEVICE_BLOCK
        first = start // size

        def fill(number: int) -> None:
            block = first + number
            low, high = block * size, min((block + 1) * size, self._size)
            begin, end = max(start, low), min(stop, high)
            part = noise[begin - start : end - start]
            if end - begin == high - low:
                part.normal_(
                    0.0, self._stddev, generator=block_generator(self._key, block, part.device)
                )
                return
            drawn = self._kept(block, high - low)[begin - low : end - low]
            if self._on_host:  # NumPy: torch's own operations would start threads inside of ours
                part.numpy()[:] = drawn.numpy()
            else:
                part.copy_(drawn)

        count = -(-stop // size) - first if len(noise) else 0
        # A few blocks take less time than a thread needs to start while torch's own threads spin.
        threads = torch.get_num_threads() if self._on_host and count > _FEW else 1
        fill_blocks(fill, count, threads)
        return noise
