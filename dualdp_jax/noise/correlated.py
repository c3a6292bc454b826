# SPDX-License-Identifier: Apache-2.0
"""Correlated noise C^-1 z of one step, from its normals z and what was kept of earlier steps.

What is kept takes the noise away from what was released: it lives in the memory of the process
that releases, on the shards where sums are sharded, and in no checkpoint, pickle or `repr`.

Source: Denisov et al. 2022 (arXiv 2202.08312); McMahan et al. 2024 (arXiv 2404.16706) for `BLT`.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dualdp.plan.correlated.strategies import BLT, Band, Strategy, Window

#: One array for each leaf of the sums.
Leaves = list[jax.Array]
#: What is kept, the newest first.
Kept = tuple[Leaves, ...]
_AT_ONCE = 8  # arrays that one program adds, so that few numbers of them are compiled


def next_noise(
    strategy: Strategy, index: int, z: Leaves, kept: Kept, stddev: float
) -> tuple[Leaves, Kept]:
    """Return the noise of a step and what is kept for the next.

    A window keeps its normals, a band as many noises as it has coefficients, a buffered Toeplitz
    strategy its buffers, and any other strategy all normals of the segment.

    Args:
        strategy: `Strategy` of the plan.
        index: int, number of the step in its segment.
        z: leaves, standard normals of the step.
        kept: leaves of the step before; () at the beginning.
        stddev: float, standard deviation of z in the sum, gradient units.
    """
    if isinstance(strategy, Band):
        first, *taps = strategy.weights
        noise = _plus(_times(z, stddev), kept, [-tap for tap in taps])
        noise = _times(noise, 1 / first)
        return noise, (noise, *kept)[: len(taps)]
    if isinstance(strategy, BLT):
        buffers = kept or tuple([jnp.zeros_like(x) for x in z] for _ in strategy.decays)
        noise = _plus(_times(z, stddev), buffers, [-scale for scale in strategy.scales])
        pairs = zip(strategy.decays, buffers, strict=True)
        return noise, tuple(_plus(_times(row, decay), (noise,), [1.0]) for decay, row in pairs)
    if isinstance(strategy, Window):
        weights, most = strategy.weights[: index + 1], len(strategy.weights) - 1
    else:
        weights, most = tuple(strategy.inverse(index + 1).tolist()), index + 1
    scaled = [stddev * weight for weight in weights]
    return _plus(_times(z, scaled[0]), kept, scaled[1:]), (z, *kept)[:most]


def _plus(leaves: Leaves, others: Kept, weights: Sequence[float]) -> Leaves:
    """Leaves plus others times their weights, one after the other."""
    for start in range(0, len(others), _AT_ONCE):
        some = others[start : start + _AT_ONCE]
        leaves = _added(leaves, some, np.asarray(weights[start : start + len(some)]))
    return leaves


@jax.jit
def _added(leaves: Leaves, others: Kept, weights: jax.Array) -> Leaves:
    for weight, other in zip(weights, others, strict=True):
        leaves = [x + weight.astype(x.dtype) * y for x, y in zip(leaves, other, strict=True)]
    return leaves


@jax.jit
def _times(leaves: Leaves, factor: jax.Array) -> Leaves:
    return [jnp.asarray(factor, x.dtype) * x for x in leaves]
