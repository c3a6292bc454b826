# SPDX-License-Identifier: Apache-2.0
"""The dry run before training."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import dualdp_jax as dpj
from dualdp_jax.validate import Finding, validate

X = np.ones((4, 3), np.float32)


def test_a_sound_model_has_no_findings():
    params = {"a": jnp.zeros((3, 2)), "b": jnp.zeros((2, 1))}  # a product of zeros at the start

    def loss_fn(params, x, key):
        x = x * jax.random.bernoulli(key, 0.5, x.shape)
        return (x @ params["a"] @ params["b"])[0] ** 2

    assert validate(loss_fn, params, X, key=jax.random.key(0)) == []


def test_parameters_without_gradient_are_named():
    params = {"used": jnp.ones(3), "unused": jnp.ones(2), "cut": {"off": jnp.ones(())}}

    def loss_fn(params, x):
        return (x @ params["used"]) * jax.lax.stop_gradient(params["cut"]["off"])

    found = validate(loss_fn, params, X)
    assert [finding.path for finding in found] == ["cut/off", "unused"]
    assert str(found[1]) == (
        "float32 ('unused'): it gets no gradient, so training would only add noise to it. Freeze "
        "it by trainable=, take it out, or let loss_fn use it."
    )
    frozen = {"used": True, "unused": False, "cut": False}
    assert validate(loss_fn, params, X, trainable=frozen) == []


def test_a_constant_gradient_is_a_gradient():
    assert validate(lambda p, x: p.sum(), jnp.ones(2), X) == []


@pytest.mark.parametrize("leaf", [jnp.zeros((), jnp.int32), 4, np.ones(2) * 1j])
def test_a_leaf_that_cannot_be_trained_is_named(leaf):
    params = {"w": jnp.ones(3), "other": leaf}
    (found,) = validate(lambda p, x: x @ p["w"], params, X)
    assert "The parameter 'other' is" in found.reason
    frozen = {"w": True, "other": False}
    assert validate(lambda p, x: x @ p["w"], params, X, trainable=frozen) == []


class Normed(nnx.Module):
    def __init__(self, rngs):
        self.layer = nnx.Linear(3, 2, rngs=rngs)
        self.norm = nnx.BatchNorm(2, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.layer(x[None]))[0].sum()


def test_variables_that_change_are_named():
    model = Normed(nnx.Rngs(0))
    (found,) = validate(lambda m, x: m(x), model, X)
    assert (found.path, found.kind) == ("loss_fn", "UnsupportedLayerError")
    assert "loss_fn changed the variable 'norm/mean'" in found.reason
    assert "use GroupNorm" in found.fix
    model.eval()
    assert validate(lambda m, x: m(x), model, X) == []


def test_running_statistics_among_the_parameters_are_named():
    model = linen.BatchNorm(use_running_average=True)
    variables = model.init(jax.random.key(0), X)
    (found,) = validate(lambda p, x: model.apply(p, x).sum(), variables, X)
    assert "batch_stats" in found.reason


def test_a_loss_with_an_axis_is_a_finding():
    (found,) = validate(lambda p, x: x * p, jnp.ones(3), X)
    assert found == Finding(
        "loss_fn",
        "ValueError",
        "loss_fn returned float32[3] for one example",
        "Expected a real scalar, shape (): the loss of that example alone, without a batch axis.",
    )


def test_the_dry_run_is_part_of_the_face():
    assert dpj.validate is validate
