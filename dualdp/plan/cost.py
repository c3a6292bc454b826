# SPDX-License-Identifier: Apache-2.0
"""`Cost`: the settings of a plan on which its epsilon and its batches depend, as plain data."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dualdp import _validate
from dualdp.plan.correlated.sensitivity import column_sums, squared_sensitivity
from dualdp.plan.correlated.strategies import Band, Strategy, identity
from dualdp.plan.samplers import WHOLE_PASS, num_batches
from dualdp.plan.schedules import AdaptiveNorm, Constant, Schedule, values_at

Vector = NDArray[np.float64]
#: Samplers whose runs are accounted as a whole, whatever their noise.
PATTERNED = ("cyclic_poisson", "fixed_order")
#: Samplers that correlated noise can go with: a unit's participations are far apart.
SEPARATED = (*PATTERNED, "balls_in_bins")
#: Largest weight of earlier noise, in units of the step's own, which float32 must not round away.
_MOST_GROWTH = 2.0**10


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Settings that decide what a run costs; the fields are those of `PrivacyPlan`."""

    num_examples: int
    expected_batch_size: Schedule
    num_steps: int | None
    noise_multiplier: Schedule
    max_grad_norm: Schedule
    delta: float
    sampler: str = "poisson"
    neighboring_relation: str = "add_or_remove"
    noise: str = "fast"
    accountant: str = "pld"
    max_batch_size: int | None = None
    target_epsilon: float | None = None
    correlation: Strategy | None = None
    min_separation: int | None = None
    epochs_per_assignment: int | None = None

    def noise_multiplier_at(self, step: int) -> float:
        """Return noise standard deviation / max_grad_norm at a step."""
        return self._at("noise_multiplier", self.noise_multiplier, step)

    def expected_batch_size_at(self, step: int) -> float:
        """Return the divisor of the sum of a step, in examples."""
        return self._at("expected_batch_size", self.expected_batch_size, step)

    def max_grad_norm_at(self, step: int) -> float:
        """Return C at a step, gradient units."""
        return self._at("max_grad_norm", self.max_grad_norm, step)

    def _at(self, name: str, schedule: Schedule, step: int) -> float:
        """Scheduled value at a step, validated: an open-ended schedule may leave its range."""
        if type(step) is not int or step < 0:  # asked several times a step
            step = _validate.integer("step", step)
        if isinstance(schedule, Constant):  # in range since the plan was made
            return float(schedule)
        return float(values_at(name, schedule, np.asarray([step]), self.num_examples)[0])

    @cached_property
    def is_correlated(self) -> bool:
        """True if the noises of two steps are not independent."""
        return self.correlation is not None and self.correlation != identity()

    @cached_property
    def is_patterned(self) -> bool:
        """True if the steps of a segment can only be accounted together."""
        return self.sampler in PATTERNED or self.is_correlated

    @cached_property
    def separation(self) -> int:
        """Number of steps from one participation of a unit to its next."""
        if self.sampler == "cyclic_poisson":
            return self.min_separation or 1
        return num_batches(self.num_examples, self.expected_batch_size_at(0))

    @cached_property
    def kept_epochs(self) -> int:
        """Passes for which balls-in-bins keeps an assignment."""
        if self.sampler == "balls_in_bins" and self.is_correlated:
            return max(1, -(-(self.num_steps or 0) // self.separation))
        return self.epochs_per_assignment or 1

    @cached_property
    def column(self) -> Vector:
        """(num_steps,) first column of C."""
        return (self.correlation or identity()).strategy(self.num_steps or 0)

    @cached_property
    def squared_rows(self) -> Vector:
        """(num_steps,) squares of what a unit of the first batch adds to the rows of |C| G."""
        column = np.abs(self.column)
        if not len(column):
            return column
        gap = min(self.separation, len(column))
        return column_sums(column, gap, -(-len(column) // gap)) ** 2

    @cached_property
    def squared_sensitivity(self) -> float:
        """Square of the L2 sensitivity of the whole run to a unit that joins every gap-th step."""
        n = len(self.column)
        if not n:
            return 0.0
        gap = min(self.separation, n)
        return squared_sensitivity(self.column, gap, -(-n // gap), "fixed")

    @cached_property
    def sensitivity(self) -> float:
        """s: the standard deviation of z is noise_multiplier x s x max_grad_norm."""
        if not self.is_patterned:
            return 1.0
        if self.sampler == "fixed_order":
            return math.sqrt(self.squared_sensitivity)
        return math.sqrt(float(self.column @ self.column))

    def check(self) -> None:
        """Raise a ValueError on settings for which no cost is proved."""
        self._check_sampler()
        if self.is_correlated:
            self._check_correlation()
        if self.is_patterned and self.num_steps is None:
            raise ValueError(
                "num_steps is None, but a run with correlated noise or fixed batches is accounted "
                "as a whole. Expected a number of steps."
            )
        if self.is_patterned and isinstance(self.max_grad_norm, AdaptiveNorm):
            raise ValueError(
                f"max_grad_norm is an AdaptiveNorm with sampler={self.sampler!r}. Expected a "
                "number: the counts that it releases are not accounted together with such a run."
            )
        self._check_assignment()

    def _check_sampler(self) -> None:
        """Check sizes and schedules against the sampler."""
        if (self.max_batch_size is not None) != (self.sampler == "truncated_poisson"):
            raise ValueError(
                f"max_batch_size={self.max_batch_size} with sampler={self.sampler!r}. Expected it "
                "with sampler='truncated_poisson', and only there."
            )
        schedules = {"noise_multiplier": self.noise_multiplier}
        schedules |= {"expected_batch_size": self.expected_batch_size}
        scheduled = [name for name, value in schedules.items() if not isinstance(value, Constant)]
        if self.sampler in WHOLE_PASS and scheduled:
            raise ValueError(
                f"{scheduled[0]} follows a schedule, but sampler={self.sampler!r} is accounted by "
                "whole passes. Expected a number, or sampler='poisson'."
            )
        size, classes = self.expected_batch_size_at(0), self.min_separation
        if self.sampler == "fixed_size" and (scheduled[1:] or not size.is_integer()):
            raise ValueError(
                f"expected_batch_size={size} with sampler='fixed_size'. Expected one integer."
            )
        if self.sampler == "cyclic_poisson":
            if classes is None:
                raise ValueError(
                    "sampler='cyclic_poisson' came without min_separation. Expected the number of "
                    "classes, each of which joins every min_separation-th step."
                )
            if classes * size > self.num_examples:
                raise ValueError(
                    f"min_separation={classes} classes with expected_batch_size={size} need "
                    f"{classes * size:g} examples, but num_examples={self.num_examples}. Expected "
                    "fewer classes, or smaller batches."
                )
        elif classes is not None and (self.sampler not in SEPARATED or classes != self.separation):
            raise ValueError(
                f"min_separation={classes} with sampler={self.sampler!r}. Expected it with "
                "sampler='cyclic_poisson'; elsewhere it follows from the batch size."
            )

    def _check_correlation(self) -> None:
        """Check what correlated noise goes with."""
        strategy, gap = self.correlation or identity(), self.separation
        if self.sampler not in SEPARATED:
            raise ValueError(
                f"correlation with sampler={self.sampler!r}, under which an example may join any "
                f"steps. Expected one of {', '.join(SEPARATED)}."
            )
        if self.noise == "secure":
            raise ValueError(
                "correlation with noise='secure': no bound is proved for correlated noise on the "
                "grid. Expected noise='fast' or 'portable'."
            )
        if self.num_steps:
            weights = np.abs(strategy.inverse(self.num_steps))
            if not weights.max() <= _MOST_GROWTH * weights[0]:
                raise ValueError(
                    f"correlation={strategy!r:.80} takes back noise with weights up to "
                    f"{weights.max() / weights[0]:.3g} times that of the step's own, which float32 "
                    f"would round away. Expected at most {_MOST_GROWTH:g}: a C whose entries fall "
                    "off."
                )
        if not isinstance(self.max_grad_norm, Constant):
            raise ValueError(
                "max_grad_norm changes during the run, but a correlated noise takes back noise "
                "that an earlier one scaled. Expected a number, or no correlation."
            )
        bands = len(strategy.weights) if isinstance(strategy, Band) else None
        if self.sampler == "cyclic_poisson" and (bands is None or bands > gap):
            raise ValueError(
                f"correlation has {f'{bands} bands' if bands else 'no band'}, and "
                f"sampler='cyclic_poisson' with min_separation={gap} is accounted for "
                "dualdp.correlated.band of at most that many. Expected such a band, more classes, "
                "or sampler='fixed_order'."
            )

    def _check_assignment(self) -> None:
        """Check `epochs_per_assignment`."""
        epochs = self.epochs_per_assignment
        if epochs is None:
            return
        if self.sampler != "balls_in_bins":
            raise ValueError(
                f"epochs_per_assignment={epochs} with sampler={self.sampler!r}. Expected it with "
                "sampler='balls_in_bins'."
            )
        if self.is_correlated and epochs < self.kept_epochs:
            raise ValueError(
                f"epochs_per_assignment={epochs} with a correlation, for which an assignment is "
                "kept for all epochs. Expected None."
            )


class HasCost(Protocol):
    """What has a cost: a `PrivacyPlan`."""

    @property
    def seed(self) -> int | None:
        """Seed of the batches and the noise; None for fresh bits."""
        ...

    def cost(self) -> Cost:
        """Return the settings that decide what a run costs."""
        ...
