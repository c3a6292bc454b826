# SPDX-License-Identifier: Apache-2.0
"""How much a call may keep: what the device has free bounds it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch

#: Bytes that no device is asked about, and the part of its free memory that a call may keep.
SURELY_FREE = 1 << 26
PART = 0.5


def free_memory(device: torch.device) -> int:
    """Bytes that can still be taken on a device."""
    if device.type == "cuda":
        reusable = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + reusable
    with contextlib.suppress(OSError), open("/proc/meminfo") as lines:
        sizes = dict(line.split(":", 1) for line in lines)
        return 1024 * int(sizes["MemAvailable"].split()[0])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def may_keep(numbers: int, like: torch.Tensor) -> bool:
    """Whether so many numbers, as those of `like`, may stay beside what is there already."""
    size = numbers * like.element_size()
    return size < SURELY_FREE or size < PART * free_memory(like.device)


def pieces(n: int, each: int, like: torch.Tensor) -> Iterator[slice]:
    """Rows that together take no more than what is surely free, at `each` numbers per row."""
    rows = max(SURELY_FREE // max(each * like.element_size(), 1), 1)
    for start in range(0, max(n, 1), rows):
        yield slice(start, min(start + rows, n))
