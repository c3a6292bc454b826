# SPDX-License-Identifier: Apache-2.0
"""Universal hash of clipped sums on the device where they lie; 32 bytes reach the host."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from dualdp.randomness.universal_hash import BLOCK, ROWS, Hashed, level_keys, num_integers
from dualdp_torch.rules.base import Tensor

_CHUNK = {"cpu": 1024}  # blocks that are multiplied at once, for the cache
_DEVICE_CHUNK = 1 << 14  # elsewhere: 128 MiB


def hash_sums(secret: bytes, sums: Iterable[Tensor]) -> list[Hashed]:
    """Return the hashes of some tensors, one for each device that holds some of them.

    Guarantees:
        On one device, the hash of `dualdp.randomness.universal_hash`.
            [test_hashes_of_devices_are_those_of_numpy]
    """
    by_device: dict[torch.device, list[Tensor]] = {}
    for total in sums:
        by_device.setdefault(total.device, []).append(total.detach())
    return [hash_tensors(secret, tensors) for tensors in by_device.values()]


def hash_tensors(secret: bytes, tensors: Sequence[Tensor]) -> Hashed:
    """Return the hash of tensors of one device, with their dtypes and shapes."""
    length = sum(num_integers(t.numel(), t.element_size()) for t in tensors)
    keys = torch.from_numpy(level_keys(secret, length)).to(tensors[0].device)
    layout = [(str(t.dtype).removeprefix("torch."), tuple(t.shape)) for t in tensors]
    return layout, device_hash(keys, tensors).cpu().numpy().tobytes()


def device_hash(keys: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    """Return (16,) int16, (0,) if there is no number; `keys` (levels, BLOCK + ROWS - 1) int32."""
    numbers = [_integers(t) for t in tensors]
    for key in keys.double():
        missing = -sum(map(len, numbers)) % BLOCK
        blocks = torch.cat([*numbers, numbers[0].new_zeros(missing)]).view(-1, BLOCK)
        matrix = key.unfold(0, ROWS, 1).contiguous()  # (BLOCK, ROWS)
        chunks = blocks.split(_CHUNK.get(key.device.type, _DEVICE_CHUNK))
        sums = torch.cat([chunk.double() @ matrix for chunk in chunks])  # exact: below 2^42
        # The low halves of 64-bit integers: the sums modulo 2^32.
        numbers = [sums.long().view(torch.int16).view(-1, 4)[:, :2].reshape(-1)]
    return numbers[0]


def _integers(tensor: Tensor) -> Tensor:
    """Bits of a tensor, in C order, as 16-bit integers; as 8-bit ones for dtypes of one byte."""
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.int16) if flat.element_size() > 1 else flat.view(torch.int8).short()
