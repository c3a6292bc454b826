# SPDX-License-Identifier: Apache-2.0
"""The three calls on JAX: arguments, masks, chunks, clipping, errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dualdp_jax as dpj
from dualdp.plan.clipping import MARGIN
from dualdp_jax.per_sample.call import Options, build
from dualdp_jax.per_sample.methods import METHODS
from tests.closeness import factors_of

N = 5


def loss_fn(params, x, y):
    hidden = jnp.tanh(x @ params["a"]["w"] + params["a"]["b"])
    return jnp.sum((hidden @ params["b"]["w"] - y) ** 2)


@pytest.fixture
def problem():
    rng = np.random.default_rng(3)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    params = {"a": {"w": draw(3, 4), "b": draw(4)}, "b": {"w": draw(4, 2)}}
    return params, draw(N, 3), draw(N, 2)


def per_sample(params, x, y):
    """The truth: one gradient per example, stacked."""
    grads = [jax.grad(loss_fn)(params, x[k], y[k]) for k in range(x.shape[0])]
    return jax.tree.map(lambda *leaves: np.stack(leaves), *grads)


def norms_of(grads):
    leaves = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(grads)]
    return np.sqrt(sum((leaf.reshape(len(leaf), -1) ** 2).sum(1) for leaf in leaves))


def assert_trees_close(a, b, rtol=1e-5):
    """Each leaf to rtol of its norm, plus 1e-6 of the whole norm."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    wide = lambda tree: [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(tree)]  # noqa: E731
    whole = np.sqrt(sum((leaf**2).sum() for leaf in wide(b)))
    for one, other in zip(wide(a), wide(b), strict=True):
        assert one.shape == other.shape
        error, size = np.linalg.norm(one - other), np.linalg.norm(other)
        assert error <= rtol * size + 1e-6 * whole


@pytest.mark.parametrize("method", [*METHODS, "auto"])
@pytest.mark.parametrize("size", [None, 2, 5, pytest.param(9, marks=pytest.mark.slow)])
def test_clipped_sum_matches_the_loop(problem, method, size):
    params, x, y = problem
    grads = per_sample(params, x, y)
    norms = norms_of(grads)
    bound = float(np.median(norms))

    @jax.jit
    def clipped(params, x, y, bound):
        return dpj.clipped_grad_sum(
            loss_fn, params, x, y, max_grad_norm=bound, method=method, physical_batch_size=size
        )

    result = clipped(params, x, y, bound)
    factors = factors_of(norms, bound)
    expected = jax.tree.map(lambda g: np.einsum("n,n...->...", factors, g), grads)
    assert_trees_close(result.grads, expected)
    np.testing.assert_allclose(result.norms, norms, rtol=1e-5)
    losses = [loss_fn(params, x[k], y[k]) for k in range(N)]
    np.testing.assert_allclose(result.losses, losses, rtol=1e-5)
    assert result.aux is None


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("size", [None, 2])
def test_grads_and_norms_match_the_loop(problem, method, size):
    params, x, y = problem
    options = {"method": method, "physical_batch_size": size}
    grads = per_sample(params, x, y)
    assert_trees_close(dpj.per_sample_grads(loss_fn, params, x, y, **options), grads)
    norms = dpj.per_sample_norms(loss_fn, params, x, y, **options)
    np.testing.assert_allclose(norms, norms_of(grads), rtol=1e-5)
    split = dpj.per_sample_norms(loss_fn, params, x, y, per_parameter=True, **options)
    assert_trees_close(split, jax.tree.map(lambda g: norms_of([g]), grads))


@pytest.mark.parametrize("method", METHODS)
def test_broken_examples_contribute_zero(problem, method):
    params, x, y = problem
    broken = x.at[1].set(jnp.nan).at[3].set(jnp.inf).at[4].set(jnp.nan)
    mask = jnp.array([True, True, True, True, False])
    clipped = jax.jit(
        lambda x, mask: dpj.clipped_grad_sum(
            loss_fn, params, x, y, max_grad_norm=0.7, mask=mask, method=method
        )
    )
    result = clipped(broken, mask)
    keep = jnp.array([True, False, True, False, False])
    assert_trees_close(result.grads, clipped(x, keep).grads)
    assert not np.isfinite(result.norms[jnp.array([1, 3])]).any()
    assert result.norms[4] == 0
    assert result.losses[4] == 0


@pytest.mark.parametrize("method", METHODS)
def test_fully_masked_batch_gives_zeros(problem, method):
    params, x, y = problem
    result = dpj.clipped_grad_sum(
        loss_fn, params, x * jnp.nan, y, max_grad_norm=1.0, mask=jnp.zeros(N, bool), method=method
    )
    assert all((leaf == 0).all() for leaf in jax.tree.leaves(result.grads))
    assert (result.norms == 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_padding_chunks_are_left_out(problem, method):
    params, x, y = problem
    mask = jnp.array([True, True, False, False, False])
    options = {"max_grad_norm": 0.7, "mask": mask, "method": method}
    whole = dpj.clipped_grad_sum(loss_fn, params, x, y, **options)
    chunks = dpj.clipped_grad_sum(loss_fn, params, x, y, physical_batch_size=2, **options)
    assert_trees_close(whole.grads, chunks.grads)
    np.testing.assert_allclose(whole.norms, chunks.norms, rtol=1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_no_examples_give_zeros_without_a_call(problem, method):
    params, x, y = problem

    def never(params, x, y):
        raise AssertionError("loss_fn was called")

    result = dpj.clipped_grad_sum(
        never, params, x[:0], y[:0], max_grad_norm=1.0, method=method, has_aux=True
    )
    assert_trees_close(result.grads, jax.tree.map(jnp.zeros_like, params))
    assert result.norms.shape == result.losses.shape == (0,)
    grads = dpj.per_sample_grads(never, params, x[:0], y[:0], method=method)
    assert grads["a"]["w"].shape == (0, 3, 4)
    assert dpj.per_sample_norms(never, params, x[:0], y[:0], method=method).shape == (0,)


@pytest.mark.parametrize("clipping", ["flat", "automatic", "per_layer"])
@pytest.mark.parametrize("method", METHODS)
def test_contributions_are_bounded(problem, clipping, method):
    params, x, y = problem

    @jax.jit
    def contributions(scale, bound):
        scaled = lambda p, x, y: loss_fn(p, x, y) * scale  # noqa: E731
        alone = lambda x, y: dpj.clipped_grad_sum(  # noqa: E731
            scaled, params, x, y, max_grad_norm=bound, clipping=clipping, method=method
        )
        return [alone(x[k : k + 1], y[k : k + 1]).grads for k in range(2)]

    for scale in (1e-30, 1e-18, 1e-6, 1.0, 1e8):
        for bound in (1e-30, 1e-12, 1e-3, 1.0, 1e6):
            for grads in contributions(scale, bound):
                norm = norms_of(jax.tree.map(lambda g: np.asarray(g)[None], grads))[0]
                assert norm <= bound * (1 + 1e-4), (scale, bound)


def test_per_layer_groups_share_the_bound(problem):
    params, x, y = problem
    grads = per_sample(params, x, y)
    bounds = {"a": 0.3, "b": 2.0}
    given = dpj.clipped_grad_sum(loss_fn, params, x, y, max_grad_norm=bounds, clipping="per_layer")
    for group, bound in bounds.items():
        factors = factors_of(norms_of(grads[group]), bound)
        expected = jax.tree.map(lambda g, f=factors: np.einsum("n,n...->...", f, g), grads[group])
        assert_trees_close(given.grads[group], expected)
    np.testing.assert_allclose(given.norms, norms_of(grads), rtol=1e-5)
    even = dpj.clipped_grad_sum(loss_fn, params, x, y, max_grad_norm=1.0, clipping="per_layer")
    share = dpj.clipped_grad_sum(
        loss_fn, params, x, y, max_grad_norm=dict.fromkeys("ab", 0.5**0.5), clipping="per_layer"
    )
    assert_trees_close(even.grads, share.grads)


def test_automatic_clipping_normalises(problem):
    params, x, y = problem
    grads = per_sample(params, x, y)
    factors = 0.8 / (1 + MARGIN["float32"]) / (norms_of(grads) + 0.01)
    expected = jax.tree.map(lambda g: np.einsum("n,n...->...", factors, g), grads)
    result = dpj.clipped_grad_sum(loss_fn, params, x, y, max_grad_norm=0.8, clipping="automatic")
    assert_trees_close(result.grads, expected)


def test_a_new_bound_does_not_recompile(problem):
    params, x, y = problem
    clipped = jax.jit(
        lambda bound: dpj.clipped_grad_sum(loss_fn, params, x, y, max_grad_norm=bound).grads
    )
    small, large = clipped(jnp.float32(0.1)), clipped(jnp.float32(1e6))
    assert clipped._cache_size() == 1
    assert_trees_close(large, jax.tree.map(lambda g: g.sum(0), per_sample(params, x, y)))
    assert norms_of([leaf[None] for leaf in jax.tree.leaves(small)])[0] <= 0.1 * N


@pytest.mark.parametrize("bound", [float("nan"), 0.0, -1.0, float("inf")])
def test_traced_bad_bound_poisons_the_sum(problem, bound):
    params, x, y = problem
    grads = jax.jit(
        lambda bound: dpj.clipped_grad_sum(loss_fn, params, x, y, max_grad_norm=bound).grads
    )(bound)
    assert all(np.isnan(leaf).all() for leaf in jax.tree.leaves(grads))


@pytest.mark.parametrize("bound", [float("nan"), 0.0, -1.0, np.float32(-2), jnp.float32(0)])
def test_bad_bounds_are_refused(problem, bound):
    params, x, y = problem
    with pytest.raises(ValueError, match="max_grad_norm=.*is (out of range|not a number)"):
        dpj.clipped_grad_sum(loss_fn, params, x, y, max_grad_norm=bound)


def test_frozen_leaves_are_none_and_do_not_count(problem):
    params, x, y = problem
    flags = {"a": False, "b": {"w": True}}
    grads = per_sample(params, x, y)
    result = dpj.clipped_grad_sum(loss_fn, params, x, y, max_grad_norm=0.5, trainable=flags)
    assert result.grads["a"] == {"w": None, "b": None}
    np.testing.assert_allclose(result.norms, norms_of(grads["b"]), rtol=1e-5)
    norms = dpj.per_sample_norms(loss_fn, params, x, y, trainable=flags, per_parameter=True)
    assert norms["a"]["w"] is None


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("size", [None, 2])
def test_key_is_folded_by_position(problem, method, size):
    params, x, y = problem
    key = jax.random.key(7)

    def noisy(params, x, y, key):
        return loss_fn(params, x * jax.random.bernoulli(key, 0.5, x.shape), y)

    grads = dpj.per_sample_grads(
        noisy, params, x, y, key=key, method=method, physical_batch_size=size
    )
    each = [jax.grad(noisy)(params, x[k], y[k], key=jax.random.fold_in(key, k)) for k in range(N)]
    assert_trees_close(grads, jax.tree.map(lambda *leaves: np.stack(leaves), *each))


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_aux_is_stacked(problem, method):
    params, x, y = problem
    with_aux = lambda p, x, y: (loss_fn(p, x, y), {"x": x * 2, "one": 1})  # noqa: E731
    options = {"has_aux": True, "method": method, "physical_batch_size": 2}
    result = dpj.clipped_grad_sum(with_aux, params, x, y, max_grad_norm=1.0, **options)
    np.testing.assert_allclose(result.aux["x"], x * 2)
    assert result.aux["one"].shape == (N,)
    _, aux = dpj.per_sample_grads(with_aux, params, x, y, **options)
    np.testing.assert_allclose(aux["x"], x * 2)
    _, aux = dpj.per_sample_norms(with_aux, params, x, y, **options)
    np.testing.assert_allclose(aux["x"], x * 2)


def test_nested_batches_and_constants_are_handed_on(problem):
    params, x, y = problem
    seen = []

    def nested(params, batch, tag, scale):
        seen.append((tag, scale, batch["note"]))
        return loss_fn(params, batch["x"], batch["more"][0]) * scale

    batch = {"x": np.asarray(x), "more": (y, None), "note": "text"}
    grads = dpj.per_sample_grads(nested, params, batch, "tag", 2)
    assert set(seen) == {("tag", 2, "text")}
    doubled = jax.tree.map(lambda g: 2 * g, per_sample(params, x, y))
    assert_trees_close(grads, doubled)


@pytest.mark.parametrize("method", sorted({*METHODS} - {"two_pass"}))
def test_sums_are_float32_for_bfloat16_parameters(problem, method):
    params, x, y = problem
    low = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    result = dpj.clipped_grad_sum(loss_fn, low, x, y, max_grad_norm=0.5, method=method)
    assert {leaf.dtype for leaf in jax.tree.leaves(result.grads)} == {jnp.dtype("float32")}
    assert result.norms.dtype == result.losses.dtype == jnp.float32
    grads = dpj.per_sample_grads(loss_fn, low, x, y, method=method)
    assert grads["a"]["w"].dtype == jnp.bfloat16
    exact = norms_of(jax.tree.map(lambda g: np.asarray(g, np.float32), grads))
    np.testing.assert_allclose(result.norms, exact, rtol=0.02)


def test_float64_parameters_give_float64():
    with jax.enable_x64(True):
        params = {"w": jnp.arange(3.0, dtype=jnp.float64)}
        x = jnp.ones((2, 3), jnp.float64)
        result = dpj.clipped_grad_sum(lambda p, x: (p["w"] @ x) ** 2, params, x, max_grad_norm=0.5)
        assert result.grads["w"].dtype == result.norms.dtype == jnp.float64
        empty = dpj.clipped_grad_sum(
            lambda p, x: (p["w"] @ x) ** 2, params, x[:0], max_grad_norm=0.5
        )
        assert empty.norms.dtype == empty.grads["w"].dtype == jnp.float64


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_max_memory_makes_chunks(problem, method):
    params, x, y = problem
    call = build(loss_fn, params, (x, y), Options())
    one = METHODS[method].footprint(call)
    gradients, operands = 12 + 4 + 8, (3 + 4) + (4 + 2)
    expected = {"vmap": gradients, "loop": gradients, "materialize": gradients + operands}
    assert one == 4 * expected.get(method, operands + 4)  # the bias is kept
    options = {"max_grad_norm": 0.5, "method": method}
    whole = dpj.clipped_grad_sum(loss_fn, params, x, y, **options)
    small = dpj.clipped_grad_sum(loss_fn, params, x, y, max_memory=2 * one, **options)
    assert_trees_close(whole.grads, small.grads)
    with pytest.raises(ValueError, match="max_memory=8 bytes do not hold what one example needs"):
        dpj.clipped_grad_sum(loss_fn, params, x, y, max_memory=8, **options)


def test_an_unused_parameter_gets_zeros(problem):
    params, x, y = problem
    result = dpj.clipped_grad_sum(
        loss_fn, {**params, "spare": jnp.ones(3)}, x, y, max_grad_norm=1.0
    )
    np.testing.assert_array_equal(result.grads["spare"], np.zeros(3))


# ---------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("loss", "error", "text"),
    [
        (lambda p, x, y: p["b"]["w"][0], ValueError, r"returned float32\[2\] for one example"),
        (lambda p, x, y: jnp.int32(1), ValueError, r"returned int32\[\]"),
        (lambda p, x, y: (loss_fn(p, x, y), 1), TypeError, "use has_aux=True"),
        (lambda p, x, y: None, TypeError, "returned None for one example"),
        (lambda p, x, y: "loss", TypeError, "returned a str"),
    ],
)
def test_wrong_losses_are_refused(problem, loss, error, text):
    params, x, y = problem
    with pytest.raises(error, match=text):
        dpj.clipped_grad_sum(loss, params, x, y, max_grad_norm=1.0)


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (loss_fn, r"has_aux=True, but loss_fn returned a .*Expected \(loss, aux\)"),
        (lambda p, x, y: (loss_fn(p, x, y), "text"), "returned 'text' in aux"),
    ],
)
def test_wrong_aux_is_refused(problem, loss, text):
    params, x, y = problem
    with pytest.raises(TypeError, match=text):
        dpj.per_sample_grads(loss, params, x, y, has_aux=True)


def test_wrong_batches_are_refused(problem):
    params, x, y = problem
    cases = [
        ((x, y[:3]), ValueError, r"different numbers of examples \(batch\[0\]: 5, batch\[1\]: 3\)"),
        (("a", 3), ValueError, "The batch holds no array"),
        ((x, jnp.float32(1)), ValueError, r"batch\[1\] is an array without axes"),
        ((x, np.array(["a"] * N)), TypeError, r"batch\[1\] has dtype <U1"),
    ]
    for batch, error, text in cases:
        with pytest.raises(error, match=text):
            dpj.per_sample_grads(loss_fn, params, *batch)


def test_wrong_options_are_refused(problem):
    params, x, y = problem
    call = lambda **options: dpj.clipped_grad_sum(  # noqa: E731
        loss_fn, params, x, y, **{"max_grad_norm": 1.0, **options}
    )
    cases = [
        ({"method": "guess"}, ValueError, "method='guess' is unknown. Expected one of auto, "),
        ({"mask": jnp.ones(3, bool)}, ValueError, r"mask is bool\[3\]. Expected bool\[5\]"),
        ({"mask": jnp.ones(N)}, ValueError, r"mask is float32\[5\]"),
        ({"clipping": "none"}, ValueError, "clipping='none' is unknown"),
        ({"max_grad_norm": {"a": 1.0}}, ValueError, "is a mapping with clipping='flat'"),
        (
            {"max_grad_norm": {"a": 1.0}, "clipping": "per_layer"},
            ValueError,
            r"lacks \['b'\] and names \[\]",
        ),
        ({"max_grad_norm": jnp.ones(2)}, ValueError, r"max_grad_norm has shape \(2,\)"),
        ({"max_grad_norm": "1"}, TypeError, "max_grad_norm='1' is a str"),
        ({"physical_batch_size": 0}, ValueError, "physical_batch_size=0 is out of range"),
        ({"key": 3}, TypeError, "key=3 is not one random key"),
        ({"key": jax.random.split(jax.random.key(0), 2)}, TypeError, "is not one random key"),
        ({"key": jax.random.key(0, impl="rbg")}, ValueError, "key is of the implementation 'rbg'"),
        ({"trainable": {"a": True}}, ValueError, "trainable does not have the structure"),
        ({"trainable": "all"}, TypeError, "trainable holds 'all', a str"),
    ]
    for options, error, text in cases:
        with pytest.raises(error, match=text):
            call(**options)


@pytest.mark.parametrize("leaf", [jnp.arange(3), np.arange(3), 3, True, jnp.ones(2, complex)])
def test_leaves_that_cannot_be_trained_are_named(problem, leaf):
    params, x, y = problem
    params = {**params, "c": {"count": leaf}}
    with pytest.raises(TypeError, match="The parameter 'c/count' is .*freeze it by trainable="):
        dpj.per_sample_grads(loss_fn, params, x, y)
    flags = {"a": True, "b": True, "c": False}
    grads = dpj.per_sample_grads(loss_fn, params, x, y, trainable=flags)
    assert grads["c"]["count"] is None
