# SPDX-License-Identifier: Apache-2.0
"""Mechanisms as data: public facts about each release.

An event describes one release, or several releases that can only be accounted together (an epoch of
balls-in-bins). Events are frozen, hashable and convert to plain dictionaries, so that histories can
be counted, stored and compared. `dualdp.accountants` computes their epsilon.

`noise_multiplier` is always noise standard deviation / max_grad_norm (Laplace: scale /
sensitivity); the neighboring relation belongs to the accountant, never to the event.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

from dualdp import _validate
from dualdp._validate import AccountingError

_count = functools.partial(_validate.integer, minimum=1)
_CHECKS: Mapping[str, Callable[[str, Any], Any]] = {
    "noise_multiplier": _validate.non_negative,
    "sample_rate": functools.partial(
        _validate.probability, hint="use expected_batch_size / num_examples"
    ),
    "num_examples": _count,
    "max_batch_size": _count,
    "num_bins": _count,
    "epochs_per_assignment": _count,
    "num_batches": _count,
    "noise_parameter": _validate.probability,
    "num_buckets": functools.partial(_validate.integer, minimum=2),
    "epsilon": _validate.non_negative,
    "delta": _validate.probability,
}


@dataclasses.dataclass(frozen=True)
class Mechanism:
    """Base class of all events; `releases` noisy outputs are accounted together."""

    @property
    def releases(self) -> int:
        """Number of releases in one unit of composition, 1 by default."""
        return 1

    def __post_init__(self) -> None:
        """Validate every field by its name; a name has one meaning in all mechanisms."""
        for name in self.__dataclass_fields__:
            if name in _CHECKS:
                object.__setattr__(self, name, _CHECKS[name](name, getattr(self, name)))

    def _set(self, **values: object) -> None:
        """Set validated values on the frozen dataclass."""
        for name, value in values.items():
            object.__setattr__(self, name, value)


@dataclasses.dataclass(frozen=True)
class Gaussian(Mechanism):
    """Gaussian noise on a sum over all examples: sampling rate 1."""

    noise_multiplier: float


@dataclasses.dataclass(frozen=True)
class PoissonSubsampledGaussian(Mechanism):
    """Gaussian noise on a sum that each example joins with probability `sample_rate`.

    Source: Abadi et al. 2016, Algorithm 1.
    """

    noise_multiplier: float
    sample_rate: float


@dataclasses.dataclass(frozen=True)
class TruncatedPoissonSubsampledGaussian(Mechanism):
    """Poisson sampling, truncated to a random subset of size `max_batch_size`.

    Source: Chua et al. 2024 (arXiv 2411.04205), section 3.
    """

    noise_multiplier: float
    sample_rate: float
    num_examples: int
    max_batch_size: int


@dataclasses.dataclass(frozen=True)
class FixedSizeSubsampledGaussian(Mechanism):
    """Sampling of a fixed-size batch without replacement, independently at each step.

    `sample_rate` is batch size / number of examples; only the relation `replace` is meaningful.
    """

    noise_multiplier: float
    sample_rate: float


@dataclasses.dataclass(frozen=True)
class BallsInBinsGaussian(Mechanism):
    """Independent assignment of every example to ONE of `num_bins` steps; batch sizes vary.

    The assignment is kept for `epochs_per_assignment` epochs, then drawn again. Shuffled batches of
    equal size are another sampler, `ShuffledGaussian`.

    Source: Chua et al. 2024 (arXiv 2412.16802); random allocation of Feldman & Shenfeld 2025.
    """

    noise_multiplier: float
    num_bins: int
    epochs_per_assignment: int = 1

    @property
    def releases(self) -> int:
        """Number of steps in the epochs of one assignment."""
        return self.num_bins * self.epochs_per_assignment


@dataclasses.dataclass(frozen=True)
class ShuffledGaussian(Mechanism):
    """Full passes over the data in `num_batches` disjoint batches, without amplification.

    The number of examples is public here: batches consist of slots, and adding or removing an
    example fills or empties one slot.
    """

    noise_multiplier: float
    num_batches: int

    @property
    def releases(self) -> int:
        """Number of steps in one pass."""
        return self.num_batches


@dataclasses.dataclass(frozen=True)
class Laplace(Mechanism):
    """Laplace noise of scale `noise_multiplier` times the L1 sensitivity."""

    noise_multiplier: float


@dataclasses.dataclass(frozen=True)
class DiscreteGaussian(Mechanism):
    """Discrete Gaussian noise on the integers, for an integer query of sensitivity 1.

    Source: Canonne, Kamath & Steinke 2020, definition 1.
    """

    noise_multiplier: float


@dataclasses.dataclass(frozen=True)
class RandomizedResponse(Mechanism):
    """One of `num_buckets` answers: uniform with probability `noise_parameter`, else the truth."""

    noise_parameter: float
    num_buckets: int = 2


@dataclasses.dataclass(frozen=True)
class ApproximateDP(Mechanism):
    """Mechanism of which only (epsilon, delta) is known, under any relation."""

    epsilon: float
    delta: float = 0.0


@dataclasses.dataclass(frozen=True)
class MassTable(Mechanism):
    """User-defined mechanism: probability of each outcome with (p) and without (q) an example.

    With `neighboring_relation="replace"` they are those of two data sets that differ in an example.
    Both directions are accounted. An outcome with q = 0 < p has infinite privacy loss.
    """

    p: tuple[float, ...]
    q: tuple[float, ...]

    def __post_init__(self) -> None:
        p = tuple(_validate.probability(f"p[{i}]", v) for i, v in enumerate(self.p))
        q = tuple(_validate.probability(f"q[{i}]", v) for i, v in enumerate(self.q))
        if len(p) != len(q) or not p:
            raise ValueError(
                f"p has {len(p)} outcomes but q has {len(q)}. Expected one probability for each "
                "outcome in both."
            )
        for name, masses in (("p", p), ("q", q)):
            if abs(math.fsum(masses) - 1) > 1e-9:
                raise ValueError(
                    f"{name} sums to {math.fsum(masses)!r}. Expected the probabilities of all "
                    "outcomes, which sum to 1 (to 1e-9); add the missing outcome."
                )
        self._set(p=p, q=q)


@dataclasses.dataclass(frozen=True)
class Composition(Mechanism):
    """Composition of mechanisms on the same data: pairs (mechanism, count)."""

    events: tuple[tuple[Mechanism, int], ...]

    def __post_init__(self) -> None:
        checked = []
        for item in self.events:
            event, count = item if isinstance(item, tuple) else (item, 1)
            checked.append((require(event), _validate.integer("count", count)))
        self._set(events=tuple(checked))


_TYPES: dict[str, type[Mechanism]] = {cls.__name__: cls for cls in Mechanism.__subclasses__()}


def require(event: object) -> Mechanism:
    """Return the event if it is a `Mechanism`, else raise TypeError."""
    if not isinstance(event, Mechanism):
        raise TypeError(
            f"event={event!r} is {_validate.kind(event)}. Expected a mechanism of "
            f"dualdp.mechanisms: {', '.join(sorted(_TYPES))}."
        )
    return event


#: Samplers with an event of their own; a plan accounts the runs of others as a whole.
SAMPLERS = ("poisson", "truncated_poisson", "fixed_size", "balls_in_bins", "shuffle")
RELATIONS = ("add_or_remove", "replace", "zero_out")


def event(
    *,
    sampler: str = "poisson",
    noise_multiplier: float,
    sample_rate: float,
    num_examples: int | None = None,
    max_batch_size: int | None = None,
    epochs_per_assignment: int = 1,
) -> Mechanism:
    """Return the mechanism of one step of a sampler.

    Args:
        sampler: one of `SAMPLERS`.
        noise_multiplier: noise standard deviation / max_grad_norm, >= 0.
        sample_rate: expected batch size / number of examples, in [0, 1].
        num_examples: size of the data set, for `truncated_poisson`.
        max_batch_size: largest batch, for `truncated_poisson`.
        epochs_per_assignment: passes with one assignment, for `balls_in_bins`.

    Returns:
        Frozen mechanism; its `releases` is the number of steps accounted together.

    Raises:
        AccountingError: the sampler needs a fact that was not given.

    >>> event(sampler="shuffle", noise_multiplier=1.0, sample_rate=0.01)
    ShuffledGaussian(noise_multiplier=1.0, num_batches=100)
    """
    name = _validate.choice("sampler", sampler, SAMPLERS)
    if max_batch_size is not None and name != "truncated_poisson":
        raise AccountingError(
            f"max_batch_size={max_batch_size!r} with sampler={name!r}, whose epsilon does not hold "
            "for batches that are cut. Use sampler='truncated_poisson', or no max_batch_size."
        )
    if epochs_per_assignment != 1 and name != "balls_in_bins":
        raise AccountingError(
            f"epochs_per_assignment={epochs_per_assignment!r} with sampler={name!r}, which draws "
            "anew in each pass. Use sampler='balls_in_bins', or no epochs_per_assignment."
        )
    if name == "poisson":
        return PoissonSubsampledGaussian(noise_multiplier, sample_rate)
    if name == "fixed_size":
        return FixedSizeSubsampledGaussian(noise_multiplier, sample_rate)
    if name == "truncated_poisson":
        if num_examples is None or max_batch_size is None:
            raise AccountingError(
                "sampler='truncated_poisson' needs num_examples and max_batch_size: its epsilon "
                "depends on how often a batch is cut. Give both, or use sampler='poisson'."
            )
        return TruncatedPoissonSubsampledGaussian(
            noise_multiplier, sample_rate, num_examples, max_batch_size
        )
    noise = _validate.non_negative("noise_multiplier", noise_multiplier)
    rate = _validate.sample_rate(sample_rate)
    if name == "balls_in_bins":
        bins = 0 if rate == 0 else round(1 / rate)
        if bins < 1 or abs(bins * rate - 1) > 1e-9:
            near = max(1, bins)
            raise AccountingError(
                f"sample_rate={rate!r} is not 1 / (number of batches of an epoch), which "
                f"sampler='balls_in_bins' needs. Use 1/{near} or 1/{near + 1}."
            )
        return BallsInBinsGaussian(noise, bins, epochs_per_assignment)
    if rate == 0:
        raise AccountingError(
            "sample_rate=0.0 with sampler='shuffle' says nothing about the length of an epoch. "
            "Expected 1 / (number of batches of an epoch)."
        )
    # Rounded down: with fewer batches in a pass, an example takes part more often.
    return ShuffledGaussian(noise, max(1, math.floor(1 / rate + 1e-9)))


def num_steps_of(*, epochs: float, num_examples: int, batch_size: int) -> int:
    """Return the number of steps of `epochs` passes over the data.

    One pass takes ceil(num_examples / batch_size) steps, as with a data loader that keeps its last
    batch; a fraction of a step counts as one.

    >>> num_steps_of(epochs=2, num_examples=60_000, batch_size=256)
    470
    """
    examples = _validate.integer("num_examples", num_examples, minimum=1)
    batch = _validate.integer("batch_size", batch_size, minimum=1)
    if batch > examples:
        raise ValueError(
            f"batch_size={batch} is larger than num_examples={examples}. Expected a batch of at "
            "most all examples."
        )
    return math.ceil(_validate.non_negative("epochs", epochs) * math.ceil(examples / batch))


def to_dict(event: Mechanism) -> dict[str, Any]:
    """Return the event as plain data that JSON can represent, for `from_dict`."""
    record: dict[str, Any] = {"mechanism": type(require(event)).__name__}
    for field in dataclasses.fields(event):
        value = getattr(event, field.name)
        if isinstance(event, Composition):
            value = [[to_dict(inner), count] for inner, count in value]
        record[field.name] = list(value) if isinstance(value, tuple) else value
    return record


def from_dict(record: Mapping[str, Any]) -> Mechanism:
    """Return the event serialized by `to_dict`."""
    if not isinstance(record, Mapping):
        raise ValueError(f"record={record!r} is no event. Expected what to_dict wrote.")
    fields = dict(record)
    name = _validate.choice("mechanism", fields.pop("mechanism", None), _TYPES)
    if name == "Composition":
        if "events" not in fields:
            raise ValueError("A stored Composition has no events. Expected what to_dict wrote.")
        return Composition(tuple((from_dict(inner), count) for inner, count in fields["events"]))
    known = {field.name for field in dataclasses.fields(_TYPES[name])}
    if set(fields) - known:
        raise ValueError(
            f"A stored {name} has the unknown fields {sorted(set(fields) - known)}. "
            f"Expected {sorted(known)}; it was written by another version."
        )
    needed = {f.name for f in dataclasses.fields(_TYPES[name]) if f.default is dataclasses.MISSING}
    if needed - set(fields):
        raise ValueError(
            f"A stored {name} lacks the fields {sorted(needed - set(fields))}. "
            "Expected what to_dict wrote."
        )
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
    return _TYPES[name](**values)
