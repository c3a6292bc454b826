# SPDX-License-Identifier: Apache-2.0
"""What an implementation of DP-SGD must offer to be put to the test: one small protocol.

An adapter runs the implementation on the user's model with one more parameter, the canaries: a
vector of which example k moves coordinate `rows[k]` alone, by so much that clipping leaves a vector
of norm C along that coordinate and next to nothing elsewhere ("Dirac canaries"). What is released
is then known exactly: C times the participation, plus noise.

Source: Nasr et al. 2023, "Tight Auditing of Differentially Private Machine Learning", section 4.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from dualdp import _validate
from dualdp.mechanisms import RELATIONS, Mechanism
from dualdp.samplers import SAMPLERS

Array = NDArray[np.float64]
Rows = NDArray[np.int64]

#: Factor of the user's own loss beside the canaries, and of the canaries in units of C.
LOSS_FACTOR = 1e-6
CANARY_FACTOR = 1e4


@dataclass(frozen=True)
class Claims:
    """What an implementation says of its releases.

    Args:
        noise_multiplier: noise standard deviation / max_grad_norm, > 0.
        max_grad_norm: C, gradient units.
        sampler: one of `dualdp.samplers.SAMPLERS`.
        neighboring_relation: under which its epsilon holds.
    """

    noise_multiplier: float
    max_grad_norm: float
    sampler: str = "poisson"
    neighboring_relation: str = "add_or_remove"

    def __post_init__(self) -> None:
        _validate.positive("noise_multiplier", self.noise_multiplier)
        _validate.positive("max_grad_norm", self.max_grad_norm)
        _validate.choice("sampler", self.sampler, SAMPLERS)
        _validate.choice("neighboring_relation", self.neighboring_relation, RELATIONS)

    @property
    def noise_stddev(self) -> float:
        """Of the noise in a sum, gradient units."""
        return self.noise_multiplier * self.max_grad_norm


class Release(NamedTuple):
    """One noisy SUM of clipped gradients: a mean is multiplied by the expected batch size.

    Attributes:
        canaries: (num_canaries,) its canary coordinates, gradient units.
        leaves: the other parameters, in any fixed order and shape.
        indices: which examples took part, or None if the implementation does not say.
    """

    canaries: Array
    leaves: Sequence[Array]
    indices: Rows | None = None


class Event(NamedTuple):
    """What an accountant was told of one release."""

    noise_multiplier: float
    sample_rate: float


def events_of(history: Iterable[tuple[Mechanism, int]]) -> list[Event]:
    """The events of an accountant's history: one for each release, of subsampled Gaussians."""
    events = []
    for event, count in history:
        batches = getattr(event, "num_bins", getattr(event, "num_batches", 1))
        rate = getattr(event, "sample_rate", 1 / batches)
        events += [Event(getattr(event, "noise_multiplier", math.nan), rate)] * count
    return events


class PrivateStep(Protocol):
    """An implementation of DP-SGD on a user's model.

    Attributes:
        claims: what it says of its releases.
        num_examples: of the user's data that `clipped_sum` can take.
    """

    claims: Claims
    num_examples: int

    def clipped_sum(self, rows: Sequence[int], factors: Sequence[float]) -> Array:
        """Sum of clipped gradients without noise, flat, on the user's model without canaries.

        Args:
            rows: examples of the user's data, each may come several times.
            factors: of each one's loss: 1, 1e6, nan, inf or 0.
        """
        ...

    def releases(
        self,
        num_steps: int,
        *,
        rows: Rows,
        num_canaries: int,
        expected_batch_size: float,
        seed: int | None,
    ) -> Iterator[Release]:
        """A fresh run of so many steps with canaries.

        Args:
            num_steps: steps that are asked for.
            rows: (n,) canary coordinate of each of n examples, all different; the user's data are
                repeated or cut to n.
            num_canaries: length of the canary vector.
            expected_batch_size: sample rate times n.
            seed: fixes the run's randomness where that is possible; None for a fresh key.
        """
        ...

    def events(self) -> Sequence[Event]:
        """What the accountant of the latest run was told, one event for each release."""
        ...
