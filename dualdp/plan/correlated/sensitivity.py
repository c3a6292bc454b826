# SPDX-License-Identifier: Apache-2.0
"""Sensitivity of a lower-triangular Toeplitz strategy under repeated participation.

C is n x n with first column c. One unit joins the steps of a set S, with a clipped gradient g_t,
|g_t| <= 1, at each t in S, and changes C G by the Frobenius norm of sum_t C[:, t] g_t'. The square
of that is at most the sum of |C'C| over S x S (Choquette-Choo et al. 2023, "(Amplified) Banded
Matrix Factorization", eq. 5), with equality where C'C >= 0 and all g_t are equal.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dualdp import _validate

Vector = NDArray[np.float64]
PATTERNS = ("min_separation", "fixed")
#: Most multiplications for a sharper bound, or for sums of products one by one: about a second.
MOST_WORK = 2 * 10**8


def participations(
    num_steps: int, min_separation: int, max_participations: int | None
) -> tuple[int, int]:
    """Return (b, count): the least gap, at most num_steps, and the most steps that one unit joins.

    >>> participations(10, 4, None)
    (4, 3)
    """
    separation = _validate.integer("min_separation", min_separation, minimum=1)
    separation = min(separation, max(num_steps, 1))
    most = fitting = -(-num_steps // separation)
    if max_participations is not None:
        most = _validate.integer("max_participations", max_participations, minimum=1)
    return separation, min(fitting, most)


def column_sums(c: Vector, separation: int, count: int) -> Vector:
    """Return (n,) the sum of the columns 0, b, ..., (count - 1) b of C.

    >>> column_sums(np.array([3.0, 2.0, 1.0]), separation=1, count=2)
    array([3., 5., 3.])
    """
    n = len(c)
    rows = -(-n // separation)
    columns = np.zeros((rows, separation))
    columns.reshape(-1)[:n] = c
    sums = np.cumsum(columns, axis=0)
    if count < rows:
        sums[count:] -= sums[:-count].copy()
    return sums.reshape(-1)[:n]


def falling(c: Vector, separation: int) -> tuple[Vector, NDArray[np.int64]]:
    """Return (n,) the least column above |c| that falls from c_b on, and the index of each entry.

    >>> falling(np.array([0.0, -1.0, 2.0, 1.0]), separation=1)
    (array([0., 2., 2., 1.]), array([0, 2, 2, 3]))
    """
    n, h = len(c), np.abs(c)
    tail = h[separation:][::-1]
    is_highest = tail >= np.maximum.accumulate(tail)
    latest = np.maximum.accumulate(np.where(is_highest, np.arange(len(tail)), 0))
    origin = np.concatenate([np.arange(min(separation, n)), n - 1 - latest[::-1]])
    return h[origin], origin


def squared_sensitivity(c: Vector, separation: int, count: int, pattern: str) -> float:
    """Return an upper bound on the squared L2 sensitivity over all patterns allowed.

    Args:
        c: (n,) first column of C, n >= 1.
        separation: int b >= 1, the least gap between two participations.
        count: int, the most participations of one unit, at most ceil(n / b).
        pattern: "min_separation", any gaps >= b; or "fixed", gaps of exactly b.

    Guarantees:
        No pattern and no gradients exceed it.  [test_no_pattern_exceeds_the_sensitivity]
        It is attained for c >= 0 with fixed gaps, and for c >= 0 that does not rise after c_b with
        any gaps; for one participation, and for at most b bands, whatever the signs.
            [test_the_sensitivity_is_attained]

    Source: Kalinin & Lampert 2024 (arXiv 2405.13763), Theorem 2: with c_0 >= c_1 >= ... >= 0 the
    worst pattern is 0, b, 2b, .... Only the order from c_b on is needed: the entry (i, i + d) of
    C'C is the sum of c_t c_(t+d) over t < n - i - d; for c >= 0 it does not grow with i, and for
    d >= b not with d if c_b >= c_(b+1) >= .... So moving all participations to the earliest places
    lowers no entry. We apply it to |c|, since |C'C| <= |C|'|C|, and where |c| rises, to the least
    sequence above it that does not. With fixed gaps a later start cuts off entries, in any order.
    """
    h = np.abs(c)
    rows = column_sums(h, separation, count)
    bound = float(rows @ rows)
    if pattern == "fixed":
        signed = c.min() < 0 and len(c) * count <= MOST_WORK
        return min(bound, _fixed_gaps(c, separation, count)) if signed else bound
    if count == 1 or not np.any(np.diff(h[separation:]) > 0):
        return bound
    rows = column_sums(falling(c, separation)[0], separation, count)
    above = float(rows @ rows)
    if len(c) ** 2 * count > MOST_WORK or above <= bound * (1 + 1e-12):
        return above  # long, or it rises by rounding only
    return min(above, _any_gaps(h, separation, count))


def _fixed_gaps(c: Vector, separation: int, count: int) -> float:
    """Largest sum of |C'C| over the positions i, i + b, ..., for every start i.

    Source: Choquette-Choo et al. 2023 (arXiv 2306.08153), eq. 5, over all starts.
    """
    n = len(c)
    totals = np.zeros(n)  # [n - 1 - i]
    for gap in range(count):
        lag = gap * separation
        # [n - 1 - t]: entry (t - lag, t) of C'C, a sum over the rows that both columns have.
        entries = np.abs(np.cumsum(c[: n - lag] * c[lag:]))
        totals[lag:] += (2 if gap else 1) * column_sums(entries, separation, count - gap)
    return float(totals.max())


def _any_gaps(h: Vector, separation: int, count: int) -> float:
    """Bound the sum of |C|'|C| over any positions with gaps >= b, for c = h >= 0.

    Every position takes the best later ones for itself; then the best positions are taken. Both are
    dynamic programmes over (place, number still to take).

    Source: Choquette-Choo et al. 2023 (arXiv 2306.08153), Algorithms 3 and 4, over later positions
    only, of which each pair has one.
    """
    n = len(h)
    gram = np.zeros((n, n + separation))  # [i, d]: entry (i, i + d) of C'C, 0 past the end
    for d in range(n):
        gram[: n - d, d] = np.cumsum(h[: n - d] * h[d:])[::-1]
    later = np.zeros_like(gram)  # [i, d]: best sum of entries (i, i + d'), d' >= d
    best = np.zeros(n + separation)  # [i]: best sum over positions >= i
    for _ in range(count):
        taken = gram[:, 0] + 2 * later[:, separation] + best[separation:]
        best[:n] = np.maximum.accumulate(taken[::-1])[::-1]
        chosen = gram[:, :n] + later[:, separation:]
        later[:, :n] = np.maximum.accumulate(chosen[:, ::-1], axis=1)[:, ::-1]
    return float(best[0])
