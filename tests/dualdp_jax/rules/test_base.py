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
def cubic_product():
    """A primitive of the user's, y = (x @ w) ** 3, and its rule; both are taken away afterwards."""
    primitive = jex.Primitive("test_cubic_product")
    function = lambda x, w: (x @ w) ** 3  # noqa: E731
    primitive.def_impl(function)
    primitive.def_abstract_eval(
        lambda x, w: jax.core.ShapedArray((*x.shape[:-1], w.shape[-1]), x.dtype)
    )
    mlir.register_lowering(primitive, mlir.lower_fun(function, multiple_results=False))

    def batch(args, dims):
        moved = [x if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(args, dims, strict=True)]
        axes = [None if d is None else 0 for d in dims]
        return jax.vmap(function, in_axes=axes)(*moved), 0

    batching.primitive_batchers[primitive] = batch
    ad.primitive_jvps[primitive] = lambda primals, tangents: jax.jvp(
        function,
        primals,
        tuple(
            jnp.zeros_like(p) if type(t) is ad.Zero else t
            for p, t in zip(primals, tangents, strict=True)
        ),
    )
    yield primitive
    rules.RULES.pop("test_cubic_product", None)


def test_a_rule_of_the_users_is_used(cubic_product):
    called = []

    def grads(spec, others, grads_out):
        called.append(spec)
        return jnp.einsum("nti,nto->nio", *others, grads_out)

    # The gradient of the product is wrong on purpose (it leaves out the cube): the rule is used.
    rule = Rule(accepts=lambda params, position, shapes: position == 1, grads=grads)
    params = {"w": jnp.full((3, 2), 0.5)}
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 5, 3)), jnp.float32)
    loss = lambda p, x: jnp.sum(cubic_product.bind(x, p["w"]))  # noqa: E731
    exact = dpj.per_sample_grads(loss, params, x, method="vmap")["w"]
    np.testing.assert_allclose(
        dpj.per_sample_grads(loss, params, x, method="materialize")["w"], exact, rtol=1e-5
    )
    dpj.register_rule(cubic_product, rule)
    with pytest.raises(dualdp.ExactnessError, match="differs from plain autodiff by"):
        dpj.per_sample_grads(loss, params, x, method="materialize")
    found = dpj.per_sample_grads(loss, params, x, method="materialize", check="off")["w"]
    np.testing.assert_allclose(found, jnp.einsum("nti,nto->nio", x, jnp.ones((4, 5, 2))), rtol=1e-5)
    options = {"max_grad_norm": 1.0, "method": "book_keeping", "check": "off"}
    dpj.clipped_grad_sum(loss, params, x, **options)
    assert [spec.shape for spec in called] == [(3, 2)] * len(called)


def test_register_rule_checks_its_arguments():
    rule = rules.RULES["dot_general"]
    with pytest.raises(ValueError, match="'dot_general' has a rule already. Pass overwrite=True"):
        dpj.register_rule("dot_general", rule)
    dpj.register_rule("dot_general", rule, overwrite=True)
    for target, given in ((3, rule), ("mine", lambda x: x)):
        with pytest.raises(TypeError, match="Expected a primitive"):
            dpj.register_rule(target, given)
