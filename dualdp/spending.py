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
from dualdp.randomness.secure import accounted_noise_multiplier
from dualdp.schedules import AdaptiveNorm, Constant

if TYPE_CHECKING:
    from dualdp.plan import PrivacyPlan

Stretch = tuple[float, float, int]
_MOST_STEPS = 1 << 40


def accounted_noise(
    plan: PrivacyPlan, noise_multiplier: float, expected_batch_size: float, times: int = 1
) -> float:
    """Noise multiplier of the one Gaussian that stands for all that is released on one draw.

    Gaussian releases on one draw, each of them adaptive to those before, cost what one Gaussian
    costs whose inverse variances add up. With an adaptive bound the count below it is released
    beside the gradient: less one half for each example it has sensitivity 1/2, so that noise of
    standard deviation s is a multiplier of 2 s.

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
        precision += (2 * plan.max_grad_norm.count_stddev(expected_batch_size)) ** -2.0
    elif times == 1:
        return noise_multiplier
    return float((times * precision) ** -0.5)


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
    """Distinct (noise_multiplier, expected_batch_size) of the steps start..stop-1, and counts."""
    if isinstance(plan.noise_multiplier, Constant) and isinstance(
        plan.expected_batch_size, Constant
    ):
        same = plan.noise_multiplier.value, plan.expected_batch_size.value, stop - start
        return [same] if stop > start else []
    steps = np.arange(start, stop)
    noise, size = plan.noise_multiplier.at(steps), plan.expected_batch_size.at(steps)  # type: ignore[union-attr]
    pairs, counts = np.unique(np.stack([noise, size], axis=1), axis=0, return_counts=True)
    return [(float(n), float(s), int(c)) for (n, s), c in zip(pairs, counts, strict=True)]


def last_affordable(plan: PrivacyPlan, spent: Any, position: int) -> int | None:
    """First step that may not run: the end of the plan, or of its target epsilon.

    Args:
        plan: the run.
        spent: accountant of what was released already; it is left as it is.
        position: the step that would be next.

    Returns:
        The end, >= position; None when there is none.
    """
    target = plan.target_epsilon
    if target is None:
        return plan.num_steps

    def affords(stop: int) -> bool:
        trial = spent.copy()
        for noise, size, count in stretches(plan, position, stop):
            trial.step(num_steps=count, **release(plan, noise, size))
        return bool(trial.get_epsilon(delta=plan.delta) <= target)

    if plan.num_steps is not None:
        stop = plan.num_steps
        return stop if stop <= position or affords(stop) else _bisect(affords, position, stop)
    ahead = 1
    while affords(position + ahead):
        ahead *= 2
        if ahead > _MOST_STEPS:
            return None  # a release without cost, such as one of infinite noise
    return _bisect(affords, position, position + ahead)


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
    share = accounted_noise_multiplier(1.0) if draft.noise == "secure" else 1.0
    noise = get_schedule_scale(
        target_epsilon=target_epsilon,
        target_delta=draft.delta,
        steps=[(1.0, size / draft.num_examples, count) for size, count in sizes],
        sampler=draft.sampler,
        accountant=draft.accountant,
        neighboring_relation=draft.neighboring_relation,
        **draft.sizes,
    )
    adaptive = isinstance(draft.max_grad_norm, AdaptiveNorm)
    if noise == 0 or not (adaptive or share < 1):
        return noise
    if isinstance(draft.max_grad_norm, AdaptiveNorm):
        counts = min(2 * draft.max_grad_norm.count_stddev(size) for size, _ in sizes)
        if counts <= noise:
            raise ValueError(
                f"The noisy count of the adaptive max_grad_norm has noise multiplier {counts:.4g}, "
                f"but target_epsilon={target_epsilon} needs {noise:.4g} for all that is released. "
                "Expected a larger count_noise_multiplier, or a larger target."
            )
        noise = (noise**-2.0 - counts**-2.0) ** -0.5
    # Rounded up, so that the whole never has less noise than was found.
    return float(noise / share) * (1 + 1e-12)


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
