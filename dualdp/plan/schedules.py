# SPDX-License-Identifier: Apache-2.0
"""Schedules of noise multiplier, clipping norm and batch size, as pure functions of the step.

Clipper, noise and ledger read the same value of a step, so they cannot disagree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dualdp import _validate
from dualdp._validate import AccountingError

Values = NDArray[np.float64]


@dataclass(frozen=True)
class Schedule:
    """Function from the step, 0 or more, to a value.

    Its fields are checked by name; a name has one meaning in all schedules.
    """

    def __post_init__(self) -> None:
        for item in fields(self):
            name, value = item.name, getattr(self, item.name)
            if name in _CHECKS and (value is not None or item.default is not None):
                object.__setattr__(self, name, _CHECKS[name](name, value))

    def at(self, steps: ArrayLike) -> Values:
        """Return the values at the given steps, shape of `steps`."""
        raise NotImplementedError


def _number_or_schedule(name: str, value: float | Schedule) -> float | Schedule:
    if callable(value):  # only a plan, which knows its steps, can tabulate one
        raise TypeError(
            f"{name}={value!r} is {_validate.kind(value)}. Expected a number or a schedule."
        )
    return value if type(value) in NAMES else _validate.real(name, value)


#: Name of a field -> its check.
_CHECKS: Mapping[str, Callable[[str, Any], float | Schedule]] = {
    "then": _number_or_schedule,
    **dict.fromkeys(("initial", "final"), _validate.real),
    **dict.fromkeys(("factor", "rate", "learning_rate"), _validate.positive),
    **dict.fromkeys(("every", "over"), partial(_validate.integer, minimum=1)),
    "quantile": _validate.open_probability,
    "count_noise_multiplier": _validate.positive,
}


class Constant(float):
    """Constant value: the number itself."""

    def __new__(cls, value: float) -> Constant:
        """Return the number, checked."""
        return super().__new__(cls, _validate.real("value", value))


@dataclass(frozen=True)
class Step(Schedule):
    """`initial * factor ** (step // every)`.

    Args:
        initial: value at step 0.
        factor: float > 0, applied once every `every` steps.
        every: number of steps between two changes, >= 1.
    """

    initial: float
    factor: float
    every: int

    def at(self, steps: ArrayLike) -> Values:
        """Return the values at the given steps, shape of `steps`; inf past the largest float."""
        times = np.asarray(np.asarray(steps) // self.every, dtype=np.float64)
        with np.errstate(over="ignore", under="ignore"):
            return np.asarray(self.initial * self.factor**times)


@dataclass(frozen=True)
class Exponential(Schedule):
    """`initial * rate ** step`.

    Args:
        initial: value at step 0.
        rate: float > 0, factor from one step to the next.
    """

    initial: float
    rate: float

    def at(self, steps: ArrayLike) -> Values:
        """Return the values at the given steps, shape of `steps`; inf past the largest float."""
        return Step(self.initial, self.rate, 1).at(steps)


@dataclass(frozen=True)
class Linear(Schedule):
    """Linear change from `initial` to `final` over `over` steps, then `final`.

    Args:
        initial: value at step 0; a value below `final` gives a warm-up.
        final: value from step `over` on.
        over: number of steps of the change, >= 1.
    """

    initial: float
    final: float
    over: int

    def at(self, steps: ArrayLike) -> Values:
        """Return the values at the given steps, shape of `steps`."""
        share = self._share(np.minimum(np.asarray(steps) / self.over, 1.0))
        return np.asarray(self.initial + share * (self.final - self.initial))

    def _share(self, time: Values) -> Values:
        return time


@dataclass(frozen=True)
class Cosine(Linear):
    """Change from `initial` to `final` along half a cosine over `over` steps, then `final`.

    Source: Loshchilov & Hutter 2017, eq. 5, without restarts.
    """

    def _share(self, time: Values) -> Values:
        return np.asarray((1 - np.cos(np.pi * time)) / 2)


@dataclass(frozen=True)
class Table(Schedule):
    """Tabulated values, one for each planned step."""

    values: tuple[float, ...]

    def at(self, steps: ArrayLike) -> Values:
        """Return the values at the given steps, shape of `steps`.

        Raises:
            IndexError: a step past the table.
        """
        return np.asarray(np.asarray(self.values, dtype=np.float64)[np.asarray(steps)])


@dataclass(frozen=True)
class Warmup(Schedule):
    """Linear increase from 0 to the value of another schedule over `over` steps, then that one.

    Args:
        then: number or another schedule; its step 0 is step 0 of the run.
        over: number of warm-up steps, >= 1; step k has the share (k + 1) / over, so none is 0.
    """

    then: float | Schedule
    over: int

    def at(self, steps: ArrayLike) -> Values:
        """Return the values at the given steps, shape of `steps`."""
        share = np.minimum((np.asarray(steps) + 1) / self.over, 1.0)
        then = self.then.at(steps) if isinstance(self.then, Schedule) else self.then
        return np.asarray(share * then)


@dataclass(frozen=True)
class AdaptiveNorm(Schedule):
    """Clipping norm that follows a quantile of the gradient norms, learned privately.

    Each step also releases a noisy count of the examples with a norm below the bound. The bound is
    multiplied by `exp(-learning_rate * (noisy fraction - quantile))`. The count is accounted.

    Args:
        initial: C of step 0, > 0.
        quantile: share of the examples that should be below the bound, in (0, 1).
        learning_rate: float > 0.
        count_noise_multiplier: standard deviation of the noise in the count, in examples; None for
            a twentieth of the expected batch size.

    Source: Andrew et al. 2021 ("Differentially private learning with adaptive clipping"),
    Algorithm 1 and section 3.1; we keep the gradient's noise at noise_multiplier * C and account
    the count beside it.
    """

    initial: float
    quantile: float = 0.5
    learning_rate: float = 0.2
    count_noise_multiplier: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _validate.positive("initial", self.initial)

    def at(self, steps: ArrayLike) -> Values:
        """Return the bound of step 0; later ones depend on the releases.

        Raises:
            AccountingError: a later step.
        """
        if np.any(np.asarray(steps) > 0):
            raise AccountingError(
                "max_grad_norm adapts to the run, so it is not known ahead. Use the ledger's "
                "max_grad_norm, or pass max_grad_norm= of the step."
            )
        return np.full(np.shape(steps), self.initial, dtype=np.float64)

    def count_stddev(self, expected_batch_size: float) -> float:
        """Return the standard deviation of the noise in the count, in examples."""
        return self.count_noise_multiplier or expected_batch_size / 20

    def following(self, bound: float, noisy_fraction: float) -> float:
        """Return the bound after a step with this released noisy fraction."""
        return bound * math.exp(min(self.learning_rate * (self.quantile - noisy_fraction), 700.0))


#: What a setting of a plan may be given as.
Scheduled = float | Schedule | Callable[[int], float]
SCHEDULES: dict[str, type[Schedule]] = {
    "step": Step,
    "exponential": Exponential,
    "linear": Linear,
    "cosine": Cosine,
    "table": Table,
    "warmup": Warmup,
    "adaptive": AdaptiveNorm,
}
NAMES = {kind: name for name, kind in SCHEDULES.items()}


def tabulated(name: str, function: Callable[[int], float], num_steps: int | None) -> Table:
    """Return the values of a setting at all planned steps, for a callable of the step."""
    if num_steps is None:
        raise ValueError(
            f"{name} is a callable and num_steps is None. Expected num_steps (of an engine, or "
            f"epochs), so that it can be tabulated; or one of {', '.join(SCHEDULES)}."
        )
    _validate.takes(name, function, "(step)", 0)
    return Table(tuple(_validate.real(f"{name}({k})", function(k)) for k in range(num_steps)))


def to_json(setting: Scheduled) -> Scheduled | dict[str, Any]:
    """Return plain data: a number as it is, for a schedule `{"schedule": name, ...}`."""
    if not isinstance(setting, Schedule):
        return setting
    named = {item.name: to_json(getattr(setting, item.name)) for item in fields(setting)}
    return {"schedule": NAMES[type(setting)], **named}


def from_json(name: str, data: float | Mapping[str, Any]) -> float | Schedule:
    """Return the number or schedule that `to_json` serialized."""
    if not isinstance(data, Mapping):
        return data
    try:
        given = dict(data)
        kind = SCHEDULES[_validate.choice(name, given.pop("schedule"), SCHEDULES)]
        if kind is Table:
            given["values"] = tuple(given["values"])
        if kind is Warmup:
            given["then"] = from_json("then", given["then"])
        return kind(**given)
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"{name}={dict(data)!r} is not a schedule. Expected a number or one of "
            f"{', '.join(SCHEDULES)} with its fields."
        ) from error
