# SPDX-License-Identifier: Apache-2.0
"""Augmented views on JAX: averaged before the clip, with keys by (plan, step, example, view)."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dualdp.randomness import SegmentBits
from dualdp_jax.compat import wrap_key
from tests.dualdp_jax import runs
from tests.dualdp_jax.runs import train

N, VIEWS = 40, 3
RNG = np.random.default_rng(3)
X = RNG.normal(size=(N, 3)).astype(np.float32)
Y = np.tanh(X @ np.array([1.0, -2.0, 0.5], np.float32))


def params():
    rng = np.random.default_rng(1)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    return {"w": draw(3, 4), "v": draw(4)}


def loss_fn(params, x, y):
    return (jnp.tanh(x @ params["w"]) @ params["v"] - y) ** 2


def with_dropout(params, x, y, key):
    return loss_fn(params, x * jax.random.bernoulli(key, 0.7, x.shape), y)


def augment(example, key):
    x, y = example
    return x + 0.3 * jax.random.normal(key, x.shape), y


def make_plan(**changes):
    given = {"num_examples": N, "expected_batch_size": 8, "num_steps": 4, "seed": 5}
    return runs.make_plan(**given | {"noise_multiplier": 1.0} | changes)


def arguments(**changes):
    given = {"loss_fn": loss_fn, "params": params(), "optimizer": optax.sgd(0.1), "data": (X, Y)}
    return {**given, "views": VIEWS, "augment": augment, **changes}


def start(plan=None, **changes):
    return runs.private(plan=plan or make_plan(), **arguments(**changes))


def by_hand(params, plan, step, loss_fn, needs_key):
    """Sum of clipped means over the views, one `jax.grad` for each view; norms in draw order."""
    key = wrap_key(SegmentBits(plan.seed).key("dropout", step))
    grad, total, norms = jax.jit(jax.grad(loss_fn)), jax.tree.map(np.zeros_like, params), []
    for example in plan.batch_indices(step):
        views = []
        for view in range(VIEWS):
            row = jax.random.fold_in(key, example * VIEWS + view)
            for_view, for_loss = jax.random.split(row)
            extra = {"key": for_loss} if needs_key else {}
            views.append(grad(params, *augment((X[example], Y[example]), for_view), **extra))
        mean = jax.tree.map(lambda *leaves: np.mean(leaves, 0), *views)
        norms.append(np.sqrt(sum(np.square(leaf).sum() for leaf in jax.tree.leaves(mean))))
        factor = min(1, 0.5 / norms[-1])
        total = jax.tree.map(lambda t, g, factor=factor: t + factor * g, total, mean)
    return total, norms


@pytest.mark.parametrize(("loss", "rows"), [(loss_fn, None), (with_dropout, 3)])
def test_views_are_averaged_before_the_clip(loss, rows):
    plan, needs_key = make_plan(physical_batch_size=rows), loss is with_dropout
    engine, step, state, loader = start(plan, loss_fn=loss, needs_key=needs_key, checks=1.0)
    for t, batch in zip(range(2), loader, strict=False):
        expected, norms = by_hand(state.params, plan, t, loss, needs_key)
        state, _ = step(state, batch)
        found = engine.stages()
        np.testing.assert_allclose(found.unprotected_norms, norms, rtol=1e-4)
        for ours, truth in zip(
            *map(jax.tree.leaves, (found.unprotected_sum, expected)), strict=True
        ):
            np.testing.assert_allclose(ours, truth, rtol=1e-3, atol=1e-5)
    other = make_plan().epsilon(step=2)
    assert engine.get_epsilon(delta=1e-3) == pytest.approx(other, rel=1e-9)


def test_equal_views_are_the_example():
    same = lambda example, key: example  # noqa: E731
    several, one, without = (
        train(*start(**changes, checks=0)[1:]).params
        for changes in (
            {"augment": same},
            {"augment": same, "views": 1},
            {"augment": None, "views": 1},
        )
    )
    jax.tree.map(np.testing.assert_array_equal, one, without)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)  # noqa: E731
    jax.tree.map(close, several, without)


def test_one_example_moves_the_sum_by_at_most_its_bound():
    """All others have no gradient; its views are large and point in many directions."""
    wild = lambda example, key: (1e3 * jax.random.normal(key, (3,)) + example[0], example[1])  # noqa: E731
    x = np.zeros_like(X)
    for scale in (1.0, 1e5):
        x[7] = scale
        lone = lambda p, x, y: jnp.where(jnp.all(y == Y[7]), loss_fn(p, x, y), 0)  # noqa: E731
        plan = make_plan(expected_batch_size=N)
        engine, step, state, loader = start(plan, data=(x, Y), augment=wild, loss_fn=lone)
        train(step, state, loader, 1)
        total = jax.tree.leaves(engine.stages().unprotected_sum)
        size = np.sqrt(
            sum(np.square(leaf.astype(np.float64)).sum() for leaf in map(np.asarray, total))
        )
        assert 0 < size <= 0.5 * (1 + 1e-4)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"augment": None}, TypeError, "views=3 came with augment=None"),
        ({"views": 0}, ValueError, "views=0"),
        ({"augment": "flip"}, TypeError, "came with augment='flip'"),
        ({"views": 2**31}, ValueError, r"more than the 2\^32 keys"),
        ({"augment": lambda example, key: example[0]}, TypeError, "augment returned"),
        ({"augment": lambda example, key: [*example]}, TypeError, "augment returned a list"),
        ({"augment": lambda x, y, key: (x, y)}, TypeError, "augment failed for one example"),
        ({"augment": lambda e, key: (np.asarray(e[0]), e[1])}, TypeError, "written with jax"),
        ({"augment": lambda e, key: (e[0][:2], e[1])}, (TypeError, ValueError), "failed"),
    ],
)
def test_wrong_views_are_refused(changes, error, text, tmp_path):
    with pytest.raises(error, match=text):
        start(make_plan(), ledger=tmp_path / "ledger", **changes)
    assert not (tmp_path / "ledger").exists()
