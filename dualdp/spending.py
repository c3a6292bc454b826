# SPDX-License-Identifier: Apache-2.0
"""What the releases of a plan cost: from its numbers to events, and from events to epsilon."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from dualdp import accountants
from dualdp._validate import AccountingError
from dualdp.accountants.calibrate import get_schedule_scale
from dualdp.accountants.question import smallest_scale, target
from dualdp.randomness.secure import accounted_noise_multiplier
from dualdp.schedules import AdaptiveNorm, settles_at

if TYPE_CHECKING:
    from dualdp.plan import PrivacyPlan

Stretch = tuple[float, float, int]
_MOST_STEPS = 1 << 40
#: Steps of a schedule that never settles whose values are looked at, one by one.
_MOST_TABULATED = 10**7
#: How far ahead the end of an open-ended run with such a schedule is looked for at a time.
_HORIZON = 1 << 10
#: How far one example moves the noisy count of an adaptive bound, in which each counts 1/2 or -1/2,
#: where it moves the gradient's sum by C. Under "replace" the accountant doubles both. Under
#: "zero_out" the emptied example keeps its place, and its norm of 0 lies below every bound.
_COUNT_CHANGE = {"add_or_remove": 0.5, "replace": 0.5, "zero_out": 1.0}


def accounted_noise(
    plan: PrivacyPlan, noise_multiplier: float, expected_batch_size: float, times: int = 1
) -> float:
    """Noise multiplier of the one Gaussian that stands for all that is released on one draw.

    Gaussian releases on one draw, each of them adaptive to those before, cost what one Gaussian
    costs whose inverse variances add up. With an adaptive bound the count below it is released
    beside the gradient, with the noise multiplier of `count_noise`.

    Args:
        plan: the run.
        noise_multiplier: of the gradient, >= 0.
        expected_batch_size: of the step.
        times: how often something was released on this draw (a step run again counts again).

    Source: Andrew et al. 2021, theorem 1, solved for the whole; the draws of several steps
    interleave when steps are run again, which Vadhan & Wang 2021 ("Concurrent composition of
    differential privacy") and Vadhan & Zhang 2023 cover.
    """
    if plan.noise == "secure":
        noise_multiplier = accounted_noise_multiplier(noise_multiplier)
    precision = math.inf if noise_multiplier == 0 else noise_multiplier**-2.0
    if isinstance(plan.max_grad_norm, AdaptiveNorm):
        precision += count_noise(plan, expected_batch_size) ** -2.0
    elif times == 1:
        return noise_multiplier
    return float((times * precision) ** -0.5)


def count_noise(plan: PrivacyPlan, expected_batch_size: float) -> float:
    """Noise multiplier of the count that a plan with an adaptive bound releases at a step.

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
    """What `accountant.step` is told of one release, see `accounted_noise`."""
    return {
        "noise_multiplier": accounted_noise(plan, noise_multiplier, expected_batch_size, times),
        "sample_rate": expected_batch_size / plan.num_examples,
        "sampler": plan.sampler,
        **plan.sizes,
    }


def account(plan: PrivacyPlan, stretches: Iterable[Stretch], accountant: str | None = None) -> Any:
    """An accountant that has seen (noise_multiplier, expected_batch_size, count) of a plan."""
    made = accountants.create(
        accountant or plan.accountant, neighboring_relation=plan.neighboring_relation
    )
    for noise, size, count in stretches:
        made.step(num_steps=count, **release(plan, noise, size))
    return made


def stretches(plan: PrivacyPlan, start: int, stop: int) -> list[Stretch]:
    """Distinct (noise_multiplier, expected_batch_size) of the steps start..stop-1, and counts.

    Raises:
        ValueError: a value is out of range, or a schedule that never settles is asked for more
            steps than can be looked at.
    """
    schedules = plan.noise_multiplier, plan.expected_batch_size
    settled = max(start, *(settles_at(schedule) for schedule in schedules))  # type: ignore[arg-type]
    tail = stop if settled >= stop else int(settled)
    if tail - start > _MOST_TABULATED:
        raise ValueError(
            f"{stop} steps of a schedule that changes at every step can't be accounted at once. "
            f"Expected at most {_MOST_TABULATED}, or a schedule that settles, such as 'linear'."
        )
    index = np.arange(start, tail + (stop > tail))  # with the first of the settled steps
    noise = plan.scheduled("noise_multiplier", index)
    size = plan.scheduled("expected_batch_size", index)
    counts = np.ones(index.size, dtype=np.int64)
    counts[tail - start :] = stop - tail
    pairs, place = np.unique(noise + 1j * size, return_inverse=True)
    totals = np.zeros(pairs.size, dtype=np.int64)
    np.add.at(totals, place, counts)
    return [(p.real, p.imag, n) for p, n in zip(pairs.tolist(), totals.tolist(), strict=True)]


def last_affordable(plan: PrivacyPlan, spent: Any, position: int) -> tuple[int | None, float]:
    """First step that may not run: the end of the plan, or of its target epsilon.

    Args:
        plan: the run.
        spent: accountant of what was released already; it is left as it is.
        position: the step that would be next.

    Returns:
        `(end, looked)`: the end, >= position, or None where none lies before the step `looked`,
        at which the question must be asked again.
    """
    target = plan.target_epsilon
    if target is None:
        return plan.num_steps, math.inf

    def affords(stop: int) -> bool:
        try:
            ahead = stretches(plan, position, stop)
        except (IndexError, ValueError):  # a schedule that has left its range by then
            return False
        trial = spent.copy()
        for noise, size, count in ahead:
            trial.step(num_steps=count, **release(plan, noise, size))
        return bool(trial.get_epsilon(delta=plan.delta) <= target)

    if plan.num_steps is not None:
        stop = plan.num_steps
        end = stop if stop <= position or affords(stop) else _bisect(affords, position, stop)
        return end, math.inf
    schedules = plan.noise_multiplier, plan.expected_batch_size
    settles = all(settles_at(schedule) < math.inf for schedule in schedules)  # type: ignore[arg-type]
    ahead, most = 1, _MOST_STEPS if settles else _HORIZON
    while affords(position + ahead):
        if ahead == most:  # a schedule to be looked at again, or a release without cost
            return None, position + most if not settles else math.inf
        ahead *= 2
    return _bisect(affords, position, position + ahead), math.inf


def _bisect(affords: Callable[[int], bool], good: int, bad: int) -> int:
    """The largest stop that is afforded, where `good` counts as one and `bad` is none."""
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if affords(middle) else (good, middle)
    return good


def calibrated_noise(draft: PrivacyPlan, target_epsilon: float) -> float:
    """Noise multiplier with which the whole plan spends at most `target_epsilon`.

    Raises:
        ValueError: the plan has no end, or its count of small gradients alone spends too much.
    """
    if draft.num_steps is None:
        raise ValueError("num_steps is None. Expected a number of steps to calibrate for.")
    sizes = [(size, count) for _, size, count in stretches(draft, 0, draft.num_steps)]
    _require_count_noise(draft, target_epsilon, sizes)

    def spent(noise: float) -> float:
        made = account(draft, [(noise, size, count) for size, count in sizes])
        return float(made.get_epsilon(delta=draft.delta))

    return smallest_scale(spent, *target(target_epsilon, draft.delta))


def _require_count_noise(
    draft: PrivacyPlan, target_epsilon: float, sizes: list[tuple[float, int]]
) -> None:
    """Refuse an adaptive bound whose noisy count alone spends the target.

    Raises:
        ValueError: it does.
    """
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
    """An accountant that has seen the releases of a ledger.

    Args:
        plan: the run that made them.
        releases: entries of `Ledger.entries`; several of one step are of one draw.
        accountant: its name, or None for the plan's.

    Raises:
        AccountingError: a step was run again under balls-in-bins sampling, whose cost is unknown.
    """
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
    made = account(plan, _runs(plan, sorted(times) if passes else once), accountant)
    for step, count in again.items():
        noise, size = plan.noise_multiplier_at(step), plan.expected_batch_size_at(step)
        if passes:  # no amplification: each further release is a Gaussian of its own
            extra = accounted_noise(plan, noise, size)
            made.step(noise_multiplier=extra, sample_rate=1.0, num_steps=count - 1)
        else:
            made.step(**release(plan, noise, size, count))
    return made


def _runs(plan: PrivacyPlan, steps: list[int]) -> list[Stretch]:
    """The stretches of some steps, in increasing order."""
    if not steps:
        return []
    index = np.asarray(steps)
    breaks = np.flatnonzero(np.diff(index) != 1) + 1
    return [
        stretch
        for piece in np.split(index, breaks)
        for stretch in stretches(plan, int(piece[0]), int(piece[-1]) + 1)
    ]
