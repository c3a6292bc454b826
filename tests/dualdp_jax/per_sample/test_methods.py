# SPDX-License-Identifier: Apache-2.0
"""Methods: which losses each takes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import dualdp_jax as dpj
from tests.dualdp_jax.definition import assert_right, draw, length

steep = jax.custom_vjp(lambda x: x)
steep.defvjp(lambda x: (x, ()), lambda _, g: (jnp.clip(g, -0.05, 0.05),))
shifted = jax.custom_vjp(lambda x: x)
shifted.defvjp(lambda x: (x, ()), lambda _, g: (g + 0.01,))


def weight_in_a_scan(p, x):
    step = lambda h, row: (jnp.tanh(row @ p["u"] + h @ shifted(p["w"].T)), None)  # noqa: E731
    return 20 * jnp.sum(jax.lax.scan(step, jnp.zeros(16), x)[0] ** 2)


def weight_inside_jit(p, x):
    w = jax.jit(lambda w: 2 * steep(w))(p["w"])
    return jnp.sum((x @ p["u"] @ w) ** 2) + jnp.sum(jnp.sin(x @ p["u"] @ w))


@pytest.mark.slow
@pytest.mark.parametrize("loss", [weight_in_a_scan, weight_inside_jit])
def test_a_nonlinear_backward_gets_the_whole_cotangent(loss):
    """76: by two passes 3.5 C, because the loss is multiplied by the clip factor."""
    params, x = {"u": draw(8, 16), "w": draw(16, 16, scale=0.4)}, draw(5, 12, 8)
    for method in ("vmap", "book_keeping", "materialize"):
        assert_right(loss, params, (x,), 0.05, method)
    with pytest.raises(ValueError, match="method='two_pass' multiplies the loss by the clip fac"):
        dpj.clipped_grad_sum(loss, params, x, max_grad_norm=1.0, method="two_pass")


@jax.custom_vjp
def rounded(w):
    return jnp.round(w * 8) / 8


rounded.defvjp(lambda w: (rounded(w), None), lambda _, g: (jnp.clip(g, -0.1, 0.1),))


@pytest.mark.parametrize(
    "method", ["auto", *(pytest.param(m, marks=pytest.mark.slow) for m in ("loop", "book_keeping"))]
)
def test_a_backward_that_is_not_linear_raises_nothing(method):
    """The sum of the losses has another gradient than the losses; the definition is theirs."""
    loss = lambda p, x: ((x @ rounded(p["w"])) ** 2).sum()  # noqa: E731
    params, x = {"w": draw(5, 4)}, draw(6, 5)
    found = dpj.clipped_grad_sum(loss, params, x, max_grad_norm=0.2, method=method, check="always")
    each = [jax.grad(loss)(params, row)["w"] for row in x]
    expected = sum(g * min(1, 0.2 / (1 + 1e-4) / np.linalg.norm(g)) for g in each)
    np.testing.assert_allclose(found.grads["w"], expected, rtol=1e-4, atol=1e-5)


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


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_low_precision_products_are_summed_in_float32(dtype):
    """By two passes the sum would be in bfloat16, which is refused."""
    params = {"a": draw(8, 16), "b": draw(16, 4), "k": draw(3, 4, 5)}
    params, x = {k: jnp.asarray(w, dtype) for k, w in params.items()}, draw(6, 7, 8)

    @functools.partial(jax.jit, static_argnums=1)
    def clipped(x, method):
        return dpj.clipped_grad_sum(mixed, params, x, max_grad_norm=0.5, method=method)

    exact = clipped(x, "vmap")
    for method in ("vmap", "loop", "book_keeping", "materialize"):
        found = clipped(x, method)
        assert found.norms.dtype == found.losses.dtype == jnp.float32
        np.testing.assert_allclose(found.norms, exact.norms, rtol=0.02)
        for name in params:
            assert found.grads[name].dtype == jnp.float32
            error = jnp.linalg.norm(found.grads[name] - exact.grads[name])
            assert error < 0.02 * jnp.linalg.norm(exact.grads[name])
        assert length(clipped(x[:1], method).grads) <= 0.5 * (1 + 1e-4)
    with pytest.raises(ValueError, match="method='two_pass' would sum gradients in bfloat16"):
        clipped(x, "two_pass")


half = jax.custom_jvp(lambda x: x)
half.defjvp(lambda x, t: (x[0], t[0].astype(jnp.bfloat16).astype(jnp.float32)))
ROUNDING = {
    "bfloat16": half,
    "7 bits of man": jax.jit(lambda y: lax.reduce_precision(y, 8, 7)),
}


@pytest.mark.parametrize("said", ROUNDING)
def test_two_passes_are_refused_where_a_loss_rounds_its_numbers(said):
    """The second backward would round a gradient that is clipped already: 0.3 % over the bound."""
    loss = lambda p, x: jnp.sum(ROUNDING[said](x @ p["w"]) ** 2)  # noqa: E731
    with pytest.raises(ValueError, match=f"method='two_pass' would sum gradients in {said}"):
        dpj.clipped_grad_sum(
            loss, {"w": draw(3, 2)}, draw(4, 3), max_grad_norm=0.5, method="two_pass"
        )
