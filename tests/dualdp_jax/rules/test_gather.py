# SPDX-License-Identifier: Apache-2.0
"""Lookups: rows of any dtype, repeated, and beyond the table."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.dualdp_jax.definition import RNG, assert_right, draw
from tests.pairwise import pairwise


def by_take(p, i):
    return 50 * jnp.sum(jnp.take(p["t"], i, axis=0) ** 3)


def by_index(p, i):
    return 50 * jnp.sum(jnp.tanh(p["t"][i]) @ p["w"])


def summed(p, i):
    return 50 * jnp.sum(jnp.take(p["t"], i, axis=0).sum(0) ** 2)


def out_of_range(mode):
    """Some of the doubled numbers are no row."""
    return lambda p, i: 50 * jnp.sum(p["t"].at[i * 2].get(mode=mode, fill_value=0.0) ** 2)


def in_a_scan(p, i):
    step = lambda h, part: (jnp.tanh(h + jnp.take(part[0], part[1], axis=0)).sum(0), None)  # noqa: E731
    return jnp.sum(jax.lax.scan(step, jnp.zeros(4), (p["s"], i.reshape(3, -1)))[0] ** 2)


LOOKUPS = {
    "take": by_take,
    "index": by_index,
    "sum of rows": summed,
    "clip": out_of_range("clip"),
    "drop": out_of_range("fill"),
    "tables in a scan": in_a_scan,
}
DTYPES = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype", "method"),
    pairwise(LOOKUPS, DTYPES, ("book_keeping", "two_pass", "materialize", "auto")),
)
def test_indices_of_any_dtype(name, dtype, method):
    """73: bytes as they lie in a file gave contributions of 950,000 C."""
    # int8 can't count to 256, and XLA's older emitters (conftest.py) write beyond the table then.
    rows = 100 if dtype == "int8" else 256
    params = {"t": draw(rows, 4), "w": draw(4, 2), "s": draw(3, rows, 4)}
    most = min(rows // 2 + 10, np.iinfo(dtype).max // 2) if name in ("clip", "drop") else rows
    with jax.enable_x64("64" in dtype):
        batch = (RNG.integers(0, most, (5, 6)).astype(dtype),)
        assert_right(LOOKUPS[name], params, batch, 0.01, method)


def test_indices_beyond_the_largest_signed_number_are_clipped():
    """An index of 2**32 - 1 is no index of -1."""
    params, batch = {"t": draw(6, 4)}, (np.array([[1, 2**32 - 1], [5, 3]], np.uint32),)
    loss = lambda p, i: jnp.sum(jnp.take(p["t"], i, axis=0, mode="clip") ** 2)  # noqa: E731
    for method in ("book_keeping", "materialize"):
        assert_right(loss, params, batch, 0.01, method)
