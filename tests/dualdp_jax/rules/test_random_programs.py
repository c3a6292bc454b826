# SPDX-License-Identifier: Apache-2.0
"""Random chains of layers: every captured method is the loop."""

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jax import lax

import dualdp_jax as dpj

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


@hypothesis.given(models(), st.integers(0, 50))
@hypothesis.settings(max_examples=8)
def test_random_jaxprs_match_the_loop(model, seed):
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
