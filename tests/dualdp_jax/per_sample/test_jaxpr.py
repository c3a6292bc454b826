# SPDX-License-Identifier: Apache-2.0
"""The transform of the jaxpr, through every structure a loss can have, against `vmap(grad)`."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import dualdp_jax as dpj
from dualdp_jax.per_sample.call import Options, build

N = 3


class Case(NamedTuple):
    """A loss, shapes of its parameters, shape of one example, and how many uses find a rule."""

    loss: Any
    params: dict[str, tuple[int, ...]]
    x: tuple[int, ...]
    uses: int
    ids: bool = False


def squares(y):
    y = jnp.ravel(y)
    return jnp.sum(y**2 / 2 + y * jnp.cos(jnp.arange(y.size)))


def rnn(p, x, reverse=False):
    def step(h, x):
        h = jnp.tanh(x @ p["wx"] + h @ p["wh"] + p["b"])
        return h, h

    last, outputs = lax.scan(step, p["h0"], x, reverse=reverse)
    return squares(outputs @ p["out"]) + squares(last)


RNN = {"wx": (3, 4), "wh": (4, 4), "b": (4,), "h0": (4,), "out": (4, 2)}


def layer_stack(p, x):
    def layer(h, w):
        return jnp.tanh(h @ w["w"] * p["scale"] + w["b"]), h.sum()

    h, sums = lax.scan(layer, x, {"w": p["w"], "b": p["b"]})
    return squares(h) + squares(sums)


def nested_loops(p, x):
    """Outer scan over layers, inner scan over time; one weight is shared by all of it."""

    def layer(h, w):
        def step(c, row):
            c = jnp.tanh(c @ p["shared"] + row @ w)
            return c, c

        return lax.scan(step, h[0], h)[1], None

    return squares(lax.scan(layer, x, p["w"])[0])


def stacked_times_shared(p, x):
    """The weight of a step is its own slice times a shared matrix: no rearrangement."""

    def layer(h, w):
        return jnp.tanh(h @ (w * p["gate"])), None

    return squares(lax.scan(layer, x, p["w"])[0])


def one_loop_at_two_places(p, x, kinds):
    """The very same equation, with what `kinds` says in its place of constants."""

    @jax.jit
    def turn(w, scale, h):
        return lax.scan(lambda h, _: (jnp.tanh(h @ (w * scale) + scale @ w), None), h, length=2)[0]

    steps = jnp.arange(4.0) - 1
    values = {"constant": steps, "other": steps**2, "data": x[::-1], "weight": p["v"]}
    return squares(sum(turn(p["w"], values[kind], k * x) for k, kind in enumerate(kinds, 1)))


def rows_used_in_a_loop(p, ids):
    """Rows of one table are added up in a loop over a matrix of the same shape."""
    rows = p["table"][ids]
    step = lambda h, _: (jnp.tanh(h @ p["w"] + rows.sum(0)), None)  # noqa: E731
    return squares(lax.scan(step, p["table"][0], length=3)[0] @ p["table"])


def stacked_convolutions(p, x):
    def layer(h, w):
        y = lax.conv_general_dilated(h[None], w, (1,), "SAME")[0]
        return jnp.tanh(y), None

    return squares(lax.scan(layer, x, p["w"])[0])


def convolution_over_time(p, x):
    def step(c, frame):
        y = lax.conv_general_dilated(frame[None] + c, p["w"], (1,), "SAME")
        return jnp.tanh(y), y

    return squares(lax.scan(step, jnp.zeros((1, 2, 4), x.dtype), x)[1])


def lookups_in_a_loop(p, ids):
    def step(c, id_):
        return jnp.tanh(c + p["table"][id_]), None

    return squares(lax.scan(step, jnp.zeros((2, 3)), ids)[0])


def lookups_in_stacked_tables(p, ids):
    def layer(c, tables):
        return c + tables[ids], None

    def outer(c, tables):
        return lax.scan(layer, c, tables)[0], None

    return squares(jnp.tanh(lax.scan(outer, jnp.zeros((4, 3)), p["tables"])[0]))


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


def weight_norm(p, x):
    w = p["g"] * p["v"] / jnp.linalg.norm(p["v"], axis=0)
    return squares(jnp.tanh(x @ w))


def physics(p, x):
    """The loss holds a derivative of the model."""
    u = lambda t: jnp.tanh(t @ p["a"]) @ p["b"]  # noqa: E731
    return squares(jax.jacobian(u)(x)) + squares(u(x))


def stopped_in_a_loop(p, x):
    step = lambda c, _: (jnp.tanh(c @ lax.stop_gradient(p["w"]) @ p["w"]), None)  # noqa: E731
    return squares(lax.scan(step, x, length=2)[0])


def lower_triangle(p, x):
    scores = (x @ p["q"]) @ (x @ p["k"]).T
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape, bool)), scores, -jnp.inf)
    return squares(jax.nn.softmax(scores) @ x)


def convolve(dims=None, **options):
    options = {"window_strides": (1, 1), "padding": "VALID", **options}
    numbers = {} if dims is None else {"dimension_numbers": dims}

    def loss(p, x):
        return squares(lax.conv_general_dilated(x, p["w"], **options, **numbers))

    return loss


def gather_with(mode):
    return lambda p, ids: squares(jnp.tanh(p["w"].at[ids - 2].get(mode=mode, fill_value=0)))


def bag_and_rows(p, ids):
    """The rows are read twice, once by a sum: one use."""
    rows = p["w"][ids]
    return squares(rows.sum(0) * rows)


W = {"w": (3, 4)}
CASES = {
    "rnn": Case(rnn, RNN, (5, 3), 3),
    "rnn_reverse": Case(functools.partial(rnn, reverse=True), RNN, (5, 3), 3),
    "layer_stack": Case(layer_stack, {"w": (3, 4, 4), "b": (3, 4), "scale": (4,)}, (2, 4), 1),
    "nested_loops": Case(nested_loops, {"w": (2, 4, 4), "shared": (4, 4)}, (3, 4), 2),
    "stacked_times_shared": Case(
        stacked_times_shared, {"w": (2, 4, 4), "gate": (4, 1)}, (3, 4), 1
    ),
    "one_loop_with_two_constants": Case(
        functools.partial(one_loop_at_two_places, kinds=("constant", "other")),
        {"w": (4, 4), "v": (4,)},
        (4,),
        2,
    ),
    "one_loop_with_all_kinds": Case(
        functools.partial(one_loop_at_two_places, kinds=("data", "constant", "weight", "data")),
        {"w": (4, 4), "v": (4,)},
        (4,),
        4,
    ),
    "rows_used_in_a_loop": Case(
        rows_used_in_a_loop, {"table": (6, 6), "w": (6, 6)}, (5,), 3, True
    ),
    "stacked_transposed": Case(
        lambda p, x: squares(lax.scan(lambda h, w: (jnp.tanh(h @ w.T), None), x, p["w"].mT)[0]),
        {"w": (2, 4, 4)},
        (3, 4),
        1,
    ),
    "stacked_convolutions": Case(stacked_convolutions, {"w": (2, 3, 3, 2)}, (3, 5), 1),
    "convolution_over_time": Case(convolution_over_time, {"w": (2, 2, 3)}, (3, 2, 4), 1),
    "lookups_in_a_loop": Case(lookups_in_a_loop, {"table": (6, 3)}, (5, 2), 1, True),
    "stacked_tables": Case(lookups_in_stacked_tables, {"tables": (2, 3, 6, 3)}, (4,), 1, True),
    "unused_in_a_loop": Case(
        lambda p, x: squares(lax.scan(lambda c, w: (c * 2, None), x @ p["a"], p["w"])[0]),
        {"a": (3, 2), **W},
        (3,),
        1,
    ),
    "loop_returns_a_weight": Case(
        lambda p, x: squares(x @ lax.scan(lambda c, w: (c + 1, w * 2), 0.0, p["w"])[1]),
        W,
        (3,),
        1,
    ),
    "loop_over_weights_and_data": Case(
        lambda p, x: squares(
            lax.scan(lambda c, wx: (c + (wx[0] * wx[1]).sum(), c * wx[0]), 0.5, (p["w"], x))[1]
        ),
        {"w": (5, 2)},
        (5, 2),
        0,
    ),
    "remat": Case(
        lambda p, x: squares(jax.checkpoint(lambda w, x: jnp.tanh(x @ w))(p["w"], x)), W, (2, 3), 1
    ),
    "jit": Case(lambda p, x: squares(jax.jit(lambda w, x: x @ w.T)(p["w"].T, x)), W, (2, 3), 1),
    "custom_vjp": Case(lambda p, x: squares(halved_gradient(p["w"].T, x)), W, (3,), 0),
    "custom_jvp": Case(lambda p, x: squares(clipped_product(p["w"].T, x)), W, (3,), 0),
    "custom_jvp_of_weights": Case(lambda p, x: squares(x @ jax.nn.silu(p["w"])), W, (2, 3), 1),
    "cond": Case(
        lambda p, x: squares(
            lax.cond(x[0] > 0, lambda w: jnp.tanh(x @ w), lambda w: x @ w * 2, p["w"])
        ),
        W,
        (3,),
        0,
    ),
    "switch_of_closures": Case(
        lambda p, x: squares(
            lax.switch(
                jnp.int32(jnp.abs(x[0])),
                [lambda: x @ p["w"], lambda: jnp.zeros(4), lambda: p["b"] * x[1]],
            )
        ),
        {**W, "b": (4,)},
        (3,),
        0,
    ),
    "weight_norm": Case(weight_norm, {"g": (4,), "v": (3, 4)}, (2, 3), 1),
    "joined_weights": Case(
        lambda p, x: squares(jnp.tanh(x @ jnp.concatenate([p["a"], p["b"]], 1))),
        {"a": (3, 2), "b": (3, 4)},
        (2, 3),
        1,
    ),
    "low_rank": Case(
        lambda p, x: squares(x @ (p["a"] @ p["b"])), {"a": (3, 2), "b": (2, 4)}, (2, 3), 1
    ),
    "constants_on_the_way": Case(
        lambda p, x: squares(x @ (p["w"] * jnp.sin(jnp.arange(4.0)))), W, (2, 3), 1
    ),
    "stop_gradient": Case(
        lambda p, x: squares(x @ lax.stop_gradient(p["w"]) + x @ p["v"]),
        {**W, "v": (3, 4)},
        (2, 3),
        1,
    ),
    "stop_gradient_inside_a_loop": Case(
        stopped_in_a_loop,
        {"w": (3, 3)},
        (2, 3),
        1,
    ),
    "rounded_weights": Case(
        lambda p, x: squares(x @ p["w"] * (p["w"] > 0).sum()), W, (2, 3), 1
    ),
    "compared_weights": Case(
        lambda p, x: squares(jnp.where(p["w"] > x[0], x[1], 0.0) + p["w"]), W, (3,), 0
    ),
    "regulariser": Case(lambda p, x: squares(x @ p["w"]) + jnp.sum(p["w"] ** 2), W, (2, 3), 1),
    "no_data": Case(lambda p, x: jnp.sum(p["w"] ** 3), W, (2,), 0),
    "no_parameters": Case(lambda p, x: jnp.sum(x), W, (2,), 0),
    "batched_heads": Case(
        lambda p, x: squares(jnp.einsum("thi,hio->tho", x, p["w"])), {"w": (2, 3, 4)}, (5, 2, 3), 1
    ),
    "weight_on_the_left": Case(
        lambda p, x: squares(jnp.einsum("hoi,thi->oht", p["w"], x)), {"w": (2, 4, 3)}, (5, 2, 3), 1
    ),
    "two_contractions": Case(
        lambda p, x: squares(jnp.einsum("tij,oji->to", x, p["w"])), {"w": (4, 2, 3)}, (5, 3, 2), 1
    ),
    "long_product": Case(lambda p, x: squares(jnp.tanh(x @ p["w"])), {"w": (2, 2)}, (40, 2), 1),
    "wide_product": Case(lambda p, x: squares(x @ p["w"]), {"w": (40, 50)}, (2, 40), 1),
    "attention": Case(lower_triangle, {"q": (3, 2), "k": (3, 2)}, (4, 3), 2),
    "physics": Case(physics, {"a": (2, 4), "b": (4, 3)}, (2,), 5),
    "sequence_of_shared_weights": Case(
        lambda p, x: squares(jnp.tanh(jnp.tanh(x @ p["w"]) @ p["w"].T @ p["w"])), W, (3,), 3
    ),
    "conv_nhwc": Case(convolve(("NHWC", "HWIO", "NHWC")), {"w": (2, 3, 2, 3)}, (1, 5, 6, 2), 1),
    "conv_odd_layout": Case(
        convolve(("HCNW", "OWIH", "NWCH")), {"w": (3, 2, 6, 2)}, (5, 6, 2, 4), 1
    ),
    "conv_transposed": Case(
        convolve(lhs_dilation=(2, 1), padding=((2, -1), (0, 3))),
        {"w": (3, 2, 2, 3)},
        (1, 2, 4, 5),
        1,
    ),
    "conv_everything": Case(
        convolve(
            window_strides=(2, 1),
            padding=((1, 2), (3, 0)),
            rhs_dilation=(1, 2),
            lhs_dilation=(1, 2),
            feature_group_count=2,
        ),
        {"w": (4, 6, 2, 3)},
        (2, 12, 5, 4),
        1,
    ),
    "conv_many_channels": Case(
        convolve(padding="SAME"), {"w": (3, 8, 3, 3)}, (1, 8, 6, 6), 1
    ),
    "conv_pixel": Case(convolve(padding="SAME"), {"w": (20, 16, 3, 3)}, (1, 16, 1, 1), 1),
    "conv_batch_groups": Case(convolve(batch_group_count=2), {"w": (4, 3, 2, 2)}, (2, 3, 5, 5), 0),
    "conv_of_a_weight": Case(
        lambda p, x: squares(lax.conv_general_dilated(p["w"], x, (1, 1), "VALID")),
        {"w": (1, 2, 5, 5)},
        (3, 2, 2, 2),
        0,
    ),
    "gather_fill": Case(gather_with("fill"), {"w": (6, 3)}, (7,), 1, True),
    "gather_clip": Case(gather_with("clip"), {"w": (6, 3, 2)}, (7, 2), 1, True),
    "bag": Case(lambda p, i: squares(jnp.tanh(p["w"][i].mean(0))), {"w": (6, 3)}, (9,), 1, True),
    "bag_with_fill": Case(
        lambda p, i: squares(p["w"].at[i - 2].get(mode="fill", fill_value=0)[None].sum((0, 1))),
        {"w": (6, 3, 2)},
        (9,),
        1,
        True,
    ),
    "bag_per_row": Case(
        lambda p, i: squares(jnp.tanh(jnp.take(p["w"], i, axis=0).sum(1))),
        {"w": (6, 3)},
        (2, 5),
        1,
        True,
    ),
    "bag_of_row_sums": Case(
        lambda p, i: squares(p["w"][i].sum((0, 1))), {"w": (6, 3, 2)}, (9,), 1, True
    ),
    "bags_in_a_loop": Case(
        lambda p, i: squares(lax.map(lambda row: p["w"][row].sum(0), i)),
        {"w": (6, 3)},
        (4, 5),
        1,
        True,
    ),
    "bag_and_rows": Case(bag_and_rows, {"w": (6, 3)}, (9,), 1, True),
    "take": Case(lambda p, i: squares(jnp.take(p["w"], i, axis=0)), {"w": (6, 3)}, (7,), 1, True),
    "take_columns": Case(lambda p, i: squares(p["w"][:, i]), {"w": (3, 6)}, (7,), 0, True),
    "dynamic_slice": Case(
        lambda p, i: squares(lax.dynamic_slice(p["w"], (i[0], 0), (2, 3))),
        {"w": (6, 3)},
        (1,),
        0,
        True,
    ),
    "one_hot": Case(
        lambda p, i: squares(jnp.tanh(jax.nn.one_hot(i, 6) @ p["w"])), {"w": (6, 3)}, (7,), 1, True
    ),
    "positions": Case(
        lambda p, x: squares(jnp.tanh(x + p["w"][jnp.arange(5)])), {"w": (7, 3)}, (5, 3), 0
    ),
    "vmap_inside": Case(
        lambda p, x: squares(jax.vmap(lambda row: jnp.tanh(row @ p["w"] + p["b"]))(x)),
        {**W, "b": (4,)},
        (5, 3),
        1,
    ),
    "class_token": Case(
        lambda p, x: squares(jnp.tanh(jnp.concatenate([p["t"], x]) @ p["w"])),
        {**W, "t": (1, 3)},
        (5, 3),
        1,
    ),
    "sorted_and_selected": Case(
        lambda p, x: squares(jnp.sort(x @ p["w"])[:2] * jnp.max(p["b"])), {**W, "b": (4,)}, (3,), 1
    ),
    "through_complex_numbers": Case(
        lambda p, x: squares(x @ jnp.fft.ifft(jnp.fft.fft(p["w"]) * 1j).imag), W, (2, 3), 1
    ),
    "complex_product": Case(
        lambda p, x: squares(jnp.abs(jnp.fft.fft(x) @ jnp.fft.fft(p["w"]))), W, (2, 3), 0
    ),
    "parameters_of_size_0": Case(
        lambda p, x: squares(x @ p["w"]) + squares(x @ p["none"] @ p["none"].T),
        {**W, "none": (3, 0)},
        (2, 3),
        1,
    ),
    "scalar_parameter": Case(lambda p, x: squares(x * p["s"] + p["s"]), {"s": ()}, (3,), 0),
}  # fmt: skip


def make(case, n=N):
    rng = np.random.default_rng(len(case.params))
    params = {
        name: jnp.asarray(rng.normal(size=shape) * 0.5 + 0.1) for name, shape in case.params.items()
    }
    if case.ids:
        return params, jnp.asarray(rng.integers(0, 6, (n, *case.x)))
    return params, jnp.asarray(rng.normal(size=(n, *case.x)))


def grads(case, params, x, method):
    return dpj.per_sample_grads(case.loss, params, x, method=method, check="off")


def norms_and_sums(case, params, x, method):
    options = {"method": method, "check": "off"}
    norms = dpj.per_sample_norms(case.loss, params, x, per_parameter=True, **options)
    return norms, dpj.clipped_grad_sum(case.loss, params, x, max_grad_norm=1.5, **options)


#: Structures on which the choices of the other methods differ.
SOME = ("rnn", "layer_stack", "stacked_convolutions", "joined_weights", "conv_pixel", "take")
RUNS = [("materialize", grads, name) for name in CASES]
RUNS += [("book_keeping", norms_and_sums, name) for name in CASES]
RUNS += [(m, norms_and_sums, name) for m in ("two_pass", "auto", "materialize") for name in SOME]


@functools.cache
def results(name):
    """All runs of a case and their truth: (method, function) to results, compiled as one."""
    runs = [(method, function) for method, function, case in RUNS if case == name]
    wanted = [("vmap", grads), ("vmap", norms_and_sums), *runs]
    with jax.enable_x64(True):
        compute = lambda p, x: [f(CASES[name], p, x, method) for method, f in wanted]  # noqa: E731
        return dict(zip(wanted, jax.jit(compute)(*make(CASES[name])), strict=True))


#: Structures of the fast tier: every second one, with all that is run of it in one program.
FAST = list(CASES)[::2]


@pytest.mark.parametrize(
    ("method", "function", "name"),
    [pytest.param(*run, marks=() if run[2] in FAST else pytest.mark.slow) for run in RUNS],
    ids=lambda value: value.__name__ if callable(value) else str(value),
)
def test_every_structure_matches_vmap(method, function, name):
    expected, found = results(name)["vmap", function], results(name)[method, function]
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert ours.dtype == theirs.dtype
        scale = np.abs(theirs).max(initial=1e-300)
        np.testing.assert_allclose(ours, theirs, rtol=1e-10, atol=1e-12 * scale)


@pytest.mark.parametrize("name", CASES)
def test_uses_are_found_where_a_rule_holds(name):
    case = CASES[name]
    params, x = make(case)
    call = build(case.loss, params, (x,), Options())
    assert len(call.program.analysis.uses) == case.uses


def test_parameters_in_aux_are_no_use():
    params, x = {"w": jnp.ones((3, 2))}, jnp.ones((N, 3))
    loss = lambda p, x: (squares(x @ p["w"]), {"w": p["w"] * 2, "x": x})  # noqa: E731
    call = build(loss, params, (x,), Options(has_aux=True))
    _, aux, _, kept = call.program.capture(call.parameters.trained, call.shared, call.rows)
    assert kept == {}
    np.testing.assert_array_equal(aux["w"], jnp.full((N, 3, 2), 2.0))
