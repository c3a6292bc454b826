# SPDX-License-Identifier: Apache-2.0
"""Weights that are rearranged on their way to a use."""

import jax
import jax.numpy as jnp
import pytest

from tests.dualdp_jax.definition import assert_right, draw

REARRANGED = {
    "order F": lambda w: w.reshape(6, 10, order="F"),
    "dimensions": lambda w: jax.lax.reshape(w, (6, 10), dimensions=(2, 0, 1)),
    "ravel F": lambda w: w.ravel(order="F").reshape(6, 10),
    "reversed": lambda w: jnp.flip(w, (0, 2)).reshape(6, 10),
    "swapped": lambda w: jnp.moveaxis(w, 0, -1).reshape(6, 10),
    "broadcast": lambda w: jax.lax.broadcast_in_dim(w, (1, 3, 4, 5), (1, 2, 3)).reshape(6, 10),
    "halves exchanged": lambda w: jnp.roll(w, 1, axis=0).reshape(6, 10),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n == "order F" else pytest.mark.slow) for n in REARRANGED],
)
def test_rearranged_weights_have_their_own_gradients(name):
    """77: a reshape in Fortran's order made a sum that points elsewhere (cosine 0.00)."""
    loss = lambda p, x: jnp.sum(jnp.tanh(x @ REARRANGED[name](p["w"])) ** 2)  # noqa: E731
    for method in ("book_keeping", "two_pass", "materialize"):
        assert_right(loss, {"w": draw(3, 4, 5, scale=0.3)}, (draw(5, 4, 6),), 0.1, method)
