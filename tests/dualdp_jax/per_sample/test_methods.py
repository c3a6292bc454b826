# SPDX-License-Identifier: Apache-2.0
"""Methods: which losses each takes, and what auto chooses."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import dualdp_jax as dpj
from dualdp_jax.per_sample.methods import METHODS
from tests.dualdp_jax.definition import assert_right, draw
from tests.tiers import first

ALL = (*METHODS, "auto")
steep = jax.custom_vjp(lambda x: x)
steep.defvjp(lambda x: (x, ()), lambda _, g: (jnp.clip(g, -0.05, 0.05),))
shifted = jax.custom_vjp(lambda x: x)
shifted.defvjp(lambda x: (x, ()), lambda _, g: (g + 0.01,))


def weight_used_twice(p, x):
    w = steep(p["w"])
    return jnp.sum(jnp.tanh(jnp.tanh(x @ p["u"] @ w) @ w) ** 2)


def weight_in_a_scan(p, x):
    step = lambda h, row: (jnp.tanh(row @ p["u"] + h @ shifted(p["w"].T)), None)  # noqa: E731
    return 20 * jnp.sum(jax.lax.scan(step, jnp.zeros(16), x)[0] ** 2)


def weight_inside_jit(p, x):
    w = jax.jit(lambda w: 2 * steep(w))(p["w"])
    return jnp.sum((x @ p["u"] @ w) ** 2) + jnp.sum(jnp.sin(x @ p["u"] @ w))


def hidden_state(p, x):
    step = lambda h, row: (steep(jnp.tanh(row @ p["u"] + h @ p["w"])), None)  # noqa: E731
    return 20 * jnp.sum(jax.lax.scan(step, jnp.zeros(16), x)[0] ** 2)


CUSTOM = [weight_used_twice, weight_in_a_scan, weight_inside_jit, hidden_state]


@pytest.mark.parametrize("loss", first(2, CUSTOM))
@pytest.mark.parametrize("method", first(3, [m for m in ALL if m != "two_pass"]))
def test_a_nonlinear_backward_gets_the_whole_cotangent(loss, method):
    params = {"u": draw(8, 16), "w": draw(16, 16, scale=0.4)}
    assert_right(loss, params, (draw(5, 12, 8),), 0.05, method)


@pytest.mark.parametrize("loss", CUSTOM)
def test_two_passes_refuse_a_custom_backward(loss):
    """76: contributions of 3.5 C, because the loss is multiplied by the clip factor."""
    params, x = {"u": draw(8, 16), "w": draw(16, 16)}, draw(5, 12, 8)
    with pytest.raises(
        ValueError, match="method='two_pass' multiplies the loss by the clip factor"
    ):
        dpj.clipped_grad_sum(loss, params, x, max_grad_norm=1.0, method="two_pass")


def test_two_passes_refuse_a_backward_in_low_precision():
    half = jax.custom_jvp(lambda x: x)
    half.defjvp(lambda x, t: (x[0], t[0].astype(jnp.bfloat16).astype(jnp.float32)))
    params, x = {"u": draw(8, 16)}, draw(5, 8)
    with pytest.raises(ValueError, match="method='two_pass' would sum gradients in bfloat16"):
        dpj.clipped_grad_sum(
            lambda p, x: jnp.sum(half(x @ p["u"]) ** 2), params, x, max_grad_norm=1.0,
            method="two_pass",
        )  # fmt: skip


@pytest.mark.parametrize("method", ["auto", "vmap", "loop", "book_keeping"])
def test_a_backward_that_is_not_linear_raises_nothing(method):
    """The sum of the losses has another gradient than the losses; the definition is theirs."""

    @jax.custom_vjp
    def clipped(w):
        return jnp.round(w * 8) / 8

    clipped.defvjp(lambda w: (clipped(w), None), lambda _, g: (jnp.clip(g, -0.1, 0.1),))
    loss = lambda p, x: ((x @ clipped(p["w"])) ** 2).sum()  # noqa: E731
    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=(5, 4)).astype("f")}
    x = rng.normal(size=(6, 5)).astype("f")
    found = dpj.clipped_grad_sum(loss, params, x, max_grad_norm=0.2, method=method, check="always")
    each = [jax.grad(loss)(params, row)["w"] for row in x]
    expected = sum(g * min(1, 0.2 / (1 + 1e-4) / np.linalg.norm(g)) for g in each)
    np.testing.assert_allclose(found.grads["w"], expected, rtol=1e-4, atol=1e-5)


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


@pytest.mark.parametrize("low_params", [False, True])
def test_two_passes_in_low_precision_are_refused(low_params):
    params, x = low_precision(low_params)
    with pytest.raises(ValueError, match="method='two_pass' would sum gradients in bfloat16"):
        dpj.clipped_grad_sum(mixed, params, x, max_grad_norm=0.5, method="two_pass")


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


def test_two_passes_are_refused_where_a_loss_rounds_its_numbers():
    """The second backward would round a gradient that is clipped already: 0.3 % over the bound."""

    def loss(p, x):
        return jnp.sum(jax.jit(lambda y: lax.reduce_precision(y, 8, 7))(x @ p["w"]) ** 2)

    params, x = {"w": jnp.ones((3, 2))}, jnp.ones((4, 3))
    with pytest.raises(ValueError, match="method='two_pass' would sum gradients in 7 bits of man"):
        dpj.clipped_grad_sum(loss, params, x, max_grad_norm=0.5, method="two_pass")
