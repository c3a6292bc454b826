# SPDX-License-Identifier: Apache-2.0
"""Cost of runs whose steps can only be accounted together: correlated noise, fixed batches.

A unit joins steps at known distances, and one release after another is a row of C G + stddev z (C
the identity for independent noise). Released are rows 0 to t - 1, some of them again on another
branch of the key: a row that was released m times counts m times, since the rows before it on its
branch turn each of its releases into the same row of C G + stddev z, with a z of its own.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dualdp._validate import AccountingError
from dualdp.mechanisms import (
    BallsInBinsGaussian,
    Gaussian,
    Mechanism,
    PoissonSubsampledGaussian,
)
from dualdp.plan.correlated.sensitivity import MOST_WORK, comb, squared_sensitivity
from dualdp.plan.correlated.strategies import Band, Strategy, identity
from dualdp.plan.samplers import num_batches

if TYPE_CHECKING:
    from dualdp.plan.plan import PrivacyPlan

Vector = NDArray[np.float64]
#: Independent releases and their numbers, with the noise multiplier divided by the plan's.
Releases = tuple[tuple[Mechanism, int], ...]
#: Samplers whose runs are accounted here, whatever their noise.
PATTERNED = ("cyclic_poisson", "fixed_order")
#: Samplers that a correlated noise can go with: a unit's participations are far apart.
SEPARATED = (*PATTERNED, "balls_in_bins")
_ROUNDING = 1 + 1e-12
#: Largest weight of earlier noise, in units of the step's own, which float32 must not round away.
_MOST_GROWTH = 2.0**10
#: A finer split of the bins is tried where it lowers what they have in common by this factor.
_LOWER = 0.9


def is_patterned(plan: PrivacyPlan) -> bool:
    """Return True if the plan's releases can only be accounted together."""
    return plan.sampler in PATTERNED or plan.is_correlated


def separation(plan: PrivacyPlan) -> int:
    """Return the number of steps from one participation of a unit to its next."""
    if plan.sampler == "cyclic_poisson":
        return int(plan.min_separation or 1)
    return num_batches(plan.num_examples, plan.expected_batch_size_at(0))


def check(plan: PrivacyPlan) -> None:
    """Raise a ValueError on settings for which no cost is proved."""
    classes, cyclic = plan.min_separation, plan.sampler == "cyclic_poisson"
    if cyclic and classes is None:
        raise ValueError(
            "sampler='cyclic_poisson' came without min_separation. Expected the number of classes, "
            "each of which joins every min_separation-th step."
        )
    size = plan.expected_batch_size_at(0)
    if cyclic and classes is not None and classes * size > plan.num_examples:
        raise ValueError(
            f"min_separation={classes} classes with expected_batch_size={size} need "
            f"{classes * size:g} examples, but num_examples={plan.num_examples}. Expected fewer "
            "classes, or smaller batches."
        )
    other = plan.sampler not in SEPARATED or classes != separation(plan)
    if not cyclic and classes is not None and other:
        raise ValueError(
            f"min_separation={classes} with sampler={plan.sampler!r}. Expected it with "
            "sampler='cyclic_poisson'; elsewhere it follows from the batch size."
        )
    if plan.is_correlated:
        _check_correlated(plan)
    if is_patterned(plan):
        _check_patterned(plan)
    _check_assignment(plan)


def _check_correlated(plan: PrivacyPlan) -> None:
    if plan.sampler not in SEPARATED:
        raise ValueError(
            f"correlation with sampler={plan.sampler!r}, under which an example may join any "
            f"steps. Expected one of {', '.join(SEPARATED)}."
        )
    if plan.noise == "secure":
        raise ValueError(
            "correlation with noise='secure': no bound is proved for correlated noise on the grid. "
            "Expected noise='fast' or 'portable'."
        )
    if plan.num_steps and plan.correlation is not None:
        weights = np.abs(plan.correlation.inverse(plan.num_steps))
        if not weights.max() <= _MOST_GROWTH * weights[0]:
            raise ValueError(
                f"correlation={plan.correlation!r:.80} takes back noise with weights up to "
                f"{weights.max() / weights[0]:.3g} times that of the step's own, which float32 "
                f"would round away. Expected at most {_MOST_GROWTH:g}: a C whose entries fall off."
            )
    if not plan.is_constant("max_grad_norm"):
        raise ValueError(
            "max_grad_norm changes during the run, but a correlated noise takes back noise that an "
            "earlier one scaled. Expected a number, or no correlation."
        )
    if plan.sampler == "cyclic_poisson" and not (
        isinstance(plan.correlation, Band) and len(plan.correlation.weights) <= separation(plan)
    ):
        bands = isinstance(plan.correlation, Band) and len(plan.correlation.weights)
        what = f"{bands} bands" if bands else "no band"
        raise ValueError(
            f"correlation has {what}, and sampler='cyclic_poisson' with min_separation="
            f"{separation(plan)} is accounted for dualdp.correlated.band of at most that many. "
            "Expected such a band, more classes, or sampler='fixed_order'."
        )


def _check_patterned(plan: PrivacyPlan) -> None:
    if plan.num_steps is None:
        raise ValueError(
            "num_steps is None, but a run with correlated noise or fixed batches is accounted as a "
            "whole. Expected a number of steps."
        )
    if plan.is_adaptive:
        raise ValueError(
            f"max_grad_norm is an AdaptiveNorm with sampler={plan.sampler!r}. Expected a number: "
            "the counts that it releases are not accounted together with such a run."
        )


def _check_assignment(plan: PrivacyPlan) -> None:
    epochs = plan.epochs_per_assignment
    if epochs is None:
        return
    if plan.sampler != "balls_in_bins":
        raise ValueError(
            f"epochs_per_assignment={epochs} with sampler={plan.sampler!r}. Expected it with "
            "sampler='balls_in_bins'."
        )
    if plan.is_correlated and epochs < math.ceil((plan.num_steps or 0) / separation(plan)):
        raise ValueError(
            f"epochs_per_assignment={epochs} with a correlation, for which an assignment is kept "
            "for all epochs. Expected None."
        )


def unit_sensitivity(plan: PrivacyPlan) -> float:
    """Return s: the standard deviation of z is noise_multiplier x s x max_grad_norm."""
    if not is_patterned(plan):
        return 1.0
    if plan.sampler == "fixed_order":
        return math.sqrt(_whole_run(_strategy(plan), _num_steps(plan), separation(plan)))
    column = _column(_strategy(plan), _num_steps(plan))
    return math.sqrt(float(column @ column))


def releases(plan: PrivacyPlan, times: NDArray[np.int64]) -> list[Releases]:
    """Return sets of independent releases, each of which costs at least what the plan's cost.

    Args:
        plan: plan with `is_patterned`.
        times: (t,) number of releases of each of the first t <= num_steps steps.

    Returns:
        One or more sets; the first, without balls in bins, has a cost under every relation.

    Guarantees:
        At least the cost of every pattern of participations of one unit.
            [test_no_pattern_costs_more, test_no_bound_is_below_monte_carlo]
        More steps and more releases never cost less.  [test_epsilon_of_prefixes_is_monotone]

    Source: Denisov et al. 2022 (arXiv 2202.08312), Theorem 2.1; for cyclic Poisson sampling,
    Choquette-Choo et al. 2023 (arXiv 2306.08153), Theorem 4; docs/accounting.md, 2.11 and 2.12.
    """
    if not np.any(times):
        return [()]
    if plan.sampler == "cyclic_poisson":
        rate = min(separation(plan) * plan.sample_rate_at(0), 1.0)
        rounds = _rounds(plan, times)
        return [tuple((PoissonSubsampledGaussian(ratio, rate), count) for ratio, count in rounds)]
    total = _squared_sensitivity(_strategy(plan), _num_steps(plan), separation(plan), times)
    known: list[Releases] = [((Gaussian(plan.sensitivity / math.sqrt(total)), 1),)]
    return [*known, *_hidden(plan, times)] if plan.sampler == "balls_in_bins" else known


def _hidden(plan: PrivacyPlan, times: NDArray[np.int64]) -> list[Releases]:
    """Sets for an assignment that is kept for the run and not told, by docs/accounting.md 2.12.

    An unfinished pass counts whole. What was released again is common to all bins.
    """
    strategy, gap, n = _strategy(plan), separation(plan), _num_steps(plan)
    last = int(np.flatnonzero(times)[-1]) + 1
    stop = min(-(-last // gap) * gap, n)
    extra = np.maximum(times[:last] - 1, 0)
    again = _by_rows(_tooth(strategy, n, gap), extra, gap) if np.any(extra) else 0.0
    found: list[Releases] = []
    for bins, common, alone in _splits(strategy, n, gap, stop):
        own = BallsInBinsGaussian(plan.sensitivity / math.sqrt(alone), bins)
        shared = common + again
        both: Releases = ((own, bins),)
        if shared:
            both = ((Gaussian(plan.sensitivity / math.sqrt(shared)), 1), *both)
        found.append(both)
    return found


@functools.lru_cache(256)
def _splits(
    strategy: Strategy, num_steps: int, gap: int, stop: int
) -> list[tuple[int, float, float]]:
    """(number of bins of a class, largest inner product of two of them, squared norm above it).

    The classes are i mod r, for those r that lower the inner product, the least of them first; rows
    before `stop` count.
    """
    tooth = np.sqrt(_tooth(strategy, num_steps, gap)[:stop])
    most = min(gap, stop)
    if stop * most <= MOST_WORK:
        inner = np.array([tooth[: stop - lag] @ tooth[lag:] for lag in range(most)]) * _ROUNDING
    else:
        inner = _convolved(tooth, tooth[::-1])[stop - 1 : stop - 1 + most]
        inner = np.maximum(inner, 0.0) + 1e-12 * inner[0]
    top, found = float(inner[0]), []
    least = top
    for r in range(1, gap // 2 + 1):
        common = float(inner[r::r].max(initial=0.0))
        if common < _LOWER * least:
            found.append((gap // r, common, top - common))
            least = common
    return found[::-1]


def times_of(steps: Any, num_steps: int) -> NDArray[np.int64]:
    """Return (num_steps,) how often each step was released."""
    found = np.bincount(np.asarray(list(steps), dtype=np.int64), minlength=num_steps)
    if len(found) > num_steps:
        raise AccountingError(
            f"Step {len(found) - 1} is past the plan's num_steps={num_steps}. Expected no more."
        )
    return found


def _strategy(plan: PrivacyPlan) -> Strategy:
    return identity() if plan.correlation is None else plan.correlation


def _num_steps(plan: PrivacyPlan) -> int:
    return int(plan.num_steps or 0)


@functools.lru_cache(32)
def _column(strategy: Strategy, num_steps: int) -> Vector:
    """(n,) first column of C."""
    return strategy.strategy(num_steps)


@functools.lru_cache(32)
def _whole_run(strategy: Strategy, num_steps: int, gap: int) -> float:
    """Squared sensitivity of a run of units that join every gap-th step; 0 without steps."""
    if not num_steps:
        return 0.0
    count = -(-num_steps // gap)
    return squared_sensitivity(_column(strategy, num_steps), min(gap, num_steps), count, "fixed")


@functools.lru_cache(32)
def _tooth(strategy: Strategy, num_steps: int, gap: int) -> Vector:
    """(n,) squares of the rows that a unit of the first batch reaches, by |C|."""
    column = np.abs(_column(strategy, num_steps))
    return comb(column, min(gap, num_steps), -(-num_steps // gap)) ** 2


def _squared_sensitivity(
    strategy: Strategy, num_steps: int, gap: int, times: NDArray[np.int64]
) -> float:
    """Largest sum over the rows of times x (what a unit of one batch adds to the row)^2.

    By |C|, for which the sum is exact; for a C with negative entries that of the whole run, which
    `squared_sensitivity` may find smaller, bounds each of its parts, but not rows that were
    released again: gradients of other signs may have led to them.
    """
    rows = _by_rows(_tooth(strategy, num_steps, gap), times, gap)
    return min(rows, _whole_run(strategy, num_steps, gap)) if times.max() <= 1 else rows


def _by_rows(tooth: Vector, times: NDArray[np.int64], gap: int) -> float:
    """Largest sum of times_t tooth_(t-i) over the first steps i < gap of a unit."""
    last = int(np.flatnonzero(times)[-1]) + 1
    if np.all(times[:last] == 1):  # the first batch comes first in every pass
        return float(tooth[:last].sum())
    totals = _convolved(times[:last].astype(np.float64), tooth[:last][::-1])[last - 1 :]
    return float(totals[:gap].max()) * _ROUNDING


def _convolved(one: NDArray[np.float64], other: NDArray[np.float64]) -> NDArray[np.float64]:
    """Their full convolution."""
    from scipy.signal import fftconvolve  # half a second that `import dualdp` does without

    return np.asarray(fftconvolve(one, other))


def _rounds(plan: PrivacyPlan, times: NDArray[np.int64]) -> list[tuple[float, int]]:
    """(noise multiplier / the plan's, number) of the rounds of the class that costs most in each.

    In a round every class draws once, and the releases that hold this draw are one Gaussian: its
    column of C, the rows counted as often as they were released.
    """
    gap, strategy = separation(plan), _strategy(plan)
    column = _column(strategy, _num_steps(plan)) ** 2
    column = column[: np.flatnonzero(column)[-1] + 1]
    whole, reach = float(column.sum()), len(column)
    counts: dict[float, int] = {}
    padded = np.concatenate([times, np.zeros(gap + reach, np.int64)])
    for start in range(0, len(times), gap):
        part = padded[start : start + gap + reach - 1]
        ratio = 1.0
        if np.any(part != 1):
            largest = float(np.correlate(part.astype(np.float64), column).max())
            if not largest:
                continue
            ratio = math.sqrt(whole / largest)
            ratio = 1.0 if abs(ratio - 1) < _ROUNDING - 1 else ratio / _ROUNDING
        counts[ratio] = counts.get(ratio, 0) + 1
    return sorted(counts.items())
