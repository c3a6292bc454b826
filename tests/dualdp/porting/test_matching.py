# SPDX-License-Identifier: Apache-2.0
"""Layouts of the two stacks, as data: every axis goes where it belongs, nothing is left over."""

import numpy as np

from dualdp.porting.matching import Matcher
from dualdp.porting.parameter_map import to_jax
from tests.mistakes import refused

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
LEAVES = {
    "params/conv/bias": (8,),
    "params/conv/kernel": (5, 4, 3, 8),
    "params/emb/embedding": (7, 2),
    "params/fc/kernel": (6, 10),
}


def match(*given):
    """The map of every parameter."""
    return Matcher(*given).parameter_maps()


def test_round_trip():
    """Of single arrays, of several that lie on an axis of their own, and of several leaves."""
    rng, words = np.random.default_rng(1), ("key", "query", "value")
    (attention,) = match(
        {"in_proj_weight": (12, 4)},
        {"in_proj_weight": "attention h=2"},
        {f"{word}/kernel": (4, 2, 2) for word in words},
    )
    assert [s.path for s in attention.slices] == ["query/kernel", "key/kernel", "value/kernel"]
    for leaf in (*match(SHAPES, KINDS, LEAVES), attention):
        arrays = rng.normal(size=(3, *leaf.torch_shape))
        there = [to_jax([leaf], {leaf.torch_name: array}) for array in arrays]
        np.testing.assert_array_equal(leaf.to_torch(there[0]), arrays[0])
        stacked = {path: np.stack([one[path] for one in there]) for path in there[0]}
        np.testing.assert_array_equal(leaf.to_torch(stacked, batch_axes=1), arrays)


def test_nothing_is_left_over_silently():
    fewer, extra = dict([*LEAVES.items()][:3]), LEAVES | {"params/z/bias": (1,)}
    words = r"\['fc.weight \(10, 6\)'\] and JAX leaves \[\]"
    refused(lambda: match(SHAPES, KINDS, fewer), ValueError, words)
    words = r"\[\] and JAX leaves \['params/z/bias \(1,\)'\]"
    refused(lambda: match(SHAPES, KINDS, extra), ValueError, words)
    unknown, words = {"nobody": "params/fc/kernel"}, r"mapping names \['nobody'\], which neither"
    refused(lambda: match(SHAPES, KINDS, LEAVES, unknown), ValueError, words)
    two = {"a.weight": (2, 3), "b.weight": (2, 3)}
    given = two, dict.fromkeys(two, "linear"), {"a/kernel": (3, 2)}, {"b": "a"}
    refused(lambda: match(*given), ValueError, "Two torch parameters share a JAX leaf")
