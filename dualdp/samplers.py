# SPDX-License-Identifier: Apache-2.0
"""Which examples form each logical batch: a pure function of (key, step)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from dualdp import _validate
from dualdp.randomness import bits

Indices = NDArray[np.int64]
_RESOLUTION = 53  # bits of a float64's significand: every sample rate is compared exactly


def poisson(key: NDArray[np.uint32], *, num_examples: int, sample_rate: float) -> Indices:
    """Every example joins independently with probability `sample_rate`.

    Args:
        key: (2,) uint32, the sampling key of one step.
        num_examples: size of the data set.
        sample_rate: q in [0, 1].

    Returns:
        (k,) increasing int64 indices; k is random, and 0 at times.

    Guarantees:
        Each example joins with probability floor(q 2^53) / 2^53 <= q, independently.
            [test_inclusion_probability]
        A pure function of its arguments, on every stack and machine.  [test_known_batches]

    Source: Mironov et al. 2019, section 2 ("Poisson sampling"); the draw is ours.
    """
    rate = _validate.sample_rate(sample_rate)
    draws = bits(key, _validate.integer("num_examples", num_examples), width=64)
    threshold = np.uint64(int(rate * 2.0**_RESOLUTION))
    return np.flatnonzero((draws >> np.uint64(64 - _RESOLUTION)) < threshold).astype(np.int64)


SAMPLERS: Mapping[str, Callable[..., Indices]] = {"poisson": poisson}
