# SPDX-License-Identifier: Apache-2.0
"""Convolutions: of any layout, padding, dilation and groups; and without output."""

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

import dualdp_jax as dpj

STEPS = ("window_strides", "lhs_dilation", "rhs_dilation")


@st.composite
def convolutions(draw):
    """Shape of a kernel and (1, 3, 3, 5) images in a layout, and how they are convolved."""
    groups, pair = draw(st.sampled_from([1, 3])), st.tuples(*[st.integers(1, 2)] * 2)
    sizes = {"O": 3, "I": 3 // groups, "H": draw(st.integers(1, 3)), "W": 2}
    layout = "".join(draw(st.permutations("OIHW")))
    data, out = ("".join(draw(st.permutations("NCHW"))) for _ in range(2))
    options = {name: draw(pair) for name in STEPS} | {"feature_group_count": groups}
    options["padding"] = [(draw(st.integers(-1, 2)), 1), (1, draw(st.integers(1, 2)))]
    options["dimension_numbers"] = data, layout, out
    return tuple(sizes[axis] for axis in layout), ["NCHW".index(axis) for axis in data], options


@pytest.mark.slow
@hypothesis.given(convolutions())
@hypothesis.settings(max_examples=8)
def test_any_convolution_matches_the_loop(case):
    shape, order, options = case
    rng = np.random.default_rng(0)

    def loss(kernel, image):
        out = jax.lax.conv_general_dilated(image[None].transpose(order), kernel, **options)
        return jnp.sum(jnp.sin(out) * jnp.cos(jnp.arange(out.size).reshape(out.shape)))

    def both(*given):
        run = lambda method: dpj.clipped_grad_sum(  # noqa: E731
            loss, *given, max_grad_norm=2.0, method=method, check="off"
        )
        return run("loop"), run("book_keeping"), run("materialize")

    with jax.enable_x64(True):
        truth, *found = jax.jit(both)(rng.normal(size=shape), rng.normal(size=(3, 3, 3, 5)))
    for ours in found:
        np.testing.assert_allclose(ours.norms, truth.norms, rtol=1e-9)
        np.testing.assert_allclose(ours.grads, truth.grads, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_a_convolution_without_output_has_no_gradient():
    """Such as one of a valid kernel of 5 over 3 pixels."""

    def loss(kernel, x):
        out = jax.lax.conv_general_dilated(x[None], kernel, (1,), "VALID")
        return out.sum() + (kernel**2).sum() * x.sum()

    kernel, x = jnp.ones((2, 3, 5)), jnp.arange(27.0).reshape(3, 3, 3) - 10
    run = lambda method: dpj.clipped_grad_sum(loss, kernel, x, max_grad_norm=9.0, method=method)  # noqa: E731
    np.testing.assert_allclose(run("book_keeping").grads, run("loop").grads, rtol=1e-6)
