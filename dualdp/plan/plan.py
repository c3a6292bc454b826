# SPDX-License-Identifier: Apache-2.0
"""`PrivacyPlan`: the settings of one private run, for both backends."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import InitVar, dataclass, field, fields
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from dualdp import _validate, accountants, mechanisms
from dualdp._validate import AccountingError, newer
from dualdp.plan import accounting, participation, schedules
from dualdp.plan.clipping import CLIPPING, split_bounds
from dualdp.plan.correlated import strategies
from dualdp.plan.correlated.strategies import Strategy
from dualdp.plan.samplers import SAMPLERS, WHOLE_PASS, Draw
from dualdp.plan.units import compare
from dualdp.plan.units.rows import UserRows, draw_rows, user_rows
from dualdp.randomness import (
    LockedKey,
    RootKey,
    bits,
    fold_in,
    grid_noise,
    root_key,
    run_registry,
    unlock,
)

if TYPE_CHECKING:
    from dualdp.randomness.run_registry import HasRecord

NOISE = ("fast", "portable", "secure")
ON_BUDGET = ("raise", "stop")
UNITS = ("example", "user")
Scheduled = float | schedules.Schedule | Callable[[int], float]
_SCHEDULED = ("noise_multiplier", "max_grad_norm", "expected_batch_size")
_FORMAT = "dualdp_plan"
_VERSION = 2
_MOST_STEPS = 10**7


@dataclass(frozen=True, kw_only=True)
class PrivacyPlan:
    """Settings that determine the batches, the noise and the epsilon of a run.

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
        seed: int for a run that is reproducible without its key file, for tests and comparisons
            only; None draws the key from the operating system.
        key: root key or path of its file, to reuse an existing key.
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
        Batches, schedules, keys and epsilon are pure functions of (plan, key, step).
            [test_plan_is_a_pure_function]
        Neither `repr` nor `to_json` holds the key.  [test_the_key_is_never_published]

    Source: Abadi et al. 2016, Algorithm 1.
    """

    num_examples: int
    expected_batch_size: Scheduled
    num_steps: int | None
    noise_multiplier: Scheduled
    max_grad_norm: Scheduled | Mapping[str, float]
    delta: float
    sampler: str = "poisson"
    neighboring_relation: str = "add_or_remove"
    clipping: str = "flat"
    noise: str = "fast"
    accountant: str = "pld"
    physical_batch_size: int | None = None
    max_batch_size: int | None = None
    group_shares: Mapping[str, float] | None = None
    target_epsilon: float | None = None
    on_budget: str = "raise"
    seed: int | None = None
    key: InitVar[RootKey | LockedKey | str | os.PathLike[str] | None] = None
    correlation: Strategy | None = None
    min_separation: int | None = None
    epochs_per_assignment: int | None = None
    unit: str = "example"
    rows_per_unit: int | None = None
    root: RootKey | LockedKey = field(init=False)
    has_drawn = False  # True once a batch was drawn

    def __post_init__(self, key: RootKey | LockedKey | str | os.PathLike[str] | None) -> None:
        put = partial(object.__setattr__, self)
        put("num_examples", _validate.integer("num_examples", self.num_examples, minimum=1))
        if self.num_steps is not None:
            most = _MOST_STEPS  # the schedules are tabulated
            put("num_steps", _validate.integer("num_steps", self.num_steps, maximum=most))
        for name in _SIZES:
            if getattr(self, name) is not None:
                put(name, _validate.integer(name, getattr(self, name), minimum=1))
        norm, shares = split_bounds(self.max_grad_norm, self.group_shares, self.clipping)
        put("max_grad_norm", norm)
        put("group_shares", shares)
        for name in _SCHEDULED:
            put(name, self._checked_schedule(name, getattr(self, name)))
        put("delta", _validate.open_probability("delta", self.delta))
        if self.target_epsilon is not None:
            put("target_epsilon", _validate.positive("target_epsilon", self.target_epsilon))
        for name, table in _CHOICES.items():
            _validate.choice(name, getattr(self, name), table)
        _validate.choice("accountant", self.accountant, accountants.names())
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
        self._check_sampler()
        root = root_key(key, self.seed)
        if self.noise == "secure" and root.seed is not None:
            raise ValueError(
                f"seed={root.seed} with noise='secure'. Expected no seed: a key that anyone can "
                "guess takes the noise away."
            )
        put("root", root)
        put("seed", root.seed)

    def _checked_schedule(self, name: str, value: Scheduled) -> schedules.Schedule:
        """Schedule of one setting, with its planned values validated."""
        schedule = schedules.as_schedule(name, value, self.num_steps)
        adaptive = isinstance(schedule, schedules.AdaptiveNorm)
        if adaptive and name != "max_grad_norm":
            raise ValueError(
                f"{name} is an AdaptiveNorm. Expected a number or another schedule; only "
                "max_grad_norm follows a quantile of the norms."
            )
        constant = isinstance(schedule, schedules.Constant)
        first_only = adaptive or constant or self.num_steps is None
        planned = np.arange(1 if first_only else self.num_steps or 0)
        self._require_in_range(name, planned, schedule.at(planned), is_constant=constant)
        return schedule

    def _require_in_range(
        self, name: str, steps: NDArray[np.int64], values: Any, *, is_constant: bool = False
    ) -> None:
        """Raise for the first step whose scheduled value is out of range."""
        values = np.asarray(values, dtype=np.float64)
        least = ">= 0" if name == "noise_multiplier" else "> 0"
        low = values >= 0 if least == ">= 0" else values > 0
        possible = low & np.isfinite(values)
        fits = values <= self.num_examples if name == "expected_batch_size" else possible
        wrong = np.flatnonzero(~(possible & fits))
        if not wrong.size:
            return
        first = int(wrong[0])
        named = f"{name}={float(values[first])}{'' if is_constant else f' at step {steps[first]}'}"
        if possible[first]:
            raise ValueError(
                f"{named} exceeds num_examples={self.num_examples}. Expected at most the whole "
                "data set."
            )
        end = "" if is_constant else "; end the run or the change of the schedule before that step"
        raise ValueError(f"{named} is out of range. Expected a finite number {least}{end}.")

    def _check_sampler(self) -> None:
        """Raise on settings that the accounting of the sampler does not cover."""
        if (self.max_batch_size is not None) != (self.sampler == "truncated_poisson"):
            raise ValueError(
                f"max_batch_size={self.max_batch_size} with sampler={self.sampler!r}. Expected it "
                "with sampler='truncated_poisson', and only there."
            )
        scheduled = [
            name
            for name in ("noise_multiplier", "expected_batch_size")
            if not self.is_constant(name)
        ]
        if self.sampler in WHOLE_PASS and scheduled:
            raise ValueError(
                f"{scheduled[0]} follows a schedule, but sampler={self.sampler!r} is accounted by "
                "whole passes. Expected a number, or sampler='poisson'."
            )
        size = self.expected_batch_size_at(0)
        if self.sampler == "fixed_size" and (scheduled[1:] or not size.is_integer()):
            raise ValueError(
                f"expected_batch_size={size} with sampler='fixed_size'. Expected one integer."
            )
        participation.check(self)
        if participation.is_patterned(self) and self.sampler == "balls_in_bins":
            participation.unit_sensitivity(self)  # several bounds, compared when asked for
        elif participation.is_patterned(self):
            accounting.spent_after(self, min(self.num_steps or 0, 1))
        else:
            accounting.account(self, [(self.noise_multiplier_at(0), size, 1)])

    def is_constant(self, name: str) -> bool:
        """Return True if noise_multiplier, max_grad_norm or expected_batch_size never changes."""
        return isinstance(getattr(self, name), schedules.Constant)

    def noise_multiplier_at(self, step: int) -> float:
        """Return noise standard deviation / max_grad_norm at a step."""
        return self._at("noise_multiplier", step)

    def max_grad_norm_at(self, step: int) -> float:
        """Return C at a step, gradient units."""
        return self._at("max_grad_norm", step)

    def clipping_bounds(self, max_grad_norm: float) -> float | dict[str, float]:
        """Return the argument of the clipper: C, or a mapping from group to bound."""
        if self.group_shares is None:
            return max_grad_norm
        return {group: share * max_grad_norm for group, share in self.group_shares.items()}

    def expected_batch_size_at(self, step: int) -> float:
        """Return the divisor of the sum of a step, in examples."""
        return self._at("expected_batch_size", step)

    def sample_rate_at(self, step: int) -> float:
        """Return the probability that one example joins the logical batch of a step."""
        return self.expected_batch_size_at(step) / self.num_examples

    @cached_property
    def sensitivity(self) -> float:
        """s: how many times more noise z has than noise_multiplier * max_grad_norm.

        For "fixed_order" the L2 sensitivity of the whole run to one example with gradients of norm
        1; for other samplers the largest column norm of C, 1 for independent noise.
        """
        return participation.unit_sensitivity(self)

    @cached_property
    def is_correlated(self) -> bool:
        """True if the noises of two steps are not independent."""
        return self.correlation is not None and self.correlation != strategies.identity()

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
    def is_adaptive(self) -> bool:
        """True if max_grad_norm is learned during the run."""
        return isinstance(self.max_grad_norm, schedules.AdaptiveNorm)

    @property
    def sample_rate(self) -> float:
        """Sample rate of a run with a constant batch size.

        Raises:
            ValueError: the batch size follows a schedule.
        """
        if not isinstance(self.expected_batch_size, schedules.Constant):
            raise ValueError(
                "expected_batch_size follows a schedule, so there is no one sample_rate. Use "
                "plan.sample_rate_at(step)."
            )
        return self.sample_rate_at(0)

    def _at(self, name: str, step: int) -> float:
        """Scheduled value at a step, validated: an open-ended schedule may leave its range."""
        schedule, step = getattr(self, name), _validate.integer("step", step)
        if isinstance(schedule, schedules.Constant):  # checked when the plan was made
            return float(schedule)
        return float(self.scheduled(name, np.asarray([step]))[0])

    def scheduled(self, name: str, steps: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the values of noise_multiplier, max_grad_norm or expected_batch_size at steps.

        Raises:
            ValueError: one is out of range; the step is named.
        """
        values = np.asarray(getattr(self, name).at(steps), dtype=np.float64)
        self._require_in_range(name, steps, values)
        return values

    def step_key(self, purpose: str, step: int, branch: int = 0) -> NDArray[np.uint32]:
        """Return the (2,) uint32 key of a step for a purpose of `randomness.PURPOSES`."""
        return self.root.require_secret().step_key(purpose, step, branch)

    def batch_indices(self, step: int) -> NDArray[np.int64]:
        """Return the examples of the logical batch of a step: (k,) increasing int64."""
        object.__setattr__(self, "has_drawn", True)
        draw = Draw(
            words_at=self._sampling_words,
            step=step,
            num_examples=self.num_examples,
            expected_batch_size=self.expected_batch_size_at(step),
            max_batch_size=self.max_batch_size,
            min_separation=self.min_separation or 1,
            epochs_per_assignment=self._kept_epochs,
        )
        return SAMPLERS[self.sampler](draw)

    @property
    def rows_per_item(self) -> int | None:
        """K where an item of the data holds K rows and is one example; None for one row."""
        return self.rows_per_unit if self.unit == "example" else None

    def row_indices(self, step: int, users: Any = None) -> NDArray[np.int64]:
        """Return the rows of the logical batch of a step, unit by unit: (m,) int64.

        `dualdp.units.draw_rows` gives the same rows as blocks of K, with weights.

        Args:
            step: int.
            users: (rows,) integers or `UserRows`, the user of each row; None if unit u has the rows
                u K .. u K + K - 1.

        Raises:
            ValueError: the ids name another number of users than num_examples.
        """
        units, most = self.batch_indices(step), self.rows_per_unit or 1
        if users is None:
            return (units[:, None] * most + np.arange(most)).reshape(-1)
        owned = user_rows(users)
        require_size(self, owned.num_users)
        drawn = draw_rows(self, step, units, owned, most)
        return drawn.rows[drawn.weights > 0]

    def compare_units(self, counts: Any) -> compare.UnitComparison:
        """Compare this plan with other ways to protect users; see `dualdp.units.compare_units`.

        Args:
            counts: (users,) integers, number of rows of each user.
        """
        return compare.compare_units(self, counts)

    def _sampling_words(self, step: int, stream: int) -> NDArray[np.uint64]:
        """(num_examples,) uniform 64-bit integers that decide which examples join a batch."""
        if self.noise == "secure":
            key = grid_noise.stream_key(self, "sampling", step)
            return grid_noise.words(key, self.num_examples, stream=stream)
        words = self.step_key("sampling", step)
        return bits(fold_in(words, stream) if stream else words, self.num_examples, width=64)

    def save_key(self, path: str | os.PathLike[str]) -> None:
        """Write the secret key to a new file, mode 0600, for a resume or another process."""
        root = self.root.require_secret()
        root.save(path)
        try:
            run_registry.mark_new_file(root)
        except BaseException:
            os.unlink(path)
            raise

    def claim(
        self,
        ledger: HasRecord | None = None,
        *,
        recorder: str = "claim",
        source: str = run_registry.OWN_STEP,
        resumed: bool = False,
        follows: bool = False,
    ) -> None:
        """Reserve the key for one run: a second run would repeat the noise of the first.

        Plans with a seed are for tests and comparisons, and may be run again. `recorder` names the
        caller that keeps the `ledger` of the run, and `source` the source of its noise, "" if
        `add_noise` or `noisy_mean` will be it. `resumed` is True for the same run, continued with
        its ledger, and `follows` if another process of the same group has begun the run.

        Raises:
            AccountingError: another run has the key, of this process, or of any that left a mark
                beside the key file or on this machine; or such a mark can't be written.
        """
        run_registry.begin(self, ledger, recorder, source=source, resumed=resumed, follows=follows)

    def epsilon(self, step: int | None = None) -> float:
        """Return an upper bound on epsilon after `step` releases, at the plan's delta.

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
        spent = accounting.spent_after(self, step)
        return float(spent.get_epsilon(delta=self.delta))

    @property
    def sizes(self) -> dict[str, int | None]:
        """Sizes that this sampler's accounting needs, by argument name of `accountant.step`."""
        if self.sampler == "balls_in_bins" and self._kept_epochs > 1:
            return {"epochs_per_assignment": self._kept_epochs}
        if self.sampler != "truncated_poisson":
            return {}
        return {"num_examples": self.num_examples, "max_batch_size": self.max_batch_size}

    @property
    def _kept_epochs(self) -> int:
        """Passes for which balls-in-bins keeps an assignment."""
        if self.sampler == "balls_in_bins" and self.is_correlated:
            return max(1, -(-(self.num_steps or 0) // participation.separation(self)))
        return self.epochs_per_assignment or 1

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
        noise_multiplier = accounting.calibrated_noise(draft, target_epsilon)
        return cls(
            noise_multiplier=noise_multiplier,
            target_epsilon=target_epsilon,
            **{**arguments, "key": draft.root},
        )

    def to_json(self) -> str:
        """Return the plan as JSON; the secret key is replaced by its SHA-256."""
        data: dict[str, Any] = {_FORMAT: 1, "key_sha256": self.root.sha256}
        for name in _FIELDS:
            value = getattr(self, name)
            if name in _SINCE_2 and value == _SINCE_2[name]:
                continue
            data[name] = schedules.to_json(value) if name in _SCHEDULED else value
            if name in _SINCE_2:
                data[_FORMAT] = _VERSION
        if self.correlation is not None:
            data["correlation"] = strategies.to_json(self.correlation)
        return json.dumps(data, indent=1)

    @classmethod
    def from_json(cls, text: str, key: RootKey | str | os.PathLike[str] | None = None) -> Self:
        """Read the JSON of `to_json`.

        Args:
            text: str, the JSON.
            key: root key or path of its file. Without it the plan can be read and accounted;
                batches and noise need it, unless the plan was made from a seed.

        Raises:
            ValueError: not a plan, one of a later version, or the key of another one.
        """
        version, known = None, 1
        try:
            data = json.loads(text)
            version = data.pop(_FORMAT)
            known = _VERSION if set(data) & set(_SINCE_2) else 1
            if version != known:
                raise ValueError("unknown version")
            sha256 = data.pop("key_sha256")
            if not isinstance(sha256, str):
                raise ValueError("key_sha256 is no text")
            for name in _SCHEDULED:
                data[name] = schedules.from_json(name, data[name])
            seed = data.pop("seed")
            if data.get("correlation") is not None:
                data["correlation"] = strategies.from_json("correlation", data["correlation"])
            unknown = set(data) - set(_FIELDS)
            if unknown:
                raise ValueError(f"unknown fields {sorted(unknown)}")
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            if isinstance(version, int) and version > known:
                raise ValueError(newer("The text", "plan", version, known)) from None
            raise ValueError(
                f"The text is not a plan ({error}). Expected what PrivacyPlan.to_json wrote."
            ) from error
        if key is None:
            root = LockedKey(sha256) if seed is None else unlock(sha256, RootKey.from_seed(seed))
        else:
            root = unlock(sha256, key)
        try:
            return cls(**data, key=root)
        except (ArithmeticError, LookupError) as error:  # of a schedule, at some step
            raise ValueError(
                f"The text is not a plan ({error}). Expected what PrivacyPlan.to_json wrote."
            ) from error


def require_plan(plan: Any) -> None:
    """Raise unless this is a plan."""
    if not isinstance(plan, PrivacyPlan):
        raise TypeError(f"plan is {_validate.kind(plan)}. Expected a dualdp.PrivacyPlan.")


def checked_step(plan: PrivacyPlan, step: Any) -> int:
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
    if users is not None and users.num_users != plan.num_examples:
        raise ValueError(
            f"users names {users.num_users} users but the plan has num_examples="
            f"{plan.num_examples}. Both must be the same, or epsilon is not true: make a plan for "
            "these users; dualdp.units.user_rows(ids, num_users=) names those without rows too."
        )
    if users is None:
        require_size(plan, num_rows)


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
#: Fields that plans of version 1 do not have, and their defaults, with which a plan is written as
#: version 1.
_SINCE_2 = {
    "correlation": None,
    "min_separation": None,
    "epochs_per_assignment": None,
    "unit": "example",
    "rows_per_unit": None,
}
_SIZES = (
    *("physical_batch_size", "max_batch_size", "min_separation", "epochs_per_assignment"),
    "rows_per_unit",
)
_FIELDS = [item.name for item in fields(PrivacyPlan) if item.init]
