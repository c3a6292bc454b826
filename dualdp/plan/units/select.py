# SPDX-License-Identifier: Apache-2.0
"""Rows to keep so that nobody has more than G: for example-level sampling, accounted by groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dualdp import _validate
from dualdp.plan.units.rows import Indices, row_words, smallest_words, user_rows

if TYPE_CHECKING:
    from dualdp.plan.plan import PrivacyPlan


def keep_rows(plan: PrivacyPlan, users: Any, rows_per_user: int) -> Indices:
    """Draw at most G rows of each user once, before training on rows.

    A run of `plan` on the kept rows, with sampler "poisson", protects a user by the epsilon of
    `dualdp.get_epsilon(..., group_size=rows_per_user)`; `plan.epsilon()` is that of one row.

    Args:
        plan: `PrivacyPlan` with unit="example", whose key decides; its num_examples is the number
            of rows that are kept, `np.minimum(counts, rows_per_user).sum()`.
        users: (rows,) integers or `UserRows`, see `user_rows`.
        rows_per_user: int, G >= 1.

    Returns:
        (num_examples,) increasing int64 rows.

    Raises:
        ValueError: the plan counts users, or another number of rows.

    Source: Charles et al. 2024 (arXiv 2407.07737), Algorithm 1 (example-level sampling).
    """
    most = _validate.integer("rows_per_user", rows_per_user, minimum=1)
    if plan.unit != "example":
        raise ValueError(
            f"unit={plan.unit!r} draws rows of its users at every step. Expected unit='example', "
            "or no keep_rows."
        )
    found, owner = (rows := user_rows(users)).of(np.arange(rows.num_users))
    kept, _, _ = smallest_words(found, owner, row_words(plan, 0, found), most)
    if len(kept) != plan.num_examples:
        raise ValueError(
            f"{len(kept)} rows are kept with rows_per_user={most}, but the plan has num_examples="
            f"{plan.num_examples}. Expected a plan for the rows that are kept."
        )
    return np.sort(kept)


def require_at_most(users: Any, rows_per_user: int) -> None:
    """Raise if a user has more than G rows, before a run that is accounted with group_size=G."""
    most = _validate.integer("rows_per_user", rows_per_user, minimum=1)
    counts = user_rows(users).counts
    if counts.max() > most:
        raise ValueError(
            f"{int((counts > most).sum())} users have more rows than rows_per_user={most}, up to "
            f"{int(counts.max())}. Expected at most that; keep_rows draws as many of each."
        )


def keep_owned_rows(owners: Sequence[Iterable[int]], rows_per_owner: int) -> Indices:
    """Select rows so that each owner has at most G of them, where a row may have several owners.

    Rows are taken greedily: those with few owners first, then in their order. A selection
    depends on who owns what and on nothing else.

    Args:
        owners: one collection of integer ids for each row: all whom the row is about.
        rows_per_owner: int, G >= 1.

    Returns:
        (kept,) increasing int64 rows.

    Raises:
        TypeError, ValueError: a row without owners, or an owner that is no integer.

    Guarantees:
        Each owner has at most G of the kept rows, and no further row could be kept.
            [test_no_owner_has_more_and_no_row_is_missing]
        If the graph of ownership is public, an owner is a group of G rows: compare the data with
            all rows of one owner and with other contents in them ("zero_out"). It does not hold
            for a graph that is private: one owner more changes which rows of others are kept.

    Source: Ganesh et al. 2025 (arXiv 2503.03622), the greedy selection.
    """
    most = _validate.integer("rows_per_owner", rows_per_owner, minimum=1)
    found: list[set[int]] = []
    for row, some in enumerate(owners):
        if isinstance(some, str | bytes) or not isinstance(some, Iterable):
            raise TypeError(
                f"owners[{row}] is {_validate.kind(some)}. Expected a collection of integer ids."
            )
        found.append({_validate.integer(f"owners[{row}]", one) for one in some})
        if not found[-1]:
            raise ValueError(
                f"owners[{row}] is empty. Expected at least one owner; a row that is about nobody "
                "needs an id of its own."
            )
    taken: Counter[int] = Counter()
    kept = []
    for row in sorted(range(len(found)), key=lambda row: len(found[row])):
        if all(taken[one] < most for one in found[row]):
            taken.update(found[row])
            kept.append(row)
    return np.sort(np.array(kept, dtype=np.int64))
