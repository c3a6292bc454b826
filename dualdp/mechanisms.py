# SPDX-License-Identifier: Apache-2.0
"""Mechanisms as data: what was released, in public facts only.

An event describes one release, or one stretch of releases that can only be accounted together (an
epoch of balls-in-bins). Events are frozen, hashable and turn into plain dictionaries, so that
histories can be counted, stored and compared. They know nothing of epsilon: `dualdp.accountants`
reads them.

`noise_multiplier` is always noise standard deviation / max_grad_norm (Laplace: scale /
sensitivity); the neighbouring relation belongs to the accountant, never to the event.
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
    "sample_rate": lambda name, value: _validate.sample_rate(value),
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
    """Base of all events; `releases` noisy outputs are accounted together."""

    @property
    def releases(self) -> int:
        """How many releases form one unit that the accountant composes; 1 unless said otherwise."""
        return 1

    def __post_init__(self) -> None:
        """Check every field by its name: a name means the same in all mechanisms."""
        checks = {f.name: _CHECKS[f.name] for f in dataclasses.fields(self) if f.name in _CHECKS}
        self._set(**{name: check(name, getattr(self, name)) for name, check in checks.items()})

    def _set(self, **values: Any) -> None:
        """Store checked values; the dataclass is frozen for everybody else."""
        for name, value in values.items():
            object.__setattr__(self, name, value)


@dataclasses.dataclass(frozen=True)
class Gaussian(Mechanism):
    """Everybody takes part in a sum, Gaussian noise is added: sampling rate 1."""

    noise_multiplier: float


@dataclasses.dataclass(frozen=True)
class PoissonSubsampledGaussian(Mechanism):
    """Every example joins independently with probability `sample_rate`; Gaussian noise is added.

    Source: Abadi et al. 2016, Algorithm 1.
    """

    noise_multiplier: float
    sample_rate: float


@dataclasses.dataclass(frozen=True)
class TruncatedPoissonSubsampledGaussian(Mechanism):
    """Poisson draws, cut at random to `max_batch_size` where they are larger.

    Source: Chua et al. 2024 (arXiv 2411.04205), section 3.
    """

    noise_multiplier: float
    sample_rate: float
    num_examples: int
    max_batch_size: int


@dataclasses.dataclass(frozen=True)
class FixedSizeSubsampledGaussian(Mechanism):
    """A batch of fixed size drawn without replacement, anew at each step.

    `sample_rate` is batch size / number of examples; only the relation `replace` is meaningful.
    """

    noise_multiplier: float
    sample_rate: float


@dataclasses.dataclass(frozen=True)
class BallsInBinsGaussian(Mechanism):
    """Every example draws ONE of `num_bins` steps, independently; batch sizes vary.

    The draw is kept for `epochs_per_assignment` epochs, then drawn anew. Equal-sized shuffled
    batches are another sampler: `ShuffledGaussian`.

    Source: Chua et al. 2024 (arXiv 2412.16802); random allocation of Feldman & Shenfeld 2025.
    """

    noise_multiplier: float
    num_bins: int
    epochs_per_assignment: int = 1

    @property
    def releases(self) -> int:
        """An unfinished epoch counts whole."""
        return self.num_bins * self.epochs_per_assignment


@dataclasses.dataclass(frozen=True)
class ShuffledGaussian(Mechanism):
    """Full passes over the data in `num_batches` disjoint batches, without amplification.

    The number of examples is public here: the batches are formed from slots, and adding or
    removing an example fills or empties one slot.
    """

    noise_multiplier: float
    num_batches: int

    @property
    def releases(self) -> int:
        """An unfinished epoch counts whole."""
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
    """A black box of which only (epsilon, delta) is known, whatever the relation."""

    epsilon: float
    delta: float = 0.0


@dataclasses.dataclass(frozen=True)
class MassTable(Mechanism):
    """The user's own mechanism: probability of each outcome with (p) and without (q) an example.

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
        for name, row in (("p", p), ("q", q)):
            if abs(math.fsum(row) - 1) > 1e-9:
                raise ValueError(
                    f"{name} sums to {math.fsum(row)!r}. Expected the probabilities of all "
                    "outcomes, which sum to 1 (to 1e-9); add the missing outcome."
                )
        self._set(p=p, q=q)


@dataclasses.dataclass(frozen=True)
class Composition(Mechanism):
    """Several mechanisms run on the same data: pairs (mechanism, count)."""

    events: tuple[tuple[Mechanism, int], ...]

    def __post_init__(self) -> None:
        checked = []
        for item in self.events:
            event, count = item if isinstance(item, tuple) else (item, 1)
            checked.append((require(event), _validate.integer("count", count)))
        self._set(events=tuple(checked))


_TYPES: dict[str, type[Mechanism]] = {cls.__name__: cls for cls in Mechanism.__subclasses__()}


def require(event: Any) -> Mechanism:
    """The event itself, if it is one."""
    if not isinstance(event, Mechanism):
        raise TypeError(
            f"event={event!r} is a {type(event).__name__}. Expected a mechanism of "
            f"dualdp.mechanisms: {', '.join(sorted(_TYPES))}."
        )
    return event


def _truncated(
    noise: float, rate: float, num_examples: int | None, max_batch_size: int | None
) -> Mechanism:
    if num_examples is None or max_batch_size is None:
        raise AccountingError(
            "sampler='truncated_poisson' needs num_examples and max_batch_size: its epsilon "
            "depends on how often a batch is cut. Give both, or use sampler='poisson'."
        )
    return TruncatedPoissonSubsampledGaussian(noise, rate, num_examples, max_batch_size)


def _balls_in_bins(noise_multiplier: float, sample_rate: float, *sizes: int | None) -> Mechanism:
    bins = 0 if sample_rate == 0 else round(1 / sample_rate)
    if bins < 1 or abs(bins * sample_rate - 1) > 1e-9:
        near = max(1, bins)
        raise AccountingError(
            f"sample_rate={sample_rate!r} is not 1 / (number of batches of an epoch), which "
            f"sampler='balls_in_bins' needs. Use 1/{near} or 1/{near + 1}."
        )
    return BallsInBinsGaussian(noise_multiplier, bins)


def _shuffle(noise_multiplier: float, sample_rate: float, *sizes: int | None) -> Mechanism:
    if sample_rate == 0:
        raise AccountingError(
            "sample_rate=0.0 with sampler='shuffle' says nothing about the length of an epoch. "
            "Expected 1 / (number of batches of an epoch)."
        )
    # Rounded down: fewer batches in a pass are more participations in a given number of steps.
    return ShuffledGaussian(noise_multiplier, max(1, math.floor(1 / sample_rate + 1e-9)))


SAMPLERS: Mapping[str, Callable[[float, float, int | None, int | None], Mechanism]] = {
    "poisson": lambda noise, rate, *sizes: PoissonSubsampledGaussian(noise, rate),
    "truncated_poisson": _truncated,
    "fixed_size": lambda noise, rate, *sizes: FixedSizeSubsampledGaussian(noise, rate),
    "balls_in_bins": _balls_in_bins,
    "shuffle": _shuffle,
}

RELATIONS = ("add_or_remove", "replace", "zero_out")


def event(
    *,
    sampler: str = "poisson",
    noise_multiplier: float,
    sample_rate: float,
    num_examples: int | None = None,
    max_batch_size: int | None = None,
) -> Mechanism:
    """The mechanism that one step of a sampler is, so that no other can be accounted for it.

    Args:
        sampler: one of `SAMPLERS`.
        noise_multiplier: noise standard deviation / max_grad_norm, >= 0.
        sample_rate: expected batch size / number of examples, in [0, 1].
        num_examples: size of the data set; needed by `truncated_poisson` only.
        max_batch_size: where a batch is cut; needed by `truncated_poisson` only.

    Returns:
        A frozen mechanism; its `releases` says how many steps are accounted together.

    Raises:
        AccountingError: the sampler needs a fact that was not given.

    >>> event(sampler="shuffle", noise_multiplier=1.0, sample_rate=0.01)
    ShuffledGaussian(noise_multiplier=1.0, num_batches=100)
    """
    name = _validate.choice("sampler", sampler, SAMPLERS)
    noise = _validate.non_negative("noise_multiplier", noise_multiplier)
    rate = _validate.sample_rate(sample_rate)
    return SAMPLERS[name](noise, rate, num_examples, max_batch_size)


def num_steps_of(*, epochs: float, num_examples: int, batch_size: int) -> int:
    """Number of steps of `epochs` passes: the one place where epochs become steps.

    One pass takes ceil(num_examples / batch_size) steps, as a data loader does that keeps its last
    batch; a fraction of a step counts whole.

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
    """The event as plain data that JSON can hold; `from_dict` brings it back."""
    record: dict[str, Any] = {"mechanism": type(require(event)).__name__}
    for field in dataclasses.fields(event):
        value = getattr(event, field.name)
        if isinstance(event, Composition):
            value = [[to_dict(part), count] for part, count in value]
        record[field.name] = list(value) if isinstance(value, tuple) else value
    return record


def from_dict(record: Mapping[str, Any]) -> Mechanism:
    """The event that `to_dict` described."""
    if not isinstance(record, Mapping):
        raise ValueError(f"record={record!r} is no event. Expected what to_dict wrote.")
    fields = dict(record)
    name = _validate.choice("mechanism", fields.pop("mechanism", None), _TYPES)
    if name == "Composition":
        if "events" not in fields:
            raise ValueError("A stored Composition has no events. Expected what to_dict wrote.")
        return Composition(tuple((from_dict(part), count) for part, count in fields["events"]))
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
