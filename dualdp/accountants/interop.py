# SPDX-License-Identifier: Apache-2.0
"""Conversion from and to Opacus histories and dp-accounting events.

Their objects are read by the public names of their classes and fields. dp-accounting is imported
only by `to_dp_event`, Opacus never.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dualdp import _validate, mechanisms
from dualdp._validate import AccountingError
from dualdp.accountants.base import as_gaussian
from dualdp.mechanisms import Composition, Mechanism

History = Iterable[tuple[Mechanism, int]]


def from_opacus(history: Iterable[tuple[float, float, int]]) -> Composition:
    """Return the composition of an Opacus history, `[(noise_multiplier, sample_rate, steps)]`.

    Its sampler was Poisson only if the data loader was made with `poisson_sampling=True`, which the
    history doesn't record.
    """
    events = []
    for item in history:
        if not isinstance(item, tuple | list) or len(item) != 3:
            raise ValueError(
                f"history holds {item!r}. Expected triples (noise_multiplier, sample_rate, steps)."
            )
        sigma, rate, steps = item
        event = mechanisms.PoissonSubsampledGaussian(sigma, rate)
        events.append((event, _validate.integer("steps", steps)))
    return Composition(tuple(events))


def to_opacus(history: History) -> list[tuple[float, float, int]]:
    """Return `accountant.history` as an Opacus history; raise on an event that Opacus lacks."""
    rows = []
    for event, count in history:
        sigma = as_gaussian(event)
        if isinstance(event, mechanisms.PoissonSubsampledGaussian):
            rows.append((event.noise_multiplier, event.sample_rate, count))
        elif isinstance(event, mechanisms.Gaussian) and sigma is not None:
            rows.append((sigma, 1.0, count))
        else:
            raise AccountingError(
                f"Opacus' history cannot hold {type(event).__name__}. Expected Poisson-subsampled "
                "or full-batch Gaussians only."
            )
    return rows


def from_dp_event(event: Any) -> Composition:
    """Return the composition of a dp-accounting `DpEvent`, read by its class and fields.

    Known are Gaussian, Laplace, randomised response, composed, self-composed, Poisson-sampled or
    fixed-size-sampled Gaussian, truncated Poisson and NoOp.

    Raises:
        AccountingError: an event that has no counterpart here.
    """
    return Composition(tuple(_read(event, 1)))


def _read(event: Any, count: int) -> list[tuple[Mechanism, int]]:
    """Flat list of (mechanism, count) pairs of a dp-accounting event."""
    match type(event).__name__:
        case "NoOpDpEvent":
            return []
        case "ComposedDpEvent":
            return [pair for part in event.events for pair in _read(part, count)]
        case "SelfComposedDpEvent":
            return _read(event.event, count * event.count)
        case "GaussianDpEvent":
            return [(mechanisms.Gaussian(event.noise_multiplier), count)]
        case "LaplaceDpEvent":
            return [(mechanisms.Laplace(event.noise_multiplier), count)]
        case "RandomizedResponseDpEvent":
            made = mechanisms.RandomizedResponse(event.noise_parameter, event.num_buckets)
            return [(made, count)]
        case "PoissonSampledDpEvent":
            sigma = _one_gaussian(event)
            rate = event.sampling_probability
            return [(mechanisms.PoissonSubsampledGaussian(sigma, rate), count)]
        case "SampledWithoutReplacementDpEvent":
            rate = event.sample_size / event.source_dataset_size
            sigma = _one_gaussian(event)
            return [(mechanisms.FixedSizeSubsampledGaussian(sigma, rate), count)]
        case "TruncatedSubsampledGaussianDpEvent":
            truncated = mechanisms.TruncatedPoissonSubsampledGaussian(
                event.noise_multiplier,
                event.sampling_probability,
                event.dataset_size,
                event.truncated_batch_size,
            )
            return [(truncated, count)]
    raise AccountingError(_unknown(event))


def _one_gaussian(event: Any) -> float:
    """Noise multiplier of the single Gaussian inside a sampling event."""
    inner = _read(event.event, 1)
    if len(inner) == 1 and inner[0][1] == 1 and isinstance(inner[0][0], mechanisms.Gaussian):
        return inner[0][0].noise_multiplier
    raise AccountingError(_unknown(event))


def _unknown(event: Any) -> str:
    return (
        f"{event!r} has no counterpart here. Expected Gaussian, Laplace or randomised response, "
        "sampled (one Gaussian) or composed."
    )


def to_dp_event(history: History) -> Any:
    """Return `accountant.history` as a dp-accounting event.

    Raises:
        AccountingError: dp-accounting has no event for a mechanism.
        ModuleNotFoundError: dp-accounting is not installed.
    """
    try:
        import dp_accounting
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "dp-accounting is not installed. Install it with `pip install dp-accounting`."
        ) from error
    return dp_accounting.ComposedDpEvent(
        [
            dp_accounting.SelfComposedDpEvent(_write(event, dp_accounting), count)
            for event, count in history
        ]
    )


def _write(event: Mechanism, d: Any) -> Any:
    """dp-accounting event of one mechanism."""
    match event:
        case mechanisms.Gaussian(sigma):
            return d.GaussianDpEvent(sigma)
        case mechanisms.PoissonSubsampledGaussian(sigma, rate):
            return d.PoissonSampledDpEvent(rate, d.GaussianDpEvent(sigma))
        case mechanisms.TruncatedPoissonSubsampledGaussian(sigma, rate, examples, cut):
            return d.dp_event.TruncatedSubsampledGaussianDpEvent(examples, rate, cut, sigma)
        case mechanisms.Laplace(scale):
            return d.LaplaceDpEvent(scale)
        case mechanisms.RandomizedResponse(noise, buckets):
            return d.dp_event.RandomizedResponseDpEvent(noise, buckets)
    raise AccountingError(
        f"dp-accounting has no event for {type(event).__name__} that means the same. Expected a "
        "history without it; epsilon_bounds of our accountants covers it."
    )
