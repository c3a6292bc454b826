# SPDX-License-Identifier: Apache-2.0
"""Rows of a user, or views of an example: averaged and clipped once, whatever they are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dualdp_jax as dpj
from dualdp import units
from dualdp.plan.batches import drawn_rows
from dualdp.randomness import SegmentBits
from dualdp_jax.compat import wrap_key
from tests.closeness import factors_of
from tests.dualdp_jax import runs
from tests.dualdp_jax.definition import length

N, USERS, K, C = 60, 25, 3, 0.5
RNG = np.random.default_rng(3)
X = RNG.normal(size=(N, 3)).astype(np.float32)
Y = np.tanh(X @ np.array([1.0, -2.0, 0.5], np.float32))
#: (60,) user of each row, in no order; most have one to three rows.
OWNERS = 2 * RNG.permutation([*range(USERS), *range(15), *([4] * 8), *([7] * 12)])
PARAMS = {"w": jnp.asarray(RNG.normal(size=(3, 4)), "f"), "v": jnp.asarray(RNG.normal(size=4), "f")}


def loss_fn(params, x, y):
    return (jnp.tanh(x @ params["w"]) @ params["v"] - y) ** 2


def with_dropout(params, x, y, key):
    return loss_fn(params, x * jax.random.bernoulli(key, 0.7, x.shape), y)


def augment(example, key):
    x, y = example
    return x + 0.3 * jax.random.normal(key, x.shape, x.dtype), y


OF_USERS = {"unit": "user", "rows_per_unit": K, "num_examples": USERS}
VIEWS = {"users": None, "views": K, "augment": augment}


def plan(**changes):
    given = {"expected_batch_size": 8, "num_steps": 3, "max_grad_norm": C, "seed": 5}
    return runs.make_plan(**({} if "unit" in changes else OF_USERS) | given | changes)


OF_EXAMPLES = {"unit": "example", "rows_per_unit": None, "num_examples": N}


def start(run=None, **changes):
    given = {"loss_fn": loss_fn, "params": PARAMS, "users": OWNERS}
    return runs.private(plan=run or plan(), **given | {"data": (X, Y)} | changes)


def views_of(bits, step, example):
    """The views of an example, each with the key of its loss."""
    key = wrap_key(bits.key("dropout", step))
    for view in range(K):
        of_view, of_loss = jax.random.split(jax.random.fold_in(key, example * K + view))
        yield augment((X[example], Y[example]), of_view), of_loss


def rows_of(bits, step, user):
    """The rows that were drawn of a user, each with its key."""
    drawn = drawn_rows(plan(), bits, step, np.array([user]), units.user_rows(OWNERS), K)
    key = wrap_key(bits.key("dropout", step))
    for place, row in enumerate(drawn.rows[drawn.weights > 0]):
        yield (X[row], Y[row]), jax.random.fold_in(key, user * K + place)


def sum_by_hand(params, run, step, parts_of):
    """Sum of clipped means over the rows of a unit, one `jax.grad` for each row."""
    total = jax.tree.map(np.zeros_like, params)
    for unit in run.batch_indices(step):
        parts = parts_of(SegmentBits(run.seed), step, unit)
        each = [jax.grad(with_dropout)(params, *row, key) for row, key in parts]
        mean = jax.tree.map(lambda *leaves: np.mean(leaves, 0), *each)
        factor = float(factors_of(length(mean), C))
        total = jax.tree.map(lambda t, g, factor=factor: t + factor * g, total, mean)
    return total


CASES = {"views": (plan(**OF_EXAMPLES, physical_batch_size=3), VIEWS, views_of)}
CASES["users"] = plan(physical_batch_size=3), {}, rows_of


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_units_are_averaged_before_the_clip(name):
    """With keys by (plan, step, unit, row), in chunks, every step checked."""
    run, changes, parts_of = CASES[name]
    given = {"loss_fn": with_dropout, "needs_key": True, "checks": 1.0}
    engine, step, state, loader = start(run, **given | changes)
    for batch in loader.remaining():
        expected = sum_by_hand(state.params, run, batch.step, parts_of)
        state, _ = step(state, batch)
        found = engine.stages().unprotected_sum
        for ours, truth in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
            np.testing.assert_allclose(ours, truth, rtol=1e-3, atol=1e-5)
    assert engine.ledger.last_check == 2
    assert engine.get_epsilon() == run.epsilon()


@pytest.mark.slow
def test_one_row_of_each_unit_is_the_run_on_examples():
    """Bitwise, with the same keys; equal views are the example, too."""
    of_users = plan(**OF_EXAMPLES | {"unit": "user", "rows_per_unit": 1})
    same = {"users": None, "augment": lambda example, key: example, "needs_key": False}
    ends = []
    for run, changes in (
        (plan(**OF_EXAMPLES), {"users": None}),
        (of_users, {"users": np.arange(N) + 7}),
        (plan(**OF_EXAMPLES), {"users": None, "loss_fn": loss_fn, "needs_key": False}),
        (plan(**OF_EXAMPLES), same | {"loss_fn": loss_fn, "views": K}),
    ):
        given = {"loss_fn": with_dropout, "needs_key": True, "checks": 0}
        ends.append(runs.train(*start(run, **given | changes)[1:]).params)
    examples, users, plain, views = ends
    jax.tree.map(np.testing.assert_array_equal, examples, users)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)  # noqa: E731
    jax.tree.map(close, plain, views)


def test_users_without_rows_are_drawn_and_add_nothing():
    rows = units.user_rows(OWNERS // 2, num_users=2 * USERS)
    run = plan(num_examples=2 * USERS, expected_batch_size=16, physical_batch_size=4)
    x = X.copy()
    x[0] = np.nan  # which pads masked batches
    *_, step, state, loader = start(run, users=rows, data=(x, Y), checks=0)
    drawn = [c.indices[c.mask] for t in range(3) for c in loader.batch(t).chunks]
    assert all(rows.counts[np.concatenate(drawn)] > 0)
    assert sum(map(len, drawn)) < sum(len(run.batch_indices(t)) for t in range(3))
    state = runs.train(step, state, loader)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.params))


WRONG = {
    "no users": ({"users": None}, "unit='user', but users is missing"),
    "too short": ({"users": OWNERS[1:]}, "59 ids but the data has 60 rows"),
    "text": ({"users": [f"user {i}" for i in OWNERS]}, "Expected a one-dimensional"),
    "unknown": ({"users": OWNERS - 1}, "is negative"),
    "number": ({"run": plan(num_examples=26)}, "25 users but the plan has num_ex"),
    "examples": ({"run": plan(**OF_EXAMPLES)}, "users came for a plan with unit='example'"),
    "views too": (VIEWS | {"users": OWNERS}, "users and augment= came together"),
    "many rows": ({"run": plan(rows_per_unit=2**28)}, r"268435456 rows or views of 25 units are m"),
}
WRONG_VIEWS = {
    "no augment": ({"augment": None}, "views=3 came with augment=None"),
    "no view": ({"views": 0}, "views=0"),
    "text": ({"augment": "flip"}, "came with augment='flip'"),
    "many": ({"views": 2**31}, r"more than the 2\^32 keys"),
    "a part": ({"augment": lambda example, key: example[0]}, "augment returned"),
    "a list": ({"augment": lambda example, key: [*example]}, "augment returned a list"),
    "arguments": ({"augment": lambda x, y, key: (x, y)}, "augment failed for one example"),
    "NumPy": ({"augment": lambda e, key: (np.asarray(e[0]), e[1])}, "written with jax"),
    "shape": ({"augment": lambda e, key: (e[0][:2], e[1])}, "failed"),
}


def refused(said, tmp_path, **given):
    with pytest.raises((TypeError, ValueError), match=said):
        start(ledger=tmp_path / "ledger", **given)
    assert not (tmp_path / "ledger").exists()


@pytest.mark.parametrize("name", WRONG)
def test_wrong_users_are_refused_before_anything_changes(name, tmp_path):
    changes, said = WRONG[name]
    refused(said, tmp_path, **changes)
    if name not in ("views too", "many rows"):
        given = {"plan": changes.get("run", plan()), "users": changes.get("users", OWNERS)}
        with pytest.raises((TypeError, ValueError), match=said):
            dpj.PrivacyEngine().make_loader(data=(X, Y), **given)


@pytest.mark.parametrize("name", WRONG_VIEWS)
def test_wrong_views_are_refused(name, tmp_path):
    changes, said = WRONG_VIEWS[name]
    refused(said, tmp_path, run=plan(**OF_EXAMPLES), **VIEWS | changes)
