# SPDX-License-Identifier: Apache-2.0
"""Correlated noise C^-1 z of one step, from its normals z and what was kept of earlier steps.

What is kept takes the noise away from what was released: it lives in the memory of the process
that releases, on the shards where sums are sharded, and in no checkpoint, pickle or `repr`.

Source: Denisov et al. 2022 (arXiv 2202.08312); McMahan et al. 2024 (arXiv 2404.16706) for `BLT`.
"""

from __future__ import annotations

from dualdp.plan.correlated.strategies import BLT, Band, Strategy, Window
from dualdp_torch.rules.base import Tensor

#: Kept arrays, the newest first.
Kept = tuple[Tensor, ...]


def next_noise(
    strategy: Strategy, index: int, z: Tensor, kept: Kept, stddev: float
) -> tuple[Tensor, Kept]:
    """Return the noise of a step and what is kept for the next.

    A window keeps its normals, a band as many noises as it has coefficients, a buffered Toeplitz
    strategy its buffers, and any other strategy all normals of the segment.

    Args:
        strategy: `Strategy` of the plan.
        index: int, number of the step in its segment.
        z: (k,) standard normals of the step, which may be overwritten.
        kept: arrays (k,) of the step before; () at the beginning.
        stddev: float, standard deviation of z in the sum, gradient units.
    """
    if isinstance(strategy, Band):
        first, *taps = strategy.weights
        noise = z.mul_(stddev)
        for tap, earlier in zip(taps, kept, strict=False):
            noise.sub_(earlier * tap)
        noise.mul_(1 / first)
        return noise.clone(), (noise, *kept)[: len(taps)]
    if isinstance(strategy, BLT):
        buffers = kept or tuple(z.new_zeros(len(z)) for _ in strategy.decays)
        noise = z.mul_(stddev)
        for scale, buffer in zip(strategy.scales, buffers, strict=True):
            noise.sub_(buffer * scale)  # rounded twice, on any device and in any part
        pairs = zip(strategy.decays, buffers, strict=True)
        return noise, tuple((buffer * decay).add_(noise) for decay, buffer in pairs)
    weights = weights_of(strategy, index)
    noise = z * (stddev * weights[0])
    for weight, earlier in zip(weights[1:], kept, strict=False):
        noise.add_(earlier * (stddev * weight))
    most = len(strategy.weights) - 1 if isinstance(strategy, Window) else index + 1
    return noise, (z, *kept)[:most]


def weights_of(strategy: Strategy, index: int) -> tuple[float, ...]:
    """Return the weights of the normals of a step and of those before, the newest first."""
    if isinstance(strategy, Window):
        return strategy.weights[: index + 1]
    return tuple(strategy.inverse(index + 1).tolist())
