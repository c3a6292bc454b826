# SPDX-License-Identifier: Apache-2.0
"""What each example of a batch contributes to a clipped sum, and what it should."""

import jax
import numpy as np

import dualdp_jax as dpj

RNG = np.random.default_rng(0)


def draw(*shape, scale=1.0):
    return (scale * RNG.normal(size=shape)).astype(np.float32)


def length(tree):
    leaves = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(tree)]
    return float(np.sqrt(sum((leaf**2).sum() for leaf in leaves)))


def contributions(loss, params, batch, bound, method, **options):
    """What each example of a batch contributes to the sum of one program."""
    n = len(batch[0])
    run = jax.jit(
        lambda mask: dpj.clipped_grad_sum(
            loss, params, *batch, max_grad_norm=bound, mask=mask, method=method, check="off",
            **options,
        ).grads
    )  # fmt: skip
    run(np.ones(n, bool))
    return [run(np.arange(n) == k) for k in range(n)]


def assert_right(loss, params, batch, bound, method, off=1e-4, **options):
    """Each contribution is that of plain autodiff, and at most the bound."""
    found = contributions(loss, params, batch, bound, method, **options)
    for k, ours in enumerate(found):
        grads = jax.grad(loss)(params, *(part[k] for part in batch))
        factor = min(1.0, bound / (1 + 1e-4) / length(grads))
        gap = jax.tree.map(lambda a, b: np.float64(a) - factor * np.float64(b), ours, grads)  # noqa: B023
        assert length(ours) <= bound, (method, k)
        assert length(gap) <= off * bound, (method, k)
