# SPDX-License-Identifier: Apache-2.0
"""Products: positions that cancel, and sums in low precision."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import dualdp_jax as dpj
from dualdp_jax.rules import arrays, dot_general
from tests.tiers import first

CAPTURED = ("book_keeping", "two_pass", "materialize", "auto")


def norms_of(loss_fn, params, x, method):
    return dpj.per_sample_norms(loss_fn, params, x, method=method)


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
