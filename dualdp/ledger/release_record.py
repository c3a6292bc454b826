# SPDX-License-Identifier: Apache-2.0
"""Numbers of a release, and the digest that proves a repeated release identical."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dualdp.plan import accounting
from dualdp.plan.correlated.noise import START, Path
from dualdp.plan.plan import PrivacyPlan
from dualdp.randomness import grid_noise, normal
from dualdp.randomness.universal_hash import Hashed, hash_arrays

Arrays = Iterable[NDArray[Any]]
#: Digest of the seals that are written; a seal without a scheme is of dualdp 0.1.0.
SCHEME = "multilinear"


class Seal(NamedTuple):
    """Numbers of one release, fixed before its noise is drawn."""

    step: int
    branch: int  # of the key; 0 unless the step was run before with other gradients
    max_grad_norm: float  # C that clipped the sum
    noise_stddev: float  # of the noise drawn for this step, gradient units
    expected_batch_size: float  # divisor of the noisy sum
    is_replay: bool  # the identical release was made before, so it costs nothing
    path: Path = START  # branches of this step and of those before, whose noise a correlation uses


def planned(plan: PrivacyPlan, step: int) -> dict[str, Any]:
    """Return the arguments of `accountant.step` for the release of a step."""
    noise, size = plan.noise_multiplier_at(step), plan.expected_batch_size_at(step)
    return accounting.release(plan, noise, size)


def digest(
    plan: PrivacyPlan,
    facts: tuple[Any, ...],
    parts: Arrays | Callable[[], Arrays],
    hashes: Callable[[bytes], list[Hashed]] | None = None,
    scheme: str | None = SCHEME,
) -> str | None:
    """Return a keyed digest of everything that determines a release except its noise.

    32 hexadecimal digits, which without the plan's key reveal nothing about the sums; None for the
    scheme of another version.

    Args:
        plan: `PrivacyPlan` with its key.
        facts: tuple of numbers and strings: the step, then the bound, the source of the noise.
        parts: clipped sums, or a function that returns them.
        hashes: callable from a secret to universal hashes of the sums, or None to hash `parts`.
        scheme: str, name of a digest, or None for that of dualdp 0.1.0.

    Guarantees:
        Sums that differ in one bit, in shape or in dtype have another digest, but for a collision
            of probability 2^-127.  [test_the_digest_sees_every_bit]
        A run of dualdp 0.1.0 repeats its steps.  [test_a_seal_of_the_first_version_is_recognised]
    """
    root = plan.root.require_secret()
    if scheme not in (None, SCHEME):
        return None
    secret, found, arrays = root.step_secret("digest", facts[0]), list[Hashed](), list[Any]()
    if scheme is not None and hashes is not None:
        found = hashes(secret)
    else:
        shown = parts() if callable(parts) else parts
        arrays = [np.asarray(array, order="C") for array in shown]
        found = [hash_arrays(secret, arrays)]
    if not any(shapes for shapes, _ in found):
        raise ValueError("No clipped sum came, so nothing tells this release from another one.")
    if scheme is not None:
        return root.digest([repr((scheme, facts, found)).encode()])
    head = repr((facts, [(array.shape, array.dtype.str) for array in arrays])).encode()
    bodies = (array.reshape(-1).view(np.uint8).data for array in arrays if array.size)
    return root.digest([head, *bodies])


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
