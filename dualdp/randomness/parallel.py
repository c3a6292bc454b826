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


class Blocks:
    """Blocks 0..count-1, each filled once by `fill(index)`, now or in background threads.

    Guarantees:
        After `finish` every block is filled, also when a background thread died.
            [test_a_block_whose_thread_died_is_filled_by_the_caller]
    """

    def __init__(self, fill: Callable[[int], None], count: int) -> None:
        self._fill, self._left = fill, deque(range(count))  # whose pops are thread-safe
        self._failed: list[int] = []
        self._threads: list[threading.Thread] = []

    def begin(self, threads: int = 1) -> None:
        """Start background threads and return."""
        for _ in range(min(threads, len(self._left))):
            # A daemon: a process that ends must not wait for unused noise.
            thread = threading.Thread(target=self._work, daemon=True)
            self._threads.append(thread)
            thread.start()

    def finish(self, threads: int | None = None) -> None:
        """Fill the remaining blocks, with the calling thread too, and wait for all threads."""
        self.begin(min(threads or cores(), len(self._left)) - 1)
        self._work()
        for thread in self._threads:
            thread.join()
        for index in self._failed:
            self._fill(index)

    def _work(self) -> None:
        """Fill blocks until none is left."""
        while True:
            try:
                index = self._left.popleft()
            except IndexError:
                return
            try:
                self._fill(index)
            except Exception:  # noqa: BLE001 - repeated by the calling thread, which raises it
                self._failed.append(index)


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

    Blocks(fill, -(-stop // block) - first if len(out) else 0).finish(threads)
