# SPDX-License-Identifier: Apache-2.0
"""Every way to read a table by indices of any dtype: the clipped sum is the truth's.

The truth is `vmap(grad)` in float64, clipped by hand. One example replaced moves the sum by at most
2 C.
"""

import functools
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dualdp_jax as dpj
from dualdp.plan.clipping import MARGIN
from tests.pairwise import pairwise

jax.config.update("jax_disable_most_optimizations", True)  # they cost more than they save here
ROOT = Path(__file__).parents[2]
N, T, WIDTH = 8, 3, 4
DTYPES = ("uint8", "int8", "uint16", "int16")  # that can't name all rows of an ordinary table
WAYS = ("auto", "book_keeping", "two_pass", "materialize")
BOUND, TOLERANCE = 0.5, 1e-3


def score(y):
    """Scalar: smooth and asymmetric."""
    y = jnp.ravel(y)
    return jnp.sum(y**2 / 2 + y * jnp.cos(jnp.arange(y.size, dtype=y.dtype)))


def by_take(mode):
    return lambda table, body, ids: jnp.take(table, ids, axis=0, mode=mode, fill_value=0) @ body


def windows(table, body, ids):
    start = ids[0] % (table.shape[0] - 2)
    return jax.lax.dynamic_slice_in_dim(table, start, 2) @ body


def scanned(table, body, ids):
    turn = lambda h, i: (jnp.tanh(h @ body + table[i]), h)  # noqa: E731
    return jax.lax.scan(turn, jnp.zeros(WIDTH, table.dtype), ids)[1]


#: name -> (table (rows, WIDTH), body (WIDTH, WIDTH), ids (T,)) -> outputs of one example.
PROGRAMS = {
    "rows": lambda table, body, ids: jnp.tanh(table[ids]) @ body,
    "one row": lambda table, body, ids: table[ids[0]],
    "tied": lambda table, body, ids: jnp.tanh(table[ids] @ body) @ table[:5].T,
    "numbers": lambda table, body, ids: table[ids, ids % WIDTH],
    "columns": lambda table, body, ids: table.T[:, ids],
    "clipped": by_take("clip"),
    "filled": by_take("fill"),
    "wrapped": by_take("wrap"),
    "along an axis": lambda table, body, ids: jnp.take_along_axis(table, ids[:, None], 0),
    "windows": windows,
    "in a scan": scanned,
    "under vmap": lambda table, body, ids: jax.vmap(lambda i: jnp.tanh(table[i]) @ body)(ids),
}


@functools.cache
def loss_of(program):
    return lambda p, ids: score(PROGRAMS[program](p["table"], p["body"], ids))


@functools.cache
def plain_grads(program):
    """`vmap(grad)`, compiled once for data of one shape."""
    return jax.jit(jax.vmap(jax.grad(loss_of(program)), in_axes=(None, 0)))


def truth(program, params, ids):
    """Clipped sum and norms by `vmap(grad)` in float64, by hand."""
    with jax.enable_x64(True):
        wide = {name: jnp.asarray(array, jnp.float64) for name, array in params.items()}
        grads = plain_grads(program)(wide, jnp.asarray(ids))
        grads = {name: np.asarray(grad) for name, grad in grads.items()}
    norms = np.sqrt(sum(np.square(g).reshape(N, -1).sum(1) for g in grads.values()))
    factors = np.minimum(1, BOUND / (1 + MARGIN["float32"]) / np.maximum(norms, 1e-300))
    return {name: np.einsum("n,n...->...", factors, g) for name, g in grads.items()}, norms


def distance(one, other):
    """L2 distance of two sums in float64."""
    return np.sqrt(sum(np.square(np.asarray(one[k], float) - other[k]).sum() for k in one))


def check(program, dtype, method, more_rows=0):
    """Both sums are the truth's, and 2 C apart at most; or JAX itself does not take the dtype."""
    last, rng = min(int(np.iinfo(dtype).max), 70_000), np.random.default_rng(0)
    shapes = {"table": (last + 1 + more_rows, WIDTH), "body": (WIDTH, WIDTH)}
    params = {k: (rng.normal(size=v) * 0.5).astype(np.float32) for k, v in shapes.items()}
    ids = rng.integers(0, last + 1, (N, T)).astype(dtype)
    ids[0, 0] = last
    neighbour = np.concatenate([ids[:-1], ids[:1] // 2])
    options = {"max_grad_norm": BOUND, "method": method, "check": "off"}
    run = jax.jit(lambda p, ids: dpj.clipped_grad_sum(loss_of(program), p, ids, **options)[:2])
    try:
        truth(program, params, ids)
    except OverflowError:  # negative indices are made positive in their own dtype
        with pytest.raises(OverflowError):
            run(params, ids)
        return
    sums = []
    for batch in (ids, neighbour):
        total, norms = run(params, batch)
        expected, lengths = truth(program, params, batch)
        assert distance(total, expected) <= TOLERANCE * BOUND
        np.testing.assert_allclose(norms, lengths, rtol=TOLERANCE)
        sums.append(total)
    assert 0 < distance(*sums) <= 2 * BOUND


@pytest.mark.slow
@pytest.mark.parametrize(("program", "method", "dtype"), pairwise(PROGRAMS, WAYS, DTYPES))
def test_a_replaced_example_moves_the_sum_by_its_own_part(program, dtype, method):
    check(program, dtype, method)


def check_larger(dtype):
    """All programs, with a table that has more rows than the dtype has numbers.

    Not "windows": where a slice begins is clamped in the dtype of the index, so that JAX's own
    gradient of one example writes outside of the table.
    """
    for program in PROGRAMS:
        if program != "windows":
            check(program, dtype, "book_keeping", more_rows=45)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["uint8", "int16"])
def test_tables_with_more_rows_than_the_dtype_has_numbers(dtype):
    """In a process without the suite's flags: XLA's older emitters write outside of such tables."""
    code = f"from tests.property.test_sensitivity_jax import *; check_larger({dtype!r})"
    command, environment = [sys.executable, "-c", code], {**os.environ, "XLA_FLAGS": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
