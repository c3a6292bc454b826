# SPDX-License-Identifier: Apache-2.0
"""Every primitive with a rule, every dtype of indices: the clipped sum is the truth's.

The truth is `vmap(grad)` in float64, clipped by hand. One example replaced moves the sum by at most
2 C.
"""

import functools
import itertools
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dualdp_jax as dpj
from dualdp.plan.clipping import MARGIN
from dualdp_jax.per_sample.methods import METHODS
from dualdp_jax.rules import RULES
from tests.pairwise import pairwise

pytestmark = pytest.mark.usefixtures("slow_unchecked")

jax.config.update("jax_disable_most_optimizations", True)  # they cost more than they save here
ROOT = Path(__file__).parents[2]
N, T, WIDTH = 8, 3, 4
DTYPES = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "int64")
SIZES = ("small", "whole")
#: Dtypes that can't name all rows of an ordinary table.
NARROW = ("uint8", "int8", "uint16", "int16")
WAYS = ("auto", *METHODS)
SAMPLE = 24
BOUND, TOLERANCE = 0.5, 1e-3


def rows_of(dtype, size):
    """Rows of the table: few, as many as the dtype has numbers from 0 on, or more."""
    whole = min(int(np.iinfo(dtype).max) + 1, 70_000)
    return {"small": 11, "whole": whole, "larger": whole + 45}[size]


def score(y):
    """Scalar: smooth and asymmetric."""
    y = jnp.ravel(y)
    return jnp.sum(y**2 / 2 + y * jnp.cos(jnp.arange(y.size, dtype=y.dtype)))


class Program(NamedTuple):
    """A loss of one example whose weights meet indices.

    Attributes:
        primitive: with a rule, that this is about.
        loss: (parameters, ids (T,)) -> scalar.
        has_table: the first parameter is a table of `rows_of` rows; else of 11.
    """

    primitive: str
    loss: Any
    has_table: bool = True


def _hot(ids, like):
    return jax.nn.one_hot(ids, like.shape[0], dtype=like.dtype)


def _windows(p, ids):
    start = ids[0] % (p["table"].shape[0] - 2)
    return score(jax.lax.dynamic_slice_in_dim(p["table"], start, 2) @ p["body"])


def _convolved(p, ids):
    x = (ids % 7).astype(p["kernel"].dtype)[None, :, None] * jnp.ones(2, p["kernel"].dtype)
    numbers = ("NWC", "WIO", "NWC")
    return score(
        jax.lax.conv_general_dilated(x, p["kernel"], (1,), "SAME", dimension_numbers=numbers)
    )


def _scanned(p, ids):
    turn = lambda h, i: (jnp.tanh(h @ p["body"] + p["table"][i]), h)  # noqa: E731
    return score(jax.lax.scan(turn, jnp.zeros(WIDTH, p["table"].dtype), ids)[1])


def _counted(p, ids):
    counts = (ids % 5).astype(p["body"].dtype) @ jnp.ones((T, WIDTH), p["body"].dtype)
    return score(counts @ p["body"])


#: name -> program.
PROGRAMS = {
    "rows": Program("gather", lambda p, ids: score(jnp.tanh(p["table"][ids]) @ p["body"])),
    "one row": Program("gather", lambda p, ids: score(p["table"][ids[0]])),
    "tied": Program(
        "gather", lambda p, ids: score(jnp.tanh(p["table"][ids] @ p["body"]) @ p["table"][:5].T)
    ),
    "numbers": Program("gather", lambda p, ids: score(p["table"][ids, ids % WIDTH])),
    "columns": Program("gather", lambda p, ids: score(p["table"].T[:, ids])),
    "clipped": Program(
        "gather", lambda p, ids: score(jnp.take(p["table"], ids, axis=0, mode="clip") @ p["body"])
    ),
    "filled": Program(
        "gather",
        lambda p, ids: score(
            jnp.take(p["table"], ids, axis=0, mode="fill", fill_value=0) @ p["body"]
        ),
    ),
    "wrapped": Program(
        "gather", lambda p, ids: score(jnp.take(p["table"], ids, axis=0, mode="wrap") @ p["body"])
    ),
    "along an axis": Program(
        "gather", lambda p, ids: score(jnp.take_along_axis(p["table"], ids[:, None], 0))
    ),
    "windows": Program("gather", _windows),
    "in a scan": Program("gather", _scanned),
    "under vmap": Program(
        "gather", lambda p, ids: score(jax.vmap(lambda i: jnp.tanh(p["table"][i]) @ p["body"])(ids))
    ),
    "one hot": Program(
        "dot_general",
        lambda p, ids: score(_hot(ids, p["table"]) @ p["table"] @ p["body"]),
        has_table=False,
    ),
    "counts": Program("dot_general", _counted, has_table=False),
    "by position": Program(
        "dot_general",
        lambda p, ids: score(jnp.einsum("tw,twd->td", p["table"][ids % 11], p["blocks"])),
        has_table=False,
    ),
    "convolution": Program("conv_general_dilated", _convolved, has_table=False),
}


class Case(NamedTuple):
    """One program on data of one kind."""

    program: str
    dtype: str
    size: str

    def parameters(self):
        """Float32 arrays by name."""
        size = self.size if PROGRAMS[self.program].has_table else "small"
        shapes = {
            "table": (rows_of(self.dtype, size), WIDTH),
            "body": (WIDTH, WIDTH),
            "blocks": (T, WIDTH, 2),
            "kernel": (2, 2, 3),
        }
        rng = np.random.default_rng(0)
        return {
            name: (rng.normal(size=shape) * 0.5).astype(np.float32)
            for name, shape in shapes.items()
        }

    def ids(self, seed=0):
        """(N, T) of the dtype, up to the last row that it can name."""
        size = self.size if PROGRAMS[self.program].has_table else "small"
        rows = rows_of(self.dtype, size)
        last = min(rows - 1, int(np.iinfo(self.dtype).max))
        ids = np.random.default_rng(seed).integers(0, last + 1, (N, T))
        ids[0, 0] = last
        return ids.astype(self.dtype)


CASES = [Case(*case) for case in itertools.product(PROGRAMS, DTYPES, SIZES)]


@functools.cache
def plain_grads(program):
    """`vmap(grad)`, compiled once for data of one shape."""
    return jax.jit(jax.vmap(jax.grad(PROGRAMS[program].loss), in_axes=(None, 0)))


@functools.cache
def truth(case, replaced):
    """Clipped sum by `vmap(grad)` in float64, by hand."""
    with jax.enable_x64(True):
        p = {name: jnp.asarray(array, jnp.float64) for name, array in case.parameters().items()}
        ids = jnp.asarray(batch(case, replaced))
        grads = plain_grads(case.program)(p, ids)
        grads = {name: np.asarray(grad) for name, grad in grads.items()}
    norms = np.sqrt(sum(np.square(g).reshape(N, -1).sum(1) for g in grads.values()))
    factors = np.minimum(1, BOUND / (1 + MARGIN["float32"]) / np.maximum(norms, 1e-300))
    return {name: np.einsum("n,n...->...", factors, g) for name, g in grads.items()}, norms


def batch(case, replaced):
    """The ids, or those of a neighbouring data set."""
    ids = case.ids()
    if replaced:
        ids[-1] = case.ids(seed=7)[0]
    return ids


def sums(case, method):
    """Clipped sums and norms of the data and of its neighbour, by one program."""
    loss = PROGRAMS[case.program].loss
    run = jax.jit(
        lambda p, ids: dpj.clipped_grad_sum(loss, p, ids, max_grad_norm=BOUND, method=method)[:2]
    )
    with jax.enable_x64(case.dtype == "int64"):
        p = {name: jnp.asarray(array) for name, array in case.parameters().items()}
        found = [run(p, jnp.asarray(batch(case, replaced))) for replaced in (False, True)]
        assert {str(part.dtype) for part in jax.tree.leaves(found)} == {"float32"}
        return [({k: np.asarray(v) for k, v in total.items()}, np.asarray(n)) for total, n in found]


def distance(one, other):
    """L2 distance of two sums in float64."""
    return np.sqrt(sum(np.square(one[k].astype(float) - other[k]).sum() for k in one))


def check(case, method):
    """Both sums are the truth's, and 2 C apart at most; or JAX itself does not take the dtype."""
    try:
        truth(case, False)
    except OverflowError:  # negative indices are made positive in their own dtype
        with pytest.raises(OverflowError):
            sums(case, method)
        return
    found = sums(case, method)
    for replaced, (total, norms) in enumerate(found):
        expected, lengths = truth(case, bool(replaced))
        assert distance(total, expected) <= TOLERANCE * BOUND
        np.testing.assert_allclose(norms, lengths, rtol=TOLERANCE)
    assert 0 < distance(found[0][0], found[1][0]) <= 2 * BOUND


def _name(case):
    return "-".join(case).replace(" ", "_")


@pytest.mark.parametrize(
    ("case", "method"),
    [
        pytest.param(case, way, id=f"{_name(case)}-{way}")
        for case, way in random.Random(0).sample([(c, w) for c in CASES for w in WAYS], SAMPLE)
    ],
)
def test_a_replaced_example_moves_the_sum_by_its_own_part(case, method):
    check(case, method)


def covering():
    """Each program and dtype by book-keeping, which does arithmetic with the indices.

    And each program by each other method, with the dtypes and sizes in turn.
    """
    others = [way for way in WAYS if way != "book_keeping"]
    sizes = pairwise(PROGRAMS, DTYPES, SIZES)
    by_others = zip(itertools.product(PROGRAMS, others), itertools.cycle(DTYPES), strict=False)
    return [
        *((Case(*case), "book_keeping") for case in sizes),
        *(
            (Case(program, dtype, SIZES[turn // len(others) % 2]), way)
            for turn, ((program, way), dtype) in enumerate(by_others)
        ),
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "method"),
    [pytest.param(case, way, id=f"{_name(case)}-{way}") for case, way in covering()],
)
def test_every_program_and_dtype(case, method):
    check(case, method)


def check_larger(dtype):
    """All programs with a table that has more rows than the dtype has numbers.

    Not "windows": where a slice begins is clamped in the dtype of the index, so that JAX's own
    gradient of one example writes outside of the table.
    """
    programs = [name for name in PROGRAMS if PROGRAMS[name].has_table and name != "windows"]
    for number, program in enumerate(programs):
        case = Case(program, dtype, "larger")
        check(case, "book_keeping")
        if number % len(NARROW) == NARROW.index(dtype):  # each program with one of the dtypes
            check(case, "auto")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", NARROW)
def test_tables_with_more_rows_than_the_dtype_has_numbers(dtype):
    """In a process without the suite's flags: XLA's older emitters write outside of such tables."""
    code = f"from tests.property.test_sensitivity_jax import *; check_larger({dtype!r})"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "XLA_FLAGS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_every_primitive_with_a_rule_is_here():
    assert {program.primitive for program in PROGRAMS.values()} == set(RULES)


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_programs_use_their_primitive(name):
    case = Case(name, "int32", "small")
    over_rows = jax.vmap(PROGRAMS[name].loss, in_axes=(None, 0))
    jaxpr = jax.make_jaxpr(over_rows)(case.parameters(), case.ids())
    assert PROGRAMS[name].primitive in str(jaxpr)
