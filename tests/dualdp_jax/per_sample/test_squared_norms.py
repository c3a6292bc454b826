# SPDX-License-Identifier: Apache-2.0
"""Norms by Gram matrices where they cancel, overflow or are flushed: the error bound decides."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.dualdp_jax.definition import assert_right, contributions, draw, length


def square(p, x, y):
    return 0.5 * jnp.sum((x @ p["w"] - y) ** 2)


def convolved(p, x, y):
    names = ("NHC", "HIO", "NHC")
    out = jax.lax.conv_general_dilated(
        x[None], p["w"][None], (1,), "VALID", dimension_numbers=names
    )
    return 0.5 * jnp.sum((out[0] - y) ** 2)


def tied(p, x, y):
    return jnp.sum((x @ p["w"]) * y) + jnp.sum((x[::-1] @ p["w"]) * y)


def unit(a):
    return a / np.linalg.norm(a, axis=2, keepdims=True)


@pytest.mark.slow
@pytest.mark.parametrize("loss", [square, convolved])
def test_a_gram_form_that_overflows_is_not_taken_for_safe(loss):
    """75: nearly equal positions of opposite sign, so large that the bound of the error is inf."""
    near, u = unit(draw(4, 1, 256)), unit(draw(4, 1, 256))
    x = np.concatenate([near, near + draw(4, 1, 256, scale=4e-6)], 1) * np.float32(1e9)
    y = np.concatenate([u, -u], 1) * np.float32(1.2e10)
    # What is compared are differences of numbers 1e5 times as large.
    params = {"w": np.zeros((256, 256), np.float32)}
    for method in ("book_keeping", "vmap"):
        assert_right(loss, params, (x, y), 1.0, method, off=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(("loss", "t"), [(square, 1), (square, 3), (convolved, 3), (tied, 1)])
def test_squares_that_are_flushed_are_not_taken_for_zero(loss, t):
    """75: activations of 1e-21 against gradients of 1e18, and the other way round."""
    params = {"w": draw(200, 200, scale=0.05)}
    for small, large in ((1e-21, 1e18), (1e-16, 1e15)):
        x, y = draw(4, t, 200) * np.float32(small), draw(4, t, 200) * np.float32(large)
        assert_right(loss, params, (x, y), 1e-4, "book_keeping")


@pytest.mark.parametrize("clipping", ["per_layer", "automatic"])
def test_each_group_is_judged_by_what_its_factor_is_made_of(clipping):
    """58: beside a layer with a large gradient the error of a small one counted for nothing."""
    rng = np.random.default_rng(3)
    signs = rng.normal(size=(6, 4, 128))
    signs -= signs.mean(1, keepdims=True)
    near = (1 + 1e-5 * rng.normal(size=(6, 4, 128))).astype(np.float32)
    batch = (near, signs.astype(np.float32), draw(6, 4, 128, scale=1e3))

    def loss(p, near, signs, large):
        small = jnp.sum((near @ p["small"]["w"]) * signs)
        return small + 0 * jnp.sum(large) + jnp.sum((large @ p["large"]["w"]) * signs)

    params = {name: {"w": np.zeros((128, 128), np.float32)} for name in ("small", "large")}
    bound = 1e-3 if clipping == "per_layer" else 100.0
    for ours in contributions(loss, params, batch, bound, "book_keeping", clipping=clipping):
        assert length(ours) <= bound
        if clipping == "per_layer":
            assert max(length(ours["small"]), length(ours["large"])) <= bound / np.sqrt(2)


@pytest.mark.slow
@pytest.mark.parametrize(("t", "method"), [(2, "book_keeping"), (6, "two_pass")])
def test_rounding_of_the_sum_is_part_of_the_norm(method, t):
    """A gradient that nearly cancels is summed in another order than its norm was taken in."""
    loss = lambda p, x, y: jnp.sum((x @ p["w"]) * y)  # noqa: E731
    params = {"w": np.zeros((64, 64), np.float32)}
    for near in (1e-5, 1e-6, 1e-7):
        y = draw(8, t, 64)
        y = (y - y.mean(1, keepdims=True)) * np.float32(1e9)
        x = unit(draw(8, 1, 64)) + draw(8, t, 64, scale=near / 8)
        for ours in contributions(loss, params, (x, y), 1.0, method):
            assert length(ours) <= 1.0
