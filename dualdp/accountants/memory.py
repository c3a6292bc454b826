# SPDX-License-Identifier: Apache-2.0
"""What a growing history need not compute again."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from dualdp.accountants.cells import Subsampled
from dualdp.accountants.lattice import Part
from dualdp.mechanisms import Mechanism, PoissonSubsampledGaussian

Array = npt.NDArray[Any]
T = TypeVar("T")

_MOST = 12  # sums of one direction: a few megabytes


class Memory:
    """Sums over the mechanisms of one direction, to which later questions only add what is new.

    Kept for histories of one kind that grow at their end, as those of a run do; anything else
    starts afresh.
    """

    def __init__(self) -> None:
        self._kept: dict[Any, tuple[Any, list[Array]]] = {}

    def total(
        self,
        key: Any,
        parts: Sequence[Part],
        fresh: Callable[[], T],
        add: Callable[[T, list[Part]], None],
    ) -> T:
        """The sum over `parts`: a fresh one, or that kept under `key` with the rest added."""
        kept: tuple[T | None, list[Array]] = self._kept.pop(key, (None, []))
        total, seen = kept
        new: list[Part | None] = [None]
        if total is not None and len(seen) == len(parts):
            new = [_beyond(part, counts) for part, counts in zip(parts, seen, strict=True)]
        rest = [part for part in new if part is not None]
        if total is None or len(rest) < len(new):
            total, rest = fresh(), list(parts)
        add(total, [part for part in rest if part.counts.size])
        if len(self._kept) >= _MOST:
            self._kept.pop(next(iter(self._kept)))
        self._kept[key] = (total, [part.counts.copy() for part in parts])
        return total


def _beyond(part: Part, counts: Array) -> Part | None:
    """What a part holds beyond `counts`; None if it is not a continuation."""
    more = part.counts.copy()
    if counts.size > more.size:
        return None
    more[: counts.size] -= counts
    rows = np.flatnonzero(more)
    if not rows.size:
        return Part(part.family, more[:0], part.flipped)
    if np.any(more < 0) or not isinstance(part.family, Subsampled):
        return None
    family = Subsampled(part.family.sigma[rows], part.family.rate[rows])
    return Part(family, more[rows], part.flipped)


class Rows:
    """A history of Poisson-subsampled Gaussians as arrays, of which only the new end is read."""

    def __init__(self) -> None:
        self._sigma: list[float] = []
        self._rate: list[float] = []
        self._usable = True
        self.sigma = self.rate = self.counts = np.zeros(0)

    def of(self, history: Mapping[Mechanism, int]) -> Rows | None:
        """The arrays of a history whose events only ever come to the end; None for others."""
        if len(history) < len(self._sigma):
            self.__init__()  # type: ignore[misc]
        for event in itertools.islice(history, len(self._sigma), None):
            self._sigma.append(getattr(event, "noise_multiplier", 0.0))
            self._rate.append(getattr(event, "sample_rate", 0.0))
            self._usable &= isinstance(event, PoissonSubsampledGaussian)
            self._usable &= 1e-100 < self._sigma[-1] < 1e100 and 1e-47 < self._rate[-1] <= 1
        if not self._usable:
            return None
        if len(self._sigma) > self.sigma.size:
            self.sigma, self.rate = np.array(self._sigma), np.array(self._rate)
        self.counts = np.fromiter(history.values(), dtype=float, count=len(history))
        sampled = bool(np.any((self.counts > 0) & (self.rate < 1)))
        return self if sampled and self.counts.sum() > 1 else None
