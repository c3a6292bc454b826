# SPDX-License-Identifier: Apache-2.0
"""Weights by name, in the order of the tree, and back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from dualdp_jax.checkpoint import weights


class Net(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(3, 4, rngs=rngs)
        self.last = nnx.Linear(4, 2, rngs=rngs)


def test_leaves_are_named_in_tree_order():
    nested = {"b": jnp.ones((2, 3)), "a": [jnp.ones(1), {"w": jnp.ones(())}]}
    assert [*weights.leaves(nested).items()] == [("a/0", (1,)), ("a/1/w", ()), ("b", (2, 3))]
    linen_names = [*weights.leaves(linen.Dense(2).init(jax.random.key(0), jnp.ones(3)))]
    assert linen_names[0] == "params/bias"
    module = Net(nnx.Rngs(0))
    assert [*weights.leaves(module).items()][1] == ("first/kernel", (3, 4))
    assert weights.leaves(nnx.state(module, nnx.Param)) == weights.leaves(module)


@pytest.mark.parametrize("kind", ["nested", "module", "state"])
def test_from_named_rebuilds(kind):
    module = Net(nnx.Rngs(0))
    like = {
        "nested": {"a": jnp.ones(2), "b": [jnp.ones((1, 2), jnp.bfloat16)]},
        "module": module,
        "state": nnx.state(module, nnx.Param),
    }[kind]
    named = enumerate(weights.leaves(like).items())
    arrays = {path: np.full(shape, i, float) for i, (path, shape) in named}
    rebuilt = weights.from_named(like, arrays)
    for name, back in weights.to_numpy(rebuilt).items():
        np.testing.assert_array_equal(arrays[name], back.astype(float))
    if kind == "nested":
        assert rebuilt["b"][0].dtype == jnp.bfloat16
    else:
        nnx.update(module, rebuilt)
        assert (module.last.kernel.get_value() == 3).all()


def test_from_named_refuses_what_does_not_fit():
    like = {"a": jnp.ones(2), "b": jnp.ones(3)}
    with pytest.raises(ValueError, match=r"The array for 'b' has shape \(2,\). Expected \(3,\)"):
        weights.from_named(like, {"a": np.ones(2), "b": np.ones(2)})
    with pytest.raises(TypeError, match="The parameter 'a' is a str"):
        weights.leaves({"a": "text"})
