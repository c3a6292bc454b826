# SPDX-License-Identifier: Apache-2.0
"""Multithreaded work in fixed blocks, each of which depends on its index alone."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor


def cores() -> int:
    """Return the number of processors that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def fill_blocks(fill: Callable[[int], None], count: int, threads: int | None = None) -> None:
    """Fill blocks 0..count-1, each once by `fill(index)`, in several threads.

    Guarantees:
        An error in a thread is raised here: noise that was not drawn is never released as zero.
            [test_an_error_in_a_thread_is_raised]
    """
    several = max(1, min(threads or cores(), count))

    def share(first: int) -> None:
        for index in range(first, count, several):
            fill(index)

    if several == 1:  # also sparing small draws the pool
        share(0)
        return
    with ThreadPoolExecutor(several - 1) as pool:
        helping = [pool.submit(share, first) for first in range(1, several)]
        share(0)
        for one in helping:
            one.result()
