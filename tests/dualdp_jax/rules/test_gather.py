# SPDX-License-Identifier: Apache-2.0
"""Lookups of numbers that are no row, and of tables that a loop goes through."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.dualdp_jax.definition import RNG, assert_right, draw


def of_mode(mode):
    """Some of the doubled numbers are no row."""
    return lambda p, i: 50 * jnp.sum(p["t"].at[i * 2].get(mode=mode, fill_value=0.0) ** 2)


def in_a_scan(p, i):
    step = lambda h, part: (jnp.tanh(h + jnp.take(part[0], part[1], axis=0)).sum(0), None)  # noqa: E731
    return jnp.sum(jax.lax.scan(step, jnp.zeros(4), (p["s"], i.reshape(3, -1)))[0] ** 2)


IDS = RNG.integers(0, 20, (5, 6))
LOOKUPS = {
    "clip": (of_mode("clip"), IDS.astype(np.uint8)),
    "drop": (of_mode("fill"), IDS),
    "tables in a scan": (in_a_scan, IDS.astype(np.uint8)),
    "of 2**32 - 1": (
        lambda p, i: jnp.sum(jnp.take(p["t"], i, axis=0, mode="clip") ** 2),
        np.array([[1, 2**32 - 1], [5, 3]], np.uint32),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LOOKUPS)
def test_lookups_are_those_of_plain_autodiff(name):
    """73: an index in its own dtype wraps around; 2**32 - 1 is no index of -1."""
    loss, ids = LOOKUPS[name]
    params = {"t": draw(30, 4), "s": draw(3, 30, 4)}
    for method in ("book_keeping", "materialize"):
        assert_right(loss, params, (ids,), 0.01, method)
