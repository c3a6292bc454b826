# SPDX-License-Identifier: Apache-2.0
"""Samplers: the examples of each logical batch, as a pure function of (key, step).

Each sampler has the event of the same name in `dualdp.mechanisms` for its accounting. A plan
selects both by one name, so a run cannot be accounted as another sampler.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dualdp import _validate

Indices = NDArray[np.int64]
#: (step, stream) -> (num_examples,) uniform 64-bit integers of the run.
Words = Callable[[int, int], NDArray[np.uint64]]
_RESOLUTION = 53  # bits of a float64's significand: every sample rate is compared exactly
_CUT = 1  # stream that selects the examples a truncated batch keeps
_CLASS = 2  # stream that assigns every example to a class of cyclic Poisson sampling


@dataclass(frozen=True)
class Draw:
    """Input of a sampler.

    Args:
        words_at: function (step, stream) -> (num_examples,) 64-bit integers, the randomness.
        step: step of the run.
        num_examples: size of the data set.
        expected_batch_size: sample rate times num_examples.
        max_batch_size: largest batch of `truncated_poisson`.
        min_separation: number of classes of `cyclic_poisson`.
        epochs_per_assignment: passes for which `balls_in_bins` keeps an assignment.
    """

    words_at: Words
    step: int
    num_examples: int
    expected_batch_size: float
    max_batch_size: int | None = None
    min_separation: int = 1
    epochs_per_assignment: int = 1

    def words(self, step: int, stream: int = 0) -> NDArray[np.uint64]:
        """Return (num_examples,) uniform 53-bit integers of a step and stream."""
        return self.words_at(step, stream) >> np.uint64(64 - _RESOLUTION)

    @property
    def num_batches(self) -> int:
        """Batches of one pass over the data: ceil(num_examples / expected_batch_size)."""
        return num_batches(self.num_examples, self.expected_batch_size)

    def place(self, step: int, stream: int, count: int) -> Indices:
        """Return (num_examples,) uniform integers below count, independent for each example."""
        # A 53-bit integer is exact in float64; the product is below count even when rounded up.
        share = self.words(step, stream).astype(np.float64) * 2.0**-_RESOLUTION
        return (share * count).astype(np.int64)


def num_batches(num_examples: int, expected_batch_size: float) -> int:
    """Return the batches of one pass over the data: ceil(num_examples / expected_batch_size)."""
    return max(1, int(np.ceil(num_examples / expected_batch_size - 1e-9)))


def poisson(draw: Draw) -> Indices:
    """Sample every example independently with probability expected_batch_size / num_examples.

    Returns:
        (k,) increasing int64 indices; k is random, and 0 at times.

    Guarantees:
        Each example joins with probability floor(q 2^53) / 2^53 <= q, independently.
            [test_inclusion_probability]
        A pure function of (key, step), on every stack and machine.  [test_seeded_batches]

    Source: Mironov et al. 2019, section 2 ("Poisson sampling"); the draw is ours.
    """
    rate = _validate.sample_rate(draw.expected_batch_size / draw.num_examples)
    return _where(draw.words(draw.step) < np.uint64(int(rate * 2.0**_RESOLUTION)))


def truncated_poisson(draw: Draw) -> Indices:
    """Draw a Poisson batch, reduced to a uniform subset of size max_batch_size if larger.

    Guarantees:
        At most max_batch_size examples, so that one static shape serves.  [test_truncation]

    Source: Chua et al. 2024 ("Scalable DP-SGD"), truncated Poisson sampling.
    """
    drawn = poisson(draw)
    if draw.max_batch_size is None or len(drawn) <= draw.max_batch_size:
        return drawn
    order = np.argsort(draw.words(draw.step, _CUT)[drawn], kind="stable")
    return np.sort(drawn[order[: draw.max_batch_size]])


def fixed_size(draw: Draw) -> Indices:
    """Draw exactly expected_batch_size examples without replacement, all sets equally likely.

    Source: Balle et al. 2018 (subsampling without replacement).
    """
    size = round(draw.expected_batch_size)
    return np.sort(np.argsort(draw.words(draw.step), kind="stable")[:size].astype(np.int64))


def balls_in_bins(draw: Draw) -> Indices:
    """Assign every example to one step of the pass, anew after `epochs_per_assignment` passes.

    Batch sizes vary; every example is used exactly once a pass.

    Source: Chua et al. 2025 ("Balls-and-bins sampling for DP-SGD").
    """
    epoch, position = divmod(draw.step, draw.num_batches)
    drawn_at = (epoch - epoch % draw.epochs_per_assignment) * draw.num_batches
    return _where(draw.place(drawn_at, 0, draw.num_batches) == position)


def cyclic_poisson(draw: Draw) -> Indices:
    """Sample, at step t, from the class t mod min_separation with that many times the sample rate.

    Every example belongs to one class, drawn once for the run, so it joins steps at least
    min_separation apart.

    Source: Choquette-Choo et al. 2023 (arXiv 2306.08153), Algorithm 2, with independent classes.
    """
    classes = draw.min_separation
    rate = _validate.sample_rate(classes * draw.expected_batch_size / draw.num_examples)
    of_class = draw.place(0, _CLASS, classes) == draw.step % classes
    return _where(of_class & (draw.words(draw.step) < np.uint64(int(rate * 2.0**_RESOLUTION))))


def shuffle(draw: Draw) -> Indices:
    """Split a new permutation into consecutive batches in each pass, without amplification."""
    epoch, position = divmod(draw.step, draw.num_batches)
    return _split(draw, epoch * draw.num_batches, position)


def fixed_order(draw: Draw) -> Indices:
    """Split one permutation, drawn for the run, into the same consecutive batches in each pass."""
    return _split(draw, 0, draw.step % draw.num_batches)


def _split(draw: Draw, drawn_at: int, position: int) -> Indices:
    """Batch of a pass over the permutation drawn at a step."""
    order = np.argsort(draw.words(drawn_at), kind="stable").astype(np.int64)
    return np.sort(np.array_split(order, draw.num_batches)[position])


def _where(chosen: NDArray[np.bool_]) -> Indices:
    return np.flatnonzero(chosen).astype(np.int64)


SAMPLERS: Mapping[str, Callable[[Draw], Indices]] = {
    "poisson": poisson,
    "truncated_poisson": truncated_poisson,
    "fixed_size": fixed_size,
    "balls_in_bins": balls_in_bins,
    "shuffle": shuffle,
    "cyclic_poisson": cyclic_poisson,
    "fixed_order": fixed_order,
}

#: Samplers accounted by whole passes, in which noise and batch size must not change.
WHOLE_PASS = ("balls_in_bins", "shuffle", "cyclic_poisson", "fixed_order")
