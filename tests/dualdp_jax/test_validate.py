# SPDX-License-Identifier: Apache-2.0
"""The dry run before training."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import dualdp_jax as dpj
from dualdp_jax.validate import Finding

X = np.ones((4, 3), np.float32)


def test_a_sound_model_has_no_findings():
    """A product of zeros at the start has gradients, as has what is constant."""
    params = {"a": jnp.zeros((3, 2)), "b": jnp.zeros((2, 1)), "c": jnp.ones(2)}

    def loss_fn(params, x, key):
        x = x * jax.random.bernoulli(key, 0.5, x.shape)
        return (x @ params["a"] @ params["b"])[0] ** 2 + params["c"].sum()

    assert dpj.validate(loss_fn, params, X, key=jax.random.key(0)) == []


def test_parameters_without_gradient_are_named():
    params = {"used": jnp.ones(3), "unused": jnp.ones(2), "cut": {"off": jnp.ones(())}}

    def loss_fn(params, x):
        return (x @ params["used"]) * jax.lax.stop_gradient(params["cut"]["off"])

    found = dpj.validate(loss_fn, params, X)
    assert [finding.path for finding in found] == ["cut/off", "unused"]
    assert str(found[1]) == (
        "float32 ('unused'): it gets no gradient, so training would only add noise to it. Freeze "
        "it by trainable=, take it out, or let loss_fn use it."
    )
    frozen = {"used": True, "unused": False, "cut": False}
    assert dpj.validate(loss_fn, params, X, trainable=frozen) == []


def test_a_leaf_that_cannot_be_trained_is_named():
    for leaf in (jnp.zeros((), jnp.int32), 4, np.ones(2) * 1j):
        params, loss = {"w": jnp.ones(3), "other": leaf}, lambda p, x: x @ p["w"]
        (found,) = dpj.validate(loss, params, X)
        assert "The parameter 'other' is" in found.reason
        with pytest.raises(TypeError, match="The parameter 'other' is .*freeze it by trainable="):
            dpj.per_sample_grads(loss, params, X)
        assert dpj.validate(loss, params, X, trainable={"w": True, "other": False}) == []


class Normed(nnx.Module):
    def __init__(self, rngs):
        self.layer = nnx.Linear(3, 2, rngs=rngs)
        self.norm = nnx.BatchNorm(2, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.layer(x[None]))[0].sum()


def test_variables_that_change_are_named():
    model = Normed(nnx.Rngs(0))
    (found,) = dpj.validate(lambda m, x: m(x), model, X)
    assert (found.path, found.kind) == ("loss_fn", "UnsupportedLayerError")
    assert "loss_fn changed the variable 'norm/mean'" in found.reason
    assert "use GroupNorm" in found.fix
    model.eval()
    assert dpj.validate(lambda m, x: m(x), model, X) == []


def test_a_loss_with_an_axis_is_a_finding():
    (found,) = dpj.validate(lambda p, x: x * p, jnp.ones(3), X)
    assert found == Finding(
        "loss_fn",
        "ValueError",
        "loss_fn returned float32[3] for one example",
        "Expected a real scalar, shape (): the loss of that example alone, without a batch axis.",
    )
