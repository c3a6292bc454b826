# SPDX-License-Identifier: Apache-2.0
"""Rows of users, their second draw, and plans that name their unit."""

import itertools
from collections import Counter

import numpy as np
import pytest
from scipy import stats

from dualdp import PrivacyPlan, units
from dualdp.randomness import SegmentBits
from tests.mistakes import refused

BITS = SegmentBits(3)
USERS = np.array([40, 7, 7, 40, 12, 7, 7, 40, 7, 3])  # 3: 1 row, 7: 5, 12: 1, 40: 3


def plan(**changes):
    settings = {"num_examples": 4, "expected_batch_size": 2, "num_steps": 50, "delta": 1e-5}
    settings |= {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "seed": 3}
    return PrivacyPlan(**settings | {"unit": "user", "rows_per_unit": 2} | changes)


def test_rows_of_each_user_in_any_order():
    for users in (USERS, USERS.astype(np.uint8), USERS.tolist(), USERS + 2**40):
        rows = units.user_rows(users, num_rows=10)
        assert rows.num_users == 4
        np.testing.assert_array_equal(rows.counts, [1, 5, 1, 3])
        found, owner = rows.of(np.array([3, 0, 1]))
        np.testing.assert_array_equal(found, [0, 3, 7, 9, 1, 2, 5, 6, 8])
        np.testing.assert_array_equal(owner, [0, 0, 0, 1, 2, 2, 2, 2, 2])
    np.testing.assert_array_equal(units.user_rows(rows).order, rows.order)


def test_wrong_users_are_refused():
    read, names = units.user_rows, r"for names, np.unique\(names, return_inverse=True\)"
    refused(lambda: read([1, 2], num_rows=3), ValueError, "users has 2 ids but the data has 3 rows")
    for users, error, words in (
        ([0.0, 1.0], TypeError, "dtype float64. Expected a one-dimensional array of integers"),
        ([True, False], TypeError, "dtype bool. Expected a one-dimensional array"),
        (["ann", "bob"], TypeError, names),
        ([[1, 2]], ValueError, r"shape \(1, 2\) and dtype int64. Expected a one-dim"),
        ([[1], [2, 3]], TypeError, "users is a list. Expected a one-dimensional array"),
        (np.zeros(0, int), ValueError, r"shape \(0,\)"),
        (None, TypeError, "users is None of shape"),
        ([3, -1], ValueError, r"users\[1\]=-1 is negative.*an id of its own"),
    ):
        refused(lambda: read(users), error, words)  # noqa: B023
    words = r"users\[1\]=9 with num_users=9. Expected ids below"
    refused(lambda: read([3, 9], num_users=9), ValueError, words)


def test_rows_are_of_the_user_and_weights_of_the_number_drawn():
    rows = units.user_rows(USERS)
    for step in range(30):
        drawn = units.draw_rows(plan(), BITS, step, np.arange(4), rows, 2)
        for user, name in enumerate([3, 7, 12, 40]):
            own = drawn.rows[user][drawn.weights[user] > 0]
            assert len(set(own)) == len(own) == min(2, (USERS == name).sum())
            assert (USERS[drawn.rows[user]] == name).all()  # padding is the user's own, too
            assert drawn.weights[user].sum() == 1
            assert set(drawn.weights[user]) <= {0, 1 / len(own)}


@pytest.mark.parametrize("noise", ["fast", "secure"])
def test_every_subset_is_as_likely(noise):
    run = plan(noise=noise, seed=None if noise == "secure" else 3)
    bits, rows = SegmentBits(run.seed), units.user_rows(USERS)
    subsets, both = Counter(), Counter()
    for step in range(3000):
        drawn = units.draw_rows(run, bits, step, np.arange(4), rows, 2).rows
        subsets[tuple(drawn[1])] += 1
        both[tuple(drawn[1]), tuple(drawn[3])] += 1
    assert set(subsets) == set(itertools.combinations([1, 2, 5, 6, 8], 2))
    # 1e-9, not 1e-4: fresh bits differ in every run.
    assert stats.chisquare(list(subsets.values())).pvalue > 1e-9
    assert len(both) == 30  # of two users: independent
    assert stats.chisquare(list(both.values())).pvalue > 1e-9


def test_rows_of_a_user_do_not_depend_on_the_split():
    rng = np.random.default_rng(0)
    rows = units.user_rows(rng.integers(0, 300, 4000))
    run, drawn = plan(num_examples=300), rng.permutation(300)[:90]
    whole = units.draw_rows(run, BITS, 7, drawn, rows, 5)
    for size in (1, 7, 90):
        split = np.split(drawn, range(size, 90, size))
        parts = [units.draw_rows(run, BITS, 7, part, rows, 5) for part in split]
        for name in ("rows", "weights"):
            found = np.concatenate([getattr(part, name) for part in parts])
            np.testing.assert_array_equal(found, getattr(whole, name))
    for bits, step in ((BITS, 8), (SegmentBits(4), 7)):
        assert (units.draw_rows(run, bits, step, drawn, rows, 5).rows != whole.rows).any()


def test_a_plan_of_users_draws_users_and_then_rows():
    rng = np.random.default_rng(1)
    users = rng.integers(0, 60, 500) * 3  # ids with gaps
    names = np.unique(users)
    run = plan(num_examples=len(names), expected_batch_size=12, rows_per_unit=3)
    sizes = []
    for step in range(50):
        batch = run.batch_indices(step)
        rows = run.row_indices(step, users)
        of_user = Counter(users[rows])
        assert sorted(of_user) == names[batch].tolist()
        assert all(n == min(3, (users == name).sum()) for name, n in of_user.items())
        sizes.append(len(batch))
        blocks = units.draw_rows(run, BITS, step, batch, units.user_rows(users), 3)
        np.testing.assert_array_equal(rows, blocks.rows[blocks.weights > 0])
    assert abs(np.mean(sizes) - 12) < 2
    whole = run.row_indices(0)  # blocks: unit u owns rows 3 u .. 3 u + 2
    np.testing.assert_array_equal(whole.reshape(-1, 3)[:, 0], 3 * run.batch_indices(0))
    with pytest.raises(ValueError, match="The data has 2 users but the plan has num_examples"):
        run.row_indices(0, [1, 2])


def test_rows_of_a_data_set_are_each_held_once():
    rows = units.user_rows(USERS, num_rows=10)
    again = units.user_rows(rows, num_rows=10)
    np.testing.assert_array_equal(again.order, rows.order)
    np.testing.assert_array_equal(again.counts, [1, 5, 1, 3])
    words = "users has 10 ids but the data has 11 rows"
    refused(lambda: units.user_rows(rows, num_rows=11), ValueError, words)
    own = units.UserRows(np.ones(3, np.int64), np.array([0, 3]))
    refused(lambda: units.user_rows(own), ValueError, r"users\[0\]=-1 is negative")
