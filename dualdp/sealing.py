# SPDX-License-Identifier: Apache-2.0
"""The numbers of a release, and the proof that a repeated one is the very same."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dualdp.randomness import normal, secure

if TYPE_CHECKING:
    from dualdp.plan import PrivacyPlan

Arrays = Iterable[NDArray[Any]]


class Seal(NamedTuple):
    """The numbers of one release, fixed before its noise is drawn.

    Attributes:
        step: of the run.
        branch: of the key; 0 unless the step was run before with other gradients.
        max_grad_norm: C that clipped the sum.
        noise_stddev: of the noise in the sum, gradient units.
        expected_batch_size: what the noisy sum is divided by.
        is_replay: the very same release was made before, so that it costs nothing.
    """

    step: int
    branch: int
    max_grad_norm: float
    noise_stddev: float
    expected_batch_size: float
    is_replay: bool


def digest(plan: PrivacyPlan, facts: tuple[Any, ...], parts: Arrays) -> str:
    """Keyed digest of everything that decides a release but its noise.

    Args:
        plan: holds the key, without which a digest tells nothing about the sums.
        facts: plain numbers and words: the step, the bound, where the noise comes from.
        parts: the clipped sums, in a fixed order; at least one.

    Raises:
        ValueError: there is none.

    Guarantees:
        Sums that differ in one bit, in shape or in dtype have another digest, but for a 128-bit
            collision.  [test_the_digest_sees_every_bit]
    """
    arrays = [np.asarray(part, order="C") for part in parts]
    if not arrays:
        raise ValueError("No clipped sum came, so nothing tells this release from another one.")
    head = repr((facts, [(array.shape, array.dtype.str) for array in arrays])).encode()
    bodies = (array.reshape(-1).view(np.uint8).data for array in arrays if array.size)
    return plan.root.require_secret().digest([head, *bodies])


def noisy_fraction(
    plan: PrivacyPlan, step: int, branch: int, num_below: int | None, num_rows: int | None
) -> float:
    """Share of the examples below the bound, with the noise of that step and branch.

    Each example counts 1/2 or -1/2, so that one example more moves the sum by 1/2, and one that is
    replaced or emptied by 1; the sum is divided by the expected batch size, never by the size that
    was drawn.

    Source: Andrew et al. 2021, Algorithm 1.
    """
    size = plan.expected_batch_size_at(step)
    stddev = plan.max_grad_norm.count_stddev(size)  # type: ignore[union-attr]
    if plan.noise == "secure":
        drawn = float(secure.normals(secure.stream_key(plan, "count", step, branch), 1)[0])
        noise = round(2 * stddev * drawn) / 2  # the count lies on the grid of halves
    else:
        drawn = float(normal(plan.step_key("count", step, branch), (), dtype=np.float64))
        noise = stddev * drawn
    return float(((num_below or 0) - (num_rows or 0) / 2 + noise) / size + 0.5)
