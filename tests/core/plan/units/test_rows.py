# SPDX-License-Identifier: Apache-2.0
"""Rows of users, their second draw, and the rows that are kept once."""

import itertools
from collections import Counter

import numpy as np
import pytest
from scipy import stats

from dualdp import PrivacyPlan, units
from dualdp.plan.units import bits_at
from dualdp.randomness import bits

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
    assert units.user_rows(rows) is rows


def test_users_without_rows():
    rows = units.user_rows([4, 1, 4], num_users=6)
    np.testing.assert_array_equal(rows.counts, [0, 1, 0, 0, 2, 0])
    drawn = units.draw_rows(plan(num_examples=6), 0, np.array([5, 4, 0]), rows, 3)
    np.testing.assert_array_equal(drawn.rows, [[0, 0, 0], [0, 2, 0], [0, 0, 0]])
    np.testing.assert_array_equal(drawn.weights, [[0, 0, 0], [0.5, 0.5, 0], [0, 0, 0]])


@pytest.mark.parametrize(
    ("users", "options", "error", "message"),
    [
        ([1, 2], {"num_rows": 3}, ValueError, "users has 2 ids but the data has 3 rows"),
        ([0.0, 1.0], {}, TypeError, "dtype float64. Expected a one-dimensional array of integers"),
        ([True, False], {}, TypeError, "dtype bool. Expected a one-dimensional array"),
        (["ann", "bob"], {}, TypeError, r"for names, np.unique\(names, return_inverse=True\)"),
        ([[1, 2]], {}, ValueError, r"shape \(1, 2\) and dtype int64. Expected a one-dim"),
        ([[1], [2, 3]], {}, TypeError, "users is a list. Expected a one-dimensional array"),
        (np.zeros(0, int), {}, ValueError, r"shape \(0,\)"),
        (None, {}, TypeError, "users is None of shape"),
        ([3, -1], {}, ValueError, r"users\[1\]=-1 is negative.*an id of its own"),
        (
            [3, 9],
            {"num_users": 9},
            ValueError,
            r"users\[1\]=9 with num_users=9. Expected ids below",
        ),
    ],
)
def test_wrong_users_are_refused(users, options, error, message):
    with pytest.raises(error, match=message):
        units.user_rows(users, **options)


def test_rows_are_of_the_user_and_weights_of_the_number_drawn():
    rows = units.user_rows(USERS)
    for step in range(30):
        drawn = units.draw_rows(plan(), step, np.arange(4), rows, 2)
        for user, name in enumerate([3, 7, 12, 40]):
            own = drawn.rows[user][drawn.weights[user] > 0]
            assert len(set(own)) == len(own) == min(2, (USERS == name).sum())
            assert (USERS[drawn.rows[user]] == name).all()  # padding is the user's own, too
            assert drawn.weights[user].sum() == 1
            assert set(drawn.weights[user]) <= {0, 1 / len(own)}


@pytest.mark.parametrize("noise", ["fast", "secure"])
def test_every_subset_is_as_likely(noise):
    if noise == "secure":
        pytest.importorskip("cryptography")
    run = plan(noise=noise, seed=None if noise == "secure" else 3)
    rows = units.user_rows(USERS)
    subsets, both = Counter(), Counter()
    for step in range(3000):
        drawn = units.draw_rows(run, step, np.arange(4), rows, 2).rows
        subsets[tuple(drawn[1])] += 1
        both[tuple(drawn[1]), tuple(drawn[3])] += 1
    assert set(subsets) == set(itertools.combinations([1, 2, 5, 6, 8], 2))
    # 1e-9, not 1e-4: a secure key differs in every run.
    assert stats.chisquare(list(subsets.values())).pvalue > 1e-9
    assert len(both) == 30  # of two users: independent
    assert stats.chisquare(list(both.values())).pvalue > 1e-9


def test_rows_of_a_user_do_not_depend_on_the_split():
    rng = np.random.default_rng(0)
    rows = units.user_rows(rng.integers(0, 300, 4000))
    run, drawn = plan(num_examples=300), rng.permutation(300)[:90]
    whole = units.draw_rows(run, 7, drawn, rows, 5)
    for size in (1, 7, 90):
        parts = [units.draw_rows(run, 7, drawn[i : i + size], rows, 5) for i in range(0, 90, size)]
        np.testing.assert_array_equal(np.concatenate([part.rows for part in parts]), whole.rows)
        np.testing.assert_array_equal(
            np.concatenate([part.weights for part in parts]), whole.weights
        )
    other = units.draw_rows(run, 8, drawn, rows, 5)
    assert (other.rows != whole.rows).any()
    assert (
        units.draw_rows(plan(num_examples=300, seed=4), 7, drawn, rows, 5).rows != whole.rows
    ).any()


def test_known_rows():
    rows = units.user_rows(USERS)
    drawn = [units.draw_rows(plan(), step, np.array([1, 3]), rows, 2).rows for step in range(3)]
    np.testing.assert_array_equal(drawn, [[[1, 5], [3, 7]], [[2, 6], [0, 7]], [[2, 6], [0, 3]]])


def test_words_are_those_of_the_stream():
    key = plan().step_key("rows", 0)
    some = np.array([0, 5, 70_000, 3])
    np.testing.assert_array_equal(bits_at(key, some), bits(key, 70_001, width=64)[some])


def test_a_plan_of_users_draws_users_and_then_rows():
    rng = np.random.default_rng(1)
    users = rng.integers(0, 60, 500) * 3  # ids with gaps
    names = np.unique(users)
    run = plan(num_examples=len(names), expected_batch_size=12, rows_per_unit=3)
    joined, sizes = np.zeros(len(names)), []
    for step in range(50):
        batch = run.batch_indices(step)
        rows = run.row_indices(step, users)
        of_user = Counter(users[rows])
        assert sorted(of_user) == names[batch].tolist()
        assert all(n == min(3, (users == name).sum()) for name, n in of_user.items())
        joined[batch] += 1
        sizes.append(len(batch))
        blocks = units.draw_rows(run, step, batch, units.user_rows(users), 3)
        np.testing.assert_array_equal(rows, blocks.rows[blocks.weights > 0])
    assert abs(np.mean(sizes) - 12) < 2
    whole = run.row_indices(0)  # blocks: unit u owns rows 3 u .. 3 u + 2
    np.testing.assert_array_equal(whole.reshape(-1, 3)[:, 0], 3 * run.batch_indices(0))
    with pytest.raises(ValueError, match="The data has 2 users but the plan has num_examples"):
        run.row_indices(0, [1, 2])


def test_at_most_g_rows_of_each_user_are_kept_once():
    rows_of = {3: 1, 7: 2, 12: 1, 40: 2}
    subsets = Counter()
    for seed in range(400):
        run = plan(unit="example", rows_per_unit=None, num_examples=6, seed=seed)
        kept = units.keep_rows(run, USERS, 2)
        assert (np.diff(kept) > 0).all()
        assert Counter(USERS[kept]) == rows_of
        units.require_at_most(USERS[kept], 2)
        subsets[tuple(kept[USERS[kept] == 7])] += 1
        np.testing.assert_array_equal(kept, units.keep_rows(run, USERS, 2))
    assert stats.chisquare(list(subsets.values())).pvalue > 1e-4
    assert len(subsets) == 10
    with pytest.raises(ValueError, match="6 rows are kept with rows_per_user=2.*num_examples=10"):
        units.keep_rows(plan(unit="example", rows_per_unit=None, num_examples=10), USERS, 2)
    with pytest.raises(ValueError, match="unit='user' draws rows of its users at every step"):
        units.keep_rows(plan(), USERS, 2)
    with pytest.raises(ValueError, match="2 users have more rows than rows_per_user=2, up to 5"):
        units.require_at_most(USERS, 2)


def test_no_owner_has_more_and_no_row_is_missing():
    rng = np.random.default_rng(2)
    for most in (1, 2, 5):
        owners = [
            rng.choice(15, size=int(rng.integers(1, 5)), replace=False).tolist() for _ in range(60)
        ]
        kept = units.keep_owned_rows(owners, most)
        assert (np.diff(kept) > 0).all()
        counts = Counter(itertools.chain.from_iterable(owners[row] for row in kept))
        assert max(counts.values()) <= most
        for row in set(range(60)) - set(kept):
            assert any(counts[owner] == most for owner in owners[row])
        np.testing.assert_array_equal(kept, units.keep_owned_rows(owners, most))
    np.testing.assert_array_equal(units.keep_owned_rows([[1, 2], [1], [2], [2, 2]], 1), [1, 2])
    single = units.keep_owned_rows([[user] for user in USERS], 2)  # one owner: the first two rows
    np.testing.assert_array_equal(single, [0, 1, 2, 3, 4, 9])


@pytest.mark.parametrize(
    ("owners", "error", "message"),
    [
        ([[1], []], ValueError, r"owners\[1\] is empty. Expected at least one owner"),
        ([1, 2], TypeError, r"owners\[0\] is an int. Expected a collection of integer ids"),
        (["ann"], TypeError, r"owners\[0\] is a str"),
        ([["ann"]], TypeError, r"owners\[0\]='ann' is a str. Expected an integer"),
    ],
)
def test_wrong_owners_are_refused(owners, error, message):
    with pytest.raises(error, match=message):
        units.keep_owned_rows(owners, 1)
    with pytest.raises(ValueError, match="rows_per_owner=0 is out of range"):
        units.keep_owned_rows([[1]], 0)
