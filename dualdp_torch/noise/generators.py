# SPDX-License-Identifier: Apache-2.0
"""Normals of torch's own generators, seeded by our keys, in blocks that can be drawn separately."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch._utils import _unflatten_dense_tensors

from dualdp.randomness import threefry
from dualdp.randomness.parallel import Blocks
from dualdp_torch.rules.base import Tensor, on_host

_STATE_WORDS = 624  # words of the Mersenne Twister behind torch's CPU generator
_STATE_OFFSET = 24  # bytes before these words in the saved state
_BLOCK = 1 << 16  # numbers that one keyed generator draws on the CPU
_FEW = 16  # blocks up to which one thread draws them all
_DEVICE_BLOCK = 1 << 22  # numbers per block on other devices, where each draw costs a launch
#: Version of the fast noise's stream; a run resumed with another version releases its steps anew.
STREAM = 3


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
    """Weighted sum of normals: a flat array of `size` numbers, of the dtype and device of `like`.

    `terms` are keys and factors, added up in this order; the first factor is >= 0. The normals
    depend on all 64 bits of a key. Each block has a generator of its own, so that any part can be
    drawn separately. On the CPU, where torch draws on one core, blocks are drawn in parallel; the
    numbers do not depend on the number of threads.
    """

    def __init__(self, terms: Sequence[tuple[Any, float]], size: int, like: Tensor) -> None:
        self._terms, self._size = terms, size
        self._like, self._on_host = like.new_empty(0), on_host(like)
        self._kept = lru_cache(2)(self._whole_block)  # consecutive small parameters share a block

    def _draw(self, block: int, out: Tensor) -> None:
        """Fill `out` with one block of the sum."""
        (key, stddev), *more = self._terms
        out.normal_(0.0, stddev, generator=_block_generator(key, block, out.device))
        term = torch.empty_like(out) if more else out
        total, drawn = (out.numpy(), term.numpy()) if self._on_host else (out, term)
        for key, factor in more:
            term.normal_(0.0, abs(factor), generator=_block_generator(key, block, out.device))
            if factor < 0:
                total -= drawn
            else:
                total += drawn

    def _whole_block(self, block: int, length: int) -> Any:
        drawn = self._like.new_empty(length)
        self._draw(block, drawn)
        return drawn.numpy() if self._on_host else drawn

    def add_at(self, start: int, *totals: Tensor) -> Tensor:
        """Return (k,) normals, the array's from `start` on, plus the k numbers of some tensors."""
        noise = self._like.new_empty(sum(total.numel() for total in totals))
        stop = start + len(noise)
        size = _BLOCK if self._on_host else _DEVICE_BLOCK
        # NumPy, because torch's own operations would start threads inside of ours.
        out: Any = noise.numpy() if self._on_host else noise
        first = start // size

        def fill(number: int) -> None:
            block = first + number
            low, high = block * size, min((block + 1) * size, self._size)
            begin, end = max(start, low), min(stop, high)
            part = slice(begin - start, end - start)
            if end - begin == high - low:
                self._draw(block, noise[part])
            else:
                out[part] = self._kept(block, high - low)[begin - low : end - low]

        count = -(-stop // size) - first if len(noise) else 0
        # A few blocks take less time than a thread needs to start while torch's own threads spin.
        threads = torch.get_num_threads() if self._on_host and count > _FEW else 1
        Blocks(fill, count).finish(threads)
        torch._foreach_add_(_unflatten_dense_tensors(noise, totals), totals)
        return noise
