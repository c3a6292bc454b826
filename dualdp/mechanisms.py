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
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypedDict

from dualdp import _validate
from dualdp._validate import AccountingError


def _masses(name: str, value: Iterable[object]) -> tuple[float, ...]:
    """Return the probabilities of all outcomes."""
    masses = tuple([_validate.probability(f"{name}[{i}]", v) for i, v in enumerate(value)])
    if abs(math.fsum(masses) - 1) > 1e-9:
        raise ValueError(
            f"{name} sums to {math.fsum(masses)!r}. Expected the probabilities of all outcomes, "
            "which sum to 1 (to 1e-9); add the missing outcome."
        )
    return masses


_COUNTS = ("num_examples", "max_batch_size", "num_bins", "num_batches", "epochs_per_assignment")
#: Check of each field; a name has one meaning in all mechanisms.
_CHECKS: Mapping[str, Callable[[str, Any], Any]] = {
    "num_buckets": functools.partial(_validate.integer, minimum=2),
    **dict.fromkeys(_COUNTS, functools.partial(_validate.integer, minimum=1)),
    **dict.fromkeys(("noise_multiplier", "epsilon"), _validate.non_negative),
    **dict.fromkeys(("sample_rate", "noise_parameter", "delta"), _validate.probability),
    **dict.fromkeys(("p", "q"), _masses),
}


@dataclasses.dataclass(frozen=True)
class Mechanism:
    """Base class of all events; `releases` noisy outputs are accounted together."""

    @property
    def releases(self) -> int:
        """Number of releases that are accounted together as this event, 1 by default."""
        return 1

    def __post_init__(self) -> None:
        """Check every field by its name, and keep it as a plain number."""
        for name in self.__dataclass_fields__:
            if name in _CHECKS:
                object.__setattr__(self, name, _CHECKS[name](name, getattr(self, name)))


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
        super().__post_init__()
        if len(self.p) != len(self.q):
            raise ValueError(
                f"p has {len(self.p)} outcomes but q has {len(self.q)}. Expected one probability "
                "for each outcome in both."
            )


#: Every mechanism by its name.
TYPES: Mapping[str, type[Mechanism]] = {cls.__name__: cls for cls in Mechanism.__subclasses__()}


def require(event: object) -> Mechanism:
    """Return the event if it is a `Mechanism`, else raise TypeError."""
    if not isinstance(event, Mechanism):
        raise TypeError(
            f"event={event!r} is {_validate.kind(event)}. Expected a mechanism of "
            f"dualdp.mechanisms: {', '.join(sorted(TYPES))}."
        )
    return event


#: Samplers with an event of their own; a plan accounts the runs of others as a whole.
SAMPLERS = ("poisson", "truncated_poisson", "fixed_size", "balls_in_bins", "shuffle")
RELATIONS = ("add_or_remove", "replace", "zero_out")


class Sampling(TypedDict, total=False):
    """How the batches of equal steps are drawn.

    Keys:
        sampler: one of `SAMPLERS`, `poisson` if it is left out; it decides the amplification.
        num_examples: size of the data set, for `truncated_poisson`.
        max_batch_size: largest batch, to which `truncated_poisson` truncates.
        epochs_per_assignment: passes for which `balls_in_bins` keeps an assignment.
    """

    sampler: str
    num_examples: int | None
    max_batch_size: int | None
    epochs_per_assignment: int


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
    for word, value, none, own in (
        ("max_batch_size", max_batch_size, None, "truncated_poisson"),
        ("epochs_per_assignment", epochs_per_assignment, 1, "balls_in_bins"),
    ):
        if value != none and name != own:
            raise AccountingError(
                f"{word}={value!r} with sampler={name!r}, whose epsilon does not hold for it. "
                f"Use sampler={own!r}, or no {word}."
            )
    if name == "poisson":
        return PoissonSubsampledGaussian(noise_multiplier, sample_rate)
    if name == "fixed_size":
        return FixedSizeSubsampledGaussian(noise_multiplier, sample_rate)
    if name == "truncated_poisson":
        sizes = {"num_examples": num_examples, "max_batch_size": max_batch_size}
        most = [_validate.integer(word, size) for word, size in sizes.items()]
        return TruncatedPoissonSubsampledGaussian(noise_multiplier, sample_rate, *most)
    rate = _validate.probability("sample_rate", sample_rate)
    bins = round(1 / rate) if rate else 0
    if name == "balls_in_bins" and bins and abs(bins * rate - 1) <= 1e-9:
        return BallsInBinsGaussian(noise_multiplier, bins, epochs_per_assignment)
    if name == "shuffle" and bins:
        # Rounded down: with fewer batches in a pass, an example takes part more often.
        return ShuffledGaussian(noise_multiplier, max(1, math.floor(1 / rate + 1e-9)))
    raise AccountingError(
        f"sample_rate={rate!r} is not 1 / (number of batches of an epoch), which sampler={name!r} "
        f"needs. Use 1/{max(1, bins)} or 1/{max(1, bins) + 1}."
    )


def num_steps_of(*, epochs: float, num_examples: int, batch_size: int) -> int:
    """Return the number of steps of `epochs` passes over the data.

    One pass takes ceil(num_examples / batch_size) steps, as with a data loader that keeps its last
    batch; a fraction of a step counts as one.

    >>> num_steps_of(epochs=2, num_examples=60_000, batch_size=256)
    470
    """
    examples = _validate.integer("num_examples", num_examples, minimum=1)
    batch = _validate.integer("batch_size", batch_size, minimum=1)
    return math.ceil(_validate.non_negative("epochs", epochs) * math.ceil(examples / batch))


def to_dict(event: Mechanism) -> dict[str, Any]:
    """Return the event as plain data that JSON can represent, for `from_dict`."""
    return {"mechanism": type(require(event)).__name__, **dataclasses.asdict(event)}


def from_dict(record: Mapping[str, Any]) -> Mechanism:
    """Return the event serialized by `to_dict`."""
    if not isinstance(record, Mapping):
        raise ValueError(f"record={record!r} is no event. Expected what to_dict wrote.")
    fields = dict(record)
    name = _validate.choice("mechanism", fields.pop("mechanism", None), TYPES)
    known = list(TYPES[name].__dataclass_fields__)
    if sorted(fields) != sorted(known):
        raise ValueError(
            f"A stored {name} has the fields {sorted(fields)}. Expected {known}; it was written by "
            "another version."
        )
    return TYPES[name](**fields)
