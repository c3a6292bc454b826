# SPDX-License-Identifier: Apache-2.0
"""Cache of partial sums, to which a growing history only adds its new mechanisms."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from dualdp.accountants.pld_engine.discretize import Pmf, Term
from dualdp.accountants.pld_engine.dominating_pairs import Subsampled
from dualdp.mechanisms import Mechanism, PoissonSubsampledGaussian

Array = npt.NDArray[Any]

MOST_SUMS = 12  # cached sums of one direction: a few megabytes


class _Sum(Protocol):
    def add(self, pmfs: Iterable[Pmf]) -> None:
        """Add chunks of pmfs, with counts."""
        ...


S = TypeVar("S", bound=_Sum)


class PrefixCache:
    """Cache of sums over the mechanisms of one direction.

    It serves histories of one kind that grow at their end, as those of a run do; any other change
    starts a new sum.
    """

    def __init__(self) -> None:
        self._sums: dict[Any, tuple[Any, list[Array]]] = {}

    def total(
        self,
        key: Any,
        terms: Sequence[Term],
        empty: Callable[[], S],
        pmfs: Callable[[Sequence[Term]], Iterable[Pmf]],
    ) -> S:
        """Return the sum over `terms`: the one cached under `key` plus new ones, or a new sum."""
        cached: tuple[S | None, list[Array]] = self._sums.pop(key, (None, []))
        total, seen = cached
        new: list[Term | None] = [None]
        if total is not None and len(seen) == len(terms):
            new = [_beyond(term, counts) for term, counts in zip(terms, seen, strict=True)]
        rest = [term for term in new if term is not None]
        if total is None or len(rest) < len(new):
            total, rest = empty(), list(terms)
        total.add(pmfs([term for term in rest if term.counts.size]))
        if len(self._sums) >= MOST_SUMS:
            self._sums.pop(next(iter(self._sums)))
        self._sums[key] = (total, [term.counts.copy() for term in terms])
        return total


def _beyond(term: Term, counts: Array) -> Term | None:
    """Mechanisms of a term beyond the cached `counts`; None if the term is no continuation."""
    more = term.counts.copy()
    if counts.size > more.size:
        return None
    more[: counts.size] -= counts
    rows = np.flatnonzero(more)
    if not rows.size:
        return Term(term.pairs, more[:0], term.flipped)
    if np.any(more < 0) or not isinstance(term.pairs, Subsampled):
        return None
    return Term(Subsampled(term.pairs.sigma[rows], term.pairs.rate[rows]), more[rows], term.flipped)


class PoissonHistory:
    """A history of Poisson-subsampled Gaussians as arrays, of which only new events are read."""

    def __init__(self) -> None:
        self._sigma: list[float] = []
        self._rate: list[float] = []
        self._usable = True
        self._pairs = Subsampled(np.zeros(0), np.zeros(0))

    def read(self, history: Mapping[Mechanism, int]) -> tuple[Subsampled, Array] | None:
        """Return (pairs, counts) of a history that grows at its end; None for other events."""
        if len(history) < len(self._sigma):
            self.__init__()  # type: ignore[misc]
        for event in itertools.islice(history, len(self._sigma), None):
            self._sigma.append(getattr(event, "noise_multiplier", 0.0))
            self._rate.append(getattr(event, "sample_rate", 0.0))
            self._usable &= isinstance(event, PoissonSubsampledGaussian)
            self._usable &= 1e-100 < self._sigma[-1] < 1e100 and 1e-47 < self._rate[-1] <= 1
        if not self._usable:
            return None
        if len(self._sigma) > self._pairs.sigma.size:
            self._pairs = Subsampled(np.array(self._sigma), np.array(self._rate))
        counts = np.fromiter(history.values(), dtype=float, count=len(history))
        is_sampled = bool(np.any((counts > 0) & (self._pairs.rate < 1)))
        return (self._pairs, counts) if is_sampled and counts.sum() > 1 else None
