# SPDX-License-Identifier: Apache-2.0
"""Protocol of a DP-SGD implementation under test.

An adapter runs the implementation on the user's model with one more parameter, the canaries: a
vector of which example k moves coordinate `rows[k]` alone, by so much that clipping leaves a vector
of norm C along that coordinate and next to nothing elsewhere ("Dirac canaries"). The release is
then known exactly: C times the participation, plus noise.

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
from dualdp.plan.accounting import PATTERNED
from dualdp.plan.correlated.strategies import Strategy
from dualdp.plan.samplers import SAMPLERS

Array = NDArray[np.float64]
Rows = NDArray[np.int64]

#: Factors of the user's loss and of the canaries' loss, the latter in units of C.
LOSS_FACTOR = 1e-6
CANARY_FACTOR = 1e4


@dataclass(frozen=True)
class Claims:
    """Claimed properties of the releases of an implementation.

    Args:
        noise_multiplier: noise standard deviation / max_grad_norm, > 0.
        max_grad_norm: C, gradient units.
        sampler: one of `dualdp.plan.samplers.SAMPLERS`.
        neighboring_relation: one of `dualdp.mechanisms.RELATIONS`.
        correlation: strategy of `dualdp.correlated`, None for independent noise.
        min_separation: number of classes of `cyclic_poisson`.
    """

    noise_multiplier: float
    max_grad_norm: float
    sampler: str = "poisson"
    neighboring_relation: str = "add_or_remove"
    correlation: Strategy | None = None
    min_separation: int = 1

    def __post_init__(self) -> None:
        _validate.positive("noise_multiplier", self.noise_multiplier)
        _validate.positive("max_grad_norm", self.max_grad_norm)
        _validate.choice("sampler", self.sampler, SAMPLERS)
        _validate.choice("neighboring_relation", self.neighboring_relation, RELATIONS)

    @property
    def noise_stddev(self) -> float:
        """Standard deviation of independent noise in a sum, gradient units; see `noise_scale`."""
        return self.noise_multiplier * self.max_grad_norm

    @property
    def is_patterned(self) -> bool:
        """True if the run is accounted as a whole."""
        return self.correlation is not None or self.sampler in PATTERNED

    def strategy(self, num_steps: int) -> Array:
        """Return (num_steps, num_steps) C."""
        if self.correlation is None:
            return np.eye(num_steps)
        column = self.correlation.strategy(num_steps)
        later = np.subtract.outer(np.arange(num_steps), np.arange(num_steps))
        return np.asarray(np.where(later >= 0, column[np.abs(later)], 0.0))

    def noise_scale(self, num_steps: int, sample_rate: float) -> float:
        """Return how many times larger than `noise_stddev` the z of a step must be.

        For fixed batches the norm of C u, u the steps of the unit that is seen most; else the
        largest column norm of C.
        """
        columns = self.strategy(num_steps)
        if self.sampler == "fixed_order":
            gap = math.ceil(1 / sample_rate - 1e-9)
            columns = np.stack([columns[:, i::gap].sum(1) for i in range(gap)], axis=1)
        return float(np.linalg.norm(columns, axis=0).max(initial=0.0))


class Release(NamedTuple):
    """One noisy SUM of clipped gradients: a mean is multiplied by the expected batch size.

    Attributes:
        canaries: (num_canaries,) canary coordinates, gradient units.
        leaves: sequence of the other parameters' arrays, in any fixed order and shape.
        indices: (k,) examples that took part, or None if the implementation does not report them.
    """

    canaries: Array
    leaves: Sequence[Array]
    indices: Rows | None = None


class Event(NamedTuple):
    """Arguments given to an accountant for one release."""

    noise_multiplier: float
    sample_rate: float


def events_of(history: Iterable[tuple[Mechanism, int]]) -> list[Event]:
    """Return the events of an accountant's history, one per release of a subsampled Gaussian."""
    events = []
    for event, count in history:
        batches = getattr(event, "num_bins", getattr(event, "num_batches", 1))
        rate = getattr(event, "sample_rate", 1 / batches)
        events += [Event(getattr(event, "noise_multiplier", math.nan), rate)] * count
    return events


class PrivateStep(Protocol):
    """DP-SGD implementation on a user's model.

    Attributes:
        claims: `Claims` about its releases.
        num_examples: number of the user's examples that `clipped_sum` can take.
    """

    claims: Claims
    num_examples: int

    def clipped_sum(self, rows: Sequence[int], factors: Sequence[float]) -> Array:
        """Return the flat sum of clipped gradients without noise, on the model without canaries.

        Args:
            rows: indices of the user's examples, possibly repeated.
            factors: factor of each example's loss: 1, 1e6, nan, inf or 0.
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
        """Start a new run with canaries and yield its releases.

        Args:
            num_steps: number of steps.
            rows: (n,) distinct canary coordinates, one for each of n examples; the user's data are
                repeated or cut to n.
            num_canaries: length of the canary vector.
            expected_batch_size: sample rate times n.
            seed: int that fixes the run's randomness where possible; None for a new key.
        """
        ...

    def events(self) -> Sequence[Event]:
        """Return the events accounted in the latest run, one for each release."""
        ...
