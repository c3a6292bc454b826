# SPDX-License-Identifier: Apache-2.0
"""Work in fixed blocks by any number of threads: what a block holds depends on its index alone."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any


def cores() -> int:
    """Processors that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


class Blocks:
    """Blocks 0..count-1, each filled once, now or ahead of time in the background.

    Args:
        fill: writes the block of this index; called from several threads at once.
        count: number of blocks.

    Guarantees:
        After `finish` every block is filled, also when a background thread died.
            [test_a_block_whose_thread_died_is_filled_by_the_caller]
    """

    def __init__(self, fill: Callable[[int], None], count: int) -> None:
        self._fill, self._count = fill, count
        self._lock, self._next, self._filled = threading.Lock(), 0, 0
        self._failed: list[int] = []
        self._threads: list[threading.Thread] = []

    def begin(self, threads: int = 1) -> None:
        """Start so many threads in the background and return."""
        for _ in range(min(threads, self._count)):
            # A daemon: a process that ends must not wait for noise that nobody will add.
            thread = threading.Thread(target=self._work, daemon=True)
            self._threads.append(thread)
            thread.start()

    def finish(self, threads: int | None = None) -> None:
        """Fill what is left, the caller helping, and wait for the others."""
        left = self._count - self._next
        self.begin(min(threads or cores(), left) - 1)
        self._work()
        for thread in self._threads:
            thread.join()
        for index in self._failed:
            self._fill(index)

    def _work(self) -> None:
        """Take blocks until none is left."""
        while (index := self._take()) is not None:
            try:
                self._fill(index)
            except Exception:  # noqa: BLE001 - done again by the caller, where it is raised
                self._failed.append(index)

    def _take(self) -> int | None:
        """The next block that nobody has taken."""
        with self._lock:
            if self._next == self._count:
                return None
            self._next += 1
            return self._next - 1


def fill_between(
    out: Any,
    start: int,
    *,
    size: int,
    block: int,
    draw: Callable[[int, int], Any],
    threads: int | None = None,
) -> None:
    """Fill a part of a long array of fixed blocks, of which only those that it meets are drawn.

    Args:
        out: (k,) array that becomes the numbers start..start+k-1 of the long array.
        start: its place there.
        size: numbers in the long array.
        block: numbers in each of its blocks; the last one may have fewer.
        draw: (index, length) -> the whole block, (length,).
        threads: None for all processors.

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
