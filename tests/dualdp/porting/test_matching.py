# SPDX-License-Identifier: Apache-2.0
"""Layouts of the two stacks, as data: every axis goes where it belongs, nothing is left over."""

import numpy as np
import pytest

from dualdp.porting import matching

SHAPES = {
    "conv.weight": (8, 3, 5, 4),
    "conv.bias": (8,),
    "fc.weight": (10, 6),
    "emb.weight": (7, 2),
}
KINDS = {
    "conv.weight": "conv",
    "conv.bias": "conv",
    "fc.weight": "linear",
    "emb.weight": "embedding",
}
LEAVES = [
    (("params", "conv", "bias"), (8,)),
    (("params", "conv", "kernel"), (5, 4, 3, 8)),
    (("params", "emb", "embedding"), (7, 2)),
    (("params", "fc", "kernel"), (6, 10)),
]


def test_match_pairs_by_name_and_kind():
    leaves = {leaf.torch_name: leaf for leaf in matching.match(SHAPES, KINDS, LEAVES)}
    assert {name: leaf.jax_index for name, leaf in leaves.items()} == {
        "conv.weight": 1,
        "conv.bias": 0,
        "fc.weight": 3,
        "emb.weight": 2,
    }
    weight = np.random.default_rng(0).normal(size=SHAPES["conv.weight"])
    ported = leaves["conv.weight"].to_jax(weight)
    assert ported.shape == leaves["conv.weight"].jax_shape == (5, 4, 3, 8)
    assert ported[1, 2, 0, 7] == weight[7, 0, 1, 2]
    assert leaves["fc.weight"].jax_shape == (6, 10)
    assert leaves["emb.weight"].jax_shape == (7, 2)


@pytest.mark.parametrize("batch_axes", [0, 1])
def test_round_trip(batch_axes):
    rng = np.random.default_rng(1)
    for leaf in matching.match(SHAPES, KINDS, LEAVES):
        array = rng.normal(size=(*(3,) * batch_axes, *leaf.torch_shape))
        there = leaf.to_jax(array, batch_axes=batch_axes)
        np.testing.assert_array_equal(leaf.to_torch(there, batch_axes=batch_axes), array)


def test_nothing_is_left_over_silently():
    with pytest.raises(ValueError, match=r"\['fc.weight \(10, 6\)'\] and the JAX leaves \[\]"):
        matching.match(SHAPES, KINDS, LEAVES[:3])
    extra = [*LEAVES, (("params", "z", "bias"), (1,))]
    with pytest.raises(ValueError, match=r"\[\] and the JAX leaves \['params/z/bias \(1,\)'\]"):
        matching.match(SHAPES, KINDS, extra)
    with pytest.raises(ValueError, match=r"mapping names \['nobody'\], which neither model has"):
        matching.match(SHAPES, KINDS, LEAVES, mapping={"nobody": "params/fc/kernel"})


def test_one_leaf_serves_one_parameter():
    shapes = {"a.weight": (2, 3), "b.weight": (2, 3)}
    leaves = [(("a", "kernel"), (3, 2))]
    with pytest.raises(ValueError, match="Two torch parameters share a JAX leaf"):
        matching.match(shapes, dict.fromkeys(shapes, "linear"), leaves, {"b": "a"})


def test_a_parameter_of_several_leaves_is_no_single_one():
    shapes, kinds = {"in_proj_weight": (12, 4)}, {"in_proj_weight": "attention h=2"}
    leaves = [((word, "kernel"), (4, 2, 2)) for word in ("key", "query", "value")]
    (leaf,) = matching.match(shapes, kinds, leaves)
    assert [s.path for s in leaf.slices] == ["query/kernel", "key/kernel", "value/kernel"]
    with pytest.raises(ValueError, match=r"in_proj_weight is held by 3 JAX leaves \(query/kernel"):
        leaf.to_torch(np.zeros((4, 2, 2)))
