# SPDX-License-Identifier: Apache-2.0
"""Whole JAX models: a private step is that of a plain float64 loop over rows."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import dualdp_jax as dpj
from dualdp import PrivacyPlan
from dualdp_jax.per_sample.methods import METHODS
from tests import closeness
from tests.closeness import whole_norms
from tests.zoo.jax_models import MODELS, N

jax.config.update("jax_disable_most_optimizations", True)  # they cost more than they save here
#: Largest distance of two clipped sums, in units of C, and of norms, relative.
TOLERANCE = 2e-5
OF_LIBRARIES = ("linen", "nnx", "eqx", "hk")  # which take longer to compile


each = pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow if n.startswith(OF_LIBRARIES) else ()) for n in MODELS],
)


def truth_of(params, loss_fn, batch, trainable):
    """Leaf number -> (n, *shape): `jax.grad` of one row's loss after the other, in float64."""
    with jax.enable_x64(True):
        params, batch = jax.tree.map(doubled, (params, batch))
        if isinstance(params, nnx.Module):
            graph, trained, rest = nnx.split(params, nnx.Param, ...)
            combine = lambda trained, rest: nnx.merge(graph, trained, rest)  # noqa: E731
        else:
            trained, rest = eqx.partition(
                params, eqx.is_inexact_array if trainable is None else trainable
            )
            combine = eqx.combine
        grad = jax.jit(jax.grad(lambda trained, *row: loss_fn(combine(trained, rest), *row)))
        rows = [grad(trained, *(part[k] for part in batch)) for k in range(N)]
        leaves = zip(*map(jax.tree.leaves, rows), strict=True)
        return {k: np.stack([np.asarray(g) for g in grads]) for k, grads in enumerate(leaves)}


def doubled(leaf):
    is_float = hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)
    return jnp.asarray(leaf, jnp.float64) if is_float else leaf


def assert_exact(grads, norms, truth, bound):
    """Sum and norms are the truth's."""
    expected, found = closeness.clipped_sum(truth, bound), jax.tree.leaves(grads)
    assert {str(total.dtype) for total in found} == {"float32"}
    gaps = [np.linalg.norm(a - b) for a, b in zip(found, expected.values(), strict=True)]
    assert np.linalg.norm(gaps) <= TOLERANCE * bound
    np.testing.assert_allclose(norms, whole_norms(truth), rtol=TOLERANCE)


@each
def test_clipped_grad_sum_is_that_of_the_loop(name):
    """Inside jit; the methods take turns."""
    method = METHODS[[*MODELS].index(name) % len(METHODS)]
    params, loss_fn, batch, trainable = MODELS[name]()
    truth = truth_of(params, loss_fn, batch, trainable)
    bound = float(np.median(whole_norms(truth)))
    options = {"max_grad_norm": bound, "trainable": trainable, "method": method, "check": "off"}

    @jax.jit
    def call(*batch):
        found = dpj.clipped_grad_sum(loss_fn, params, *batch, **options)
        return jax.tree.leaves(found.grads), found.norms

    assert_exact(*call(*batch), truth, bound)


@each
def test_steps_of_an_engine_are_those_of_the_loop(name):
    """Two steps, each checked."""
    params, loss_fn, batch, trainable = MODELS[name]()
    truth = truth_of(params, loss_fn, batch, trainable)
    bound = float(np.median(whole_norms(truth)))
    plan = PrivacyPlan(
        num_examples=N, expected_batch_size=N, num_steps=2, noise_multiplier=0.0,
        max_grad_norm=bound, delta=1e-5, sampler="shuffle", physical_batch_size=N, seed=3,
    )  # fmt: skip
    engine = dpj.PrivacyEngine()
    step, state, loader = engine.make_private(
        loss_fn=loss_fn,
        params=params,
        optimizer=optax.sgd(1e-3),
        data=batch,
        plan=plan,
        trainable=trainable,
        checks=1.0,
    )
    for chunks in loader.remaining():
        state, _ = step(state, chunks)
        if len(engine.ledger) == 1:
            stages, order = engine.stages(), plan.batch_indices(0)
            rows = {key: grads[order] for key, grads in truth.items()}
            assert_exact(stages.unprotected_sum, stages.unprotected_norms, rows, bound)
    assert engine.ledger.failed_check is None
    assert engine.ledger.last_check == 1
