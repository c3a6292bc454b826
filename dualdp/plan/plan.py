# SPDX-License-Identifier: Apache-2.0
"""`PrivacyPlan`: the settings of one private run, for both backends."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dualdp import _validate, accountants, mechanisms
from dualdp._validate import AccountingError, newer
from dualdp.plan import accounting, schedules
from dualdp.plan.accounting import MOST_TABULATED, Cost
from dualdp.plan.batches import drawn_indices, drawn_rows
from dualdp.plan.clipping import CLIPPING
from dualdp.plan.correlated import strategies
from dualdp.plan.correlated.strategies import Strategy
from dualdp.plan.samplers import SAMPLERS
from dualdp.plan.schedules import NAMES, AdaptiveNorm, tabulated
from dualdp.plan.units import UserRows, user_rows
from dualdp.randomness import SegmentBits
from dualdp.randomness.bits import checked_seed

NOISE = ("fast", "portable", "secure")
ON_BUDGET = ("raise", "stop")
UNITS = ("example", "user")
_SCHEDULED = ("noise_multiplier", "max_grad_norm", "expected_batch_size")
_FORMAT = "dualdp_plan"
_VERSION = 3
_BROKEN = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


@dataclass(frozen=True, kw_only=True)
class PrivacyPlan(Cost):
    """Settings that decide what a run draws and what it costs.

    They may be published, apart from a `seed`: whoever reads that can take the noise away.

    Args:
        num_examples: size of the data set, in units.
        expected_batch_size: sample rate times num_examples, > 0; sums are divided by it, never by
            the drawn size.
        num_steps: number of noise releases; None for an open-ended run.
        noise_multiplier: noise standard deviation / max_grad_norm, >= 0.
        max_grad_norm: C > 0, the L2 bound on one example's gradient; for clipping="per_layer" also
            a mapping from group to bound, with C the root of the sum of squares.
        delta: float in (0, 1).
        sampler: one of `dualdp.plan.samplers.SAMPLERS`.
        neighboring_relation: one of `dualdp.mechanisms.RELATIONS`.
        clipping: one of `dualdp.plan.clipping.CLIPPING`.
        noise: "fast" (the framework's generator with our keys), "portable" (the same normals in
            both backends) or "secure" (a cryptographic generator and a public grid).
        accountant: one of `dualdp.accountants.names()`.
        physical_batch_size: number of examples processed at once; None for the whole draw.
        max_batch_size: largest batch for `sampler="truncated_poisson"`.
        group_shares: mapping from group to bound / C, for clipping="per_layer" with a schedule of
            C.
        target_epsilon: largest epsilon at `delta`; a step that would exceed it is refused.
        on_budget: "raise" or "stop": a step past the target raises an error or ends the loader.
        seed: int below 2^128 for the same batches and noise each time, for tests, comparisons and
            papers: epsilon is then that of a run whose noise is secret. None for fresh bits of the
            operating system.
        correlation: strategy of `dualdp.correlated`: the noise of a step also takes back noise of
            earlier steps. None for independent noise. The noise multiplier is then that of the
            whole run (`sensitivity`), and the sampler "fixed_order", "cyclic_poisson" (for a band)
            or "balls_in_bins".
        min_separation: number of classes of `sampler="cyclic_poisson"`.
        epochs_per_assignment: passes for which `sampler="balls_in_bins"` keeps an assignment; None
            for 1, and with a correlation for all.
        unit: "example", or "user": epsilon then protects all rows of a user. Batches, sample rates
            and num_examples count units.
        rows_per_unit: K; with unit="user", where it is required, the most rows of a user in one
            step; with unit="example" an item of the data holds K rows, such as a preference pair,
            which are drawn, clipped and masked as one example.

    noise_multiplier, max_grad_norm and expected_batch_size accept a number, a schedule of
    `dualdp.schedules` or a callable of the step. Read, they are the number or the schedule.
    max_grad_norm also accepts `AdaptiveNorm`, whose later values are known to the ledger only.

    Guarantees:
        Schedules and epsilon are pure functions of (plan, step), and with a seed the batches.
            [test_plan_is_a_pure_function]

    Source: Abadi et al. 2016, Algorithm 1.
    """

    clipping: str = "flat"
    physical_batch_size: int | None = None
    group_shares: Mapping[str, float] | None = None
    on_budget: str = "raise"
    unit: str = "example"
    rows_per_unit: int | None = None

    def __post_init__(self) -> None:
        put = partial(object.__setattr__, self)
        put("num_examples", _validate.integer("num_examples", self.num_examples, minimum=1))
        if self.num_steps is not None:
            put("num_steps", _validate.integer("num_steps", self.num_steps, maximum=MOST_TABULATED))
        for name in _SIZES:
            if getattr(self, name) is not None:
                put(name, _validate.integer(name, getattr(self, name), minimum=1))
        norm, shares = split_bounds(self.max_grad_norm, self.group_shares, self.clipping)
        put("max_grad_norm", norm)
        put("group_shares", shares)
        for name in _SCHEDULED:
            setting = getattr(self, name)
            if callable(setting):
                put(name, tabulated(name, setting, self.num_steps))
            elif type(setting) not in NAMES:
                put(name, _validate.real(name, setting))
            is_adaptive = isinstance(setting, AdaptiveNorm)
            if is_adaptive and name != "max_grad_norm":
                raise ValueError(
                    f"{name} is an AdaptiveNorm. Expected a number or another schedule; only "
                    "max_grad_norm follows a quantile of the norms."
                )
            only_first = is_adaptive or self.is_constant(name) or self.num_steps is None
            self.values(name, np.arange(1 if only_first else self.num_steps or 0))
        put("delta", _validate.open_probability("delta", self.delta))
        if self.delta * self.num_examples > 1 + 1e-9:  # one published at random is within it
            said = f"delta={self.delta:g} is above 1 / num_examples. Expected less."
            if self.delta > 1e-3:  # below it is a habit with large data sets
                raise ValueError(said)
            warnings.warn(said, stacklevel=4)
        if self.target_epsilon is not None:
            put("target_epsilon", _validate.positive("target_epsilon", self.target_epsilon))
        for name, table in _CHOICES.items():
            _validate.choice(name, getattr(self, name), table)
        accountants.require_bound(self.accountant)
        if self.seed is not None:
            put("seed", checked_seed(self.seed))
        self._check_together()

    def _check_together(self) -> None:
        """Raise on settings that do not go together, or whose cost is not known."""
        if self.unit == "user" and self.rows_per_unit is None:
            raise ValueError(
                "rows_per_unit is missing beside unit='user'. Expected the most rows of a user "
                "that one step uses."
            )
        if not isinstance(self.correlation, Strategy | None):
            raise TypeError(
                f"correlation is {_validate.kind(self.correlation)}. Expected a strategy of "
                "dualdp.correlated, or None."
            )
        if self.noise == "secure" and self.seed is not None:
            raise ValueError(
                f"seed={self.seed} with noise='secure'. Expected no seed: noise that anyone can "
                "draw again can be taken away."
            )
        self.check()
        # An accountant or relation without a bound for one step is refused now, not after a run.
        if not (self.is_patterned and self.sampler == "balls_in_bins"):  # whose bounds take long
            steps = min(self.num_steps or 0, 1) if self.is_patterned else 1
            accounting.spent_by(self, [accounting.Segment(0, steps)])

    def clipping_bounds(self, max_grad_norm: float) -> float | dict[str, float]:
        """Return the argument of the clipper: C, or a mapping from group to bound."""
        if self.group_shares is None:
            return max_grad_norm
        return {group: share * max_grad_norm for group, share in self.group_shares.items()}

    def sample_rate_at(self, step: int) -> float:
        """Return the probability that one example joins the logical batch of a step."""
        return self.expected_batch_size_at(step) / self.num_examples

    def draw_stddev(self, step: int, max_grad_norm: float) -> float:
        """Return the standard deviation of the z of a step with this bound, gradient units."""
        return self.noise_multiplier_at(step) * self.sensitivity * max_grad_norm

    def noise_stddev(self, step: int) -> float:
        """Return the standard deviation of the noise in the SUM of a step, gradient units.

        That of z, times the root of sum_j w_j^2 over the steps so far if the noise is correlated.
        """
        drawn = self.draw_stddev(step, self.max_grad_norm_at(step))
        if self.correlation is None:
            return drawn
        weights = self.correlation.inverse(step + 1)
        return drawn * math.sqrt(float(weights @ weights))

    @property
    def sample_rate(self) -> float:
        """Sample rate of a run with a constant batch size.

        Raises:
            ValueError: the batch size follows a schedule.
        """
        if not self.is_constant("expected_batch_size"):
            raise ValueError(
                "expected_batch_size follows a schedule, so there is no one sample_rate. Use "
                "plan.sample_rate_at(step)."
            )
        return self.sample_rate_at(0)

    def batch_indices(self, step: int) -> NDArray[np.int64]:
        """Return the examples of the logical batch of a step: (k,) increasing int64.

        Raises:
            ValueError: the plan has no seed, so that only a loader knows its batches.
        """
        return drawn_indices(self, self._seeded_bits(), _validate.integer("step", step))

    def _seeded_bits(self) -> SegmentBits:
        if self.seed is None:
            raise ValueError(
                "The plan has no seed, so its batches are drawn anew by each run. Expected the "
                "loader of make_private or make_loader, whose batches (loader.indices()) are "
                "those that epsilon holds for; or seed=, for tests and comparisons."
            )
        return SegmentBits(self.seed)

    @property
    def rows_per_item(self) -> int | None:
        """K where an item of the data holds K rows and is one example; None for one row."""
        return self.rows_per_unit if self.unit == "example" else None

    def row_indices(
        self, step: int, users: ArrayLike | UserRows | None = None
    ) -> NDArray[np.int64]:
        """Return the rows of the logical batch of a step, unit by unit: (m,) int64.

        `dualdp.units.draw_rows` gives the same rows as blocks of K, with weights.

        Args:
            step: int.
            users: (rows,) integers or `UserRows`, the user of each row; None if unit u has the rows
                u K .. u K + K - 1.

        Raises:
            ValueError: the plan has no seed, or the ids name another number of users than
                num_examples.
        """
        units, most = self.batch_indices(step), self.rows_per_unit or 1
        if users is None:
            return (units[:, None] * most + np.arange(most)).reshape(-1)
        owned = user_rows(users)
        require_size(self, owned.num_users)
        drawn = drawn_rows(self, self._seeded_bits(), step, units, owned, most)
        return drawn.rows[drawn.weights > 0]

    def epsilon(self, step: int | None = None) -> float:
        """Return an upper bound on epsilon after `step` releases, at the plan's delta.

        It is that of one segment, a run that was never resumed; `Ledger.get_epsilon` is that of the
        releases on record.

        Args:
            step: number of releases; None for the whole plan.

        Raises:
            ValueError: the run is open-ended and no step was given, or the step is past the plan.
        """
        if step is None:
            step = self.num_steps
        if step is None:
            raise ValueError("num_steps is None, so the run has no end. Pass step=.")
        step = _validate.integer("step", step)
        if self.num_steps is not None and step > self.num_steps:
            raise ValueError(
                f"step={step} is past the plan's num_steps={self.num_steps}. Expected at most that."
            )
        return accounting.epsilon(self, [accounting.Segment(0, step)])

    @classmethod
    def calibrate(cls, *, target_epsilon: float, **arguments: Any) -> Self:
        """Return the plan whose whole run spends at most `target_epsilon`.

        Args:
            target_epsilon: float, at the plan's delta.
            **arguments: arguments of `PrivacyPlan`, without noise_multiplier.

        Raises:
            ValueError: noise_multiplier was given too, or the run is open-ended.
        """
        if "noise_multiplier" in arguments:
            raise ValueError(
                "noise_multiplier and target_epsilon came together. Expected one of the two; "
                "calibrate finds the noise multiplier."
            )
        draft = cls(noise_multiplier=1.0, target_epsilon=target_epsilon, **arguments)
        steps = _validate.integer("num_steps", draft.num_steps, minimum=1)
        noise = accounting.scale_within(draft, [], 0, steps, target_epsilon)
        return cls(noise_multiplier=noise, target_epsilon=target_epsilon, **arguments)

    def to_json(self) -> str:
        """Return the plan as JSON."""
        data: dict[str, Any] = {_FORMAT: _VERSION}
        data |= {item.name: getattr(self, item.name) for item in fields(self)}
        data |= {name: schedules.to_json(data[name]) for name in _SCHEDULED}
        if self.correlation is not None:
            data["correlation"] = strategies.to_json(self.correlation)
        return json.dumps(data, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read the JSON of `to_json`.

        Raises:
            ValueError: not a plan, or one of another version.
        """
        version = None
        try:
            data = json.loads(text)
            version = data.pop(_FORMAT)
            if version != _VERSION:
                raise ValueError(f"its version is {version!r}")
            for name in _SCHEDULED:
                data[name] = schedules.from_json(name, data[name])
            if data["correlation"] is not None:
                data["correlation"] = strategies.from_json("correlation", data["correlation"])
            if unknown := set(data) ^ {item.name for item in fields(cls)}:
                raise ValueError(f"unknown or missing fields {sorted(unknown)}")
            return cls(**data)
        except _BROKEN as error:
            if isinstance(version, int) and version != _VERSION:
                raise ValueError(newer("The text", "plan", version, _VERSION)) from error
            raise ValueError(
                f"The text is not a plan ({error}). Expected what PrivacyPlan.to_json wrote."
            ) from error


def split_bounds(
    max_grad_norm: Any, shares: Mapping[str, float] | None, clipping: str
) -> tuple[Any, dict[str, float] | None]:
    """Return group bounds as one C and the share of each group in C.

    `shares` are scaled so that their squares add up to 1.

    Returns:
        `(C, shares)`; C unchanged, or the root of the sum of the groups' squared bounds.
    """
    if not isinstance(max_grad_norm, Mapping) and shares is None:
        return max_grad_norm, None
    both = isinstance(max_grad_norm, Mapping) and shares is not None
    if clipping != "per_layer" or both:
        also = " and group_shares=" if both else ""
        raise ValueError(
            f"Bounds of groups came with clipping={clipping!r}{also}. Expected one max_grad_norm; "
            "or, with clipping='per_layer', a mapping or group_shares."
        )
    name = "max_grad_norm" if shares is None else "group_shares"
    given = max_grad_norm if shares is None else shares
    if not isinstance(given, Mapping) or not given:
        raise TypeError(f"{name}={given!r} holds no group. Expected a mapping group -> number.")
    bounds = {str(g): _validate.positive(f"{name}[{g!r}]", given[g]) for g in given}
    whole = math.hypot(*bounds.values())
    if abs(whole - 1) < 1e-12:  # keeps shares that are scaled already bit for bit
        whole = 1.0
    scaled = {group: bound / whole for group, bound in bounds.items()}
    return (whole if shares is None else max_grad_norm), scaled


def require_plan(plan: object) -> None:
    """Raise unless this is a plan."""
    if not isinstance(plan, PrivacyPlan):
        raise TypeError(f"plan is {_validate.kind(plan)}. Expected a dualdp.PrivacyPlan.")


def checked_step(plan: PrivacyPlan, step: int) -> int:
    """Return the step as an integer, if the plan has it."""
    number = _validate.integer("step", step)
    if plan.num_steps is not None and number >= plan.num_steps:
        raise AccountingError(
            f"step={number} is past the plan's num_steps={plan.num_steps}. Plan more steps, or "
            "num_steps=None for an open-ended run."
        )
    return number


def require_units(plan: PrivacyPlan, num_rows: int, users: UserRows | None) -> None:
    """Raise unless a loader can draw the units of the plan from data of `num_rows` rows.

    `users` has the rows of each user, for unit="user", and is None for unit="example".
    """
    if users is not None and plan.unit == "example":
        raise ValueError(
            "users came for a plan with unit='example', whose epsilon is that of one row. Expected "
            "unit='user' and rows_per_unit=, the most rows of a user in one step, with "
            f"num_examples={users.num_users} users; or no users."
        )
    if users is None and plan.unit == "user":
        raise ValueError(
            "The plan has unit='user', but users is missing. Expected users=, the id of the user "
            "of each row of the data, in make_private, make_loader or resume; in a loop without "
            "an engine, clipped_grad_sum(rows_per_unit=) takes the rows of dualdp.units.draw_rows."
        )
    require_size(plan, num_rows if users is None else users.num_users)


def require_size(plan: PrivacyPlan, num_examples: int) -> None:
    """Raise unless the data have as many examples, or users, as the plan."""
    if num_examples != plan.num_examples:
        raise ValueError(
            f"The data has {num_examples} {plan.unit}s but the plan has num_examples="
            f"{plan.num_examples}. Both must be the same, or epsilon is not true: make a plan for "
            "these data."
        )


_CHOICES = {
    "sampler": SAMPLERS,
    "neighboring_relation": mechanisms.RELATIONS,
    "clipping": CLIPPING,
    "noise": NOISE,
    "on_budget": ON_BUDGET,
    "unit": UNITS,
}
_SIZES = (
    *("physical_batch_size", "max_batch_size", "min_separation", "epochs_per_assignment"),
    "rows_per_unit",
)
