# SPDX-License-Identifier: Apache-2.0
"""Flax linen, Flax nnx, Equinox and Haiku models, handed in as their users hold them."""

import equinox
import haiku
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import dualdp_jax as dpj
from dualdp import UnsupportedLayerError
from dualdp_jax.checkpoint import weights
from dualdp_jax.per_sample.methods import METHODS

N = 4
X = jnp.asarray(np.random.default_rng(0).normal(size=(N, 3)), jnp.float32)
Y = jnp.arange(N) % 2


def squares(out, y):
    return jnp.sum((out - y) ** 2)


def loop(loss_fn, params):
    grads = [jax.grad(loss_fn)(params, X[k], Y[k]) for k in range(N)]
    return jax.tree.map(lambda *leaves: np.stack(leaves), *grads)


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for one, other in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6)


class Linen(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(2)(jnp.tanh(linen.Dense(4)(x)))


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_linen(method):
    model = Linen()
    variables = model.init(jax.random.key(0), X[0])
    loss_fn = lambda v, x, y: squares(model.apply(v, x), y)  # noqa: E731
    assert_same(
        dpj.per_sample_grads(loss_fn, variables, X, Y, method=method), loop(loss_fn, variables)
    )
    norms = dict.fromkeys(("params/Dense_0", "params/Dense_1"), 0.1)
    result = dpj.clipped_grad_sum(
        loss_fn, variables, X, Y, max_grad_norm=norms, clipping="per_layer", method=method
    )
    assert jax.tree.structure(result.grads) == jax.tree.structure(variables)


class LinenBatchNorm(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(2)(linen.BatchNorm(use_running_average=True)(x))


def test_linen_running_statistics_are_not_trained():
    model = LinenBatchNorm()
    variables = model.init(jax.random.key(0), X)
    loss_fn = lambda v, x, y: squares(model.apply(v, x), y)  # noqa: E731
    with pytest.raises(UnsupportedLayerError, match="hold the collection 'batch_stats'"):
        dpj.per_sample_grads(loss_fn, variables, X, Y)
    flags = {"params": True, "batch_stats": False}
    grads = dpj.per_sample_grads(loss_fn, variables, X, Y, trainable=flags)
    assert jax.tree.leaves(grads["batch_stats"]) == []
    assert len(jax.tree.leaves(grads["params"])) == 4


@pytest.mark.parametrize("method", METHODS)
def test_equinox(method):
    model = equinox.nn.MLP(3, 2, 4, 1, activation=jnp.tanh, key=jax.random.key(0))
    loss_fn = lambda m, x, y: squares(m(x), y)  # noqa: E731
    grads = [equinox.filter_grad(loss_fn)(model, X[k], Y[k]) for k in range(N)]
    expected = jax.tree.map(lambda *leaves: np.stack(leaves), *grads)
    assert_same(dpj.per_sample_grads(loss_fn, model, X, Y, method=method), expected)


def test_equinox_numbers_are_settings():
    model = {"net": equinox.nn.Dropout(0.5), "w": jnp.ones(3)}
    loss_fn = lambda m, x, y, key: squares(m["net"](x * m["w"], key=key), y)  # noqa: E731
    grads = dpj.per_sample_grads(loss_fn, model, X, Y, key=jax.random.key(1))
    assert grads["net"].p is None
    assert grads["w"].shape == (N, 3)


@pytest.mark.parametrize("method", METHODS)
def test_haiku(method):
    model = haiku.without_apply_rng(
        haiku.transform(lambda x: haiku.nets.MLP([4, 2], activation=jnp.tanh)(x))
    )
    params = model.init(jax.random.key(0), X[0])
    loss_fn = lambda p, x, y: squares(model.apply(p, x), y)  # noqa: E731
    grads = dpj.per_sample_grads(loss_fn, params, X, Y, method=method)
    assert_same(grads, loop(loss_fn, params))


class Net(nnx.Module):
    def __init__(self, rngs, *, dropout=0.0, norm=None):
        self.first = nnx.Linear(3, 4, rngs=rngs)
        self.norm = norm or (lambda x: x)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)
        self.last = nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, x):
        return self.last(self.dropout(self.norm(jnp.tanh(self.first(x)))))


def nnx_loss(model, x, y):
    return squares(model(x), y)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("jit", [False, True])
def test_nnx_module(method, jit):
    model = Net(nnx.Rngs(0))
    run = lambda x: dpj.per_sample_grads(nnx_loss, model, x, Y, method=method)  # noqa: E731
    grads = jax.jit(run)(X) if jit else run(X)
    each = [nnx.grad(nnx_loss)(model, X[k], Y[k]) for k in range(N)]
    expected = jax.tree.map(lambda *leaves: np.stack(leaves), *each)
    assert_same(grads, expected)
    assert isinstance(grads, nnx.State)


def test_nnx_functional_split():
    graphdef, params = nnx.split(Net(nnx.Rngs(0)), nnx.Param, ...)[:2]
    rest = nnx.split(Net(nnx.Rngs(0)), nnx.Param, ...)[2]

    def loss_fn(params, x, y):
        return nnx_loss(nnx.merge(graphdef, params, rest), x, y)

    expected = dpj.per_sample_grads(nnx_loss, Net(nnx.Rngs(0)), X, Y)
    assert_same(dpj.per_sample_grads(loss_fn, params, X, Y), expected)


@pytest.mark.parametrize("method", METHODS)
def test_nnx_rng_state_is_split_per_example_and_left_alone(method):
    model = Net(nnx.Rngs(0), dropout=0.5)
    before = jax.tree.leaves(nnx.state(model))
    same = jnp.broadcast_to(X[:1], X.shape)
    grads = dpj.per_sample_grads(nnx_loss, model, same, Y * 0, method=method)
    kernels = np.asarray(jax.tree.leaves(grads)[3])
    assert len(np.unique(kernels.round(6), axis=0)) > 1
    after = jax.tree.leaves(nnx.state(model))
    assert all(one is other for one, other in zip(before, after, strict=True))
    again = dpj.per_sample_grads(nnx_loss, model, same, Y * 0, method=method)
    np.testing.assert_array_equal(kernels, jax.tree.leaves(again)[3])


def test_nnx_frozen_parameters():
    model = Net(nnx.Rngs(0))
    flags = jax.tree.map(lambda _: True, nnx.state(model, nnx.Param))
    flags["first"]["kernel"] = flags["first"]["kernel"].replace(False)
    grads = dpj.per_sample_grads(nnx_loss, model, X, Y, trainable=flags)
    assert len(jax.tree.leaves(grads)) == 3


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


class Counter(nnx.Variable):
    pass


class Counting(Net):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.calls = Counter(jnp.zeros(()))

    def __call__(self, x):
        self.calls.set_value(self.calls.get_value() + 1)
        return super().__call__(x)


class Keeping(Net):
    def __call__(self, x):
        self.seen = nnx.Cache(x)
        return super().__call__(x)


@pytest.mark.parametrize(("cls", "name"), [(Keeping, "seen")])
def test_nnx_changed_variables_are_refused(cls, name):
    model = cls(nnx.Rngs(0))
    with pytest.raises(UnsupportedLayerError, match=f"changed the variable '{name}"):
        dpj.per_sample_norms(nnx_loss, model, X, Y)


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.product = nnx.Linear(3, 3, rngs=rngs)

    def __call__(self, x):
        return jnp.tanh(self.product(x))


class Stack(nnx.Module):
    """Stacked layers under `nnx.scan` and `nnx.remat`, which hand their variables back anew."""

    def __init__(self, rngs, write=lambda layer: None):
        self.layers = nnx.split_rngs(splits=2)(nnx.vmap(Layer))(rngs)
        self.write = write

    def __call__(self, x):
        def turn(x, layer):
            def run(layer, x):
                self.write(layer)
                return layer(x)

            return nnx.remat(run)(layer, x)

        return nnx.scan(turn, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)[:2]


def scaled(layer):
    layer.product.kernel.set_value(layer.product.kernel.get_value() * 0.9)


def transposed(layer):
    layer.product.kernel.set_value(layer.product.kernel.get_value().T)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["vmap", "book_keeping"])
def test_nnx_transformations_are_no_changes(method):
    model = Stack(nnx.Rngs(0))
    expected = dpj.per_sample_grads(nnx_loss, model, X, Y, method="loop")
    assert_same(dpj.per_sample_grads(nnx_loss, model, X, Y, method=method), expected)


@pytest.mark.parametrize("write", [scaled, transposed])
def test_nnx_changes_inside_transformations_are_refused(write):
    with pytest.raises(UnsupportedLayerError, match="variable 'layers/product/kernel'"):
        dpj.per_sample_norms(nnx_loss, Stack(nnx.Rngs(0), write), X, Y)


def test_nnx_integer_parameters_are_named():
    model = Net(nnx.Rngs(0))
    model.first.steps = nnx.Param(jnp.arange(2))
    with pytest.raises(TypeError, match="The parameter 'first/steps' is int32"):
        dpj.per_sample_grads(nnx_loss, model, X, Y)


# ---------------------------------------------------------------------- weights


def test_leaves_are_named_in_tree_order():
    nested = {"b": jnp.ones((2, 3)), "a": [jnp.ones(1), {"w": jnp.ones(())}]}
    assert weights.leaves(nested) == [(("a", "0"), (1,)), (("a", "1", "w"), ()), (("b",), (2, 3))]
    linen_names = [path for path, _ in weights.leaves(Linen().init(jax.random.key(0), X[0]))]
    assert linen_names[0] == ("params", "Dense_0", "bias")
    module = Net(nnx.Rngs(0))
    assert weights.leaves(module)[1] == (("first", "kernel"), (3, 4))
    assert weights.leaves(nnx.state(module, nnx.Param)) == weights.leaves(module)


@pytest.mark.parametrize("kind", ["nested", "module", "state"])
def test_from_numpy_rebuilds(kind):
    module = Net(nnx.Rngs(0))
    like = {
        "nested": {"a": jnp.ones(2), "b": [jnp.ones((1, 2), jnp.bfloat16)]},
        "module": module,
        "state": nnx.state(module, nnx.Param),
    }[kind]
    arrays = [np.full(shape, i, float) for i, (_, shape) in enumerate(weights.leaves(like))]
    rebuilt = weights.from_numpy(like, arrays)
    for array, back in zip(arrays, weights.to_numpy(rebuilt), strict=True):
        np.testing.assert_array_equal(array, back.astype(float))
    if kind == "nested":
        assert rebuilt["b"][0].dtype == jnp.bfloat16
    else:
        nnx.update(module, rebuilt)
        assert (module.last.kernel.get_value() == 3).all()


def test_from_numpy_refuses_what_does_not_fit():
    like = {"a": jnp.ones(2), "b": jnp.ones(3)}
    with pytest.raises(ValueError, match="1 arrays came for 2 parameters"):
        weights.from_numpy(like, [np.ones(2)])
    with pytest.raises(ValueError, match=r"The array for 'b' has shape \(2,\). Expected \(3,\)"):
        weights.from_numpy(like, [np.ones(2), np.ones(2)])
    with pytest.raises(TypeError, match="The parameter 'a' is a str"):
        weights.leaves({"a": "text"})


class Counted(nnx.Module):
    """A layer that counts its calls, as spectral normalisation and schedules of quantisation do."""

    def __init__(self, rngs, what):
        self.dense = nnx.Linear(5, 3, rngs=rngs)
        self.calls = nnx.Variable(jnp.zeros(()))
        self.what = what

    def __call__(self, x):
        y = self.dense(x)
        steps = {"calls": 1.0, "rows": x.sum(), "parameters": self.dense.kernel.sum()}
        self.calls[...] = self.calls[...] + steps[self.what]
        return jnp.sum(jnp.tanh(y) ** 2)


@pytest.mark.parametrize("what", ["calls", "rows", "parameters"])
def test_counters_are_no_state_that_examples_share(what):
    """A counter moves alike whatever the row; what reads rows or parameters is refused."""
    module, x = Counted(nnx.Rngs(0), what), jnp.ones((4, 5))

    def call():
        return dpj.clipped_grad_sum(lambda m, x: m(x), module, x, max_grad_norm=0.1)

    if what != "calls":
        with pytest.raises(UnsupportedLayerError, match="changed the variable 'calls'"):
            call()
        return
    norm = np.sqrt(sum((np.asarray(g) ** 2).sum() for g in jax.tree.leaves(call().grads)))
    np.testing.assert_allclose(norm, 0.4, rtol=1e-3)
    assert float(module.calls[...]) == 0


@pytest.mark.parametrize("method", ["auto", "book_keeping", "two_pass", "materialize", "vmap"])
def test_parameters_of_size_0_raise_nothing(method):
    params = {"w": jnp.ones((5, 3)), "none": jnp.ones((0, 3)), "wide": jnp.ones((5, 0))}

    def loss(p, x):
        more = jnp.concatenate([x @ p["w"], x @ p["wide"], p["none"].sum(0) * x[:3]])
        return jnp.sum(jnp.tanh(more) ** 2)

    x = jnp.ones((4, 5)) / 5
    found = dpj.clipped_grad_sum(loss, params, x, max_grad_norm=0.1, method=method)
    assert found.grads["none"].shape == (0, 3)
    truth = jax.grad(loss)(params, x[0])["w"]
    np.testing.assert_allclose(found.norms, 4 * [np.linalg.norm(truth)], rtol=1e-5)
    dpj.per_sample_grads(loss, params, x, method=method)
    norms = dpj.per_sample_norms(loss, params, x, method=method, per_parameter=True)
    np.testing.assert_array_equal(norms["wide"], 0)
