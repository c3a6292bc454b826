# SPDX-License-Identifier: Apache-2.0
"""Privacy cost of a plan: its steps as events, their epsilon, and the step that ends a run."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from dualdp import accountants
from dualdp._validate import AccountingError
from dualdp.accountants.search import check_target, smallest_scale
from dualdp.accountants.solve import get_schedule_scale
from dualdp.plan import participation
from dualdp.plan.samplers import num_batches
from dualdp.plan.schedules import AdaptiveNorm, settles_at
from dualdp.randomness.grid_noise import accounted_noise_multiplier

if TYPE_CHECKING:
    from dualdp.plan.plan import PrivacyPlan

Stretch = tuple[float, float, int]
_MOST_STEPS = 1 << 40
#: Most steps that are tabulated for a schedule that never becomes constant.
_MOST_TABULATED = 10**7
#: Steps ahead within which the end of an open-ended run with such a schedule is searched.
_HORIZON = 1 << 10
#: Sensitivity of the count of an adaptive bound, in which an example counts 1/2 or -1/2, relative
#: to that of the gradient sum in units of C. Under "replace" the accountant doubles both. Under
#: "zero_out" the zeroed example is still counted, with norm 0, below every bound.
_COUNT_CHANGE = {"add_or_remove": 0.5, "replace": 0.5, "zero_out": 1.0}


def constant_target(plan: PrivacyPlan) -> float:
    """Return the epsilon at which other settings of a constant plan are compared with it.

    Raises on a schedule, no number of steps, or an epsilon that is 0 or infinite.
    """
    constant = ("noise_multiplier", "expected_batch_size")
    if not plan.num_steps or plan.is_adaptive or not all(map(plan.is_constant, constant)):
        raise ValueError(
            f"num_steps={plan.num_steps}, or a schedule in the plan. Expected a number of steps, "
            "constant noise_multiplier and expected_batch_size, and no adaptive max_grad_norm."
        )
    target = plan.target_epsilon or plan.epsilon()
    if not 0 < target < math.inf:
        raise ValueError(
            f"The plan's epsilon is {target}. Expected noise that makes it finite and above 0."
        )
    return target


def accounted_noise(
    plan: PrivacyPlan, noise_multiplier: float, expected_batch_size: float, times: int = 1
) -> float:
    """Return the noise multiplier of one Gaussian equivalent to all releases of one draw.

    Gaussian releases on one draw, each adaptive to those before, cost as much as one Gaussian whose
    inverse variance is the sum of theirs. An adaptive bound also releases the noisy count of small
    norms, with the noise multiplier of `count_noise`.

    Source: Andrew et al. 2021, theorem 1, solved for the whole; the draws of several steps
    interleave when steps are run again, which Vadhan & Wang 2021 ("Concurrent composition of
    differential privacy") and Vadhan & Zhang 2023 cover.
    """
    if plan.noise == "secure":
        noise_multiplier = accounted_noise_multiplier(noise_multiplier)
    precision = math.inf if noise_multiplier < 1e-150 else noise_multiplier**-2.0
    if isinstance(plan.max_grad_norm, AdaptiveNorm):
        precision += count_noise(plan, expected_batch_size) ** -2.0
    elif times == 1:
        return noise_multiplier
    return float((times * precision) ** -0.5)


def count_noise(plan: PrivacyPlan, expected_batch_size: float) -> float:
    """Return the noise multiplier of the count released at a step; inf without an adaptive bound.

    Guarantees:
        No neighbor moves the count by more.  [test_the_count_moves_by_what_is_accounted]
    """
    if not isinstance(plan.max_grad_norm, AdaptiveNorm):
        return math.inf
    stddev = plan.max_grad_norm.count_stddev(expected_batch_size)
    return stddev / _COUNT_CHANGE[plan.neighboring_relation]


def release(
    plan: PrivacyPlan, noise_multiplier: float, expected_batch_size: float, times: int = 1
) -> dict[str, Any]:
    """Return the record of one release; see `accounted_noise`."""
    return {
        "noise_multiplier": accounted_noise(plan, noise_multiplier, expected_batch_size, times),
        "sample_rate": expected_batch_size / plan.num_examples,
        "sampler": plan.sampler,
        **plan.sizes,
    }


def _charged(
    plan: PrivacyPlan, noise_multiplier: float, expected_batch_size: float, times: int = 1
) -> dict[str, Any]:
    """Return the arguments of `accountant.step` for one release.

    A shuffled pass has whole batches only: B / n would count one less where B does not divide n.
    """
    charged = release(plan, noise_multiplier, expected_batch_size, times)
    if plan.sampler == "shuffle":
        charged["sample_rate"] = 1 / num_batches(plan.num_examples, expected_batch_size)
    return charged


def account(plan: PrivacyPlan, stretches: Iterable[Stretch], accountant: str | None = None) -> Any:
    """Return an accountant with the given (noise_multiplier, expected_batch_size, count)."""
    made = accountants.create(
        accountant or plan.accountant, neighboring_relation=plan.neighboring_relation
    )
    for noise, size, count in stretches:
        made.step(num_steps=count, **_charged(plan, noise, size))
    return made


def spent_after(
    plan: PrivacyPlan,
    steps: int,
    accountant: str | None = None,
    noise_multiplier: float | None = None,
) -> Any:
    """Return an accountant with the first steps of a plan, each released once.

    `noise_multiplier` takes the place of the plan's.
    """
    if participation.is_patterned(plan):
        times = np.ones(steps, dtype=np.int64)
        return _patterned(plan, times, accountant, noise_multiplier)
    ahead = stretches(plan, 0, steps)
    if noise_multiplier is not None:
        ahead = [(noise_multiplier, size, count) for _, size, count in ahead]
    return account(plan, ahead, accountant)


def _patterned(
    plan: PrivacyPlan, times: Any, accountant: str | None, noise_multiplier: float | None = None
) -> Any:
    """Accountant of a plan with `is_patterned` whose step t was released times[t] times.

    It holds those of the equivalent releases that have the least epsilon at the plan's delta.
    """
    noise = plan.noise_multiplier_at(0) if noise_multiplier is None else noise_multiplier
    noise = accounted_noise(plan, noise, plan.expected_batch_size_at(0))
    made = account(plan, [], accountant)
    found = [_scaled(releases, noise) for releases in participation.releases(plan, times)]
    setting = made.name, plan.neighboring_relation, plan.delta
    for event, count in found[0] if len(found) == 1 else _cheapest(found, *setting):
        made.compose(event, count)
    return made


def _cheapest(found: list[participation.Releases], *setting: Any) -> participation.Releases:
    """The releases with the least epsilon; the first if none has one."""
    best, least = found[0], math.inf
    for releases in found:
        if _epsilon(releases[:1], *setting) < least:  # a part costs no more than the whole
            epsilon = _epsilon(releases, *setting)
            if epsilon < least:
                best, least = releases, epsilon
    return best


def _scaled(releases: participation.Releases, noise: float) -> participation.Releases:
    """The releases with `noise` times their noise multipliers."""
    return tuple(
        (dataclasses.replace(event, noise_multiplier=noise * event.noise_multiplier), count)  # type: ignore[attr-defined, call-arg]
        for event, count in releases
    )


@functools.lru_cache(1024)
def _epsilon(
    releases: participation.Releases, accountant: str, relation: str, delta: float
) -> float:
    """Epsilon of the releases; inf where this accountant or relation has no bound for them."""
    made = accountants.create(accountant, neighboring_relation=relation)
    try:
        for event, count in releases:
            made.compose(event, count)
        return float(made.get_epsilon(delta=delta))
    except AccountingError:
        return math.inf


def stretches(plan: PrivacyPlan, start: int, stop: int) -> list[Stretch]:
    """Return distinct (noise_multiplier, expected_batch_size, count) of steps start..stop-1.

    Raises if a value is out of range, or a schedule never settles within the steps looked at.
    """
    schedules = plan.noise_multiplier, plan.expected_batch_size
    settled = max(start, *(settles_at(schedule) for schedule in schedules))  # type: ignore[arg-type]
    tail = stop if settled >= stop else int(settled)
    if tail - start > _MOST_TABULATED:
        raise ValueError(
            f"{stop} steps of a schedule that changes at every step can't be accounted at once. "
            f"Expected at most {_MOST_TABULATED}, or a schedule that settles, such as 'linear'."
        )
    index = np.arange(start, tail + (stop > tail))  # includes one of the steps with constant values
    noise = plan.scheduled("noise_multiplier", index)
    size = plan.scheduled("expected_batch_size", index)
    counts = np.ones(index.size, dtype=np.int64)
    counts[tail - start :] = stop - tail
    pairs, index_of = np.unique(noise + 1j * size, return_inverse=True)
    totals = np.zeros(pairs.size, dtype=np.int64)
    np.add.at(totals, index_of, counts)
    return [(p.real, p.imag, n) for p, n in zip(pairs.tolist(), totals.tolist(), strict=True)]


def last_affordable(
    plan: PrivacyPlan, spent: Any, position: int, released: Iterable[int] = ()
) -> tuple[int | None, float]:
    """Return the first step that may not run: the end of the plan or of its target epsilon.

    Args:
        plan: the plan.
        spent: accountant of what was released.
        position: the next step.
        released: the step of each release, needed for a plan that is accounted as a whole.

    Returns:
        `(end, horizon)`; end is None if there is none before the step `horizon`, at which the
        search must be repeated.
    """
    target, made = plan.target_epsilon, list(released)
    if target is None:
        return plan.num_steps, math.inf

    def affords(stop: int) -> bool:
        if participation.is_patterned(plan):
            times = participation.times_of([*made, *range(position, stop)], plan.num_steps or 0)
            trial = _patterned(plan, times, spent.name)
            return bool(trial.get_epsilon(delta=plan.delta) <= target)
        try:
            ahead = stretches(plan, position, stop)
        except (IndexError, ValueError):  # a schedule is out of range by then
            return False
        trial = spent.copy()
        for noise, size, count in ahead:
            trial.step(num_steps=count, **_charged(plan, noise, size))
        return bool(trial.get_epsilon(delta=plan.delta) <= target)

    if plan.num_steps is not None:
        stop = plan.num_steps
        end = stop if stop <= position or affords(stop) else _bisect(affords, position, stop)
        return end, math.inf
    schedules = plan.noise_multiplier, plan.expected_batch_size
    settles = all(settles_at(schedule) < math.inf for schedule in schedules)  # type: ignore[arg-type]
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


def calibrated_noise(draft: PrivacyPlan, target_epsilon: float) -> float:
    """Return the noise multiplier with which the plan spends at most `target_epsilon`."""
    if draft.num_steps is None:
        raise ValueError("num_steps is None. Expected a number of steps to calibrate for.")
    sizes = [(size, count) for _, size, count in stretches(draft, 0, draft.num_steps)]
    _require_count_noise(draft, target_epsilon, sizes)

    def spent(noise: float) -> float:
        made = spent_after(draft, draft.num_steps or 0, noise_multiplier=noise)
        return float(made.get_epsilon(delta=draft.delta))

    return smallest_scale(spent, *check_target(target_epsilon, draft.delta))


def _require_count_noise(
    draft: PrivacyPlan, target_epsilon: float, sizes: list[tuple[float, int]]
) -> None:
    """Raise if the noisy count of an adaptive bound alone spends the target."""
    if not isinstance(draft.max_grad_norm, AdaptiveNorm):
        return
    needed = get_schedule_scale(
        target_epsilon=target_epsilon,
        target_delta=draft.delta,
        steps=[(1.0, size / draft.num_examples, count) for size, count in sizes],
        sampler=draft.sampler,
        accountant=draft.accountant,
        neighboring_relation=draft.neighboring_relation,
        **draft.sizes,
    )
    counts = min((count_noise(draft, size) for size, _ in sizes), default=math.inf)
    if counts <= needed:
        raise ValueError(
            f"The noisy count of the adaptive max_grad_norm has noise multiplier {counts:.4g}, "
            f"but target_epsilon={target_epsilon} needs {needed:.4g} for all that is released. "
            "Expected a larger count_noise_multiplier, or a larger target."
        )


def spent_by(
    plan: PrivacyPlan, releases: Iterable[dict[str, Any]], accountant: str | None = None
) -> Any:
    """Return an accountant with the releases of a ledger; those of one step belong to one draw.

    Raises if a step was run again under balls-in-bins sampling, whose cost is unknown.
    """
    if participation.is_patterned(plan):
        steps = (int(entry["step"]) for entry in releases)
        return _patterned(plan, participation.times_of(steps, plan.num_steps or 0), accountant)
    times: dict[int, int] = {}
    for entry in releases:
        times[entry["step"]] = times.get(entry["step"], 0) + 1
    once = sorted(step for step, count in times.items() if count == 1)
    again = {step: count for step, count in times.items() if count > 1}
    passes = plan.sampler in ("balls_in_bins", "shuffle")
    if again and plan.sampler == "balls_in_bins":
        raise AccountingError(
            f"Step {min(again)} was run {again[min(again)]} times under sampler='balls_in_bins', "
            "for which no bound is known. Expected a replay with nothing changed, or another "
            "sampler."
        )
    alone = np.asarray(sorted(times) if passes else once, dtype=np.int64)
    spans = np.split(alone, np.flatnonzero(np.diff(alone) != 1) + 1) if alone.size else []
    planned = (stretches(plan, int(span[0]), int(span[-1]) + 1) for span in spans)
    made = account(plan, itertools.chain.from_iterable(planned), accountant)
    for step, count in again.items():
        noise, size = plan.noise_multiplier_at(step), plan.expected_batch_size_at(step)
        if passes:  # not amplified: each further release is a separate Gaussian
            extra = accounted_noise(plan, noise, size)
            made.step(noise_multiplier=extra, sample_rate=1.0, num_steps=count - 1)
        else:
            made.step(**_charged(plan, noise, size, count))
    return made
