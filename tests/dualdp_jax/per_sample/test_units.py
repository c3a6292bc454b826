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
from tests.backends import _jax as backend
from tests.cases import layers
from tests.closeness import factors_of
from tests.dualdp_jax.two_layers import assert_trees_close, loss_fn, norms_of, per_sample

BY_NAME = {case.name: case for case in layers.ALL}


@pytest.fixture
def problem():
    rng = np.random.default_rng(4)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    params = {"a": {"w": draw(3, 4), "b": draw(4)}, "b": {"w": draw(4, 2)}}
    return params, draw(6, 3), draw(6, 2)


def of_units(grads, weights):
    """Gradients (rows, ...) mixed by weights (U, K)."""
    mix = lambda g: np.einsum("uk,uk...->u...", weights, g.reshape(*weights.shape, *g.shape[1:]))  # noqa: E731
    return jax.tree.map(mix, grads)


@pytest.mark.parametrize("method", ["auto", "book_keeping", "loop"])
def test_one_row_per_unit_is_an_example(problem, method):
    params, x, y = problem

    def program(**options):
        def compute(params, x, y):
            options_ = {"max_grad_norm": 0.7, "method": method, "check": "off", **options}
            return dpj.clipped_grad_sum(loss_fn, params, x, y, key=jax.random.key(0), **options_)

        return str(jax.make_jaxpr(compute)(params, x, y))

    loss_fn = lambda p, x, y, key: per_row(p, x, y, key)  # noqa: E731
    assert program(rows_per_unit=1) == program()
    assert program(rows_per_unit=2) != program()


def per_row(params, x, y, key):
    return loss_fn(params, x * jax.random.bernoulli(key, 0.5, x.shape), y)


@pytest.mark.parametrize("method", ["auto", "loop"])
def test_rows_have_keys_by_their_position(problem, method):
    params, x, y = problem
    key = jax.random.key(7)
    options = {"rows_per_unit": 3, "method": method, "physical_batch_size": 1, "check": "off"}
    grads = dpj.per_sample_grads(per_row, params, x, y, key=key, **options)
    keys = [jax.random.fold_in(key, k) for k in range(6)]
    each = [jax.grad(per_row)(params, x[k], y[k], keys[k]) for k in range(6)]
    rows = jax.tree.map(lambda *leaves: np.stack(leaves), *each)
    assert_trees_close(grads, of_units(rows, np.full((2, 3), 1 / 3)))


def test_a_loss_of_the_whole_unit_gets_it_as_one_example(problem):
    """Pairs: the better row first. One key for each unit."""
    params, x, _ = problem
    score = lambda p, x: jnp.sum(jnp.tanh(x @ p["a"]["w"] + p["a"]["b"]) @ p["b"]["w"], -1)  # noqa: E731

    def preference(params, pair, key):
        better, worse = score(params, pair + 0.1 * jax.random.normal(key, pair.shape))
        return -jax.nn.log_sigmoid(better - worse)

    pairs, key = x.reshape(3, 2, 3), jax.random.key(1)
    grads = dpj.per_sample_grads(preference, params, pairs, key=key, check="off")
    keys = [jax.random.fold_in(key, u) for u in range(3)]
    each = [jax.grad(preference)(params, pairs[u], keys[u]) for u in range(3)]
    assert_trees_close(grads, jax.tree.map(lambda *leaves: np.stack(leaves), *each))


@pytest.mark.parametrize("method", ["book_keeping", "two_pass", "vmap"])
def test_padding_never_enters(problem, method):
    """Rows of weight 0 that hold nan, in short and in empty units; in grads, norms and sum."""
    params, x, y = problem
    weights = np.array([[0, 2.0], [0, 0], [-1.0, 0]], np.float32)
    rows = of_units(per_sample(params, x, y), weights)
    norms = norms_of(rows)
    x = jnp.where(weights.reshape(-1, 1) == 0, jnp.nan, x)

    @jax.jit
    def compute(x, weights):
        options = {"rows_per_unit": 2, "row_weights": weights, "method": method, "check": "off"}
        return (
            dpj.per_sample_grads(loss_fn, params, x, y, **options),
            dpj.per_sample_norms(loss_fn, params, x, y, per_parameter=True, **options),
            dpj.clipped_grad_sum(loss_fn, params, x, y, max_grad_norm=1.0, **options),
        )

    grads, found, result = compute(x, weights.ravel())
    assert_trees_close(grads, rows)
    assert found["a"]["w"][1] == 0
    np.testing.assert_allclose(result.norms, norms, rtol=1e-5)
    assert result.norms[1] == result.losses[1] == 0
    factors = factors_of(norms, 1.0)
    truth = jax.tree.map(lambda g: np.einsum("u,u...->...", factors, g), rows)
    assert_trees_close(result.grads, truth)


@pytest.mark.parametrize("clipping", ["flat", "per_layer", "automatic"])
def test_masks_and_bounds_count_units(problem, clipping):
    params, x, y = problem
    weights = np.array([[0.5, -3.0], [1.0, 0], [2.0, 1.0]], np.float32)
    options = {"rows_per_unit": 2, "row_weights": weights.ravel(), "clipping": clipping}
    bound = {"a": 0.3, "b": 0.2} if clipping == "per_layer" else 0.5
    run = jax.jit(
        lambda mask: dpj.clipped_grad_sum(
            loss_fn, params, x, y, max_grad_norm=bound, mask=mask, **options
        )
    )
    rows = of_units(per_sample(params, x, y), weights)
    for mask in ([True, False, True], [False, True, False], [False] * 3):
        result = run(np.array(mask))
        total = jax.tree.map(np.zeros_like, result.grads)
        for u in np.flatnonzero(mask):
            one = jax.tree.map(lambda g, u=u: g[u : u + 1], rows)
            for layer, part in one.items():
                size = norms_of(part if clipping == "per_layer" else one)[0]
                limit = bound[layer] if clipping == "per_layer" else bound
                factor = limit / (size + 0.01) if clipping == "automatic" else min(1, limit / size)
                for name, grad in part.items():
                    total[layer][name] = total[layer][name] + factor * grad[0]
        wide = lambda tree: [np.asarray(x, np.float64) for x in jax.tree.leaves(tree)]  # noqa: E731
        for ours, truth in zip(wide(result.grads), wide(total), strict=True):
            np.testing.assert_allclose(ours, truth, rtol=3e-4, atol=1e-6)
        assert result.norms.shape == (3,)


@pytest.mark.parametrize("method", ["book_keeping", "two_pass"])
def test_a_replaced_unit_moves_the_sum_by_twice_the_bound(problem, method):
    """Whatever its rows and its weights are; eight others are there, so no method takes a loop."""
    params, x, y = problem
    rng = np.random.default_rng(8)
    data = [jnp.asarray(np.concatenate([part] * 3)) for part in (x, y)]  # 9 units of 2 rows
    weights = rng.normal(size=18).astype(np.float32)

    @jax.jit
    def total(x, y, weights, bound):
        options = {"rows_per_unit": 2, "row_weights": weights, "max_grad_norm": bound}
        return dpj.clipped_grad_sum(loss_fn, params, x, y, method=method, **options).grads

    for bound, scale, weight in itertools.product((1e-3, 1.0), (1e-6, 1.0, 1e4), (1e-6, 1.0, 1e8)):
        before = total(*data, weights, bound)
        changed = [part.at[:2].set(scale * rng.normal(size=part[:2].shape)) for part in data]
        other = weights.copy()
        other[:2] = weight * np.array([1.0, -1.0])
        after = total(*changed, other, bound)
        gaps = jax.tree.map(lambda a, b: np.asarray(a, np.float64)[None] - b, after, before)
        assert norms_of(gaps)[0] <= 2 * bound * (1 + 1e-3), (scale, weight)


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


@pytest.mark.parametrize("name", ["mlp", "cnn", "token_net", "tied", "reuse_ranks", "class_token"])
def test_units_meet_the_rules_that_examples_meet(name):
    model = backend.build(BY_NAME[name].but(n=12))
    found, one = (
        dpj.explain(
            model.loss_fn,
            model.params,
            model.x,
            method="book_keeping",
            rows_per_unit=size,
        )
        for size in (4, 1)
    )
    uses = lambda found: [(use["primitive"], use["parameters"]) for use in found["uses"]]  # noqa: E731
    assert uses(found) == uses(one)
    assert found["uses"]
    assert found["instantiated"] == one["instantiated"]


def test_a_fault_in_units_is_found_by_the_check(problem, monkeypatch):
    params, x, y = problem
    rule = RULES["dot_general"]
    wrong = rule._replace(weighted_sum=lambda *a: 1.1 * rule.weighted_sum(*a))
    monkeypatch.setitem(RULES, "dot_general", wrong)

    with pytest.raises(ExactnessError, match="differs from plain autodiff"):
        dpj.check(loss_fn, params, x, y, rows_per_unit=3, method="book_keeping")


@pytest.mark.slow
def test_rows_of_an_operation_without_batching_go_one_by_one(problem):
    """`lax.ragged_dot` has rules for vmap in some versions only: both ways are right."""
    _, x, _ = problem
    params = {"w": jnp.arange(24.0).reshape(2, 3, 4) / 10}
    ragged_dot = lambda p, x: jnp.sum(jax.lax.ragged_dot(x[None], p["w"], jnp.array([0, 1])) ** 2)  # noqa: E731
    grads = dpj.per_sample_grads(ragged_dot, params, x, rows_per_unit=2, check="off")
    each = np.stack([jax.grad(ragged_dot)(params, row)["w"] for row in x])
    assert_trees_close(grads, {"w": each.reshape(3, 2, 2, 3, 4).mean(1)})


def test_aux_and_nothing(problem):
    params, x, y = problem
    with_aux = lambda p, x, y: (loss_fn(p, x, y), x * 2)  # noqa: E731
    options = {"has_aux": True, "rows_per_unit": 3, "max_grad_norm": 1.0, "check": "off"}
    result = dpj.clipped_grad_sum(with_aux, params, x, y, physical_batch_size=1, **options)
    np.testing.assert_allclose(result.aux, (x * 2).reshape(2, 3, 3))
    none = dpj.clipped_grad_sum(with_aux, params, x[:0], y[:0], row_weights=x[:0, 0], **options)
    assert none.norms.shape == none.losses.shape == (0,)
    assert not any(jnp.any(leaf) for leaf in jax.tree.leaves(none.grads))


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"rows_per_unit": 4}, ValueError, "The batch has 6 rows with rows_per_unit=4"),
        ({"rows_per_unit": 0}, ValueError, "rows_per_unit=0"),
        ({"rows_per_unit": "2"}, TypeError, "rows_per_unit='2'"),
        ({"row_weights": [1.0] * 6}, TypeError, "row_weights is a list"),
        ({"row_weights": np.ones(6, bool)}, TypeError, "row_weights is an array of bool"),
        ({"row_weights": np.ones(6, int)}, TypeError, "row_weights is an array of int64"),
        ({"row_weights": np.ones(5)}, ValueError, r"row_weights has the shape \(5,\)"),
        ({"row_weights": np.ones((6, 1))}, ValueError, r"row_weights has the shape \(6, 1\)"),
        ({"row_weights": np.full(6, np.inf)}, ValueError, "not finite"),
        ({"row_weights": np.full(6, 1e60)}, ValueError, "not finite in float32"),
        ({"rows_per_unit": 2, "mask": np.ones(6, bool)}, ValueError, r"Expected bool\[3\]"),
        ({"rows_per_unit": None, "row_weights": np.ones(6)}, ValueError, "without rows_per_unit"),
    ],
)
def test_wrong_units_are_refused(problem, options, error, text):
    params, x, y = problem
    with pytest.raises(error, match=text):
        dpj.clipped_grad_sum(
            loss_fn, params, x, y, max_grad_norm=1.0, **{"rows_per_unit": 1, **options}
        )


def test_a_loss_of_all_rows_is_told_that_it_gets_one(problem):
    params, x, y = problem
    losses = lambda p, x, y: jax.vmap(loss_fn, (None, 0, 0))(p, x, y)  # noqa: E731
    with pytest.raises(ValueError, match="ONE example"):
        dpj.per_sample_norms(losses, params, x, y, rows_per_unit=2)


@pytest.mark.parametrize("call", [dpj.per_sample_grads, dpj.per_sample_norms])
def test_checks_pass_on_units_that_are_empty_or_padded(problem, call):
    params, x, y = problem
    weights = np.array([0, 2.0, 0, 0, -1.0, 3.0])
    x = jnp.where(weights[:, None] == 0, jnp.nan, x)
    call(loss_fn, params, x, y, rows_per_unit=2, row_weights=weights, check="always")
