# SPDX-License-Identifier: Apache-2.0
"""A model of two layers, its gradients by `jax.grad` of single examples, and how close is close."""

import jax
import jax.numpy as jnp
import numpy as np

N = 5


def loss_fn(params, x, y):
    hidden = jnp.tanh(x @ params["a"]["w"] + params["a"]["b"])
    return jnp.sum((hidden @ params["b"]["w"] - y) ** 2)


def drawn(n=N):
    """Parameters, inputs (n, 3) and targets (n, 2)."""
    rng = np.random.default_rng(3)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    params = {"a": {"w": draw(3, 4), "b": draw(4)}, "b": {"w": draw(4, 2)}}
    return params, draw(n, 3), draw(n, 2)


def per_sample(params, x, y):
    """The truth: one gradient per example, stacked."""
    grads = [jax.grad(loss_fn)(params, x[k], y[k]) for k in range(x.shape[0])]
    return jax.tree.map(lambda *leaves: np.stack(leaves), *grads)


def norms_of(grads):
    """(n,) norms over all leaves (n, *shape), in float64."""
    leaves = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(grads)]
    return np.sqrt(sum((leaf.reshape(len(leaf), -1) ** 2).sum(1) for leaf in leaves))


def weighted(factors, grads):
    """Sum of the rows (n, *shape) of each leaf, times factors (n,)."""
    return jax.tree.map(lambda g: np.einsum("n,n...->...", factors, g), grads)


def assert_trees_close(a, b, rtol=1e-5):
    """Each leaf to rtol of its norm, plus 1e-6 of the whole norm."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    wide = lambda tree: [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(tree)]  # noqa: E731
    whole = np.sqrt(sum((leaf**2).sum() for leaf in wide(b)))
    for one, other in zip(wide(a), wide(b), strict=True):
        assert one.shape == other.shape
        assert np.linalg.norm(one - other) <= rtol * np.linalg.norm(other) + 1e-6 * whole
