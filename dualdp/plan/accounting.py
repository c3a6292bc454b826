# SPDX-License-Identifier: Apache-2.0
"""What a run costs: epsilon of its steps and segments, calibration, and the step that ends it.

    spent = spent_by(plan.cost(), [Segment(0, 400), Segment(300, 900)])   # resumed at step 300
    spent.get_epsilon(delta=plan.delta)

Every function takes a `Cost`, plain data. A segment is what one process released without a break:
steps that run again after a resume are further releases of another segment (docs/accounting.md,
2.13).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dualdp import accountants, mechanisms
from dualdp._validate import AccountingError
from dualdp.accountants.base import Accountant
from dualdp.accountants.search import check_target, smallest_scale
from dualdp.mechanisms import BallsInBinsGaussian, Gaussian, PoissonSubsampledGaussian
from dualdp.plan.correlated.sensitivity import MOST_WORK, column_sums
from dualdp.plan.correlated.strategies import Strategy, identity
from dualdp.plan.cost import Cost
from dualdp.plan.schedules import AdaptiveNorm, Constant, settles_at, values_at
from dualdp.randomness.grid_noise import accounted_noise_multiplier

#: Independent releases and their numbers, with the noise multiplier divided by the plan's.
Event = Gaussian | PoissonSubsampledGaussian | BallsInBinsGaussian
Releases = tuple[tuple[Event, int], ...]
_MOST_STEPS = 1 << 40
#: Most steps that are tabulated for a schedule that never becomes constant.
_MOST_TABULATED = 10**7
#: Steps ahead within which the end of an open-ended run with such a schedule is searched.
_HORIZON = 1 << 10
#: Sensitivity of the count of an adaptive bound, in which an example counts 1/2 or -1/2, relative
#: to that of the gradient sum in units of C. Under "replace" the accountant doubles both. Under
#: "zero_out" the zeroed example is still counted, with norm 0, below every bound.
_COUNT_CHANGE = {"add_or_remove": 0.5, "replace": 0.5, "zero_out": 1.0}
_ROUNDING = 1 + 1e-12
#: A finer split of the bins is tried where it lowers what they have in common by this factor.
_LOWER = 0.9


@dataclass(frozen=True)
class Segment:
    """Steps start .. stop - 1 of one process, each released once.

    `noise_scale` is what the plan's noise multipliers were multiplied by; see `recalibrated`.
    """

    start: int
    stop: int
    noise_scale: float = 1.0


def spent_by(cost: Cost, segments: Sequence[Segment]) -> Accountant:
    """Return an accountant with everything that the segments of a run released.

    Where each step draws its batch and noise anew (Poisson, truncated Poisson, fixed size), all
    releases are composed. Elsewhere a segment is a mechanism of its own, from its first step to its
    last: it draws its permutation, classes or bins anew, its strategy counts from its first step,
    and a pass that it begins in the middle is a further pass.

    Args:
        cost: settings of the plan.
        segments: of one or more processes, in order.

    Raises:
        AccountingError: the accountant has no bound for these mechanisms.

    Guarantees:
        At least the cost of every pattern of participations of one unit.
            [test_no_pattern_costs_more, test_segments_against_brute_force]

    Source: composition of adaptively chosen mechanisms; docs/accounting.md, 2.13.
    """
    spent = empty_account(cost)
    if cost.is_patterned:
        for segment in segments:
            for event, count in _cheapest(cost, segment):
                spent.compose(event, count)
    elif cost.sampler in ("balls_in_bins", "shuffle"):
        for segment in segments:
            for steps in _by_passes(cost, segment):
                part = empty_account(cost)
                _compose(part, cost, segment.noise_scale * cost.noise_multiplier_at(0), steps)
                spent.merge(part)
    else:
        counts: dict[tuple[float, float], int] = {}
        for segment in segments:
            for noise, size, count in stretches(cost, segment.start, segment.stop):
                setting = segment.noise_scale * noise, size
                counts[setting] = counts.get(setting, 0) + count
        for (noise, size), count in counts.items():
            _compose(spent, cost, noise, count, size)
    return spent


def empty_account(cost: Cost) -> Accountant:
    """Return the plan's accountant without any release."""
    return accountants.create(cost.accountant, neighboring_relation=cost.neighboring_relation)


def _compose(
    spent: Accountant, cost: Cost, noise: float, count: int, size: float | None = None
) -> None:
    """Add `count` releases with one noise multiplier and expected batch size."""
    event = _event(cost, noise, cost.expected_batch_size_at(0) if size is None else size)
    if cost.sampler == "shuffle":  # B / n would count a batch less where B does not divide n
        event["sample_rate"] = 1 / cost.separation
    spent.compose(mechanisms.event(**event), count)


def _by_passes(cost: Cost, segment: Segment) -> list[int]:
    """Numbers of steps of a segment before and after the first pass (assignment) that ends in it.

    A pass that the segment begins in its middle is one more pass, for which the accountant counts a
    whole one.
    """
    length = cost.separation * cost.kept_epochs
    first = min(-segment.start % length, segment.stop - segment.start)
    return [steps for steps in (first, segment.stop - segment.start - first) if steps]


def release(cost: Cost, step: int, noise_scale: float = 1.0) -> dict[str, float | int | str]:
    """Return what the record of a release holds, by argument name of `Accountant.step`."""
    noise = noise_scale * cost.noise_multiplier_at(step)
    return _event(cost, noise, cost.expected_batch_size_at(step))


def _event(cost: Cost, noise_multiplier: float, size: float) -> dict[str, Any]:
    """Arguments of `Accountant.step` for one release."""
    event: dict[str, Any] = {
        "noise_multiplier": accounted_noise(cost, noise_multiplier, size),
        "sample_rate": size / cost.num_examples,
        "sampler": cost.sampler,
    }
    if cost.sampler == "truncated_poisson":
        event |= {"num_examples": cost.num_examples, "max_batch_size": cost.max_batch_size}
    elif cost.sampler == "balls_in_bins" and cost.kept_epochs > 1:
        event["epochs_per_assignment"] = cost.kept_epochs
    return event


def accounted_noise(cost: Cost, noise_multiplier: float, expected_batch_size: float) -> float:
    """Return the noise multiplier of the Gaussian that all releases of one step amount to.

    An adaptive bound also releases the noisy count of small norms. Gaussian releases on one draw,
    each adaptive to those before, cost as much as one Gaussian whose inverse variance is the sum of
    theirs.

    Source: Andrew et al. 2021, theorem 1, solved for the whole.
    """
    if cost.noise == "secure":
        noise_multiplier = accounted_noise_multiplier(noise_multiplier)
    if not isinstance(cost.max_grad_norm, AdaptiveNorm):
        return noise_multiplier
    precision = math.inf if noise_multiplier < 1e-150 else noise_multiplier**-2.0
    precision += count_noise(cost, expected_batch_size) ** -2.0
    return float(precision**-0.5)


def count_noise(cost: Cost, expected_batch_size: float) -> float:
    """Return the noise multiplier of the count released at a step; inf without an adaptive bound.

    Guarantees:
        No neighbor moves the count by more.  [test_the_count_moves_by_what_is_accounted]
    """
    if not isinstance(cost.max_grad_norm, AdaptiveNorm):
        return math.inf
    stddev = cost.max_grad_norm.count_stddev(expected_batch_size)
    return stddev / _COUNT_CHANGE[cost.neighboring_relation]


def stretches(cost: Cost, start: int, stop: int) -> list[tuple[float, float, int]]:
    """Return distinct (noise_multiplier, expected_batch_size, count) of steps start .. stop - 1.

    Raises:
        ValueError: a value is out of range, or a schedule never settles within the steps.
    """
    if stop <= start:
        return []
    schedules = noise, size = cost.noise_multiplier, cost.expected_batch_size
    if isinstance(noise, Constant) and isinstance(size, Constant):
        return [(float(noise), float(size), stop - start)]
    settled = max(start, *(settles_at(schedule) for schedule in schedules))
    tail = stop if settled >= stop else int(settled)
    if tail - start > _MOST_TABULATED:
        raise ValueError(
            f"{stop} steps of a schedule that changes at every step can't be accounted at once. "
            f"Expected at most {_MOST_TABULATED}, or a schedule that settles, such as 'linear'."
        )
    index = np.arange(start, tail + (stop > tail))  # includes one of the steps with constant values
    noises = values_at("noise_multiplier", noise, index, cost.num_examples)
    sizes = values_at("expected_batch_size", size, index, cost.num_examples)
    counts = np.ones(index.size, dtype=np.int64)
    counts[tail - start :] = stop - tail
    pairs, index_of = np.unique(noises + 1j * sizes, return_inverse=True)
    totals = np.zeros(pairs.size, dtype=np.int64)
    np.add.at(totals, index_of, counts)
    return [(p.real, p.imag, n) for p, n in zip(pairs.tolist(), totals.tolist(), strict=True)]


def calibrated_noise(cost: Cost, target_epsilon: float) -> float:
    """Return the noise multiplier with which the whole plan spends at most `target_epsilon`.

    `cost` is that of the plan with noise multiplier 1.
    """
    if cost.num_steps is None:
        raise ValueError("num_steps is None. Expected a number of steps to calibrate for.")
    return _scale_within(cost, [], 0, cost.num_steps, target_epsilon)


def recalibrated(cost: Cost, segments: Sequence[Segment], position: int) -> float:
    """Return what to multiply the noise of the steps that are left by, so that all of them fit.

    Args:
        cost: settings of the plan.
        segments: everything on record.
        position: int, the next step.

    Returns:
        float >= 1: the whole run then spends at most `target_epsilon`, or without one the epsilon
        of the plan. Exactly 1 where nothing is to be made up for.

    Raises:
        AccountingError: what is on record has spent the target.
        ValueError: the plan is open-ended.
    """
    if cost.num_steps is None:
        raise ValueError(
            "num_steps is None, so it is not known how many steps are left. Expected a plan with a "
            "number of steps to recalibrate."
        )
    target = cost.target_epsilon or epsilon(cost, [Segment(0, cost.num_steps)])
    planned = [*segments, Segment(position, cost.num_steps)]
    if position >= cost.num_steps or epsilon(cost, planned) <= target:
        return 1.0
    spent = epsilon(cost, segments)
    if spent >= target:
        raise AccountingError(
            f"The releases on record have spent epsilon={spent:.6g} and the target is "
            f"{target:.6g}, so no noise makes room for further steps. Expected a larger target."
        )
    return max(1.0, _scale_within(cost, segments, position, cost.num_steps, target))


def _scale_within(
    cost: Cost, segments: Sequence[Segment], start: int, stop: int, target: float
) -> float:
    """Smallest noise scale found with which the steps start .. stop - 1 fit the target too."""
    check_target(target, cost.delta)
    if isinstance(cost.max_grad_norm, AdaptiveNorm):
        largest = epsilon(cost, [*segments, Segment(start, stop, math.inf)])
        if largest > target:
            counts = min(count_noise(cost, size) for _, size, _ in stretches(cost, start, stop))
            raise ValueError(
                f"The noisy count of the adaptive max_grad_norm has noise multiplier "
                f"{counts:.4g} and alone spends epsilon={largest:.4g}, but the target is {target}. "
                "Expected a larger count_noise_multiplier, or a larger target."
            )

    def spent(scale: float) -> float:
        return epsilon(cost, [*segments, Segment(start, stop, scale)])

    return smallest_scale(spent, target, cost.delta)


def epsilon(cost: Cost, segments: Sequence[Segment]) -> float:
    """Return an upper bound on epsilon of everything that the segments released."""
    return spent_by(cost, segments).get_epsilon(delta=cost.delta)


def last_affordable(cost: Cost, segments: Sequence[Segment]) -> tuple[int | None, float]:
    """Return the first step that may not run: the end of the plan or of its target epsilon.

    Args:
        cost: settings of the plan.
        segments: of the run; the last one goes on.

    Returns:
        `(end, horizon)`; end is None if there is none before the step `horizon`, at which the
        search must be repeated.
    """
    target, (*before, last) = cost.target_epsilon, segments
    position = last.stop
    if target is None:
        return cost.num_steps, math.inf

    def affords(stop: int) -> bool:
        try:
            return epsilon(cost, [*before, replace(last, stop=stop)]) <= target
        except (IndexError, ValueError):  # a schedule is out of range by then
            return False

    if cost.num_steps is not None:
        stop = cost.num_steps
        end = stop if stop <= position or affords(stop) else _bisect(affords, position, stop)
        return end, math.inf
    schedules = cost.noise_multiplier, cost.expected_batch_size
    settles = all(settles_at(schedule) < math.inf for schedule in schedules)
    ahead, most = 1, _MOST_STEPS if settles else _HORIZON
    while affords(position + ahead):
        if ahead == most:  # end beyond the horizon, or a release without cost
            return None, position + most if not settles else math.inf
        ahead *= 2
    return _bisect(affords, position, position + ahead), math.inf


def _bisect(affords: Callable[[int], bool], good: int, bad: int) -> int:
    """Largest affordable stop in [good, bad), where `bad` is not affordable."""
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if affords(middle) else (good, middle)
    return good


def _cheapest(cost: Cost, segment: Segment) -> Releases:
    """Releases that a patterned segment amounts to; of several bounds that of least epsilon."""
    scale = segment.noise_scale * cost.noise_multiplier_at(0)
    noise = accounted_noise(cost, scale, cost.expected_batch_size_at(0))
    options = [
        tuple(
            (replace(event, noise_multiplier=noise * event.noise_multiplier), n)
            for event, n in releases
        )
        for releases in pattern(cost, segment.stop - segment.start)
    ]

    def bound(releases: Releases) -> float:
        spent = empty_account(cost)
        try:
            for event, count in releases:
                spent.compose(event, count)
            return spent.get_epsilon(delta=cost.delta)
        except AccountingError:  # this accountant or relation has no bound for them
            return math.inf

    best, least = options[0], math.inf
    for releases in options if len(options) > 1 else ():
        if bound(releases[:1]) < least:  # a part costs no more than the whole
            whole = bound(releases)
            if whole < least:
                best, least = releases, whole
    return best


def pattern(cost: Cost, steps: int) -> list[Releases]:
    """Return sets of independent releases, each of which costs at least what a segment costs.

    A unit joins steps at known distances, and the segment releases the rows of C G + stddev z, with
    C the identity for independent noise.

    Args:
        cost: settings with `is_patterned`.
        steps: length of the segment, at most num_steps.

    Returns:
        One or more sets; the first, without balls in bins, has a cost under every relation.

    Guarantees:
        At least the cost of every pattern of participations of one unit.
            [test_no_pattern_costs_more, test_no_bound_is_below_monte_carlo]
        More steps never cost less.  [test_epsilon_of_prefixes_is_monotone]

    Source: Denisov et al. 2022 (arXiv 2202.08312), Theorem 2.1; for cyclic Poisson sampling,
    Choquette-Choo et al. 2023 (arXiv 2306.08153), Theorem 4; docs/accounting.md, 2.11 and 2.12.
    """
    if steps > (cost.num_steps or 0):
        raise AccountingError(
            f"A segment of {steps} steps came for a plan with num_steps={cost.num_steps}. Expected "
            "at most that: the noise of such a run is that of its whole length."
        )
    if not steps:
        return [()]
    gap = cost.separation
    if cost.sampler == "cyclic_poisson":
        rate = min(gap * cost.expected_batch_size_at(0) / cost.num_examples, 1.0)
        rounds, left = divmod(steps, gap)
        events = [(PoissonSubsampledGaussian(1.0, rate), rounds)] if rounds else []
        if left:  # of a class that draws in the last round, the first rows of its column
            part = float((cost.column[:left] ** 2).sum())
            ratio = max(1.0, math.sqrt(cost.sensitivity**2 / part) / _ROUNDING)
            events.append((PoissonSubsampledGaussian(ratio, rate), 1))
        return [tuple(events)]
    # By |C|, for which the sum over the rows is exact; with negative entries the bound of the whole
    # run, which may be smaller, holds for each of its parts too.
    total = min(float(cost.squared_rows[:steps].sum()), cost.squared_sensitivity)
    first: Releases = ((Gaussian(cost.sensitivity / math.sqrt(total)), 1),)
    if cost.sampler != "balls_in_bins":
        return [first]
    stop = min(-(-steps // gap) * gap, cost.num_steps or 0)  # an unfinished pass counts whole
    found = [first]
    for bins, common, alone in _splits(
        cost.correlation or identity(), cost.num_steps or 0, gap, stop
    ):
        own = BallsInBinsGaussian(cost.sensitivity / math.sqrt(alone), bins), bins
        shared = [(Gaussian(cost.sensitivity / math.sqrt(common)), 1)] if common else []
        found.append((*shared, own))
    return found


@functools.lru_cache(256)
def _splits(
    strategy: Strategy, num_steps: int, gap: int, stop: int
) -> list[tuple[int, float, float]]:
    """(number of bins of a class, largest inner product of two of them, squared norm above it).

    The classes are i mod r, for those r that lower the inner product, the least of them first; rows
    before `stop` count.
    """
    column = np.abs(strategy.strategy(num_steps))
    rows = column_sums(column, min(gap, num_steps), -(-num_steps // gap))[:stop]
    most = min(gap, stop)
    if stop * most <= MOST_WORK:
        inner = np.array([rows[: stop - lag] @ rows[lag:] for lag in range(most)]) * _ROUNDING
    else:
        from scipy.signal import fftconvolve  # half a second that `import dualdp` does without

        inner = np.asarray(fftconvolve(rows, rows[::-1]))[stop - 1 : stop - 1 + most]
        inner = np.maximum(inner, 0.0) + 1e-12 * inner[0]
    top = least = float(inner[0])
    found = []
    for r in range(1, gap // 2 + 1):
        common = float(inner[r::r].max(initial=0.0))
        if common < _LOWER * least:
            found.append((gap // r, common, top - common))
            least = common
    return found[::-1]
