# SPDX-License-Identifier: Apache-2.0
"""Units of several rows on JAX: rows_per_unit and row_weights of the three calls."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dualdp_jax as dpj
from dualdp.exactness import ExactnessError
from dualdp_jax.rules import RULES
from tests.closeness import factors_of
from tests.dualdp_jax.two_layers import (
    assert_trees_close,
    drawn,
    loss_fn,
    norms_of,
    per_sample,
    weighted,
)


@pytest.fixture
def problem():
    return drawn(6)


def of_units(grads, weights):
    """Gradients (rows, ...) mixed by weights (U, K)."""
    mix = lambda g: np.einsum("uk,uk...->u...", weights, g.reshape(*weights.shape, *g.shape[1:]))  # noqa: E731
    return jax.tree.map(mix, grads)


def dropped(params, x, y, key):
    return loss_fn(params, x * jax.random.bernoulli(key, 0.5, x.shape), y)


def test_one_row_per_unit_is_an_example(problem):
    def program(**options):
        given = {"max_grad_norm": 0.7, "key": jax.random.key(0), "check": "off", **options}
        sums = lambda *batch: dpj.clipped_grad_sum(dropped, *batch, **given)  # noqa: E731
        return str(jax.make_jaxpr(sums)(*problem))

    assert program(rows_per_unit=1) == program()
    assert program(rows_per_unit=2) != program()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["auto", "loop"])
def test_rows_have_keys_by_their_position(problem, method):
    params, x, y = problem
    key = jax.random.key(7)
    options = {"rows_per_unit": 3, "method": method, "physical_batch_size": 1, "check": "off"}
    grads = dpj.per_sample_grads(dropped, params, x, y, key=key, **options)
    keys = [jax.random.fold_in(key, k) for k in range(6)]
    each = [jax.grad(dropped)(params, x[k], y[k], keys[k]) for k in range(6)]
    rows = jax.tree.map(lambda *leaves: np.stack(leaves), *each)
    assert_trees_close(grads, of_units(rows, np.full((2, 3), 1 / 3)))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["book_keeping", "two_pass"])
def test_padding_never_enters(problem, method):
    """Rows of weight 0 that hold nan, in short and in empty units; the checks pass, too."""
    params, x, y = problem
    weights = np.array([[0, 2.0], [0, 0], [-1.0, 0]], np.float32)
    rows = of_units(per_sample(params, x, y), weights)
    norms = norms_of(rows)
    x = jnp.where(weights.reshape(-1, 1) == 0, jnp.nan, x)
    given = {"rows_per_unit": 2, "row_weights": weights.ravel(), "method": method}
    given["check"] = "always"
    assert_trees_close(dpj.per_sample_grads(loss_fn, params, x, y, **given), rows)
    result = dpj.clipped_grad_sum(loss_fn, params, x, y, max_grad_norm=1.0, **given)
    np.testing.assert_allclose(result.norms, norms, rtol=1e-5)
    assert result.norms[1] == result.losses[1] == 0
    assert_trees_close(result.grads, weighted(factors_of(norms, 1.0), rows))


@pytest.mark.slow
def test_a_replaced_unit_moves_the_sum_by_twice_the_bound(problem):
    """Whatever its rows and its weights are; eight others are there, so no method takes a loop."""
    params, x, y = problem
    rng = np.random.default_rng(8)
    data = [jnp.asarray(np.concatenate([part] * 3)) for part in (x, y)]  # 9 units of 2 rows
    weights = rng.normal(size=18).astype(np.float32)

    @jax.jit
    def total(x, y, weights, bound):
        options = {"rows_per_unit": 2, "row_weights": weights, "max_grad_norm": bound}
        return dpj.clipped_grad_sum(loss_fn, params, x, y, method="book_keeping", **options).grads

    for bound, scale, weight in itertools.product((1e-3, 1.0), (1e-6, 1.0, 1e4), (1e-6, 1.0, 1e8)):
        before = total(*data, weights, bound)
        changed = [part.at[:2].set(scale * rng.normal(size=part[:2].shape)) for part in data]
        other = weights.copy()
        other[:2] = weight * np.array([1.0, -1.0])
        after = total(*changed, other, bound)
        gaps = jax.tree.map(lambda a, b: np.asarray(a, np.float64)[None] - b, after, before)
        assert norms_of(gaps)[0] <= 2 * bound * (1 + 1e-3), (scale, weight)


@pytest.mark.slow
def test_broken_units_contribute_zero(problem):
    """Weights that are nan in a traced call, and a row that is, drop their units alone."""
    params, x, y = problem
    run = jax.jit(
        lambda x, weights: dpj.clipped_grad_sum(
            loss_fn, params, x, y, rows_per_unit=2, row_weights=weights, max_grad_norm=1.0
        )
    )
    weights = np.ones(6, np.float32)
    ones = run(x, weights * np.repeat([0, 0, 1], 2))
    for bad in (np.nan, np.inf):
        broken = run(x.at[0].set(bad), np.where(np.arange(6) == 2, bad, weights))
        assert np.isfinite(broken.norms).tolist() == [False, False, True]
        assert_trees_close(broken.grads, ones.grads)


@pytest.mark.slow
def test_a_fault_in_units_is_found_by_the_check(problem, monkeypatch):
    params, x, y = problem
    rule = RULES["dot_general"]
    wrong = rule._replace(weighted_sum=lambda *a: 1.1 * rule.weighted_sum(*a))
    monkeypatch.setitem(RULES, "dot_general", wrong)

    with pytest.raises(ExactnessError, match="differs from plain autodiff"):
        dpj.check(loss_fn, params, x, y, rows_per_unit=3, method="book_keeping")


@pytest.mark.slow
def test_aux_and_nothing(problem):
    params, x, y = problem
    with_aux = lambda p, x, y: (loss_fn(p, x, y), x * 2)  # noqa: E731
    options = {"has_aux": True, "rows_per_unit": 3, "max_grad_norm": 1.0, "check": "off"}
    result = dpj.clipped_grad_sum(with_aux, params, x, y, physical_batch_size=1, **options)
    np.testing.assert_allclose(result.aux, (x * 2).reshape(2, 3, 3))
    none = dpj.clipped_grad_sum(with_aux, params, x[:0], y[:0], row_weights=x[:0, 0], **options)
    assert none.norms.shape == none.losses.shape == (0,)
    assert not any(jnp.any(leaf) for leaf in jax.tree.leaves(none.grads))


WRONG = {
    "not divided": ({"rows_per_unit": 4}, ValueError, "The batch has 6 rows with rows_per_unit=4"),
    "no row": ({"rows_per_unit": 0}, ValueError, "rows_per_unit=0"),
    "text": ({"rows_per_unit": "2"}, TypeError, "rows_per_unit='2'"),
    "a list": ({"row_weights": [1.0] * 6}, TypeError, "row_weights is a list"),
    "integers": ({"row_weights": np.ones(6, int)}, TypeError, "is an array of int64"),
    "five": ({"row_weights": np.ones(5)}, ValueError, r"row_weights has the shape \(5,\)"),
    "inf": ({"row_weights": np.full(6, np.inf)}, ValueError, "not finite"),
    "large": ({"row_weights": np.full(6, 1e60)}, ValueError, "not finite in float32"),
    "mask": ({"rows_per_unit": 2, "mask": np.ones(6, bool)}, ValueError, r"Expected bool\[3\]"),
    "alone": ({"rows_per_unit": None, "row_weights": np.ones(6)}, ValueError, "without rows_per_u"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_units_are_refused(problem, name):
    options, error, text = WRONG[name]
    with pytest.raises(error, match=text):
        dpj.clipped_grad_sum(
            loss_fn, *problem, max_grad_norm=1.0, **{"rows_per_unit": 1, **options}
        )


def test_a_loss_of_all_rows_is_told_that_it_gets_one(problem):
    params, x, y = problem
    losses = lambda p, x, y: jax.vmap(loss_fn, (None, 0, 0))(p, x, y)  # noqa: E731
    with pytest.raises(ValueError, match="ONE example"):
        dpj.per_sample_norms(losses, params, x, y, rows_per_unit=2)
