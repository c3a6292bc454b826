# SPDX-License-Identifier: Apache-2.0
"""What a run costs: epsilon of its steps and segments, calibration, and the step that ends it.

    spent = spent_by(plan, [Segment(0, 400), Segment(300, 900)])   # resumed at step 300
    spent.get_epsilon(delta=plan.delta)

Every function takes a `Cost`, plain data, which a `PrivacyPlan` extends. A segment is what one
process released without a break: steps that run again after a resume are further releases of
another segment (docs/accounting.md, 2.13).
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dualdp import _validate, accountants, mechanisms
from dualdp._validate import AccountingError
from dualdp.accountants.base import Accountant, check_target, largest_count, smallest_scale
from dualdp.mechanisms import BallsInBinsGaussian, Gaussian, PoissonSubsampledGaussian
from dualdp.plan.correlated.sensitivity import MOST_WORK, column_sums, participations
from dualdp.plan.correlated.strategies import Band, Strategy, identity
from dualdp.plan.schedules import AdaptiveNorm, Schedule, Scheduled
from dualdp.randomness.grid_noise import accounted_noise_multiplier

Vector = NDArray[np.float64]
#: Independent releases and their numbers, with the noise multiplier divided by the plan's.
Event = Gaussian | PoissonSubsampledGaussian | BallsInBinsGaussian
Releases = tuple[tuple[Event, int], ...]
#: Samplers accounted by whole passes, in which noise and batch size must not change.
WHOLE_PASS = ("balls_in_bins", "shuffle", "cyclic_poisson", "fixed_order")
#: Samplers whose runs are accounted as a whole, whatever their noise.
PATTERNED = ("cyclic_poisson", "fixed_order")
#: Samplers that correlated noise can go with: a unit's participations are far apart.
SEPARATED = (*PATTERNED, "balls_in_bins")
#: C of independent noise.
INDEPENDENT = identity()
#: Largest weight of earlier noise, in units of the step's own, which float32 must not round away.
_MOST_GROWTH = 2.0**10
#: Most steps of which a schedule is evaluated.
MOST_TABULATED = 10**7
#: Steps ahead within which the end of an open-ended run is searched.
_MOST_STEPS = 1 << 40
#: Sensitivity of the count of an adaptive bound, in which an example counts 1/2 or -1/2, relative
#: to that of the gradient sum in units of C. Under "replace" the accountant doubles both. Under
#: "zero_out" the zeroed example is still counted, with norm 0, below every bound.
_COUNT_CHANGE = {"add_or_remove": 0.5, "replace": 0.5, "zero_out": 1.0}
#: Settings of a release that decide its cost, and may follow a schedule.
_ACCOUNTED = ("noise_multiplier", "expected_batch_size")
_ROUNDING = 1 + 1e-12
#: A finer split of the bins is tried where it lowers what they have in common by this factor.
_LOWER = 0.9


def num_batches(num_examples: int, expected_batch_size: float) -> int:
    """Return the batches of one pass over the data: ceil(num_examples / expected_batch_size)."""
    return max(1, math.ceil(num_examples / expected_batch_size - 1e-9))


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Settings that decide what a run draws and costs; fields as in `PrivacyPlan`."""

    num_examples: int
    expected_batch_size: Scheduled
    num_steps: int | None
    noise_multiplier: Scheduled
    max_grad_norm: Scheduled | Mapping[str, float]
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
    seed: int | None = None

    def noise_multiplier_at(self, step: int) -> float:
        """Return noise standard deviation / max_grad_norm at a step."""
        return self._at("noise_multiplier", step)

    def expected_batch_size_at(self, step: int) -> float:
        """Return the divisor of the sum of a step, in examples."""
        return self._at("expected_batch_size", step)

    def max_grad_norm_at(self, step: int) -> float:
        """Return C at a step, gradient units."""
        return self._at("max_grad_norm", step)

    def _at(self, name: str, step: int) -> float:
        """Scheduled value at a step, checked: an open-ended schedule may leave its range."""
        setting = getattr(self, name)
        if type(step) is not int or step < 0:  # asked several times a step
            step = _validate.integer("step", step)
        return setting if isinstance(setting, float) else float(self.values(name, step))

    def values(self, name: str, steps: ArrayLike) -> Vector:
        """Return the values of a scheduled setting at some steps, shape of `steps`.

        Raises:
            ValueError: one is out of range; the first such step is named.
        """
        setting = getattr(self, name)
        found = setting.at(steps) if isinstance(setting, Schedule) else setting
        values = np.broadcast_to(np.asarray(found, np.float64), np.shape(steps))
        most = self.num_examples if name == "expected_batch_size" else math.inf
        low = values >= 0 if name == "noise_multiplier" else values > 0
        wrong = np.flatnonzero(~(low & np.isfinite(values) & (values <= most)))
        if wrong.size:
            at_step = "" if self.is_constant(name) else f" at step {np.ravel(steps)[wrong[0]]}"
            least = ">= 0" if name == "noise_multiplier" else "> 0"
            limit = "" if most == math.inf else f", at most num_examples={most}"
            raise ValueError(
                f"{name}={values.flat[wrong[0]]}{at_step} is out of range. Expected a finite "
                f"number {least}{limit}."
            )
        return values

    def is_constant(self, name: str) -> bool:
        """Return True if noise_multiplier, max_grad_norm or expected_batch_size never changes."""
        return isinstance(getattr(self, name), float)

    @property
    def is_adaptive(self) -> bool:
        """True if max_grad_norm is learned during the run."""
        return isinstance(self.max_grad_norm, AdaptiveNorm)

    @cached_property
    def is_correlated(self) -> bool:
        """True if the noises of two steps are not independent."""
        return self.strategy != INDEPENDENT

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
    def strategy(self) -> Strategy:
        """C of the correlated noise; the identity for independent noise."""
        return self.correlation or INDEPENDENT

    @cached_property
    def column(self) -> Vector:
        """(num_steps,) first column of C."""
        return self.strategy.strategy(self.num_steps or 0)

    @cached_property
    def run_sensitivity(self) -> float:
        """L2 sensitivity of the whole run to a unit that joins every `separation`-th step."""
        steps = self.num_steps or 0
        return self.strategy.sensitivity(steps, self.separation, None, pattern="fixed")

    @cached_property
    def sensitivity(self) -> float:
        """s: the standard deviation of z is noise_multiplier x s x max_grad_norm."""
        if not self.is_patterned:
            return 1.0
        if self.sampler == "fixed_order":
            return self.run_sensitivity
        return math.sqrt(float(self.column @ self.column))

    def check(self) -> None:
        """Raise a ValueError on settings for which no cost is proved."""
        self._check_sampler()
        if self.is_correlated:
            self._check_correlation()
        if self.is_patterned and (self.num_steps is None or self.is_adaptive):
            raise ValueError(
                f"num_steps={self.num_steps} and max_grad_norm={self.max_grad_norm!r:.60} came for "
                "correlated noise or fixed batches, a run that is accounted as a whole. Expected a "
                "number of steps, and a bound that does not adapt."
            )
        has_end = self.num_steps is not None or all(map(self.is_constant, _ACCOUNTED))
        if self.target_epsilon is not None and not has_end:
            raise ValueError(
                "target_epsilon came with a schedule and num_steps=None, so that the last step is "
                "not known. Expected num_steps= or epochs=."
            )
        epochs = self.epochs_per_assignment
        is_kept = self.is_correlated and (epochs or 1) < self.kept_epochs
        if epochs is not None and (self.sampler != "balls_in_bins" or is_kept):
            raise ValueError(
                f"epochs_per_assignment={epochs} with sampler={self.sampler!r}. Expected it with "
                "sampler='balls_in_bins' only, where with a correlation an assignment is kept for "
                "all epochs."
            )

    def _check_sampler(self) -> None:
        """Check sizes and schedules against the sampler."""
        sampler, classes, size = self.sampler, self.min_separation, self.expected_batch_size_at(0)
        if (self.max_batch_size is not None) != (sampler == "truncated_poisson"):
            raise ValueError(
                f"max_batch_size={self.max_batch_size} with sampler={sampler!r}. Expected it with "
                "sampler='truncated_poisson', and only there."
            )
        for name in _ACCOUNTED:
            if sampler in WHOLE_PASS and not self.is_constant(name):
                raise ValueError(
                    f"{name} follows a schedule, but sampler={sampler!r} is accounted by whole "
                    "passes. Expected a number, or sampler='poisson'."
                )
        is_fixed = self.is_constant("expected_batch_size") and size.is_integer()
        if sampler == "fixed_size" and not is_fixed:
            raise ValueError(
                f"expected_batch_size={size} with sampler='fixed_size'. Expected one integer."
            )
        if sampler == "cyclic_poisson":
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
        elif classes is not None and (sampler not in SEPARATED or classes != self.separation):
            raise ValueError(
                f"min_separation={classes} with sampler={sampler!r}. Expected it with "
                "sampler='cyclic_poisson'; elsewhere it follows from the batch size."
            )

    def _check_correlation(self) -> None:
        """Check what correlated noise goes with."""
        strategy, gap = self.strategy, self.separation
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
        weights = np.abs(strategy.inverse(max(self.num_steps or 0, 1)))
        if not weights.max() <= _MOST_GROWTH * weights[0]:
            raise ValueError(
                f"correlation={strategy!r:.80} takes back noise with weights up to "
                f"{weights.max() / weights[0]:.3g} times that of the step's own, which float32 "
                f"would round away. Expected at most {_MOST_GROWTH:g}: a C whose entries fall off."
            )
        if not self.is_constant("max_grad_norm"):
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

    - Poisson, truncated Poisson, fixed size: every step draws its own batch and noise, so all
      releases are composed, whatever segment they are of.
    - Shuffle, balls in bins: every segment draws its permutations or bins anew. Its passes are
      composed with those of the other segments, and a pass that it has in part counts whole.
    - Patterned runs (`pattern`): every segment is a mechanism of its own, whose strategy and
      classes begin with its first step. Segments are composed.

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
    spent, counts = empty_account(cost), Counter[tuple[float, float]]()
    for segment in segments:
        start, stop, scale = segment.start, segment.stop, segment.noise_scale
        if cost.is_patterned:
            spent.merge(_patterned(cost, segment))
        elif cost.sampler in ("balls_in_bins", "shuffle"):
            # A segment that begins inside a pass has the rest of it under a permutation of its own:
            # one more pass. `merge` counts it whole, where `compose` would fill up an earlier one.
            rest = min(-start % (cost.separation * cost.kept_epochs), stop - start)
            of_step = mechanisms.event(**release(cost, 0, scale))  # settings are constant here
            for steps in filter(None, (rest, stop - start - rest)):
                part = empty_account(cost)
                part.compose(of_step, steps)
                spent.merge(part)
        else:
            for noise, size, count in stretches(cost, start, stop):
                counts[scale * noise, size] += count
    for (noise, size), count in counts.items():
        spent.compose(mechanisms.event(**_event(cost, noise, size)), count)
    return spent


def empty_account(cost: Cost) -> Accountant:
    """Return the plan's accountant without any release."""
    return accountants.create(cost.accountant, neighboring_relation=cost.neighboring_relation)


def release(cost: Cost, step: int, noise_scale: float = 1.0) -> dict[str, Any]:
    """Return what the record of a release holds, by argument name of `Accountant.step`."""
    noise = noise_scale * cost.noise_multiplier_at(step)
    return _event(cost, noise, cost.expected_batch_size_at(step))


def _event(cost: Cost, noise_multiplier: float, size: float) -> dict[str, Any]:
    """Arguments of `Accountant.step` for one release."""
    # Of a shuffled pass B / n would count a batch less where B does not divide n.
    rate = 1 / cost.separation if cost.sampler == "shuffle" else size / cost.num_examples
    event: dict[str, Any] = {
        "noise_multiplier": accounted_noise(cost, noise_multiplier, size),
        "sample_rate": rate,
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
    if not cost.is_adaptive:
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
    """Return the distinct settings of steps start .. stop - 1, each with its number of steps.

    Returns:
        (noise_multiplier, expected_batch_size, count), whose counts add up to stop - start.
    """
    if stop <= start:
        return []
    if all(map(cost.is_constant, _ACCOUNTED)):
        return [(cost.noise_multiplier_at(0), cost.expected_batch_size_at(0), stop - start)]
    if stop - start > MOST_TABULATED:
        raise ValueError(
            f"{stop} steps of a schedule can't be accounted at once. Expected at most "
            f"{MOST_TABULATED}."
        )
    steps = np.arange(start, stop)
    noises, sizes = (cost.values(name, steps) for name in _ACCOUNTED)
    # One complex number for each pair: np.unique sorts them by both parts.
    pairs, counts = np.unique(noises + 1j * sizes, return_counts=True)
    return [(p.real, p.imag, n) for p, n in zip(pairs.tolist(), counts.tolist(), strict=True)]


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
        TypeError: the plan is open-ended.
    """
    end = _validate.integer("num_steps", cost.num_steps)
    target = cost.target_epsilon or epsilon(cost, [Segment(0, end)])
    if position >= end or epsilon(cost, [*segments, Segment(position, end)]) <= target:
        return 1.0
    spent = epsilon(cost, segments)
    if spent * _ROUNDING >= target:
        raise AccountingError(
            f"The releases on record have spent epsilon={spent:.6g} and the target is "
            f"{target:.6g}, so no noise makes room for further steps. Expected a larger target."
        )
    return max(1.0, scale_within(cost, segments, position, end, target))


def scale_within(
    cost: Cost, segments: Sequence[Segment], start: int, stop: int, target: float
) -> float:
    """Return the smallest noise scale found for steps start .. stop - 1 that meets the target.

    Raises:
        AccountingError: no scale up to 1e9 does, such as where the counts of an adaptive bound,
            whose noise is not scaled, exceed it alone.
    """
    check_target(target, cost.delta)

    def spent(scale: float) -> float:
        return epsilon(cost, [*segments, Segment(start, stop, scale)])

    return smallest_scale(spent, target, cost.delta)


def epsilon(cost: Cost, segments: Sequence[Segment]) -> float:
    """Return an upper bound on epsilon of all that the segments released, at the plan's delta."""
    return spent_by(cost, segments).get_epsilon(delta=cost.delta)


def last_affordable(cost: Cost, segments: Sequence[Segment]) -> int | None:
    """Return the first step that may not run: the end of the plan or of its target epsilon.

    Args:
        cost: settings of the plan.
        segments: of the run; the last one goes on.

    Returns:
        The step; None for a run without end, or of releases without a cost.
    """
    target, end, (*before, last) = cost.target_epsilon, cost.num_steps, segments
    if target is None:
        return end

    def spent(more: float) -> float:
        stop = last.stop + int(more)
        stop = stop if end is None else min(stop, end)
        return epsilon(cost, [*before, replace(last, stop=stop)])

    if end is not None and (end <= last.stop or spent(end - last.stop) <= target):
        return end
    more = largest_count(spent, target, _MOST_STEPS)
    return None if more is None else last.stop + more


def _patterned(cost: Cost, segment: Segment) -> Accountant:
    """Account of a patterned segment: that of the least epsilon, of those that bound its cost."""
    scale = segment.noise_scale * cost.noise_multiplier_at(0)
    noise = accounted_noise(cost, scale, cost.expected_batch_size_at(0))

    def account_of(releases: Releases) -> Accountant:
        account = empty_account(cost)
        for event, count in releases:
            account.compose(replace(event, noise_multiplier=noise * event.noise_multiplier), count)
        return account

    first, *others = pattern(cost, segment.stop - segment.start)
    cheapest = account_of(first)
    least = cheapest.get_epsilon(delta=cost.delta) if others else 0.0
    for releases in others:
        with suppress(AccountingError):  # no bound for them, by this accountant or at this delta
            account = account_of(releases)
            found = account.get_epsilon(delta=cost.delta)
            cheapest, least = (account, found) if found < least else (cheapest, least)
    return cheapest


def pattern(cost: Cost, steps: int) -> list[Releases]:
    """Return sets of independent releases, each of which costs at least what a segment costs.

    A unit joins steps at known distances, and the segment releases the rows of C G + stddev z, with
    C the identity for independent noise. The noise multipliers are relative to the plan's.

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
    if cost.sampler == "cyclic_poisson":
        return [_rounds(cost, steps)]
    # By |C|, for which the sum over the rows is exact; with negative entries the bound of the whole
    # run, which may be smaller, holds for each of its parts too.
    gap, num_steps = cost.separation, cost.num_steps or 0
    rows = _rows(cost.strategy, num_steps, gap)[:steps]
    total = min(math.sqrt(rows @ rows), cost.run_sensitivity)
    bounds: list[Releases] = [((Gaussian(cost.sensitivity / total), 1),)]
    if cost.sampler != "balls_in_bins":
        return bounds
    stop = min(-(-steps // gap) * gap, num_steps)  # an unfinished pass counts whole
    for bins, off, rest in _splits(cost.strategy, num_steps, gap, stop):
        own = BallsInBinsGaussian(cost.sensitivity / math.sqrt(rest), bins), bins
        shared = [(Gaussian(cost.sensitivity / math.sqrt(off)), 1)] if off else []
        bounds.append((*shared, own))
    return bounds


@functools.lru_cache(4)
def _rows(strategy: Strategy, num_steps: int, gap: int) -> Vector:
    """(num_steps,) what a unit of the first batch, or bin, adds to the rows of |C| G."""
    column = np.abs(strategy.strategy(num_steps))
    return column_sums(column, *participations(num_steps, gap, None))


def _rounds(cost: Cost, steps: int) -> Releases:
    """Releases of cyclic Poisson sampling to one class: a subsampled Gaussian for each round."""
    gap = cost.separation
    rate = min(gap * cost.expected_batch_size_at(0) / cost.num_examples, 1.0)
    rounds, left = divmod(steps, gap)
    events = [(PoissonSubsampledGaussian(1.0, rate), rounds)] if rounds else []
    if left:  # the first class has the most rows of its last draw on record: `left` of its column
        part = float((cost.column[:left] ** 2).sum())
        ratio = max(1.0, math.sqrt(cost.sensitivity**2 / part) / _ROUNDING)
        events.append((PoissonSubsampledGaussian(ratio, rate), 1))
    return tuple(events)


@functools.lru_cache(256)
def _splits(
    strategy: Strategy, num_steps: int, gap: int, stop: int
) -> list[tuple[int, float, float]]:
    """(bins of a class, `off`, `top - off`) for each split into classes that is worth trying.

    Bins i mod r are a class. `top` is the largest squared norm of a bin's rows before `stop`, and
    `off` the largest inner product of two bins of a class (docs/accounting.md, 2.12). An r is tried
    if it lowers `off`; the split of least `off` comes first.
    """
    rows, most = _rows(strategy, num_steps, gap)[:stop], min(gap, stop)
    if stop * most <= MOST_WORK:
        inner = np.array([rows[: stop - lag] @ rows[lag:] for lag in range(most)]) * _ROUNDING
    else:
        from scipy.signal import fftconvolve  # half a second that `import dualdp` does without

        inner = np.asarray(fftconvolve(rows, rows[::-1]))[stop - 1 : stop - 1 + most]
        inner = np.maximum(inner, 0.0) + 1e-12 * inner[0]
    top = least = float(inner[0])
    splits = []
    for r in range(1, gap // 2 + 1):
        off = float(inner[r::r].max(initial=0.0))
        if off < _LOWER * least:
            splits.append((gap // r, off, top - off))
            least = off
    return splits[::-1]
