# SPDX-License-Identifier: Apache-2.0
"""One whole private training step of a zoo model on JAX against a plain float64 loop."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import dualdp_jax as dpj
from dualdp import PrivacyPlan
from dualdp.plan.clipping import MARGIN
from tests.zoo.entry import Entry, N, Problem

#: Largest distance of two clipped sums in units of C, and of norms, relative, in float32.
TOLERANCE = 1e-3


class Truth(NamedTuple):
    """What plain autodiff gives, one example at a time, in float64.

    Attributes:
        grads: one (n, *shape) for each trained leaf.
        norms: (n,) of the whole gradients.
    """

    grads: list[np.ndarray]
    norms: np.ndarray

    def clipped_sum(self, bound: float) -> list[np.ndarray]:
        """Sum of the gradients, each scaled to norm at most C / (1 + margin of float32)."""
        factors = np.minimum(1.0, bound / (1 + MARGIN["float32"]) / self.norms)
        return [np.einsum("n,n...->...", factors, grad) for grad in self.grads]


def _is_float(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)


def _doubled(leaf: Any) -> Any:
    return jnp.asarray(leaf, jnp.float64) if _is_float(leaf) else leaf


def _separate(problem: Problem) -> tuple[list[Any], Callable[..., Any]]:
    """The trained leaves in float64, and the loss as a function of them and an example."""
    if isinstance(problem.model, nnx.Module):
        definition, trained, rest = nnx.split(problem.model, nnx.Param, ...)
        leaves, tree = jax.tree.flatten(trained)
        rest = jax.tree.map(_doubled, rest)

        def loss(values: list[Any], *example: Any) -> Any:
            return problem.loss_fn(nnx.merge(definition, tree.unflatten(values), rest), *example)

        return [_doubled(leaf) for leaf in leaves], loss
    leaves, tree = jax.tree.flatten(problem.model)
    flags = jax.tree.leaves(
        jax.tree.broadcast(True if problem.trainable is None else problem.trainable, problem.model)
    )
    chosen = [flag and _is_float(leaf) for flag, leaf in zip(flags, leaves, strict=True)]
    fixed = [_doubled(leaf) for leaf in leaves]

    def loss(values: list[Any], *example: Any) -> Any:
        values = iter(values)
        filled = [next(values) if c else old for c, old in zip(chosen, fixed, strict=True)]
        return problem.loss_fn(tree.unflatten(filled), *example)

    return [leaf for leaf, c in zip(fixed, chosen, strict=True) if c], loss


@functools.cache
def truth_of(entry: Entry) -> Truth:
    """The gradients by `jax.grad` of one example's loss after the other."""
    problem = entry.build()
    with jax.enable_x64(True):
        values, loss = _separate(problem)
        grad = jax.jit(jax.grad(loss))
        batch = [_doubled(part) for part in problem.batch]
        each = [grad(values, *(part[k] for part in batch)) for k in range(N)]
        grads = [
            np.stack([np.asarray(g, np.float64) for g in of]) for of in zip(*each, strict=True)
        ]
    norms = np.sqrt(sum(np.square(g).reshape(N, -1).sum(1) for g in grads))
    return Truth(grads, norms)


def call(problem: Problem, bound: float, method: str = "auto") -> tuple[list[Any], Any]:
    """Clipped sum, one array for each trained leaf, and norms of the functional call."""

    def run(batch: Any) -> Any:
        found = dpj.clipped_grad_sum(
            problem.loss_fn,
            problem.model,
            *batch,
            max_grad_norm=bound,
            trainable=problem.trainable,
            method=method,
        )
        return jax.tree.leaves(found.grads), found.norms

    return jax.jit(run)(tuple(map(jnp.asarray, problem.batch)))


def engine_step(problem: Problem, bound: float) -> tuple[list[Any], Any]:
    """Clipped sum and norms in the batch's order: one step of the engine without noise.

    The optimizer keeps the mean that it is given.
    """
    plan = PrivacyPlan(
        num_examples=N, expected_batch_size=N, num_steps=1, noise_multiplier=0.0,
        max_grad_norm=bound, delta=1e-5, sampler="shuffle", physical_batch_size=N, seed=3,
    )  # fmt: skip
    keeper = optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params),
        lambda updates, state, params=None: (jax.tree.map(jnp.zeros_like, updates), updates),
    )
    engine = dpj.PrivacyEngine()
    step, state, loader = engine.make_private(
        loss_fn=problem.loss_fn,
        params=problem.model,
        optimizer=keeper,
        data=problem.batch,
        plan=plan,
        trainable=problem.trainable,
        checks=0,  # of which test_checks.py has enough
    )
    for batch in loader.remaining():
        state, _ = step(state, batch)
    norms = np.empty(N)
    norms[plan.batch_indices(0)] = np.asarray(engine.stages().unprotected_norms)
    return [np.asarray(mean) * N for mean in jax.tree.leaves(state.opt_state)], norms


def assert_exact(truth: Truth, bound: float, sums: list[Any], norms: Any) -> None:
    """Sum and norms are the truth's."""
    expected = truth.clipped_sum(bound)
    assert [np.shape(total) for total in sums] == [total.shape for total in expected]
    assert {str(total.dtype) for total in sums} == {"float32"}
    apart = [np.asarray(a, np.float64) - b for a, b in zip(sums, expected, strict=True)]
    distance = np.sqrt(sum(np.square(part).sum() for part in apart)) / bound
    assert distance <= TOLERANCE
    assert (np.abs(np.asarray(norms, np.float64) - truth.norms) / truth.norms).max() <= TOLERANCE
