# SPDX-License-Identifier: Apache-2.0
"""Rules of the user's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core as jex
from jax.interpreters import ad, batching, mlir

import dualdp
import dualdp_jax as dpj
from dualdp_jax import rules
from dualdp_jax.rules import Rule


@pytest.fixture
def product():
    """A primitive of the user's, x @ w, and its rule; both are taken away afterwards."""
    primitive = jex.Primitive("test_product")
    primitive.def_impl(jnp.matmul)
    primitive.def_abstract_eval(
        lambda x, w: jax.core.ShapedArray((*x.shape[:-1], w.shape[-1]), x.dtype)
    )
    mlir.register_lowering(primitive, mlir.lower_fun(jnp.matmul, multiple_results=False))
    batching.primitive_batchers[primitive] = lambda args, dims: (
        jax.vmap(jnp.matmul, in_axes=dims)(*args),
        0,
    )
    ad.defjvp(primitive, lambda dx, x, w: dx @ w, lambda dw, x, w: x @ dw)
    yield primitive
    rules.RULES.pop("test_product", None)


def test_a_rule_of_the_users_is_used(product):
    """Its gradient is twice too large on purpose, which the check of the first call finds."""
    rule = Rule(
        accepts=lambda params, position, shapes: position == 1,
        grads=lambda spec, others, grads_out: 2 * jnp.einsum("nti,nto->nio", *others, grads_out),
    )
    params = {"w": jnp.full((3, 2), 0.5)}
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 5, 3)), jnp.float32)
    loss = lambda p, x: jnp.sum(jnp.sin(product.bind(x, p["w"])))  # noqa: E731
    grads = lambda **given: dpj.per_sample_grads(loss, params, x, **given)["w"]  # noqa: E731
    exact = grads(method="vmap")
    np.testing.assert_allclose(grads(method="materialize"), exact, rtol=1e-5)
    dpj.register_rule(product, rule)
    with pytest.raises(dualdp.ExactnessError, match="differs from plain autodiff by"):
        grads(method="materialize")
    np.testing.assert_allclose(grads(method="materialize", check="off"), 2 * exact, rtol=1e-5)


def test_register_rule_checks_its_arguments():
    rule = rules.RULES["dot_general"]
    with pytest.raises(ValueError, match="'dot_general' has a rule already. Pass overwrite=True"):
        dpj.register_rule("dot_general", rule)
    dpj.register_rule("dot_general", rule, overwrite=True)
    for target, given in ((3, rule), ("mine", lambda x: x)):
        with pytest.raises(TypeError, match="Expected a primitive"):
            dpj.register_rule(target, given)
