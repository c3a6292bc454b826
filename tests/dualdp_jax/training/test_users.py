# SPDX-License-Identifier: Apache-2.0
"""Users on JAX: a user's rows are averaged and clipped once, whatever they are."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dualdp_jax as dpj
from dualdp import units
from dualdp.plan.batches import drawn_rows
from dualdp.randomness import SegmentBits
from dualdp_jax.compat import wrap_key
from tests.closeness import factors_of
from tests.dualdp_jax import runs

N, USERS, K, C = 60, 25, 3, 0.5
RNG = np.random.default_rng(3)
X = RNG.normal(size=(N, 3))
Y = np.tanh(X @ np.array([1.0, -2.0, 0.5]))
#: (60,) user of each row, in no order; most have one to three rows.
OWNERS = 2 * RNG.permutation([*range(USERS), *range(15), *([4] * 8), *([7] * 12)])


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


def params():
    rng = np.random.default_rng(1)
    return {"w": jnp.asarray(rng.normal(size=(3, 4))), "v": jnp.asarray(rng.normal(size=4))}


def loss_fn(params, x, y):
    return (jnp.tanh(x @ params["w"]) @ params["v"] - y) ** 2


def with_dropout(params, x, y, key):
    return loss_fn(params, x * jax.random.bernoulli(key, 0.7, x.shape), y)


def plan(**changes):
    of_users = {"unit": "user", "rows_per_unit": K, "num_examples": USERS}
    given = {"expected_batch_size": 8, "num_steps": 3, "max_grad_norm": C, "seed": 5}
    return runs.make_plan(**of_users | given | changes)


def arguments(**changes):
    given = {"loss_fn": loss_fn, "params": params(), "optimizer": optax.sgd(0.1), "data": (X, Y)}
    return {**given, "users": OWNERS, **changes}


def start(run=None, **changes):
    return runs.private(plan=run or plan(), **arguments(**changes))


def by_hand(params, run, steps, loss_fn=loss_fn, needs_key=False, x=X):
    """Train by `jax.grad` of each row that was drawn of a user, averaged and clipped once."""
    rows, grad = units.user_rows(OWNERS), jax.jit(jax.grad(loss_fn))
    bits = SegmentBits(run.seed)
    for step in range(steps):
        key = wrap_key(bits.key("dropout", step))
        total = jax.tree.map(jnp.zeros_like, params)
        for user in run.batch_indices(step):
            drawn = drawn_rows(run, bits, step, np.array([user]), rows, run.rows_per_unit)
            each = []
            for place, row in enumerate(drawn.rows[drawn.weights > 0]):
                named = {"key": jax.random.fold_in(key, user * K + place)} if needs_key else {}
                each.append(grad(params, x[row], Y[row], **named))
            mean = jax.tree.map(lambda *leaves: sum(leaves) / len(leaves), *each)
            norm = np.sqrt(sum(float((leaf**2).sum()) for leaf in jax.tree.leaves(mean)))
            factor = float(factors_of(norm, C, "float64"))
            total = jax.tree.map(lambda t, g, factor=factor: t + factor * g, total, mean)
        noisy = dpj.noisy_mean(total, run, step)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, noisy)
    return params


def assert_close(ours, theirs, atol=1e-10):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=atol, atol=atol), ours, theirs)


CASES = [
    (loss_fn, {}, "auto"),
    (with_dropout, {"physical_batch_size": 3}, "two_pass"),
    (loss_fn, {"physical_batch_size": 1}, "materialize"),
]


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("case", CASES)
def test_training_is_autodiff_of_the_mean_of_each_user(case):
    loss, changes, method = case
    run, needs_key = plan(**changes), loss is with_dropout
    engine, step, state, loader = start(
        run, loss_fn=loss, needs_key=needs_key, method=method, checks=float(bool(changes))
    )
    start_, state = state.params, runs.train(step, state, loader)
    assert engine.ledger.last_check == (2 if changes else None)
    assert engine.get_epsilon() == plan().epsilon()
    assert_close(state.params, by_hand(start_, plan(), 3, loss, needs_key))
    rows = units.user_rows(OWNERS)
    bits = SegmentBits(run.seed)
    drawn = [drawn_rows(run, bits, step, run.batch_indices(step), rows, K) for step in range(3)]
    assert {int(n) for some in drawn for n in (some.weights > 0).sum(1)} == {1, 2, 3}


def test_one_row_of_each_user_is_the_run_on_examples():
    ends = []
    for run, users in (
        (plan(unit="example", rows_per_unit=None, num_examples=N), None),
        (plan(rows_per_unit=1, num_examples=N), np.arange(N) + 7),
    ):
        given = {"users": users, "loss_fn": with_dropout}
        _, *parts = start(run, **given, needs_key=True, checks=0)
        ends.append(runs.train(*parts).params)
    jax.tree.map(np.testing.assert_array_equal, *ends)


def sum_of_users(x):
    run = plan(expected_batch_size=USERS, num_steps=1, noise_multiplier=0.0, physical_batch_size=25)
    engine, *parts = start(run, data=(x, Y), checks=0)
    runs.train(*parts, 1)
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(engine.stages().unprotected_sum)])


def farthest():
    """Largest distance of two sums whose data differ in all rows of one user."""
    before, apart = sum_of_users(X), [0.0]
    for value in (300.0, -30.0, np.nan):
        other = X.copy()
        other[OWNERS == 2 * 4] = value  # ten rows
        apart.append(float(np.linalg.norm(sum_of_users(other) - before)))
    return max(apart)


def test_the_rows_of_a_user_move_the_sum_by_twice_the_bound():
    assert C / 2 < farthest() <= 2 * C


def test_users_without_rows_are_drawn_and_add_nothing():
    rows = units.user_rows(OWNERS // 2, num_users=2 * USERS)
    run = plan(num_examples=2 * USERS, expected_batch_size=16, physical_batch_size=4)
    x = X.copy()
    x[0] = np.nan  # which pads masked batches
    *_, step, state, loader = start(run, users=rows, data=(x, Y))
    drawn = [c.indices[c.mask] for t in range(3) for c in loader.batch(t).chunks]
    assert all(rows.counts[np.concatenate(drawn)] > 0)
    assert sum(map(len, drawn)) < sum(len(run.batch_indices(t)) for t in range(3))
    state = runs.train(step, state, loader)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.params))


WRONG = {
    "no users": ({"users": None}, ValueError, "unit='user', but users is missing"),
    "too short": ({"users": OWNERS[1:]}, ValueError, "59 ids but the data has 60 rows"),
    "text": ({"users": [f"user {i}" for i in OWNERS]}, TypeError, "Expected a one-dimensional"),
    "unknown": ({"users": OWNERS - 1}, ValueError, "is negative"),
    "number": ({"plan": plan(num_examples=26)}, ValueError, "25 users but the plan has num_ex"),
    "examples": (
        {"plan": plan(unit="example", rows_per_unit=None, num_examples=N)},
        ValueError,
        "users came for a plan with unit='example'",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_users_are_refused_before_anything_changes(name, tmp_path):
    changes, error, match = WRONG[name]
    given = {"plan": plan()} | changes
    with pytest.raises(error, match=match):
        dpj.PrivacyEngine().make_private(**arguments(**given), ledger=tmp_path / "ledger")
    loader = {key: given[key] for key in ("plan", "users") if key in given}
    with pytest.raises(error, match=match):
        dpj.PrivacyEngine().make_loader(data=(X, Y), users=loader.pop("users", OWNERS), **loader)
    assert not (tmp_path / "ledger").exists()


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"views": 2, "augment": lambda example, key: example}, "users and augment= came together"),
        ({"run": plan(rows_per_unit=2**28)}, r"268435456 rows or views of 25 units are more than"),
    ],
)
def test_what_does_not_go_with_users_is_refused(changes, match):
    with pytest.raises(ValueError, match=match):
        start(**changes)
