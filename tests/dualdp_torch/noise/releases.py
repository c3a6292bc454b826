# SPDX-License-Identifier: Apache-2.0
"""Releases of a plan as a ledger gives them, and their noise, for tests without a ledger."""

from __future__ import annotations

import torch

from dualdp.ledger.ledger import Release
from dualdp.plan.plan import PrivacyPlan
from dualdp.randomness import noise_bits
from dualdp_torch.noise.noise import NoiseSource


def plan(**changes):
    """A small plan with a seed."""
    arguments = {
        "num_examples": 1000,
        "expected_batch_size": 50,
        "num_steps": 10,
        "noise_multiplier": 1.3,
        "max_grad_norm": 0.7,
        "delta": 1e-5,
        "seed": 3,
        "accountant": "rdp",
    }
    return PrivacyPlan(**{**arguments, **changes})


def release(run, step, segment=0, start=0):
    """The release of a step, in a segment that begins at `start`."""
    bound = run.max_grad_norm_at(step)
    return Release(
        step=step,
        segment=segment,
        segment_start=start,
        max_grad_norm=bound,
        noise_multiplier=run.noise_multiplier_at(step),
        draw_stddev=run.draw_stddev(step, bound),
        expected_batch_size=run.expected_batch_size_at(step),
    )


def released(sums, run, step, source=None, bits=None, segment=0, start=0, **more):
    """The noisy mean of a step, from a source of its own unless one came."""
    source = source or NoiseSource(run)
    bits = bits or noise_bits(run.seed, step)
    return source.noisy_mean(sums, release(run, step, segment, start), bits, **more)


def flat(mean, size=50):
    """Means times the batch size, one float64 array."""
    return size * torch.cat([value.flatten().double() for value in mean.values()]).numpy()
