# SPDX-License-Identifier: Apache-2.0
"""Bound on the memory that a call may keep, from the free memory of the device."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch

#: Bytes that are taken without asking the device, and fraction of its free memory for one call.
SURELY_FREE = 1 << 26
PART = 0.5


def free_memory(device: torch.device) -> int:
    """Bytes that can still be allocated on a device."""
    if device.type == "cuda":
        reusable = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + reusable
    with contextlib.suppress(OSError), open("/proc/meminfo") as lines:
        sizes = dict(line.split(":", 1) for line in lines)
        return 1024 * int(sizes["MemAvailable"].split()[0])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def may_keep(numbers: int, like: torch.Tensor) -> bool:
    """True if `numbers` more elements of the dtype of `like` may be kept on its device."""
    size = numbers * like.element_size()
    return size < SURELY_FREE or size < PART * free_memory(like.device)


def row_slices(n: int, each: int, like: torch.Tensor) -> Iterator[slice]:
    """Yield slices of n rows, each of at most SURELY_FREE bytes at `each` numbers per row."""
    rows = max(SURELY_FREE // max(each * like.element_size(), 1), 1)
    for start in range(0, max(n, 1), rows):
        yield slice(start, min(start + rows, n))
