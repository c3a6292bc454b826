# SPDX-License-Identifier: Apache-2.0
"""Rules on their own: precision, cancellation, rules of the user's, random jaxprs."""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax import lax
from jax.extend import core as jex
from jax.interpreters import ad, batching, mlir

import dualdp
import dualdp_jax as dpj
from dualdp_jax import rules
from dualdp_jax.rules import Rule, arrays, conv, dot_general
from dualdp_jax.rules.estimate import Estimate
from tests.tiers import first

pytestmark = pytest.mark.usefixtures("slow_unchecked")

CAPTURED = ("book_keeping", "two_pass", "materialize", "auto")


def norms_of(loss_fn, params, x, method):
    return dpj.per_sample_norms(loss_fn, params, x, method=method)


# ---------------------------------------------------------------------- known_failures 51


@pytest.mark.slow
@pytest.mark.parametrize("method", first(2, CAPTURED))
@pytest.mark.parametrize("kind", ["dot", "conv"])
def test_cancelling_positions_do_not_fool_the_gram_form(method, kind):
    """Nearly equal positions whose gradients nearly sum to zero: the Gram form cancels."""
    rng = np.random.default_rng(0)
    t, width = 8, 256
    x = np.ones((3, 1, width)) + 1e-4 * rng.normal(size=(3, t, width))
    weights = rng.normal(size=(t, width))
    weights = jnp.asarray(1e2 * (weights - weights.mean(0)), jnp.float32)
    params = {"w": jnp.zeros((width, width), jnp.float32)}

    def loss(p, x):
        if kind == "dot":
            return jnp.sum((x @ p["w"]) * weights)
        y = lax.conv_general_dilated(
            x[None], p["w"][None], (1,), "VALID", dimension_numbers=("NHC", "HIO", "NHC")
        )
        return jnp.sum(y[0] * weights)

    x = x.astype(np.float32)
    gradients = np.einsum("nti,to->nio", x.astype(np.float64), np.asarray(weights, np.float64))
    true = np.sqrt((gradients**2).sum((1, 2)))
    np.testing.assert_allclose(norms_of(loss, params, jnp.asarray(x), method), true, rtol=1e-3)
    naive = dot_general.gram_norms(x[:, None], jnp.broadcast_to(weights, (3, 1, t, width)))
    assert (naive.errors > 1e-4 * true**2).all()
    assert np.abs(np.sqrt(naive.sq_norms) / true - 1).max() > 1e-3


def test_harmless_positions_keep_the_gram_form():
    rng = np.random.default_rng(1)
    acts, grads = (jnp.asarray(rng.normal(size=(4, 1, 6, 50)), jnp.float32) for _ in range(2))
    found = dot_general.gram_norms(acts, grads)
    assert (found.errors < 1e-4 * found.sq_norms).all()
    formed = arrays.sq_norm(arrays.outer(acts, grads))
    np.testing.assert_allclose(found.sq_norms, formed, rtol=1e-4)


# ---------------------------------------------------------------------- low precision


def mixed(p, x):
    h = jnp.tanh(x.astype(jnp.bfloat16) @ p["a"].astype(jnp.bfloat16))
    y = lax.dot_general(
        h, p["b"].astype(jnp.bfloat16), (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32
    )
    kernel = p["k"].astype(jnp.bfloat16)
    z = lax.conv_general_dilated(
        y[None].astype(jnp.bfloat16), kernel, (1,), "SAME", dimension_numbers=("NHC", "HIO", "NHC")
    )
    return jnp.sum(z.astype(jnp.float32) ** 2)


def low_precision(low_params):
    rng = np.random.default_rng(2)
    shapes = {"a": (8, 16), "b": (16, 4), "k": (3, 4, 5)}
    dtype = jnp.bfloat16 if low_params else jnp.float32
    params = {k: jnp.asarray(rng.normal(size=s), dtype) for k, s in shapes.items()}
    x = jnp.asarray(rng.normal(size=(6, 7, 8)), jnp.float32)
    return params, x


@pytest.mark.slow
@pytest.mark.parametrize("method", first(1, ["auto", "book_keeping", "materialize"]))
@pytest.mark.parametrize("low_params", [False, True])
def test_low_precision_products_are_summed_in_float32(method, low_params):
    params, x = low_precision(low_params)

    @functools.partial(jax.jit, static_argnums=1)
    def clipped(x, method):
        return dpj.clipped_grad_sum(mixed, params, x, max_grad_norm=0.5, method=method)

    exact, found = clipped(x, "vmap"), clipped(x, method)
    np.testing.assert_allclose(found.norms, exact.norms, rtol=0.02)
    for name in params:
        assert found.grads[name].dtype == jnp.float32
        error = jnp.linalg.norm(found.grads[name] - exact.grads[name])
        assert error < 0.02 * jnp.linalg.norm(exact.grads[name])
    alone = clipped(x[:1], method).grads.values()
    squares = [np.square(np.asarray(leaf, np.float64)).sum() for leaf in alone]
    assert np.sqrt(sum(squares)) <= 0.5 * (1 + 1e-4)


@pytest.mark.parametrize("low_params", [False, True])
def test_two_passes_in_low_precision_are_refused(low_params):
    params, x = low_precision(low_params)
    with pytest.raises(ValueError, match="method='two_pass' would sum gradients in bfloat16"):
        dpj.clipped_grad_sum(mixed, params, x, max_grad_norm=0.5, method="two_pass")


def test_two_passes_are_refused_where_a_loss_rounds_its_numbers():
    """The second backward would round a gradient that is clipped already: 0.3 % over the bound."""

    def loss(p, x):
        return jnp.sum(jax.jit(lambda y: lax.reduce_precision(y, 8, 7))(x @ p["w"]) ** 2)

    params, x = {"w": jnp.ones((3, 2))}, jnp.ones((4, 3))
    with pytest.raises(ValueError, match="method='two_pass' would sum gradients in 7 bits of man"):
        dpj.clipped_grad_sum(loss, params, x, max_grad_norm=0.5, method="two_pass")


# ---------------------------------------------------------------------- rules of the user's


@pytest.fixture
def cubic_product():
    """A primitive of the user's, y = (x @ w) ** 3, and its rule; both are taken away afterwards."""
    primitive = jex.Primitive("test_cubic_product")
    function = lambda x, w: (x @ w) ** 3  # noqa: E731
    primitive.def_impl(function)
    primitive.def_abstract_eval(
        lambda x, w: jax.core.ShapedArray((*x.shape[:-1], w.shape[-1]), x.dtype)
    )
    mlir.register_lowering(primitive, mlir.lower_fun(function, multiple_results=False))

    def batch(args, dims):
        moved = [x if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(args, dims, strict=True)]
        axes = [None if d is None else 0 for d in dims]
        return jax.vmap(function, in_axes=axes)(*moved), 0

    batching.primitive_batchers[primitive] = batch
    ad.primitive_jvps[primitive] = lambda primals, tangents: jax.jvp(
        function,
        primals,
        tuple(
            jnp.zeros_like(p) if type(t) is ad.Zero else t
            for p, t in zip(primals, tangents, strict=True)
        ),
    )
    yield primitive
    rules.RULES.pop("test_cubic_product", None)


def test_a_rule_of_the_users_is_used(cubic_product):
    called = []

    def grads(spec, others, grads_out):
        called.append(spec)
        return jnp.einsum("nti,nto->nio", *others, grads_out)

    # The gradient of the product is wrong on purpose (it leaves out the cube): the rule is used.
    rule = Rule(accepts=lambda params, position, shapes: position == 1, grads=grads)
    params = {"w": jnp.full((3, 2), 0.5)}
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 5, 3)), jnp.float32)
    loss = lambda p, x: jnp.sum(cubic_product.bind(x, p["w"]))  # noqa: E731
    exact = dpj.per_sample_grads(loss, params, x, method="vmap")["w"]
    np.testing.assert_allclose(
        dpj.per_sample_grads(loss, params, x, method="materialize")["w"], exact, rtol=1e-5
    )
    dpj.register_rule(cubic_product, rule)
    with pytest.raises(dualdp.ExactnessError, match="differs from plain autodiff by"):
        dpj.per_sample_grads(loss, params, x, method="materialize")
    found = dpj.per_sample_grads(loss, params, x, method="materialize", check="off")["w"]
    np.testing.assert_allclose(found, jnp.einsum("nti,nto->nio", x, jnp.ones((4, 5, 2))), rtol=1e-5)
    options = {"max_grad_norm": 1.0, "method": "book_keeping", "check": "off"}
    dpj.clipped_grad_sum(loss, params, x, **options)
    assert [spec.shape for spec in called] == [(3, 2)] * len(called)


PLANTED = {
    "dot_general": (lambda p, x: jnp.sum(jnp.tanh(x @ p["w"])), (3, 2)),
    "conv_general_dilated": (
        lambda p, x: jnp.sum(jnp.tanh(lax.conv(x[None, None], p["w"], (1,), "SAME"))),
        (2, 1, 3),
    ),
    "gather": (lambda p, x: jnp.sum(jnp.tanh(p["w"][jnp.int32(x[:, 0] * 3) % 4])), (4, 2)),
}


def scaled(found):
    """A result of a rule, a thousandth too large."""
    if isinstance(found, Estimate):
        return found._replace(sq_norms=1.002 * found.sq_norms)
    return 1.001 * found


@pytest.mark.parametrize("field", ["grads", "norms", "weighted_sum"])
@pytest.mark.parametrize("primitive", PLANTED)
def test_a_planted_wrong_rule_is_seen(monkeypatch, primitive, field):
    """The comparison that random jaxprs go through fails for it."""
    loss, shape = PLANTED[primitive]
    if primitive == "conv_general_dilated":
        model = lambda p, x: loss(p, x[:, 0])  # noqa: E731
    else:
        model = loss
    right = rules.RULES[primitive]
    wrong = lambda *args: scaled(getattr(right, field)(*args))  # noqa: E731
    _compare_with_the_loop((model, {"w": shape}, 4), 0)
    monkeypatch.setitem(rules.RULES, primitive, right._replace(**{field: wrong}))
    with pytest.raises(AssertionError):
        _compare_with_the_loop((model, {"w": shape}, 4), 0)


@pytest.mark.slow
@pytest.mark.parametrize("n", first(1, [3, 1]))
@pytest.mark.parametrize("patches", [False, True])
def test_both_forms_of_a_convolutions_gradients_agree(monkeypatch, patches, n):
    """By kernel offset as wide convolutions are done, by patches as thin ones; plain for one."""
    monkeypatch.setattr(conv, "_prefers_patches", lambda spec, grads_out: patches)
    options = {"padding": [(2, 1), (0, 1)], "rhs_dilation": (1, 2), "feature_group_count": 2}
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        params = {"w": jnp.asarray(rng.normal(size=(4, 3, 2, 2)))}
        x = jnp.asarray(rng.normal(size=(n, 1, 6, 5, 6)))
        loss = lambda p, x: jnp.sum(  # noqa: E731
            jnp.sin(lax.conv_general_dilated(x, p["w"], (2, 1), **options))
        )
        for method in ("materialize", "book_keeping"):
            truth, found = (
                dpj.clipped_grad_sum(loss, params, x, max_grad_norm=1.0, method=m)
                for m in ("vmap", method)
            )
            np.testing.assert_allclose(found.norms, truth.norms, rtol=1e-10)
            np.testing.assert_allclose(found.grads["w"], truth.grads["w"], rtol=1e-9, atol=1e-12)


def test_register_rule_checks_its_arguments():
    rule = rules.RULES["dot_general"]
    with pytest.raises(ValueError, match="'dot_general' has a rule already. Pass overwrite=True"):
        dpj.register_rule("dot_general", rule)
    dpj.register_rule("dot_general", rule, overwrite=True)
    for target, given in ((3, rule), ("mine", lambda x: x)):
        with pytest.raises(TypeError, match="Expected a primitive"):
            dpj.register_rule(target, given)


# ---------------------------------------------------------------------- random jaxprs

WIDTH = 3


def _dense(draw, p, name):
    p[name] = (WIDTH, WIDTH)
    transposed = draw(st.booleans())
    return lambda q, x: x @ (q[name].T if transposed else q[name])


def _bias(draw, p, name):
    p[name] = (WIDTH,)
    return lambda q, x: x + q[name]


def _scale(draw, p, name):
    p[name] = (1, WIDTH)
    return lambda q, x: x * jnp.exp(q[name])


def _convolution(draw, p, name):
    size, dilation = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    groups = draw(st.sampled_from([1, WIDTH]))
    p[name] = (size, WIDTH // groups, WIDTH)
    return lambda q, x: lax.conv_general_dilated(
        x[None],
        q[name],
        (1,),
        "SAME",
        rhs_dilation=(dilation,),
        dimension_numbers=("NHC", "HIO", "NHC"),
        feature_group_count=groups,
    )[0]


def _lookup(draw, p, name):
    p[name] = (4, WIDTH)
    return lambda q, x: x + q[name][jnp.int32(jnp.abs(x[:, 0]) * 3) % 4]


def _recurrence(draw, p, name):
    p[name], reverse = (WIDTH, WIDTH), draw(st.booleans())

    def apply(q, x):
        def step(h, row):
            h = jnp.tanh(row + h @ q[name])
            return h, h

        return lax.scan(step, x[0], x, reverse=reverse)[1]

    return apply


def _stack(draw, p, name):
    p[name] = (draw(st.integers(1, 3)), WIDTH, WIDTH)
    step = lambda h, w: (jnp.tanh(h @ w), None)  # noqa: E731
    return lambda q, x: lax.scan(step, x, q[name])[0]


def _branch(draw, p, name):
    p[name] = (WIDTH, WIDTH)
    return lambda q, x: lax.cond(x[0, 0] > 0, lambda w: x @ w, lambda w: jnp.sin(x), q[name])


def _shared(draw, p, name):
    squares = sorted(key for key, shape in p.items() if shape == (WIDTH, WIDTH))
    if not squares:
        return _dense(draw, p, name)
    other = draw(st.sampled_from(squares))
    return lambda q, x: x @ q[other]


def _prepend(draw, p, name):
    p[name] = (1, WIDTH)
    return lambda q, x: jnp.concatenate([q[name], x])[:-1]


def _select(draw, p, name):
    p[name] = (WIDTH,)
    return lambda q, x: jnp.where(x > 0, x, q[name])


def _wrapped(draw, p, name):
    inner = _dense(draw, p, name)
    wrap = draw(st.sampled_from([jax.jit, jax.checkpoint]))
    return lambda q, x: wrap(lambda q, x: jnp.tanh(inner(q, x)))(q, x)


def _heads(draw, p, name):
    """One product per head, the weight on either side, its axes in any order."""
    order = draw(st.permutations([0, 1, 2]))
    p[name] = (WIDTH,) * 3
    where = {axis: position for position, axis in enumerate(order)}  # of head, inputs, outputs
    weight_first = draw(st.booleans())

    def apply(q, x):
        z = x[:, :, None] * jnp.cos(x[:, None, :])  # (t, head, input)
        contract, batch = ((2,), (where[1],)), ((1,), (where[0],))
        if weight_first:
            y = lax.dot_general(q[name], z, (contract[::-1], batch[::-1])).swapaxes(1, 2)
        else:
            y = lax.dot_general(z, q[name], (contract, batch))
        return y.sum(0)  # (t, output)

    return apply


def _image(draw, p, name):
    """A convolution with everything a convolution can have."""
    groups = draw(st.sampled_from([1, WIDTH]))
    sizes = {"O": WIDTH, "I": WIDTH // groups, "H": draw(st.integers(1, 3)), "W": 2}
    layout = "".join(draw(st.permutations("OIHW")))
    data, out = ("".join(draw(st.permutations("NCHW"))) for _ in range(2))
    pads = [tuple(draw(st.integers(-1, 2)) for _ in range(2)), (1, draw(st.integers(1, 2)))]
    options = {n: tuple(draw(st.integers(1, 2)) for _ in range(2)) for n in STEPS}
    p[name] = tuple(sizes[axis] for axis in layout)

    def apply(q, x):
        image = jnp.stack([jnp.tile(x.T, 3), jnp.cos(jnp.tile(x.T, 3)), jnp.tile(x.T, 3) ** 2])
        image = image[None, :, :, :5]  # N C H W
        image = image.transpose([("NCHW").index(axis) for axis in data])
        y = lax.conv_general_dilated(
            image,
            q[name],
            padding=pads,
            dimension_numbers=(data, layout, out),
            feature_group_count=groups,
            **options,
        )
        y = y.transpose([out.index(axis) for axis in "NCHW"])[0].reshape(WIDTH, -1)
        return x + jnp.tanh(y @ jnp.cos(jnp.arange(y.shape[1])))

    return apply


STEPS = ("window_strides", "lhs_dilation", "rhs_dilation")


def _bag(draw, p, name):
    p[name], axis = (4, WIDTH), draw(st.integers(0, 1))
    return lambda q, x: x + q[name][jnp.int32(jnp.abs(x) * 3) % 4].sum(axis).mean(0)


def _columns(draw, p, name):
    p[name] = (WIDTH, 4)
    return lambda q, x: x + q[name][:, jnp.int32(jnp.abs(x[:, 0]) * 3) % 4].T


def _switch(draw, p, name):
    p[name] = (WIDTH, WIDTH)
    ways = [lambda w, x: x @ w, lambda w, x: x * w[0], lambda w, x: jnp.sin(x)]
    return lambda q, x: lax.switch(jnp.int32(jnp.abs(x[0, 0]) * 7) % 3, ways, q[name], x)


def _while(draw, p, name):
    """A loop that jax can't differentiate, on the value of a parameter that is also used."""
    p[name] = (WIDTH,)
    halve = lambda v: lax.while_loop(lambda v: jnp.abs(v).max() > 1, lambda v: v / 2, v)  # noqa: E731
    return lambda q, x: x * q[name] + lax.stop_gradient(halve(x[0] + lax.stop_gradient(q[name])))


def _scalar(draw, p, name):
    p[name] = ()
    return lambda q, x: x + jnp.broadcast_to(q[name], x.shape) * jnp.cos(x)


def _cast(draw, p, name):
    p[name] = (WIDTH, WIDTH)
    return lambda q, x: x @ q[name].astype(jnp.float32).T.astype(x.dtype)


LAYERS = [_dense, _bias, _scale, _convolution, _lookup, _recurrence, _stack, _branch]
LAYERS += [_shared, _prepend, _select, _wrapped, _heads, _image, _bag, _columns, _switch]
LAYERS += [_while, _scalar, _cast]


@st.composite
def models(draw):
    """(loss, parameter shapes, positions): a random chain of layers, some with a residual."""
    shapes, layers = {}, []
    for number in range(draw(st.integers(1, 4))):
        layer = draw(st.sampled_from(LAYERS))(draw, shapes, f"p{number}")
        layers.append((layer, draw(st.booleans())))

    def loss(q, x):
        for layer, residual in layers:
            y = jnp.tanh(layer(q, x))
            x = x + y if residual else y
        return jnp.sum(x**2 / 2 + x * jnp.cos(jnp.arange(x.size).reshape(x.shape)))

    return loss, shapes, draw(st.sampled_from([1, 2, 7]))


@hypothesis.given(models(), st.integers(0, 5))
@hypothesis.settings(max_examples=6)
def test_random_jaxprs_match_the_loop(model, seed):
    _compare_with_the_loop(model, seed)


@pytest.mark.slow
@hypothesis.given(models(), st.integers(0, 50))
@hypothesis.settings(max_examples=20)
def test_many_random_jaxprs_match_the_loop(model, seed):
    _compare_with_the_loop(model, seed)


def _compare_with_the_loop(model, seed):
    loss, shapes, t = model
    rng = np.random.default_rng(seed)
    with jax.enable_x64(True):
        params = {name: jnp.asarray(rng.normal(size=s) * 0.5) for name, s in shapes.items()}
        x = jnp.asarray(rng.normal(size=(3, t, WIDTH)))

        def both(params, x):
            run = lambda method: dpj.clipped_grad_sum(  # noqa: E731
                loss, params, x, max_grad_norm=2.0, method=method, check="off"
            )
            return run("loop"), run("book_keeping"), run("materialize")

        truth, *found = jax.jit(both)(params, x)
        # jax rounds a gradient to float32 on its way through a cast, ours is not rounded
        bound = 1e-6 if "float32" in str(jax.make_jaxpr(loss)(params, x[0])) else 1e-9
        for ours in found:
            np.testing.assert_allclose(ours.norms, truth.norms, rtol=bound)
            for name in shapes:
                scale = float(jnp.abs(truth.grads[name]).max())
                error = float(jnp.abs(ours.grads[name] - truth.grads[name]).max())
                assert error <= bound * scale + 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("method", first(1, ["auto", "book_keeping", "materialize", "two_pass"]))
@pytest.mark.parametrize("stride", [1, 2])
def test_a_convolution_without_output_has_no_gradient(method, stride):
    """Such as one of a valid kernel of 5 over 3 pixels."""

    def loss(kernel, x):
        out = jax.lax.conv_general_dilated(x[None], kernel, (stride,), "VALID")
        return out.sum() + (kernel**2).sum() * x.sum()

    kernel, x = jnp.ones((2, 3, 5)), jnp.arange(27.0).reshape(3, 3, 3) - 10
    run = lambda method: dpj.clipped_grad_sum(loss, kernel, x, max_grad_norm=9.0, method=method)  # noqa: E731
    np.testing.assert_allclose(run(method).grads, run("loop").grads, rtol=1e-6)
