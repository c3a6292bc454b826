# SPDX-License-Identifier: Apache-2.0
"""Convolutions without output."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dualdp_jax as dpj
from tests.tiers import first


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
