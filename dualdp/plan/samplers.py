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


@dataclass(frozen=True)
class Draw:
    """Input of a sampler.

    Args:
        words_at: function (step, stream) -> (num_examples,) 64-bit integers, the randomness.
        step: step of the run.
        num_examples: size of the data set.
        expected_batch_size: sample rate times num_examples.
        max_batch_size: largest batch of `truncated_poisson`.
    """

    words_at: Words
    step: int
    num_examples: int
    expected_batch_size: float
    max_batch_size: int | None = None

    def words(self, step: int, stream: int = 0) -> NDArray[np.uint64]:
        """Return (num_examples,) uniform 53-bit integers of a step and stream."""
        return self.words_at(step, stream) >> np.uint64(64 - _RESOLUTION)

    @property
    def num_batches(self) -> int:
        """Batches of one pass over the data: ceil(num_examples / expected_batch_size)."""
        return max(1, int(np.ceil(self.num_examples / self.expected_batch_size - 1e-9)))


def poisson(draw: Draw) -> Indices:
    """Sample every example independently with probability expected_batch_size / num_examples.

    Returns:
        (k,) increasing int64 indices; k is random, and 0 at times.

    Guarantees:
        Each example joins with probability floor(q 2^53) / 2^53 <= q, independently.
            [test_inclusion_probability]
        A pure function of (key, step), on every stack and machine.  [test_known_batches]

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
    """Assign every example to one step of the pass, independently for each pass.

    Batch sizes vary; every example is used exactly once a pass.

    Source: Chua et al. 2025 ("Balls-and-bins sampling for DP-SGD").
    """
    epoch, position = divmod(draw.step, draw.num_batches)
    # A 53-bit integer is exact in float64; the product is below num_batches even when rounded up.
    share = draw.words(epoch * draw.num_batches).astype(np.float64) * 2.0**-_RESOLUTION
    return _where((share * draw.num_batches).astype(np.int64) == position)


def shuffle(draw: Draw) -> Indices:
    """Split a new permutation into consecutive batches in each pass, without amplification."""
    epoch, position = divmod(draw.step, draw.num_batches)
    order = np.argsort(draw.words(epoch * draw.num_batches), kind="stable").astype(np.int64)
    return np.sort(np.array_split(order, draw.num_batches)[position])


def _where(chosen: NDArray[np.bool_]) -> Indices:
    return np.flatnonzero(chosen).astype(np.int64)


SAMPLERS: Mapping[str, Callable[[Draw], Indices]] = {
    "poisson": poisson,
    "truncated_poisson": truncated_poisson,
    "fixed_size": fixed_size,
    "balls_in_bins": balls_in_bins,
    "shuffle": shuffle,
}

#: Samplers whose event spans a whole pass, in which noise and batch size must not change.
WHOLE_PASS = ("balls_in_bins", "shuffle")
