# SPDX-License-Identifier: Apache-2.0
"""Multithreaded work in fixed blocks, each of which depends on its index alone."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from numpy.typing import NDArray


def cores() -> int:
    """Return the number of processors that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def fill_blocks(fill: Callable[[int], None], count: int, threads: int | None = None) -> None:
    """Fill blocks 0..count-1, each once by `fill(index)`, in several threads.

    Guarantees:
        Every block is filled, also when a helping thread died.
            [test_a_block_whose_thread_died_is_filled_by_the_caller]
    """
    left, failed = deque(range(count)), list[int]()  # a deque's pops are thread-safe

    def work() -> None:
        while True:
            try:
                index = left.popleft()
            except IndexError:
                return
            try:
                fill(index)
            except Exception:  # noqa: BLE001 - repeated by the calling thread, which raises it
                failed.append(index)

    # Daemons: a process that ends must not wait for unused noise.
    several = range(min(threads or cores(), count) - 1)
    helpers = [threading.Thread(target=work, daemon=True) for _ in several]
    for helper in helpers:
        helper.start()
    work()
    for helper in helpers:
        helper.join()
    for index in failed:
        fill(index)


def fill_between(
    out: NDArray[Any],
    start: int,
    *,
    size: int,
    block: int,
    draw: Callable[[int, int], NDArray[Any]],
    threads: int | None = None,
) -> None:
    """Fill `out` with the elements from `start` on of an array of `size` in fixed blocks.

    Only blocks that overlap it are drawn, each as a whole, by draw(index, length).

    Guarantees:
        The numbers are those of the whole array, whatever part is asked for.
            [test_a_part_is_that_of_the_whole]
    """
    stop, first = start + len(out), start // block

    def fill(number: int) -> None:
        low = (first + number) * block
        drawn = draw(first + number, min(block, size - low))
        begin, end = max(start, low), min(stop, low + len(drawn))
        out[begin - start : end - start] = drawn[begin - low : end - low]

    fill_blocks(fill, -(-stop // block) - first if len(out) else 0, threads)
