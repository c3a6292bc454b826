# SPDX-License-Identifier: Apache-2.0
"""The transform of the jaxpr, through every structure a loss can have, against `vmap(grad)`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import dualdp_jax as dpj
from dualdp_jax.per_sample.call import Options, build

N = 3


def squares(y):
    y = jnp.ravel(y)
    return jnp.sum(y**2 / 2 + y * jnp.cos(jnp.arange(y.size)))


def rnn(p, x):
    def step(h, x):
        h = jnp.tanh(x @ p["wx"] + h @ p["wh"] + p["b"])
        return h, h

    last, outputs = lax.scan(step, p["h0"], x, reverse=True)
    return squares(outputs @ p["out"]) + squares(last)


def nested_loops(p, x):
    """Outer scan over layers, inner scan over time; one weight is shared by all of it."""

    def layer(h, w):
        def step(c, row):
            c = jnp.tanh(c @ p["shared"] + row @ w)
            return c, c

        return lax.scan(step, h[0], h)[1], None

    return squares(lax.scan(layer, x, p["w"])[0])


def one_loop_at_many_places(p, x):
    """The very same equation, with other things in the place of its constants."""

    @jax.jit
    def turn(w, scale, h):
        return lax.scan(lambda h, _: (jnp.tanh(h @ (w * scale) + scale @ w), None), h, length=2)[0]

    scales = x[::-1], jnp.arange(4.0) - 1, p["v"], x[::-1]
    return squares(sum(turn(p["w"], scale, k * x) for k, scale in enumerate(scales, 1)))


def rows_used_in_a_loop(p, ids):
    """Rows of one table are added up in a loop over a matrix of the same shape."""
    rows = p["table"][ids]
    step = lambda h, _: (jnp.tanh(h @ p["w"] + rows.sum(0)), None)  # noqa: E731
    return squares(lax.scan(step, p["table"][0], length=3)[0] @ p["table"])


def stacked_convolutions(p, x):
    layer = lambda h, w: (jnp.tanh(lax.conv(h[None], w, (1,), "SAME")[0]), None)  # noqa: E731
    return squares(lax.scan(layer, x, p["w"])[0])


def lookups_in_stacked_tables(p, ids):
    layer = lambda c, tables: (c + tables[ids], None)  # noqa: E731
    outer = lambda c, tables: (lax.scan(layer, c, tables)[0], None)  # noqa: E731
    return squares(jnp.tanh(lax.scan(outer, jnp.zeros((4, 3)), p["tables"])[0]))


def loop_over_weights_and_data(p, x):
    step = lambda c, wx: (c + (wx[0] * wx[1]).sum(), c * wx[0])  # noqa: E731
    return squares(lax.scan(step, 0.5, (p["w"], x))[1])


@jax.custom_vjp
def halved_gradient(w, x):
    return w @ x


halved_gradient.defvjp(
    lambda w, x: (w @ x, (w, x)),
    lambda res, g: (0.5 * jnp.outer(g, res[1]), res[0].T @ g),
)


@jax.custom_jvp
def clipped_product(w, x):
    return w @ x


@clipped_product.defjvp
def _(primals, tangents):
    (w, x), (dw, dx) = primals, tangents
    return w @ x, 0.25 * (dw @ x) + w @ dx


def remat(p, x):
    return squares(jax.checkpoint(lambda w, x: jnp.tanh(x @ w))(p["w"], x))


def switch_of_closures(p, x):
    ways = [lambda: x @ p["w"], lambda: jnp.zeros(4), lambda: p["b"] * x[1]]
    return squares(lax.switch(jnp.int32(jnp.abs(x[0])), ways))


def stopped_in_a_loop(p, x):
    step = lambda c, _: (jnp.tanh(c @ lax.stop_gradient(p["w"]) @ p["w"]), None)  # noqa: E731
    return squares(lax.scan(step, x, length=2)[0])


def physics(p, x):
    """The loss holds a derivative of the model."""
    u = lambda t: jnp.tanh(t @ p["a"]) @ p["b"]  # noqa: E731
    return squares(jax.jacobian(u)(x)) + squares(u(x))


def convolve(**options):
    options = {"window_strides": (1, 1), "padding": "VALID", **options}
    return lambda p, x: squares(lax.conv_general_dilated(x, p["w"], **options))


def bag_and_rows(p, ids):
    """The rows are read twice, once by a sum: one use."""
    rows = p["w"][ids]
    return squares(rows.sum(0) * rows)


#: name: (loss, shapes of its parameters, shape of one example, how many uses find a rule)
W, W_B, TABLE = {"w": (3, 4)}, {"w": (3, 4), "b": (4,)}, {"w": (6, 3)}
RNN = {"wx": (3, 4), "wh": (4, 4), "b": (4,), "h0": (4,), "out": (4, 2)}
OF_FLOATS = {
    "rnn": (rnn, RNN, (5, 3), 3),
    "nested_loops": (nested_loops, {"w": (2, 4, 4), "shared": (4, 4)}, (3, 4), 2),
    "one_loop_at_many_places": (one_loop_at_many_places, {"w": (4, 4), "v": (4,)}, (4,), 4),
    "stacked_convolutions": (stacked_convolutions, {"w": (2, 3, 3, 2)}, (3, 5), 1),
    "loop_over_weights_and_data": (loop_over_weights_and_data, {"w": (5, 2)}, (5, 2), 0),
    "remat": (remat, W, (2, 3), 1),
    "custom_vjp": (lambda p, x: squares(halved_gradient(p["w"].T, x)), W, (3,), 0),
    "custom_jvp": (lambda p, x: squares(clipped_product(p["w"].T, x)), W, (3,), 0),
    "custom_jvp_of_weights": (lambda p, x: squares(x @ jax.nn.silu(p["w"])), W, (2, 3), 1),
    "low_rank": (lambda p, x: squares(x @ (p["w"] @ p["b"])), {**W, "b": (4, 4)}, (2, 3), 1),
    "rounded_weights": (lambda p, x: squares(x @ p["w"] * (p["w"] > 0).sum()), W, (2, 3), 1),
    "switch_of_closures": (switch_of_closures, W_B, (3,), 0),
    "stop_gradient_inside_a_loop": (stopped_in_a_loop, {"w": (3, 3)}, (2, 3), 1),
    "regulariser": (lambda p, x: squares(x @ p["w"]) + jnp.sum(p["w"] ** 2), W, (2, 3), 1),
    "no_data": (lambda p, x: jnp.sum(p["w"] ** 3), W, (2,), 0),
    "physics": (physics, {"a": (2, 4), "b": (4, 3)}, (2,), 5),
    "conv_batch_groups": (convolve(batch_group_count=2), {"w": (4, 3, 2, 2)}, (2, 3, 5, 5), 0),
    "conv_of_a_weight": (
        lambda p, x: squares(lax.conv(p["w"], x, (1, 1), "VALID")),
        {"w": (1, 2, 5, 5)},
        (3, 2, 2, 2),
        0,
    ),
}
OF_IDS = {
    "rows_used_in_a_loop": (rows_used_in_a_loop, {"table": (6, 6), "w": (6, 6)}, (5,), 3),
    "stacked_tables": (lookups_in_stacked_tables, {"tables": (2, 3, 6, 3)}, (4,), 1),
    "bag_and_rows": (bag_and_rows, TABLE, (9,), 1),
    "bag_per_row": (lambda p, i: squares(jnp.tanh(p["w"][i].sum(1))), TABLE, (2, 5), 1),
    "sums_of_sums": (lambda p, i: squares(p["w"][i].sum(0).sum(0)), TABLE, (9,), 1),
    "take": (lambda p, i: squares(jnp.take(p["w"], i, axis=0)), TABLE, (7,), 1),
}
CASES = OF_FLOATS | OF_IDS
#: Structures on which the choices of the other methods differ.
SOME = ("rnn", "stacked_convolutions", "take")
FAST = ("remat", "custom_jvp", "bag_and_rows")


def made(name):
    loss, shapes, x, uses = CASES[name]
    rng = np.random.default_rng(len(shapes))
    params = {key: jnp.asarray(rng.normal(size=s) * 0.5 + 0.1) for key, s in shapes.items()}
    rows = rng.integers(0, 6, (N, *x)) if name in OF_IDS else rng.normal(size=(N, *x))
    return loss, params, jnp.asarray(rows), uses


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in FAST else pytest.mark.slow) for n in CASES]
)
def test_every_structure_matches_vmap(name):
    """Gradients, norms and sums, by one program; and as many uses as have a rule are found."""
    with jax.enable_x64(True):
        loss, params, rows, uses = made(name)
        assert len(build(loss, params, (rows,), Options()).program.analysis.uses) == uses
        methods = ("vmap", "book_keeping", *(("two_pass", "auto") if name in SOME else ()))

        @jax.jit
        def compute(params, rows):
            grads, sums = [], []
            for method in (*methods, "materialize"):
                given = {"method": method, "check": "off"}
                norms = dpj.per_sample_norms(loss, params, rows, per_parameter=True, **given)
                total = dpj.clipped_grad_sum(loss, params, rows, max_grad_norm=1.5, **given)
                sums.append((norms, total))
                if method in ("vmap", "materialize"):
                    grads.append(dpj.per_sample_grads(loss, params, rows, **given))
            return grads, sums

        for expected, *found in compute(params, rows):
            for ours, theirs in ((one, expected) for one in found):
                assert jax.tree.structure(ours) == jax.tree.structure(theirs)
                for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
                    assert a.dtype == b.dtype
                    scale = np.abs(b).max(initial=1e-300)
                    np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12 * scale)


@pytest.mark.slow
def test_parameters_in_aux_are_no_use():
    """They are handed out as they are."""
    params, x = {"w": jnp.ones((3, 2))}, jnp.ones((N, 3))
    loss = lambda p, x: (squares(x @ p["w"]), {"w": p["w"] * 2})  # noqa: E731
    given = {"has_aux": True, "method": "book_keeping"}
    _, aux = dpj.per_sample_norms(loss, params, x, **given)
    np.testing.assert_array_equal(aux["w"], jnp.full((N, 3, 2), 2.0))
    assert len(dpj.explain(loss, params, x, **given)["uses"]) == 1
