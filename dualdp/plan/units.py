# SPDX-License-Identifier: Apache-2.0
"""Rows of each user, and the second draw: at most K rows of each user that a batch has.

A batch of users is drawn by a sampler of the plan. Of each user in it a uniform subset of at most K
rows is drawn, their gradients are averaged, and the average is clipped once: whatever a user's rows
are, the user moves the sum by at most C, and the accounting is that of DP-SGD on users.

Source: Charles et al. 2024 (arXiv 2407.07737), Algorithm 2 (user-level sampling).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dualdp import _validate

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


def user_rows(
    users: ArrayLike | UserRows, *, num_rows: int | None = None, num_users: int | None = None
) -> UserRows:
    """Return the rows of each user.

    Args:
        users: (rows,) integers >= 0, the id of the user of each row, in any order; or what this
            function returned.
        num_rows: number of rows of the data, to compare with; None for no comparison.
        num_users: number of users, where some have no rows: ids are then 0 .. num_users - 1. None
            for the users that have rows.

    Raises:
        TypeError, ValueError: not one id for each row, or an id that names no user.
    """
    if isinstance(users, UserRows):
        ids = np.full(len(users.order), -1)  # -1 stays where a row is missing
        ids[users.order] = np.repeat(np.arange(users.num_users), users.counts)
        return user_rows(ids, num_rows=num_rows, num_users=users.num_users)
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


def rows_with_least_words(
    rows: Indices, owner: Indices, words: NDArray[np.uint64], num_units: int, most: int
) -> DrawnRows:
    """Return the rows with the smallest words of each user, at most K of each, with weights.

    Args:
        rows: (m,) rows, user by user.
        owner: (m,) the place of each row's user in the batch, 0 .. num_units - 1.
        words: (m,) uniform integers, one for each row.
        num_units: int, number of users in the batch.
        most: int, K.
    """
    order = np.lexsort((words, owner))
    chosen = order[_places(owner[order]) < most]
    chosen = chosen[np.lexsort((rows[chosen], owner[chosen]))]
    rows, owner, place = rows[chosen], owner[chosen], _places(owner[chosen])
    drawn = np.bincount(owner, minlength=num_units)
    first = np.zeros(num_units, np.int64)
    first[drawn > 0] = rows[place == 0]
    blocks = np.repeat(first[:, None], most, axis=1)  # (users, K), padded with the first row
    weights = np.zeros(blocks.shape)
    blocks[owner, place], weights[owner, place] = rows, 1 / drawn[owner]
    return DrawnRows(blocks, weights)


def _places(owner: Indices) -> Indices:
    """0, 1, 2, ... within each run of equal owners."""
    index = np.arange(len(owner))
    is_first = np.diff(owner, prepend=-1) != 0
    return index - np.maximum.accumulate(np.where(is_first, index, 0))
