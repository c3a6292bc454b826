# SPDX-License-Identifier: Apache-2.0
"""What the Python numbers of a loop mean for one example: counts of examples, or constants.

A loop that divides by `len(x)` hands the number 32 to a torch function; so does one whose layer has
32 units. Few readings are tried, and batches of two sizes show which one is right.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

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
    return value * n if counted == value and is_long(value) and not is_long(value * n) else counted


def as_constant(value: float, n: int, k: int) -> float:
    """Read every number as a constant."""
    return value


def is_long(value: float) -> bool:
    """True for a number that nobody writes by hand."""
    return type(value) is float and math.isfinite(value) and len(repr(value)) > 9


class Numbers:
    """Python numbers that a loop hands to its functions, in this batch and in the one before.

    Between batches of two sizes the meaning of a number shows: the reading by which it is the same
    for one unit of `k` rows.

    Attributes:
        seen: name of the function and value of each number, in order.
        first_read: how many numbers came before data were read from the batch.
        was_carried: True if one of many digits that came after it changed since the batch before.
    """

    def __init__(self, k: int = 1) -> None:
        self.k, self.was_carried = k, False
        self._meanings = dict[int, tuple[Reading, float]]()
        self._before: tuple[int, list[tuple[str, float]]] = 0, []
        self.next_batch()

    def next_batch(self) -> None:
        """Begin a batch."""
        self.seen, self.first_read = list[tuple[str, float]](), math.inf

    def end_batch(self, n: int) -> None:
        """Learn from the numbers of a batch of n units."""
        then, before = self._before
        pairs = list(enumerate(zip(before, self.seen, strict=False)))
        later = [(old, new) for at, ((_, old), (_, new)) in pairs if at >= self.first_read]
        self.was_carried = any(is_long(new) and new != old for old, new in later)
        if [name for name, _ in before] != [name for name, _ in self.seen]:
            self._meanings = {}
        elif then != n:
            for at, ((_, old), (_, new)) in pairs:
                for reading in (as_multiple, as_count, as_constant):
                    one = reading(new, n, self.k)
                    if math.isclose(reading(old, then, self.k), one, rel_tol=1e-12):
                        self._meanings[at] = reading, one
        self._before = n, self.seen

    def learned(self, at: int, name: str, value: float, n: int) -> float | None:
        """Return a number for one unit, as earlier batches read it; None if they don't say."""
        before = self._before[1][at : at + 1]
        reading, one = self._meanings.get(at, (as_constant, math.nan))
        is_known = bool(before) and before[0][0] == name
        return one if is_known and math.isclose(reading(value, n, self.k), one) else None

    def are_unclear(self, n: int) -> bool:
        """True if two numbers may be counts of examples or constants, each for itself."""
        doubtful = [
            at
            for at, (name, value) in enumerate(self.seen)
            if self.learned(at, name, value, n) is None and as_multiple(value, n, self.k) != value
        ]
        return len(doubtful) > 1

    def refute(self, guessed: Mapping[int, float], n: int) -> bool:
        """True if numbers were read otherwise than this batch and the one before show."""
        found = [(self.learned(at, *self.seen[at], n), read) for at, read in guessed.items()]
        return any(known is not None and known != read for known, read in found)
