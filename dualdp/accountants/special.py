# SPDX-License-Identifier: Apache-2.0
"""What needs no lattice: noiseless releases, pure bounds, one step, the cost of cut batches."""

from __future__ import annotations

import math

from scipy.special import bdtrc

from dualdp import mechanisms
from dualdp.accountants import gaussian
from dualdp.accountants.bounds import Extra
from dualdp.mechanisms import Mechanism


def noiseless(event: Mechanism) -> bool:
    """Whether one release may reveal an example entirely because no noise was added."""
    if isinstance(event, mechanisms.RandomizedResponse):
        return event.noise_parameter == 0
    return getattr(event, "noise_multiplier", 1.0) == 0


def hopeless(event: Mechanism) -> bool:
    """Whether the noise is so small that only "infinite" is said: its square would underflow."""
    return getattr(event, "noise_multiplier", 1.0) < 1e-100


def surely_revealed(events: list[tuple[Mechanism, int]]) -> float:
    """Probability that a noiseless release touched the example: epsilon is inf below it."""
    hidden = 1.0
    for event, number in events:
        truncated = isinstance(event, mechanisms.TruncatedPoissonSubsampledGaussian)
        if noiseless(event) and not truncated:
            hidden *= (1 - getattr(event, "sample_rate", 1.0)) ** number
    return 1 - hidden


def pure(events: list[tuple[Mechanism, int]], factor: float) -> float | None:
    """Sum of pure epsilons, if every event has one (rounded up)."""
    total = 0.0
    for event, number in events:
        match event:
            case mechanisms.Laplace(scale):
                one = factor / scale
            case mechanisms.RandomizedResponse(noise, buckets):
                one = math.log1p((1 - noise) / (noise / buckets))
            case mechanisms.ApproximateDP(epsilon, delta) if delta == 0:
                one = epsilon
            case mechanisms.MassTable(p, q):
                one = max(_gap(a, b) for a, b in zip(p, q, strict=True))
            case _:
                return None
        total += number * one
    return total * (1 + 1e-12)


def _gap(a: float, b: float) -> float:
    """|log(a/b)|, inf where only one is 0."""
    if a == b:
        return 0.0
    return abs(math.log(a / b)) if a > 0 and b > 0 else math.inf


def single_step(sigma: float, rate: float, delta: float) -> float:
    """Epsilon of one subsampled step, the worse direction."""
    return gaussian.smallest_epsilon(
        lambda epsilon: max(gaussian.single_step_log_delta(sigma, rate, epsilon)), math.log(delta)
    )


def truncation(events: list[tuple[Mechanism, int]], group: int) -> Extra:
    """(1 + e^epsilon) sum of P(a Poisson batch is cut).

    Cutting changes each output distribution by at most tau = P(Binomial(n + k, q) > max) in total
    variation, on both data sets: delta_cut(e) <= delta(e) + (1 + e^e) T tau. The n + k covers the
    neighbour that has a group of k examples more.

    Source: Chua et al. 2024 (arXiv 2411.04205), Theorem 3.3 in the same spirit.
    """
    total = 0.0
    for event, number in events:
        if isinstance(event, mechanisms.TruncatedPoissonSubsampledGaussian):
            most = event.num_examples + group
            if event.max_batch_size < most:
                tau = float(bdtrc(event.max_batch_size, most, event.sample_rate))
                total += number * tau * (1 + 1e-6)
    return Extra(total, total)
