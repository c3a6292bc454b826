# SPDX-License-Identifier: Apache-2.0
"""What independent noise, windows, bands and buffers would give for one plan."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from dualdp.plan.accounting import constant_target
from dualdp.plan.correlated.optimise import SIZES, optimise
from dualdp.plan.correlated.strategies import Strategy, identity
from dualdp.plan.plan import PrivacyPlan, require_plan
from dualdp.plan.samplers import num_batches

#: Family, number of weights or buffers, sampler; a band has as many classes as weights.
CANDIDATES = (
    *(("window", bands, "fixed_order") for bands in (2, 4, 8)),
    *(("window", bands, "balls_in_bins") for bands in (4, 8)),
    *(("band", bands, "cyclic_poisson") for bands in (4, 8, 16, 32)),
    ("blt", 3, "fixed_order"),
)
_CLEARLY = 0.97  # of the noise of independent noise: less is worth a change of the sampler


class Option(NamedTuple):
    """One kind of noise for the plan, calibrated to its (epsilon, delta)."""

    name: str  # such as "band of 8"
    sampler: str
    noise_multiplier: float
    error: float  # see `Advice`
    relative_error: float  # to that of independent noise under Poisson sampling
    plan: PrivacyPlan  # the plan of a new run


@dataclass(frozen=True)
class Advice:
    """Options for one plan, the least error first, all at the same (epsilon, delta).

    `error` is the root mean square over the steps of the noise, per coordinate, in the sum of all
    updates so far, each divided by the expected batch size: for SGD with learning rate 1 the
    distance between the model and the one without noise. For other optimizers it is a guide.
    """

    options: tuple[Option, ...]
    epsilon: float
    delta: float

    @property
    def verdict(self) -> str:
        """One sentence: which of them to take."""
        best = self.options[0]
        independent = next(o for o in self.options if not o.plan.is_correlated)
        if best.relative_error > _CLEARLY * independent.relative_error:
            return (
                f"Independent noise with sampler={independent.sampler!r} (DP-SGD): no correlated "
                f"noise here is clearly less at epsilon={self.epsilon:.3g}."
            )
        share = 1 - best.relative_error / independent.relative_error
        return (
            f"The {best.name} with sampler={best.sampler!r}: {share:.0%} less noise in the model "
            f"than DP-SGD at epsilon={self.epsilon:.3g}."
        )

    def __str__(self) -> str:
        """Return the table and the verdict as text."""
        head = f"{'noise':<14}{'sampler':<17}{'noise multiplier':>17}{'error':>11}{'relative':>10}"
        lines = [head]
        for o in self.options:
            numbers = f"{o.noise_multiplier:>17.4g}{o.error:>11.3g}{o.relative_error:>10.2f}"
            lines.append(f"{o.name:<14}{o.sampler:<17}{numbers}")
        return "\n".join([*lines, self.verdict])


def advise(plan: PrivacyPlan) -> Advice:
    """Compare kinds of noise for a plan: the same data, batches, steps, C, epsilon and delta.

    Args:
        plan: `PrivacyPlan` with a constant batch size and a number of steps; its epsilon is the
            target if it has one, else what the whole plan spends.

    Raises:
        ValueError: a setting for which correlated noise is refused, such as an adaptive bound.

    Guarantees:
        Every option spends at most the plan's epsilon.  [test_advice_is_at_one_epsilon]

    The noise is computed, not measured: at a small epsilon and with many participations
    independent noise is often the best, and the advice says so.
    """
    require_plan(plan)
    target, steps = constant_target(plan), plan.num_steps or 0
    found = [_option(plan, target, "independent", None, "poisson", None)]
    batches = num_batches(plan.num_examples, plan.expected_batch_size_at(0))
    for family, size, sampler in CANDIDATES:
        cyclic = sampler == "cyclic_poisson"
        gap = size if cyclic else batches
        too_many = cyclic and gap * plan.expected_batch_size_at(0) > plan.num_examples
        if too_many or size > steps:
            continue
        # Columns of a band do not overlap under cyclic Poisson: one participation decides.
        sizes: dict[str, Any] = {SIZES[family]: size}
        if not cyclic:
            sizes |= {"min_separation": gap, "max_participations": None}
        strategy = optimise(family=family, num_steps=steps, **sizes)
        name = f"{family} of {size}"
        found.append(_option(plan, target, name, strategy, sampler, gap if cyclic else None))
    scored = (option._replace(relative_error=option.error / found[0].error) for option in found)
    return Advice(tuple(sorted(scored, key=lambda o: o.error)), target, plan.delta)


def _option(
    plan: PrivacyPlan,
    target: float,
    name: str,
    strategy: Strategy | None,
    sampler: str,
    min_separation: int | None,
) -> Option:
    """The plan with this noise and sampler, calibrated to the target."""
    own = ("noise_multiplier", "target_epsilon", "max_batch_size", "seed", "key")
    kept = {f.name: getattr(plan, f.name) for f in fields(plan) if f.init and f.name not in own}
    kept |= {"correlation": strategy, "sampler": sampler, "min_separation": min_separation}
    kept |= {"epochs_per_assignment": None}
    fresh = PrivacyPlan.calibrate(target_epsilon=target, **kept)
    errors = (strategy or identity()).mean_error(plan.num_steps or 0)
    error = fresh.draw_stddev(0, fresh.max_grad_norm_at(0)) * math.sqrt(errors)
    error /= fresh.expected_batch_size_at(0)
    return Option(name, sampler, fresh.noise_multiplier_at(0), error, 1.0, fresh)
