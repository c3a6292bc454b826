# SPDX-License-Identifier: Apache-2.0
"""The three calls: gradients, norms and sums of every method, masks, chunks, keys, refusals."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dualdp_jax as dpj
from dualdp_jax.per_sample.call import Options, build
from dualdp_jax.per_sample.methods import METHODS, footprint
from tests.closeness import factors_of
from tests.dualdp_jax.two_layers import (
    N,
    assert_trees_close,
    drawn,
    loss_fn,
    norms_of,
    per_sample,
    weighted,
)

#: One way by the rules is fast, the others are slow: each compiles programs of its own.
every_method = pytest.mark.parametrize(
    "method",
    [pytest.param(m, marks=() if m == "book_keeping" else pytest.mark.slow) for m in METHODS],
)


@pytest.fixture
def problem():
    return drawn()


def noisy(params, x, y, key):
    """Loss with dropout, and two things beside it."""
    return loss_fn(params, x * jax.random.bernoulli(key, 0.5, x.shape), y), {"x": x * 2, "one": 1}


@every_method
def test_the_three_calls_are_those_of_single_examples(problem, method):
    """In chunks; each with its own key, by its position; `aux` is stacked."""
    params, x, y = problem
    key = jax.random.key(7)
    alone = lambda p, k: noisy(p, x[k], y[k], jax.random.fold_in(key, k))[0]  # noqa: E731
    losses, each = zip(*(jax.value_and_grad(alone)(params, k) for k in range(N)), strict=True)
    grads = jax.tree.map(lambda *leaves: np.stack(leaves), *each)
    norms = norms_of(grads)
    bound = float(np.median(norms))

    @jax.jit
    def compute(params, x, y, bound):
        given = {"method": method, "physical_batch_size": 2, "key": key, "has_aux": True}
        return (
            dpj.per_sample_grads(noisy, params, x, y, **given),
            dpj.per_sample_norms(noisy, params, x, y, **given),
            dpj.per_sample_norms(noisy, params, x, y, per_parameter=True, **given),
            dpj.clipped_grad_sum(noisy, params, x, y, max_grad_norm=bound, **given),
        )

    (found, aux), (whole, _), (split, _), result = compute(params, x, y, bound)
    assert_trees_close(found, grads)
    np.testing.assert_allclose(whole, norms, rtol=1e-5)
    assert_trees_close(split, jax.tree.map(lambda g: norms_of([g]), grads))
    assert_trees_close(result.grads, weighted(factors_of(norms, bound), grads))
    np.testing.assert_allclose(result.norms, norms, rtol=1e-5)
    np.testing.assert_allclose(result.losses, losses, rtol=1e-5)
    for beside in (aux, result.aux):
        np.testing.assert_allclose(beside["x"], x * 2)
        assert beside["one"].shape == (N,)


@every_method
def test_broken_and_masked_examples_contribute_zero(problem, method):
    """Padding is nan here, and fills chunks."""
    params, x, y = problem
    broken = x.at[1].set(jnp.nan).at[3].set(jnp.inf).at[4:].set(jnp.nan)
    mask = np.array([True, True, True, True, False])

    @jax.jit
    def clipped(x, mask):
        given = {"max_grad_norm": 0.7, "mask": mask, "method": method}
        whole = dpj.clipped_grad_sum(loss_fn, params, x, y, **given)
        return whole, dpj.clipped_grad_sum(loss_fn, params, x, y, physical_batch_size=2, **given)

    rows = [0, 2]
    grads = per_sample(params, x, y)
    alone = jax.tree.map(lambda leaf: leaf[rows], grads)
    expected = weighted(factors_of(norms_of(alone), 0.7), alone)
    for result in clipped(broken, mask):
        assert_trees_close(result.grads, expected)
        assert not np.isfinite(np.asarray(result.norms)[[1, 3]]).any()
        assert result.norms[4] == result.losses[4] == 0
    for result in clipped(x * jnp.nan, np.zeros(N, bool)):
        assert all((leaf == 0).all() for leaf in jax.tree.leaves(result.grads))
        assert (result.norms == 0).all()


def test_no_examples_give_zeros_without_a_call(problem):
    params, x, y = problem
    nothing = lambda p, x, y: pytest.fail("loss_fn was called"), params, x[:0], y[:0]
    result = dpj.clipped_grad_sum(*nothing, max_grad_norm=1.0)
    assert_trees_close(result.grads, jax.tree.map(jnp.zeros_like, params))
    assert result.norms.shape == result.losses.shape == (0,)
    assert dpj.per_sample_grads(*nothing)["a"]["w"].shape == (0, 3, 4)
    assert dpj.per_sample_norms(*nothing).shape == (0,)


def test_a_new_bound_does_not_recompile(problem):
    params, x, y = problem
    clipped = jax.jit(
        lambda bound: dpj.clipped_grad_sum(loss_fn, params, x, y, max_grad_norm=bound).grads
    )
    small, large = clipped(jnp.float32(0.1)), clipped(jnp.float32(1e6))
    assert clipped._cache_size() == 1
    assert_trees_close(large, jax.tree.map(lambda g: g.sum(0), per_sample(params, x, y)))
    assert norms_of([leaf[None] for leaf in jax.tree.leaves(small)])[0] <= 0.1 * N
    for bound in (float("nan"), 0.0, -1.0, float("inf")):  # which a program can't refuse
        assert all(np.isnan(leaf).all() for leaf in jax.tree.leaves(clipped(jnp.float32(bound))))


def test_frozen_leaves_are_none_and_do_not_count(problem):
    params, x, y = problem
    flags = {"a": False, "b": {"w": True}}
    grads = per_sample(params, x, y)
    result = dpj.clipped_grad_sum(loss_fn, params, x, y, max_grad_norm=0.5, trainable=flags)
    assert result.grads["a"] == {"w": None, "b": None}
    np.testing.assert_allclose(result.norms, norms_of(grads["b"]), rtol=1e-5)
    norms = dpj.per_sample_norms(loss_fn, params, x, y, trainable=flags, per_parameter=True)
    assert norms["a"]["w"] is None


def test_nested_batches_and_constants_are_handed_on(problem):
    params, x, y = problem
    seen = []

    def nested(params, batch, tag, scale):
        seen.append((tag, scale, batch["note"]))
        return loss_fn(params, batch["x"], batch["more"][0]) * scale

    batch = {"x": np.asarray(x), "more": (y, None), "note": "text"}
    grads = dpj.per_sample_grads(nested, params, batch, "tag", 2)
    assert set(seen) == {("tag", 2, "text")}
    assert_trees_close(grads, jax.tree.map(lambda g: 2 * g, per_sample(params, x, y)))


def test_max_memory_makes_chunks(problem):
    params, x, y = problem
    gradients, operands = 12 + 4 + 8, (3 + 4) + (4 + 2)
    expected = {"vmap": gradients, "loop": gradients, "materialize": gradients + operands}
    for method in METHODS:
        one = footprint(build(loss_fn, params, (x, y), Options(method=method)))
        assert one == 4 * expected.get(method, operands + 4)  # the bias is kept
        norms = functools.partial(dpj.per_sample_norms, loss_fn, method=method)
        program = str(jax.make_jaxpr(functools.partial(norms, max_memory=2 * one))(*problem))
        assert "length=3" in program  # of a scan: two rows, two, and one
        with pytest.raises(ValueError, match="max_memory=8 bytes do not hold what one example nee"):
            norms(*problem, max_memory=8)


# ---------------------------------------------------------------------- refusals


REFUSED = {
    "two numbers": (
        lambda p, x, y: p["b"]["w"][0],
        ValueError,
        r"returned float32\[2\] for one ex",
    ),
    "an integer": (lambda p, x, y: jnp.int32(1), ValueError, r"returned int32\[\]"),
    "aux": (lambda p, x, y: (loss_fn(p, x, y), 1), TypeError, "use has_aux=True"),
    "a scalar": (jnp.float32(1), ValueError, r"batch\[1\] is an array without axes"),
    "names": (np.array(["a"] * N), TypeError, r"batch\[1\] has dtype <U1"),
    "clipping": ({"clipping": "none"}, ValueError, "clipping='none' is unknown"),
    "bounds": ({"max_grad_norm": {"a": 1.0}}, ValueError, "is a mapping with clipping='flat'"),
    "a bound less": (
        {"max_grad_norm": {"a": 1.0}, "clipping": "per_layer"},
        ValueError,
        r"lacks \['b'\] and names \[\]",
    ),
    "two bounds": ({"max_grad_norm": jnp.ones(2)}, ValueError, r"has shape \(2,\)"),
    "nan as bound": ({"max_grad_norm": np.nan}, ValueError, "=nan is not a number"),
    "no bound": ({"max_grad_norm": jnp.float32(0)}, ValueError, "max_grad_norm=.*is out of range"),
    "keys": ({"key": jax.random.split(jax.random.key(0))}, TypeError, "is not one random key"),
    "rbg": ({"key": jax.random.key(0, impl="rbg")}, ValueError, "of the implementation 'rbg'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_mistakes_are_refused_by_their_fix(problem, name):
    """A loss, options, or the second part of the batch."""
    params, x, y = problem
    given, error, text = REFUSED[name]
    options = {"max_grad_norm": 1.0} | (given if isinstance(given, dict) else {})
    loss = given if callable(given) else loss_fn
    with pytest.raises(error, match=text):
        dpj.clipped_grad_sum(loss, params, x, given if hasattr(given, "shape") else y, **options)


def test_text_is_no_batch_and_no_aux(problem):
    with pytest.raises(ValueError, match="The batch holds no array"):
        dpj.per_sample_grads(loss_fn, problem[0], "a", 3)
    with pytest.raises(TypeError, match="returned 'text' in aux"):
        dpj.per_sample_grads(lambda *given: (loss_fn(*given), "text"), *problem, has_aux=True)


LABELS = np.arange(6, dtype="f")


@pytest.mark.parametrize(
    "labels",
    [list(LABELS), LABELS[:, None].tolist(), {"y": (None, range(6))}, bytes(6)],
    ids=lambda labels: type(labels).__name__,
)
def test_labels_that_are_no_array_are_refused(labels):
    """They are handed on whole: each example's loss would read the labels of all."""
    loss, x = lambda p, x, c: ((x @ p) ** 2).sum(), np.ones((6, 3), "f")  # noqa: E731
    with pytest.raises(TypeError, match="of 6 Python numbers, one for each example"):
        dpj.clipped_grad_sum(loss, jnp.ones(3), x, labels, max_grad_norm=1.0)
    for constant in ([0.5, 2.0], ("a",) * 6, 6.0, None):  # which are the same for every example
        dpj.per_sample_norms(loss, jnp.ones(3), x, constant, check="off", method="loop")


@pytest.mark.slow
def test_nothing_is_left_behind_between_calls(problem):
    """known_failures 6: the same call twice, with another in between, gives the same."""
    params, x, y = problem
    norms = lambda x, y: dpj.per_sample_norms(loss_fn, params, x, y, method="book_keeping")  # noqa: E731
    first = norms(x, y)
    norms(10 * x[:2], y[:2])
    np.testing.assert_array_equal(norms(x, y), first)
