# SPDX-License-Identifier: Apache-2.0
"""What the Python numbers of a loop mean for one example: counts of examples, or constants.

A loop that divides by `len(x)` hands the number 32 to a torch function; so does one whose layer has
32 units. Few readings are tried, and batches of two sizes show which one is right.
"""

from __future__ import annotations

import math
from collections.abc import Callable

#: A number for one unit of k rows, where the batch has n units.
Reading = Callable[[float, int, int], float]


def as_count(value: float, n: int, k: int) -> float:
    """Read n as 1, n k as k, and their inverses; other numbers as constants."""
    if type(value) is int:
        return {n * k: k, n: 1}.get(value, value)
    for rows in (1, k):
        if math.isclose(value * n * rows, 1, rel_tol=1e-12):
            return 1 / rows
    return value


def as_multiple(value: float, n: int, k: int) -> float:
    """Read m n as m, and m / n as m if m has few digits and m / n has many."""
    if value > 0 and value % n == 0:  # no count is negative, as the index -100 of ignored labels
        return type(value)(value // n)
    counted = as_count(value, n, k)
    return (
        value * n if counted == value and _is_long(value) and not _is_long(value * n) else counted
    )


def as_constant(value: float, n: int, k: int) -> float:
    """Read every number as a constant."""
    return value


def _is_long(value: float) -> bool:
    """True for a number that nobody writes by hand."""
    return type(value) is float and math.isfinite(value) and len(repr(value)) > 9


class Numbers:
    """Python numbers that a loop hands to its functions, in this batch and in the one before.

    Between batches of two sizes the meaning of a number shows: a constant, m n, or m / n.

    Attributes:
        first_read: how many numbers came before data were read from the batch.
        guessed: positions of those that twins got by a reading, not as earlier batches showed.
        was_carried: True if one of many digits that came after it changed since the batch before.
    """

    def __init__(self) -> None:
        self.first_read, self.was_carried = math.inf, False
        self.seen, self.reads = list[tuple[str, float]](), dict[int, float]()
        self.guessed = set[int]()
        self._meanings, self._reads_before = dict[int, tuple[str, float]](), dict[int, float]()
        self._before: tuple[int, list[tuple[str, float]]] = 0, []

    def end_batch(self, n: int) -> None:
        """Learn from the numbers of a batch of n units."""
        then, before = self._before
        if [name for name, _ in before] != [name for name, _ in self.seen]:
            self._meanings = {}
        elif then != n:
            for at, ((_, old), (_, new)) in enumerate(zip(before, self.seen, strict=True)):
                if new == old:
                    self._meanings[at] = "is", new
                elif type(new) is int and not new % n and new * then == old * n:
                    self._meanings[at] = "times", new // n
                elif type(new) is float and math.isclose(new * n, old * then, rel_tol=1e-12):
                    self._meanings[at] = "over", new * n
        later = [i for i in range(min(len(before), len(self.seen))) if i >= self.first_read]
        self.was_carried = any(
            _is_long(self.seen[i][1]) and self.seen[i][1] != before[i][1] for i in later
        )
        self._before, self._reads_before = (n, self.seen), self.reads

    def next_batch(self) -> None:
        """Begin a batch."""
        self.seen, self.reads, self.first_read, self.guessed = [], {}, math.inf, set()

    def is_read(self, at: int, value: float) -> bool:
        """True for a number equal to one that the loop read from the batch, if not by chance.

        It has many digits, or at this position was another number, read too, in the batch before.
        """
        self.reads[at] = value
        return _is_long(value) or self._reads_before.get(at, value) != value

    def learned(self, at: int, name: str, value: float, n: int) -> float | None:
        """Return a number for one unit, as earlier batches read it; None if they don't say."""
        if at >= len(self._before[1]) or self._before[1][at][0] != name:
            return None
        kind, number = self._meanings.get(at, ("", 0.0))
        fits = {"is": value == number, "times": value == number * n}
        fits["over"] = math.isclose(value * n, number, rel_tol=1e-12)
        return number if fits.get(kind) else None

    def are_unclear(self, n: int, k: int) -> bool:
        """True if two numbers may be counts of examples or constants, each for itself."""
        doubtful = [
            at
            for at, (name, value) in enumerate(self.seen)
            if self.learned(at, name, value, n) is None and as_multiple(value, n, k) != value
        ]
        return len(doubtful) > 1

    def refutes(self, reading: Reading, n: int, k: int) -> bool:
        """True if a reading is none of the meanings that this batch and the one before show."""
        found = [
            (self.learned(at, *self.seen[at], n), reading(self.seen[at][1], n, k))
            for at in self.guessed
        ]
        return any(known is not None and known != read for known, read in found)
