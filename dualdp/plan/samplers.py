# SPDX-License-Identifier: Apache-2.0
"""Samplers: the examples of each logical batch, as a pure function of (plan, step, words).

Each sampler has the event of the same name in `dualdp.mechanisms` for its accounting. A plan
selects both by one name, so a run cannot be accounted as another sampler. `words(step, stream)` are
(num_examples,) uniform 53-bit integers of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from dualdp.plan.accounting import Cost

Indices = NDArray[np.int64]
Words = Callable[[int, int], NDArray[np.uint64]]
RESOLUTION = 53  # bits of a float64's significand: every sample rate is compared exactly
_CUT = 1  # stream that selects the examples a truncated batch keeps
_CLASS = 2  # stream that assigns every example to a class of cyclic Poisson sampling


def poisson(plan: Cost, step: int, words: Words) -> Indices:
    """Sample every example independently with probability expected_batch_size / num_examples.

    Returns:
        (k,) increasing int64 indices; k is random, and 0 at times.

    Guarantees:
        Each example joins with probability floor(q 2^53) / 2^53 <= q, independently.
            [test_inclusion_probability]
        A pure function of (plan, step, words), on every stack and machine.
            [test_seeded_batches]

    Source: Mironov et al. 2019, section 2 ("Poisson sampling"); the draw is ours.
    """
    rate = plan.expected_batch_size_at(step) / plan.num_examples
    return np.flatnonzero(words(step, 0) < np.uint64(int(rate * 2.0**RESOLUTION)))


def truncated_poisson(plan: Cost, step: int, words: Words) -> Indices:
    """Draw a Poisson batch, reduced to a uniform subset of size max_batch_size if larger.

    Guarantees:
        At most max_batch_size examples, so that one static shape serves.  [test_truncation]

    Source: Chua et al. 2024 ("Scalable DP-SGD"), truncated Poisson sampling.
    """
    drawn = poisson(plan, step, words)
    order = np.argsort(words(step, _CUT)[drawn], kind="stable")
    return np.sort(drawn[order[: plan.max_batch_size]])


def fixed_size(plan: Cost, step: int, words: Words) -> Indices:
    """Draw exactly expected_batch_size examples without replacement, all sets equally likely.

    Source: Balle et al. 2018 (subsampling without replacement).
    """
    size = round(plan.expected_batch_size_at(step))
    return np.sort(np.argsort(words(step, 0), kind="stable")[:size])


def balls_in_bins(plan: Cost, step: int, words: Words) -> Indices:
    """Assign every example to one step of the pass, anew after `epochs_per_assignment` passes.

    Batch sizes vary; every example is used exactly once a pass.

    Source: Chua et al. 2025 ("Balls-and-bins sampling for DP-SGD").
    """
    epoch, position = divmod(step, plan.separation)
    drawn_at = (epoch - epoch % plan.kept_epochs) * plan.separation
    return np.flatnonzero(_places(words(drawn_at, 0), plan.separation) == position)


def cyclic_poisson(plan: Cost, step: int, words: Words) -> Indices:
    """Sample, at step t, from the class t mod min_separation with that many times the sample rate.

    Every example belongs to one class, drawn once for the run, so it joins steps at least
    min_separation apart.

    Source: Choquette-Choo et al. 2023 (arXiv 2306.08153), Algorithm 2, with independent classes.
    """
    classes = plan.separation
    rate = classes * plan.expected_batch_size_at(step) / plan.num_examples
    of_class = _places(words(0, _CLASS), classes) == step % classes
    return np.flatnonzero(of_class & (words(step, 0) < np.uint64(int(rate * 2.0**RESOLUTION))))


def shuffle(plan: Cost, step: int, words: Words) -> Indices:
    """Split a new permutation into consecutive batches in each pass, without amplification."""
    position = step % plan.separation
    return _split(words(step - position, 0), plan.separation, position)


def fixed_order(plan: Cost, step: int, words: Words) -> Indices:
    """Split one permutation, drawn for the run, into the same consecutive batches in each pass."""
    return _split(words(0, 0), plan.separation, step % plan.separation)


def _split(words: NDArray[np.uint64], batches: int, position: int) -> Indices:
    """Batch at a position of a pass over the permutation that sorts the words.

    Sizes differ by at most 1: of ceil(n / B) batches none has more than ceil(B) examples.
    """
    return np.sort(np.array_split(np.argsort(words, kind="stable"), batches)[position])


def _places(words: NDArray[np.uint64], count: int) -> Indices:
    """(num_examples,) uniform integers below count, independent for each example."""
    # A 53-bit integer is exact in float64; the product is below count even when rounded up.
    return (words.astype(np.float64) * 2.0**-RESOLUTION * count).astype(np.int64)


SAMPLERS: Mapping[str, Callable[[Cost, int, Words], Indices]] = {
    "poisson": poisson,
    "truncated_poisson": truncated_poisson,
    "fixed_size": fixed_size,
    "balls_in_bins": balls_in_bins,
    "shuffle": shuffle,
    "cyclic_poisson": cyclic_poisson,
    "fixed_order": fixed_order,
}
