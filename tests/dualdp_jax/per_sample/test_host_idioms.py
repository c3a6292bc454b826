# SPDX-License-Identifier: Apache-2.0
"""Idioms of JAX and Flax as their hosts document them: exact, by plain autodiff of one example.

known_failures 88.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import dualdp_jax as dpj
from dualdp.plan.plan import PrivacyPlan

N = 4
RNG = np.random.default_rng(5)
X = jnp.asarray(RNG.normal(size=(N, 4)), jnp.float32)
Y = jnp.asarray(RNG.integers(0, 3, N))
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("loop", "vmap", "two_pass")]
METHODS = ["book_keeping", *SLOW]
SUM = {"max_grad_norm": 0.7, "check": "off"}  # compared with plain autodiff here


def loss_of(logits, y):
    return optax.softmax_cross_entropy_with_integer_labels(logits, y)


def nnx_loss(model, x, y):
    return loss_of(model(x), y)


def assert_sum(found, each, bound=0.7):
    """`found` is the sum of the clipped gradients `each` (n, ...)."""
    leaves = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(each)]
    norms = np.sqrt(sum(np.square(leaf).sum(tuple(range(1, leaf.ndim))) for leaf in leaves))
    np.testing.assert_allclose(found.norms, norms, rtol=1e-5)
    factors = np.minimum(1, bound / (1 + 1e-4) / norms)
    for leaf, total in zip(leaves, jax.tree.leaves(found.grads), strict=True):
        np.testing.assert_allclose(total, np.tensordot(factors, leaf, 1), rtol=1e-4, atol=1e-6)


def stacked(gradients):
    return jax.tree.map(lambda *leaves: np.stack(leaves), *gradients)


class Block(nnx.Module):
    def __init__(self, rngs, rate):
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x):
        return self.dropout(jnp.tanh(self.linear(x)))


class Deep(nnx.Module):
    """Layers made by `vmap` with split rngs and run by `scan`, as in Flax's guide on transforms."""

    def __init__(self, rngs, rate=0.0):
        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def create(rngs):
            return Block(rngs, rate)

        self.blocks, self.head = create(rngs), nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def forward(x, block):
            return block(x)

        return self.head(forward(x, self.blocks))


class Normed(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.WeightNorm(nnx.Linear(4, 5, rngs=rngs), rngs=rngs)
        self.last = nnx.Linear(5, 3, rngs=rngs)

    def __call__(self, x):
        return self.last(jnp.tanh(self.first(x)))


class Sowing(nnx.Module):
    """Keeps what it computes; the loss reads a part of it, as an auxiliary loss of experts does."""

    def __init__(self, rngs):
        self.first, self.last = nnx.Linear(4, 5, rngs=rngs), nnx.Linear(5, 3, rngs=rngs)

    def __call__(self, x):
        hidden = jnp.tanh(self.first(x))
        self.sow(nnx.Intermediate, "hidden", hidden)
        add = {"init_fn": lambda: 0.0, "reduce_fn": lambda total, new: total + new}
        self.sow(nnx.Intermediate, "size", jnp.square(hidden).sum(), **add)
        return self.last(hidden)


def sown_loss(model, x, y):
    loss = nnx_loss(model, x, y)
    return loss + 0.1 * nnx.pop(model, nnx.Intermediate)["size"].get_value()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("build", "loss_fn"), [(Deep, nnx_loss), (Normed, nnx_loss), (Sowing, sown_loss)]
)
def test_idioms_of_nnx_are_exact(build, loss_fn, method):
    each = [nnx.grad(loss_fn)(build(nnx.Rngs(0)), X[k], Y[k]) for k in range(N)]
    model = build(nnx.Rngs(0))
    before = jax.tree.leaves(nnx.state(model))
    run = jax.jit(lambda x: dpj.clipped_grad_sum(loss_fn, model, x, Y, method=method, **SUM))
    assert_sum(run(X), stacked(each))
    after = jax.tree.leaves(nnx.state(model))
    assert all(one is other for one, other in zip(before, after, strict=True))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_an_earlier_call_sowed_is_no_part_of_the_loss():
    model = Sowing(nnx.Rngs(0))
    expected = dpj.per_sample_norms(sown_loss, model, X, Y)
    model(100 * X)  # the size of these examples stays in the module
    np.testing.assert_array_equal(dpj.per_sample_norms(sown_loss, model, X, Y), expected)


def loss_and_masks(model, x, y):
    """Loss, and the dropout masks (3, 16) that the layers would draw next."""
    masks = nnx.vmap(lambda block: block.dropout(jnp.ones(16)) > 0)(model.blocks)
    return nnx_loss(model, x, y), masks


def assert_all_differ(masks):
    masks = np.asarray(masks)
    assert masks.shape == (N, 3, 16)
    assert len({row.tobytes() for row in masks.reshape(-1, 16)}) == 3 * N


def test_split_keys_differ_between_layers_and_examples():
    model = Deep(nnx.Rngs(0, dropout=1), rate=0.5)
    _, masks = dpj.per_sample_norms(loss_and_masks, model, X, Y, has_aux=True, check="off")
    assert_all_differ(masks)


@pytest.mark.slow
def test_a_run_of_split_layers_draws_its_masks_from_the_plan():
    """Two runs of one plan agree, whatever keys the modules had; another step has other masks."""
    ends, seen = [], []
    for seed in (1, 2):
        model = Deep(nnx.Rngs(0, dropout=seed), rate=0.5)
        engine = dpj.PrivacyEngine()
        step, state, loader = engine.make_private(
            loss_fn=loss_and_masks, params=model, optimizer=optax.sgd(0.1), data=(X, Y), seed=3,
            expected_batch_size=N, num_steps=2, noise_multiplier=0.0, max_grad_norm=1.0,
            sampler="shuffle", physical_batch_size=N, has_aux=True, checks=float(seed == 2),
        )  # fmt: skip
        for batch in loader.remaining():
            state, metrics = step(state, batch)
            (masks,) = metrics["unprotected_aux"]
            assert_all_differ(masks)
            seen.append(np.asarray(masks).tobytes())
        ends.append(state.params)
    assert seen[:2] == seen[2:]
    assert seen[0] != seen[1]
    for one, other in zip(*map(jax.tree.leaves, ends), strict=True):
        np.testing.assert_array_equal(one, other)
    trained = engine.model(state)
    assert isinstance(trained, Deep)
    trained.eval()
    nnx.update(model, state.params)
    model.eval()
    np.testing.assert_array_equal(trained(X[0]), model(X[0]))
    graphdef, _, rest = nnx.split(model, nnx.Param, ...)
    np.testing.assert_array_equal(nnx.merge(graphdef, state.params, rest)(X[0]), trained(X[0]))


@pytest.mark.parametrize("method", METHODS)
def test_linen_intermediates_are_handed_out(method):
    class Net(linen.Module):
        @linen.compact
        def __call__(self, x):
            hidden = jnp.tanh(linen.Dense(4)(x))
            self.sow("intermediates", "hidden", hidden)
            return linen.Dense(3)(hidden)

    def loss_fn(params, x, y):
        logits, kept = Net().apply(params, x, mutable=["intermediates"])
        (hidden,) = kept["intermediates"]["hidden"]
        return loss_of(logits, y) + 0.1 * jnp.square(hidden).sum(), hidden

    params = Net().init(jax.random.key(0), X[0])
    each = [jax.grad(loss_fn, has_aux=True)(params, X[k], Y[k]) for k in range(N)]
    found = dpj.clipped_grad_sum(loss_fn, params, X, Y, method=method, has_aux=True, **SUM)
    assert_sum(found, stacked([grads for grads, _ in each]))
    np.testing.assert_allclose(found.aux, np.stack([aux for _, aux in each]), rtol=1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_ragged_products_of_experts_are_exact(method):
    """Positions sorted by expert, the sizes of the groups from the data."""

    def loss_fn(params, x, y):
        expert = jnp.argmax(x @ params["router"], 1)
        order = jnp.argsort(expert)
        sizes = jnp.bincount(expert, length=2).astype(jnp.int32)
        return loss_of(jax.lax.ragged_dot(x[order], params["experts"], sizes).mean(0), y)

    keys = jax.random.split(jax.random.key(1), 3)
    params = {
        "router": jax.random.normal(keys[0], (4, 2)),
        "experts": jax.random.normal(keys[1], (2, 4, 3)),
    }
    x = jax.random.normal(keys[2], (N, 6, 4))
    each = [jax.grad(loss_fn)(params, x[k], Y[k]) for k in range(N)]
    run = jax.jit(lambda p: dpj.clipped_grad_sum(loss_fn, p, x, Y, method=method, **SUM))
    assert_sum(run(params), stacked(each))


@pytest.mark.parametrize("method", METHODS[:3])
def test_strict_promotion_is_the_users_and_not_ours(method):
    dtype = "bfloat16"  # the sums of which are float32
    params = {"w": jnp.ones((4, 3), dtype) / 8, "b": jnp.zeros(3, dtype)}
    mixed = lambda p, x, y: loss_of(x.astype("float16") @ p["w"] + p["b"], y)  # noqa: E731
    loss_fn = lambda p, x, y: loss_of(x @ p["w"] + p["b"], y)  # noqa: E731
    x = X.astype(dtype)
    run = lambda p: dpj.clipped_grad_sum(  # noqa: E731
        loss_fn, p, x, Y, max_grad_norm=0.7, method=method
    )
    expected = jax.jit(run)(params)
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        found = jax.jit(run)(params)
        with pytest.raises(ValueError, match="no available implicit dtype promotion"):
            dpj.clipped_grad_sum(mixed, params, x, Y, max_grad_norm=0.7, method=method)
        assert jax.config.jax_numpy_dtype_promotion == "strict"
    for one, other in zip(*map(jax.tree.leaves, (expected, found)), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_a_run_under_strict_promotion_is_the_run_without():
    def end():
        engine = dpj.PrivacyEngine()
        step, state, loader = engine.make_private(
            loss_fn=lambda p, x, y: loss_of(x @ p["w"], y), params={"w": jnp.zeros((4, 3))},
            optimizer=optax.sgd(0.1, momentum=0.5), data=(X, Y), expected_batch_size=2,
            num_steps=3, noise_multiplier=1.0, max_grad_norm=1.0, seed=1, checks=1.0,
        )  # fmt: skip
        for batch in loader.remaining():
            state, metrics = step(state, batch)
        return state.params, engine.stages(), metrics

    expected = end()
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        found = end()
    for one, other in zip(*map(jax.tree.leaves, (expected, found)), strict=True):
        np.testing.assert_array_equal(one, other)


def test_noise_is_drawn_under_strict_promotion():
    plan = PrivacyPlan(
        num_examples=N, expected_batch_size=2, num_steps=1, noise_multiplier=1.0,
        max_grad_norm=1.0, delta=1e-3, seed=1,
    )  # fmt: skip
    sums = {"a": jnp.zeros(3, "bfloat16"), "b": jnp.zeros(2)}
    draw = lambda sums: dpj.noisy_mean(sums, plan, 0)  # noqa: E731
    expected = jax.tree.leaves(draw(sums))
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    try:
        found = jax.tree.leaves(draw(sums))
    finally:
        jax.config.update("jax_numpy_dtype_promotion", "standard")
    assert np.isfinite(found[0]).all()
    for one, other in zip(expected, found, strict=True):
        np.testing.assert_array_equal(one, other)


def batch_loss(params, x, y):
    """Written for a batch (n, 4), (n,)."""
    centred = x - x.mean(axis=-1, keepdims=True)
    logits = jnp.concatenate([centred @ params["w"], jnp.ones((len(x), 1))], axis=1)
    return loss_of(logits, y).mean(axis=0)


@pytest.mark.parametrize("method", METHODS)
def test_a_loss_for_batches_of_one_is_exact(method):
    params = {"w": jnp.asarray(RNG.normal(size=(4, 2)), jnp.float32)}
    each = [jax.grad(batch_loss)(params, X[k : k + 1], Y[k : k + 1]) for k in range(N)]
    given = {**SUM, "method": method, "keep_batch_dim": True}
    run = jax.jit(lambda p: dpj.clipped_grad_sum(batch_loss, p, X, Y, **given))
    assert_sum(run(params), stacked(each))


def test_every_function_takes_a_loss_for_batches_of_one():
    params, given = {"w": jnp.ones((4, 2))}, {"keep_batch_dim": True}
    grads = dpj.per_sample_grads(batch_loss, params, X, Y, **given)
    norms = dpj.per_sample_norms(batch_loss, params, X, Y, **given)
    np.testing.assert_allclose(norms, jnp.sqrt(jnp.square(grads["w"]).sum((1, 2))), rtol=1e-5)
    assert dpj.explain(batch_loss, params, X, Y, **given)["uses"]
    assert dpj.validate(batch_loss, params, X, Y, **given) == []
    with pytest.raises(ValueError, match=r"float32\[1\] for one .* the mean over a batch of one"):
        dpj.per_sample_norms(
            lambda p, x, y: loss_of(x @ p["w"], 0 * y), params, X, Y, keep_batch_dim=True
        )
    with pytest.raises(ValueError, match=r"for a batch of ONE example, here float32\[1,4\]|1, 4"):
        dpj.per_sample_norms(lambda p, x, y: x[0, 0, 0], params, X, Y, keep_batch_dim=True)


def test_a_run_takes_a_loss_for_batches_of_one():
    """One step without noise over all examples is the mean of their gradients."""
    params = {"w": jnp.asarray(RNG.normal(size=(4, 2)), jnp.float32)}
    engine = dpj.PrivacyEngine()
    step, state, loader = engine.make_private(
        loss_fn=batch_loss, params=params, optimizer=optax.sgd(1.0), data=(X, Y),
        expected_batch_size=N, num_steps=1, noise_multiplier=0.0, max_grad_norm=1e3,
        sampler="shuffle", keep_batch_dim=True, checks=1.0,
    )  # fmt: skip
    for batch in loader:
        state, _ = step(state, batch)
    mean = jax.grad(batch_loss)(params, X, Y)["w"]
    np.testing.assert_allclose(state.params["w"], params["w"] - mean, rtol=1e-3, atol=1e-5)
