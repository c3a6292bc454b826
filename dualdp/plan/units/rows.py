# SPDX-License-Identifier: Apache-2.0
"""Rows of each user, and the second draw: at most K rows of each user that a batch has.

A batch of users is drawn by a sampler of the plan. Of each user in it a uniform subset of at most K
rows is drawn, their gradients are averaged, and the average is clipped once: whatever a user's rows
are, the user moves the sum by at most C, and the accounting is that of DP-SGD on users.

Source: Charles et al. 2024 (arXiv 2407.07737), Algorithm 2 (user-level sampling).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dualdp import _validate
from dualdp.randomness import grid_noise
from dualdp.randomness.threefry import bits_at

if TYPE_CHECKING:
    from dualdp.plan.plan import PrivacyPlan

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class UserRows:
    """Rows of each user; user u is the u-th smallest id.

    Args:
        order: (rows,) int64 rows, those of user 0 first, increasing within a user.
        starts: (num_users + 1,) int64 places in `order` where the rows of each user begin.
    """

    order: Indices
    starts: Indices

    @property
    def num_users(self) -> int:
        """Number of users."""
        return len(self.starts) - 1

    @property
    def counts(self) -> Indices:
        """(num_users,) number of rows of each user: private."""
        return np.diff(self.starts)

    def of(self, users: Indices) -> tuple[Indices, Indices]:
        """Return (m,) rows of some users, user by user, and (m,) the place of the user in `users`.

        >>> user_rows([7, 3, 7, 5]).of(np.array([2, 0]))
        (array([0, 2, 1]), array([0, 0, 1]))
        """
        counts = self.counts[users]
        owner = np.repeat(np.arange(len(users)), counts)
        within = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
        return self.order[np.repeat(self.starts[users], counts) + within], owner

    def having_rows(self, users: Indices) -> Indices:
        """Return those of some users that have a row: the others add nothing to a sum."""
        return users[self.counts[users] > 0]


def user_rows(users: Any, *, num_rows: int | None = None, num_users: int | None = None) -> UserRows:
    """Return the rows of each user.

    Args:
        users: (rows,) integers >= 0, the id of the user of each row, in any order.
        num_rows: number of rows of the data, to compare with; None for no comparison.
        num_users: number of users, where some have no rows: ids are then 0 .. num_users - 1. None
            for the users that have rows.

    Raises:
        TypeError, ValueError: not one id for each row, or an id that names no user.
    """
    if isinstance(users, UserRows):
        return users
    try:
        ids = np.asarray(users)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"users is {_validate.kind(users)}. {_EXPECTED}") from error
    if ids.dtype.kind not in "iu" or ids.ndim != 1 or not ids.size:
        kind = ValueError if ids.dtype.kind in "iu" else TypeError
        found = f"of shape {ids.shape} and dtype {ids.dtype}"
        raise kind(f"users is {_validate.kind(users)} {found}. {_EXPECTED}")
    if num_rows is not None and len(ids) != num_rows:
        raise ValueError(
            f"users has {len(ids)} ids but the data has {num_rows} rows. Expected one id for each "
            "row, in the order of the rows."
        )
    if ids.min() < 0:
        raise ValueError(
            f"users[{int(ids.argmin())}]={ids.min()} is negative, which often means an unknown "
            "user. Expected ids >= 0; give each row of an unknown user an id of its own."
        )
    if num_users is None:
        index = np.unique(ids, return_inverse=True)[1].reshape(-1)
        num_users = int(index.max()) + 1
    else:
        num_users = _validate.integer("num_users", num_users, minimum=1)
        if ids.max() >= num_users:
            raise ValueError(
                f"users[{int(ids.argmax())}]={ids.max()} with num_users={num_users}. Expected ids "
                "below num_users."
            )
        index = ids.astype(np.int64)
    starts = np.concatenate([[0], np.cumsum(np.bincount(index, minlength=num_users))])
    return UserRows(np.argsort(index, kind="stable").astype(np.int64), starts.astype(np.int64))


def rows_of_data(users: Any, num_rows: int) -> UserRows | None:
    """Return the rows of each user of a data set, for a run on it; None for None.

    As `user_rows`; `UserRows` must hold each of the `num_rows` rows of the data once.
    """
    if users is None:
        return None
    if not isinstance(users, UserRows):
        return user_rows(users, num_rows=num_rows)
    order, counts = np.asarray(users.order), users.counts
    if not np.array_equal(np.sort(order), np.arange(num_rows)) or counts.sum() != num_rows:
        raise ValueError(
            f"users is a UserRows of {len(order)} rows but the data has {num_rows} rows. Expected "
            "each row of the data once; dualdp.units.user_rows makes it of the ids."
        )
    ids = np.zeros(num_rows, np.int64)
    ids[order] = np.repeat(np.arange(users.num_users), counts)
    return user_rows(ids, num_users=users.num_users)


def rows_digest(plan: PrivacyPlan, rows: UserRows | None) -> str | None:
    """Return a keyed digest of the rows of each user, which are private; None for None."""
    if rows is None:
        return None
    arrays = (np.ascontiguousarray(part, "<i8") for part in (rows.starts, rows.order))
    parts = [b"users", *(part.tobytes() for part in arrays)]
    return plan.root.require_secret().digest(parts)


_EXPECTED = (
    "Expected a one-dimensional array of integers, the id of the user of each row; for names, "
    "np.unique(names, return_inverse=True)[1]."
)


class DrawnRows(NamedTuple):
    """Rows of some users, K for each: `rows` (users, K) int64 and `weights` (users, K) float64.

    A user's weights are 1 / (number of its drawn rows), and 0 for padding, which repeats the first
    of them. The weights of a user without rows are 0, and its rows are 0.
    """

    rows: Indices
    weights: NDArray[np.float64]


def draw_rows(
    plan: PrivacyPlan, step: int, units: Indices, rows: UserRows, rows_per_unit: int
) -> DrawnRows:
    """Draw at most K rows of each of some users, for one step.

    Args:
        plan: `PrivacyPlan`, whose key decides.
        step: int, step of the run.
        units: (users,) int64, users of the step, or some of them.
        rows: rows of each user.
        rows_per_unit: int, K.

    Guarantees:
        All subsets of min(K, rows) rows of a user are equally likely, independently of other users
            and steps.  [test_every_subset_is_as_likely]
        Pure function of (key, step, user), the same for every split of a batch, on every stack
            and machine.  [test_rows_of_a_user_do_not_depend_on_the_split, test_known_rows]
    """
    found, owner = rows.of(units)
    found, owner, place = smallest_words(found, owner, row_words(plan, step, found), rows_per_unit)
    drawn = np.bincount(owner, minlength=len(units))
    first = np.zeros(len(units), np.int64)
    first[drawn > 0] = found[place == 0]
    chosen = np.repeat(first[:, None], rows_per_unit, axis=1)
    weights = np.zeros(chosen.shape)
    chosen[owner, place], weights[owner, place] = found, 1 / drawn[owner]
    return DrawnRows(chosen, weights)


def row_words(plan: PrivacyPlan, step: int, rows: Indices) -> NDArray[np.uint64]:
    """Return (rows,) uniform 64-bit integers of a step: a pure function of (key, step, row)."""
    if plan.noise == "secure":
        key = grid_noise.stream_key(plan, "rows", step)
        return grid_noise.words(key, int(rows.max(initial=-1)) + 1)[rows]
    return bits_at(plan.step_key("rows", step), rows)


def smallest_words(
    rows: Indices, owner: Indices, words: NDArray[np.uint64], most: int
) -> tuple[Indices, Indices, Indices]:
    """Rows with the smallest words of each owner: (rows, owner, place of the row), increasing."""
    order = np.lexsort((words, owner))
    kept = order[_places(owner[order]) < most]
    kept = kept[np.lexsort((rows[kept], owner[kept]))]
    return rows[kept], owner[kept], _places(owner[kept])


def _places(owner: Indices) -> Indices:
    """0, 1, 2, ... within each run of equal owners."""
    index = np.arange(len(owner))
    is_first = np.diff(owner, prepend=-1) != 0
    return index - np.maximum.accumulate(np.where(is_first, index, 0))
