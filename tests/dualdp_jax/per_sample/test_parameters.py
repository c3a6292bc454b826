# SPDX-License-Identifier: Apache-2.0
"""Models as their users hold them: linen, nnx, Equinox, Haiku; what is trained, what is refused."""

import equinox
import haiku
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import dualdp_jax as dpj
from dualdp import UnsupportedLayerError
from dualdp_jax.per_sample.methods import METHODS
from tests.closeness import factors_of
from tests.dualdp_jax.two_layers import norms_of

N = 4
RNG = np.random.default_rng(5)
X = jnp.asarray(RNG.normal(size=(N, 4)), jnp.float32)
Y = jnp.asarray(RNG.integers(0, 3, N))
#: Methods that go by rules.
RULED = ("book_keeping", "materialize", "two_pass")


def loss_of(logits, y):
    return optax.softmax_cross_entropy_with_integer_labels(logits, y)


def nnx_loss(model, x, y):
    return loss_of(model(x), y)


def assert_exact(loss_fn, model, gradient, method, batch=(X, Y), **options):
    """Gradients, norms and the sum of the three calls are those of single examples; their aux."""
    each = [gradient(model, *(part[k] for part in batch)) for k in range(N)]
    each = jax.tree.map(lambda *leaves: np.stack(leaves).astype(np.float64), *each)
    norms = norms_of(each)

    @jax.jit
    def compute(batch):
        given = {"method": method, "check": "off", **options}
        grads = dpj.per_sample_grads(loss_fn, model, *batch, **given)
        return grads, dpj.clipped_grad_sum(loss_fn, model, *batch, max_grad_norm=0.7, **given)

    grads, found = compute(batch)
    grads = grads[0] if options.get("has_aux") else grads
    np.testing.assert_allclose(found.norms, norms, rtol=1e-5)
    factors = factors_of(norms, 0.7)
    trees = map(jax.tree.leaves, (each, grads, found.grads))
    for rows, ours, total in zip(*trees, strict=True):
        np.testing.assert_allclose(ours, rows, rtol=2e-5, atol=1e-6)
        np.testing.assert_allclose(total, np.tensordot(factors, rows, 1), rtol=1e-4, atol=1e-6)
    return grads, found


class Linen(linen.Module):
    @linen.compact
    def __call__(self, x):
        hidden = jnp.tanh(linen.Dense(4)(x))
        self.sow("intermediates", "hidden", hidden)
        return linen.Dense(3)(hidden)


@pytest.mark.parametrize("method", RULED)
def test_linen_with_intermediates_handed_out(method):
    def loss_fn(variables, x, y):
        logits, kept = Linen().apply(variables, x, mutable=["intermediates"])
        (hidden,) = kept["intermediates"]["hidden"]
        return loss_of(logits, y) + 0.1 * jnp.square(hidden).sum(), hidden

    variables = {"params": Linen().init(jax.random.key(0), X[0])["params"]}
    alone = lambda v, x, y: jax.grad(loss_fn, has_aux=True)(v, x, y)[0]  # noqa: E731
    _, found = assert_exact(loss_fn, variables, alone, method, has_aux=True)
    hidden = [loss_fn(variables, X[k], Y[k])[1] for k in range(N)]
    np.testing.assert_allclose(found.aux, np.stack(hidden), rtol=1e-6)
    norms = dict.fromkeys(("params/Dense_0", "params/Dense_1"), 0.1)
    result = dpj.clipped_grad_sum(
        loss_fn, variables, X, Y, max_grad_norm=norms, clipping="per_layer", has_aux=True
    )
    assert jax.tree.structure(result.grads) == jax.tree.structure(variables)


class LinenBatchNorm(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(3)(linen.BatchNorm(use_running_average=True)(x))


def test_linen_running_statistics_are_not_trained():
    model = LinenBatchNorm()
    variables = model.init(jax.random.key(0), X)
    loss_fn = lambda v, x, y: loss_of(model.apply(v, x), y)  # noqa: E731
    with pytest.raises(UnsupportedLayerError, match="hold the collection 'batch_stats'"):
        dpj.per_sample_grads(loss_fn, variables, X, Y)
    flags = {"params": True, "batch_stats": False}
    grads = dpj.per_sample_grads(loss_fn, variables, X, Y, trainable=flags)
    assert jax.tree.leaves(grads["batch_stats"]) == []
    assert len(jax.tree.leaves(grads["params"])) == 4


@pytest.mark.parametrize("method", METHODS)
def test_equinox(method):
    model = equinox.nn.MLP(4, 3, 4, 1, activation=jnp.tanh, key=jax.random.key(0))
    loss_fn = lambda m, x, y: loss_of(m(x), y)  # noqa: E731
    assert_exact(loss_fn, model, equinox.filter_grad(loss_fn), method)


def test_equinox_numbers_are_settings():
    model = {"net": equinox.nn.Dropout(0.5), "w": jnp.ones(4)}
    loss_fn = lambda m, x, y, key: loss_of(m["net"](x * m["w"], key=key), y)  # noqa: E731
    grads = dpj.per_sample_grads(loss_fn, model, X, Y, key=jax.random.key(1))
    assert grads["net"].p is None
    assert grads["w"].shape == (N, 4)


@pytest.mark.parametrize("method", RULED[:1])
def test_haiku(method):
    model = haiku.without_apply_rng(
        haiku.transform(lambda x: haiku.nets.MLP([4, 3], activation=jnp.tanh)(x))
    )
    loss_fn = lambda p, x, y: loss_of(model.apply(p, x), y)  # noqa: E731
    assert_exact(loss_fn, model.init(jax.random.key(0), X[0]), jax.grad(loss_fn), method)


def batch_loss(params, x, y):
    """Written for a batch (n, 4), (n,)."""
    centred = x - x.mean(axis=-1, keepdims=True)
    logits = jnp.concatenate([centred @ params["w"], jnp.ones((len(x), 1))], axis=1)
    return loss_of(logits, y).mean(axis=0)


@pytest.mark.parametrize("method", METHODS)
def test_a_loss_for_batches_of_one_is_exact(method):
    params = {"w": jnp.asarray(RNG.normal(size=(4, 2)), jnp.float32)}
    alone = jax.grad(lambda p, x, y: batch_loss(p, x[None], y[None]))
    assert_exact(batch_loss, params, alone, method, keep_batch_dim=True)
    given = {"keep_batch_dim": True}
    assert dpj.explain(batch_loss, params, X, Y, **given)["uses"]
    assert dpj.validate(batch_loss, params, X, Y, **given) == []
    with pytest.raises(ValueError, match=r"float32\[1\] for one .* the mean over a batch of one"):
        dpj.per_sample_norms(lambda p, x, y: loss_of(x @ p["w"], 0 * y), params, X, Y, **given)
    with pytest.raises(ValueError, match=r"for a batch of ONE example, here float32\[1, 4\]"):
        dpj.per_sample_norms(lambda p, x, y: x[0, 0, 0], params, X, Y, **given)


@pytest.mark.parametrize("method", ["vmap", "book_keeping"])
def test_ragged_products_of_experts_are_exact(method):
    """Positions sorted by expert, the sizes of the groups from the data (88)."""

    def loss_fn(params, x, y):
        expert = jnp.argmax(x @ params["router"], 1)
        order = jnp.argsort(expert)
        sizes = jnp.bincount(expert, length=2).astype(jnp.int32)
        return loss_of(jax.lax.ragged_dot(x[order], params["experts"], sizes).mean(0), y)

    keys = jax.random.split(jax.random.key(1), 3)
    shapes = {"router": (4, 2), "experts": (2, 4, 3)}
    params = {k: jax.random.normal(key, shapes[k]) for key, k in zip(keys, shapes, strict=False)}
    batch = jax.random.normal(keys[2], (N, 6, 4)), Y
    assert_exact(loss_fn, params, jax.grad(loss_fn), method, batch)


@pytest.mark.parametrize("method", METHODS)
def test_parameters_of_size_0_raise_nothing(method):
    params = {"w": jnp.ones((4, 3)), "none": jnp.ones((0, 3)), "wide": jnp.ones((4, 0))}

    def loss(p, x, y):
        more = jnp.concatenate([x @ p["w"], x @ p["wide"], p["none"].sum(0) * x[:3]])
        return jnp.sum(jnp.tanh(more / 9) ** 2)

    assert_exact(loss, params, jax.grad(loss), method)
    norms = dpj.per_sample_norms(loss, params, X, Y, method=method, per_parameter=True)
    np.testing.assert_array_equal(norms["wide"], 0)


# ---------------------------------------------------------------------- nnx


class Net(nnx.Module):
    def __init__(self, rngs, *, dropout=0.0, norm=None):
        self.first = nnx.Linear(4, 4, rngs=rngs)
        self.norm = norm or (lambda x: x)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)
        self.last = nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x):
        return self.last(self.dropout(self.norm(jnp.tanh(self.first(x)))))


class Block(nnx.Module):
    def __init__(self, rngs, rate):
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x):
        return self.dropout(jnp.tanh(self.linear(x)))


class Deep(nnx.Module):
    """Layers made by `vmap` with split rngs, run by `scan` and `remat`, as Flax's guide has it."""

    def __init__(self, rngs, rate=0.0, write=lambda block: None):
        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def create(rngs):
            return Block(rngs, rate)

        self.blocks, self.head, self.write = create(rngs), nnx.Linear(4, 3, rngs=rngs), write

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def forward(x, block):
            def run(block, x):
                self.write(block)
                return block(x)

            return nnx.remat(run)(block, x)

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


NNX = [(Net, nnx_loss, method) for method in METHODS]
NNX += [(cls, nnx_loss, method) for cls in (Deep, Normed) for method in ("vmap", "book_keeping")]
NNX += [(Sowing, sown_loss, "book_keeping")]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("build", "loss_fn", "method"), NNX)
def test_modules_of_nnx_are_exact_and_left_alone(build, loss_fn, method):
    """known_failures 88."""
    model = build(nnx.Rngs(0))
    before = jax.tree.leaves(nnx.state(model))
    gradient = lambda _, x, y: nnx.grad(loss_fn)(build(nnx.Rngs(0)), x, y)  # noqa: E731
    grads, _ = assert_exact(loss_fn, model, gradient, method)
    assert isinstance(grads, nnx.State)
    after = jax.tree.leaves(nnx.state(model))
    assert all(one is other for one, other in zip(before, after, strict=True))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_an_earlier_call_sowed_is_no_part_of_the_loss():
    model = Sowing(nnx.Rngs(0))
    expected = dpj.per_sample_norms(sown_loss, model, X, Y)
    model(100 * X)  # the size of these examples stays in the module
    np.testing.assert_array_equal(dpj.per_sample_norms(sown_loss, model, X, Y), expected)


@pytest.mark.parametrize("method", METHODS)
def test_nnx_keys_are_split_per_example_and_left_alone(method):
    model = Net(nnx.Rngs(0), dropout=0.5)
    before = jax.tree.leaves(nnx.state(model))
    same = jnp.broadcast_to(X[:1], X.shape)
    grads, again = (
        dpj.per_sample_grads(nnx_loss, model, same, Y * 0, method=method) for _ in range(2)
    )
    kernels = np.asarray(grads["last"]["kernel"].get_value())
    assert len(np.unique(kernels.round(6), axis=0)) > 1
    after = jax.tree.leaves(nnx.state(model))
    assert all(one is other for one, other in zip(before, after, strict=True))
    np.testing.assert_array_equal(kernels, again["last"]["kernel"].get_value())


def loss_and_masks(model, x, y):
    """Loss, and the dropout masks (3, 16) that the layers would draw next."""
    masks = nnx.vmap(lambda block: block.dropout(jnp.ones(16)) > 0)(model.blocks)
    return nnx_loss(model, x, y), masks


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
            masks = np.asarray(metrics["unprotected_aux"][0])
            assert len({row.tobytes() for row in masks.reshape(-1, 16)}) == 3 * N
            seen.append(masks.tobytes())
        ends.append(state.params)
    assert seen[:2] == seen[2:]
    assert seen[0] != seen[1]
    jax.tree.map(np.testing.assert_array_equal, *ends)


def test_nnx_frozen_and_integer_parameters():
    model = Net(nnx.Rngs(0))
    flags = jax.tree.map(lambda _: True, nnx.state(model, nnx.Param))
    flags["first"]["kernel"] = flags["first"]["kernel"].replace(False)
    grads = dpj.per_sample_grads(nnx_loss, model, X, Y, trainable=flags)
    assert len(jax.tree.leaves(grads)) == 3
    model.first.steps = nnx.Param(jnp.arange(2))
    with pytest.raises(TypeError, match="The parameter 'first/steps' is int32"):
        dpj.per_sample_grads(nnx_loss, model, X, Y)


def test_nnx_batch_norm_is_refused_while_it_trains():
    rngs = nnx.Rngs(0)
    model = Net(rngs, norm=nnx.BatchNorm(4, rngs=rngs))
    before = jax.tree.leaves(nnx.state(model))
    with pytest.raises(UnsupportedLayerError, match="changed the variable 'norm/mean'"):
        dpj.clipped_grad_sum(nnx_loss, model, X, Y, max_grad_norm=1.0)
    after = jax.tree.leaves(nnx.state(model))
    assert all(one is other for one, other in zip(before, after, strict=True))
    model.eval()
    result = dpj.clipped_grad_sum(nnx_loss, model, X, Y, max_grad_norm=1.0)
    assert len(jax.tree.leaves(result.grads)) == 6


class Counted(Net):
    """Counts its calls, as spectral normalisation and schedules of quantisation do."""

    def __init__(self, rngs, what):
        super().__init__(rngs)
        self.calls = nnx.Variable(jnp.zeros(()))
        self.what = what

    def __call__(self, x):
        steps = {"calls": 1.0, "rows": x.sum(), "parameters": self.first.kernel.sum()}
        self.calls[...] = self.calls[...] + steps[self.what]
        return super().__call__(x)


class Keeping(Net):
    def __call__(self, x):
        self.seen = nnx.Cache(x)
        return super().__call__(x)


def scaled(block):
    block.linear.kernel.set_value(block.linear.kernel.get_value() * 0.9)


def transposed(block):
    block.linear.kernel.set_value(block.linear.kernel.get_value().T)


CHANGED = {
    "a new variable": (lambda: Keeping(nnx.Rngs(0)), "seen"),
    "a sum of rows": (lambda: Counted(nnx.Rngs(0), "rows"), "calls"),
    "a number of the parameters": (lambda: Counted(nnx.Rngs(0), "parameters"), "calls"),
    "scaled in a scan": (lambda: Deep(nnx.Rngs(0), write=scaled), "blocks/linear/kernel"),
    "transposed in a scan": (lambda: Deep(nnx.Rngs(0), write=transposed), "blocks/linear/kernel"),
}


@pytest.mark.parametrize("name", CHANGED)
def test_nnx_variables_that_change_are_refused(name):
    build, variable = CHANGED[name]
    with pytest.raises(UnsupportedLayerError, match=f"changed the variable '{variable}"):
        dpj.per_sample_norms(nnx_loss, build(), X, Y)


def test_a_counter_is_no_state_that_examples_share():
    """It moves alike whatever the row."""
    model = Counted(nnx.Rngs(0), "calls")
    norms = dpj.per_sample_norms(nnx_loss, model, X, Y)
    np.testing.assert_allclose(norms, dpj.per_sample_norms(nnx_loss, Net(nnx.Rngs(0)), X, Y))
    assert float(model.calls[...]) == 0


# ---------------------------------------------------------------------- strict promotion


@pytest.mark.parametrize("method", RULED[:2])
def test_strict_promotion_is_not_ours(method):
    dtype = "bfloat16"  # the sums of which are float32
    params = {"w": jnp.ones((4, 3), dtype) / 8, "b": jnp.zeros(3, dtype)}
    loss_fn = lambda p, x, y: loss_of(x @ p["w"] + p["b"], y)  # noqa: E731
    given = {"max_grad_norm": 0.7, "method": method}
    run = lambda p: dpj.clipped_grad_sum(loss_fn, p, X.astype(dtype), Y, **given)  # noqa: E731
    expected = jax.jit(run)(params)
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        found = jax.jit(run)(params)
    jax.tree.map(np.testing.assert_array_equal, expected, found)


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
    jax.tree.map(np.testing.assert_array_equal, expected, found)


@pytest.mark.parametrize("method", ["auto", "book_keeping", "two_pass"])
def test_a_parameter_without_numbers_is_one(method):
    def loss_fn(params, x):
        return (x @ params["w"]) ** 2 + (params["none"] @ jnp.ones((4, 2))).sum()

    params = {"w": jnp.ones(4), "none": jnp.zeros((0, 4))}
    found = dpj.clipped_grad_sum(loss_fn, params, X, max_grad_norm=0.7, method=method)
    plain = dpj.clipped_grad_sum(lambda w, x: (x @ w) ** 2, params["w"], X, max_grad_norm=0.7)
    np.testing.assert_allclose(found.grads["w"], plain.grads, rtol=1e-5)
    assert found.grads["none"].shape == (0, 4)
