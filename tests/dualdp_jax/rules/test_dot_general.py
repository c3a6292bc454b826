# SPDX-License-Identifier: Apache-2.0
"""Products: positions that cancel."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import dualdp_jax as dpj


@pytest.mark.parametrize("kind", ["dot", pytest.param("conv", marks=pytest.mark.slow)])
def test_cancelling_positions_do_not_fool_the_gram_form(kind):
    """known_failures 51: nearly equal positions whose gradients nearly sum to zero."""
    rng = np.random.default_rng(0)
    t, width = 8, 256
    x = (np.ones((3, 1, width)) + 1e-4 * rng.normal(size=(3, t, width))).astype(np.float32)
    weights = rng.normal(size=(t, width))
    weights = jnp.asarray(1e2 * (weights - weights.mean(0)), jnp.float32)

    def loss(p, x):
        if kind == "dot":
            return jnp.sum((x @ p["w"]) * weights)
        y = lax.conv_general_dilated(
            x[None], p["w"][None], (1,), "VALID", dimension_numbers=("NHC", "HIO", "NHC")
        )
        return jnp.sum(y[0] * weights)

    gradients = np.einsum("nti,to->nio", x.astype(np.float64), np.asarray(weights, np.float64))
    true = np.sqrt((gradients**2).sum((1, 2)))
    params = {"w": jnp.zeros((width, width), jnp.float32)}
    found = dpj.per_sample_norms(loss, params, jnp.asarray(x), method="book_keeping")
    np.testing.assert_allclose(found, true, rtol=1e-3)
