# SPDX-License-Identifier: Apache-2.0
"""Numbers of a release, and the digest that proves a repeated release identical."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dualdp.plan import accounting
from dualdp.plan.plan import PrivacyPlan
from dualdp.randomness import grid_noise, normal

Arrays = Iterable[NDArray[Any]]


class Seal(NamedTuple):
    """Numbers of one release, fixed before its noise is drawn."""

    step: int
    branch: int  # of the key; 0 unless the step was run before with other gradients
    max_grad_norm: float  # C that clipped the sum
    noise_stddev: float  # of the noise in the sum, gradient units
    expected_batch_size: float  # divisor of the noisy sum
    is_replay: bool  # the identical release was made before, so it costs nothing


def planned(plan: PrivacyPlan, step: int) -> dict[str, Any]:
    """Return the arguments of `accountant.step` for the release of a step."""
    noise, size = plan.noise_multiplier_at(step), plan.expected_batch_size_at(step)
    return accounting.release(plan, noise, size)


def digest(plan: PrivacyPlan, facts: tuple[Any, ...], sums: Arrays) -> str:
    """Return a keyed digest of everything that determines a release except its noise.

    Without the plan's key it reveals nothing about the sums. `facts` are numbers and strings: the
    step, the bound, the source of the noise.

    Guarantees:
        Sums that differ in one bit, in shape or in dtype have another digest, but for a 128-bit
            collision.  [test_the_digest_sees_every_bit]
    """
    arrays = [np.asarray(array, order="C") for array in sums]
    if not arrays:
        raise ValueError("No clipped sum came, so nothing tells this release from another one.")
    head = repr((facts, [(array.shape, array.dtype.str) for array in arrays])).encode()
    bodies = (array.reshape(-1).view(np.uint8).data for array in arrays if array.size)
    return plan.root.require_secret().digest([head, *bodies])


def noisy_fraction(
    plan: PrivacyPlan, step: int, branch: int, num_below: int | None, num_rows: int | None
) -> float:
    """Return the noisy share of the examples below the bound, for one step and branch.

    Each example counts 1/2 or -1/2, so one additional example changes the sum by 1/2, and a
    replaced or zeroed example by 1. The sum is divided by the expected batch size, never by the
    drawn size.

    Source: Andrew et al. 2021, Algorithm 1.
    """
    size = plan.expected_batch_size_at(step)
    stddev = plan.max_grad_norm.count_stddev(size)  # type: ignore[union-attr]
    if plan.noise == "secure":
        drawn = float(grid_noise.normals(grid_noise.stream_key(plan, "count", step, branch), 1)[0])
        noise = round(2 * stddev * drawn) / 2  # the count is a multiple of 1/2
    else:
        drawn = float(normal(plan.step_key("count", step, branch), (), dtype=np.float64))
        noise = stddev * drawn
    return float(((num_below or 0) - (num_rows or 0) / 2 + noise) / size + 0.5)
