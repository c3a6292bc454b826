# SPDX-License-Identifier: Apache-2.0
"""Protocol of a DP-SGD implementation under test, and the plans of its test runs.

An adapter runs the implementation on the user's model with one more parameter, the canaries: a
vector of which example k moves coordinate `rows[k]` alone, by so much that clipping leaves a vector
of norm C along that coordinate and next to nothing elsewhere ("Dirac canaries"). The release is
then known exactly: C times the participation, plus noise.

Source: Nasr et al. 2023, "Tight Auditing of Differentially Private Machine Learning", section 4.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import toeplitz

from dualdp import _validate
from dualdp.mechanisms import RELATIONS, Mechanism
from dualdp.plan.accounting import num_batches
from dualdp.plan.correlated.strategies import Strategy
from dualdp.plan.plan import PrivacyPlan
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

    def strategy(self, num_steps: int) -> Array:
        """Return (num_steps, num_steps) C."""
        if self.correlation is None:
            return np.eye(num_steps)
        column = self.correlation.strategy(num_steps)
        return np.asarray(toeplitz(column, np.zeros(num_steps)))

    def noise_scale(self, num_steps: int, sample_rate: float) -> float:
        """Return the standard deviation of z divided by `noise_stddev`: the sensitivity of C.

        In a fixed order it is the largest norm of the sum of the columns that one example joins;
        else it is the largest column norm of C.
        """
        columns = self.strategy(num_steps)
        if self.sampler == "fixed_order":
            gap = num_batches(1, sample_rate)
            columns = np.stack([columns[:, i::gap].sum(1) for i in range(gap)], axis=1)
        return float(np.linalg.norm(columns, axis=0).max(initial=0.0))


class Release(NamedTuple):
    """One noisy SUM of clipped gradients: a mean is multiplied by the expected batch size.

    Attributes:
        canaries: (num_canaries,) canary coordinates, gradient units.
        leaves: sequence of the other parameters' arrays, in any fixed order and shape.
        indices: (k,) examples that took part.
    """

    canaries: Array
    leaves: Sequence[Array]
    indices: Rows


class Event(NamedTuple):
    """Arguments given to an accountant for one release; see `Accountant.step`."""

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


def claims_of(plan: PrivacyPlan) -> Claims:
    """Return the claims of a plan at step 0; raise where a canary is no example of its own."""
    if plan.unit != "example":
        raise ValueError(
            f"unit={plan.unit!r} draws users, but each canary is one row. Expected unit='example', "
            "which tests the same draw, clip and noise on users of one row each: "
            "dataclasses.replace(plan, unit='example', rows_per_unit=None)."
        )
    if plan.clipping == "per_layer":
        raise ValueError(
            "clipping='per_layer' gives the canaries a part of max_grad_norm only. Expected "
            "'flat' or 'automatic'; their factors are those of per_layer's groups."
        )
    return Claims(
        plan.noise_multiplier_at(0),
        plan.max_grad_norm_at(0),
        plan.sampler,
        plan.neighboring_relation,
        plan.correlation,
        plan.min_separation or 1,
    )


def of_run(plan: PrivacyPlan, **changes: Any) -> PrivacyPlan:
    """Return the plan of a run with canaries: constant settings of step 0, no target epsilon."""
    constant: dict[str, Any] = {
        "noise_multiplier": plan.noise_multiplier_at(0),
        "max_grad_norm": plan.max_grad_norm_at(0),
        "target_epsilon": None,
        "accountant": "rdp" if plan.sampler == "poisson" else "pld",
    }
    return replace(plan, **constant | changes)


def of_sum(plan: PrivacyPlan, num_rows: int, **changes: Any) -> PrivacyPlan:
    """Return the plan of steps without noise in which every example takes part."""
    cost = {"noise_multiplier": 0.0, "noise": "fast", "sampler": "poisson", "accountant": "pld"}
    sizes = {"num_examples": num_rows, "expected_batch_size": num_rows, "seed": 0}
    none = ("max_batch_size", "correlation", "min_separation", "epochs_per_assignment")
    relation = {"neighboring_relation": "add_or_remove"}
    return of_run(plan, **cost | sizes | relation | dict.fromkeys(none) | changes)
