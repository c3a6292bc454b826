# SPDX-License-Identifier: Apache-2.0
"""The normals of a release: one flat program, whose numbers are those of `jax.random`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dualdp_jax.noise import generators

KEY = np.asarray([0x01234567, 0xFEDCBA98], np.uint32)
SHAPES = {
    "one": [()],
    "short": [(3,), (2, 2), ()],
    "empty": [(0, 4), (5,), (0,), (7,)],
    "row": [(generators._ROW,), (generators._ROW + 1,), (generators._ROW - 1,)],
    "part": [
        (generators._ROWS // 2, generators._ROW),
        (1,),
        (generators._ROWS // 2 - 1, generators._ROW),
    ],
    "many": [(300, 7), *[(k,) for k in range(1, 12)], (211, 513)],
}


def of_jax(shapes, dtype=jnp.float32):
    key = jax.random.wrap_key_data(KEY)
    return [
        jax.random.normal(jax.random.fold_in(key, i), shape, dtype)
        for i, shape in enumerate(shapes)
    ]


@pytest.mark.parametrize("program", ["draw", "_all_at_once", "_one_by_one"])
@pytest.mark.parametrize("name", SHAPES)
def test_normals_are_those_of_jax(name, program):
    leaves = [jnp.zeros(shape) for shape in SHAPES[name]]
    found = jax.jit(getattr(generators, program))(KEY, leaves)
    for ours, theirs in zip(found, of_jax(SHAPES[name]), strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)


def test_wide_and_missing_leaves():
    with jax.enable_x64(True):
        leaves = [jnp.zeros((3, 2)), jnp.zeros(4, jnp.float32)]
        found = generators.draw(KEY, leaves)
        np.testing.assert_array_equal(found[0], of_jax([(3, 2)], jnp.float64)[0])
        assert [leaf.dtype for leaf in found] == [jnp.float64, jnp.float32]
    assert generators.draw(KEY, []) == []
    assert [leaf.shape for leaf in generators.draw(KEY, [jnp.zeros((0, 2))])] == [(0, 2)]


def test_the_flat_program_takes_little_memory():
    leaves = [jnp.zeros((1000, 1000)), jnp.zeros(10)]
    compiled = jax.jit(generators._all_at_once).lower(KEY, leaves).compile()
    size = sum(4 * leaf.size for leaf in leaves)
    assert compiled.memory_analysis().temp_size_in_bytes < 1.2 * size
