# SPDX-License-Identifier: Apache-2.0
"""Default accountant: privacy-loss distributions with a certified upper bound."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, ClassVar

import numpy as np
from scipy.special import betainc

from dualdp import _validate, mechanisms
from dualdp._validate import AccountingError
from dualdp.accountants import closed_forms
from dualdp.accountants.base import Accountant, as_gaussian, num_epochs
from dualdp.accountants.pld_engine import balls_in_bins, pairs
from dualdp.accountants.pld_engine.composition import (
    RTOL,
    Direction,
    PrefixMemo,
    upper_delta,
    upper_epsilon,
)
from dualdp.accountants.rdp import RDPAccountant
from dualdp.accountants.search import smallest_epsilon
from dualdp.mechanisms import Mechanism

MIN_DELTA = 1e-150
MAX_DISCRETE = 1e4  # largest noise multiplier of a discrete Gaussian: 800,000 outcomes
_LARGE = 2e3  # above this epsilon (inf if the lattice fails) the Renyi bound may be smaller
_MANY = 64  # distinct mechanisms, above which sums over them are reused by later calls
_MAX_NOISE, _MIN_RATE = 1e100, 1e-47

_POISSON = (mechanisms.PoissonSubsampledGaussian, mechanisms.TruncatedPoissonSubsampledGaussian)
_NO_GROUPS = (mechanisms.RandomizedResponse, mechanisms.ApproximateDP, mechanisms.MassTable)

Events = list[tuple[Mechanism, int]]
Family = tuple[pairs.PairFamily, pairs.Array]  # pairs, and how often each


class PLDAccountant(Accountant):
    """Accountant with a certified upper bound, about 1 % above the truth.

    Full-batch Gaussians and a single subsampled step have closed forms; everything else is composed
    on a lattice, in both directions of the relation. Of a history with many different mechanisms
    the sums are reused when it has grown.

    Args:
        neighboring_relation: `add_or_remove`, `zero_out` (same dominating pairs: the example's
            gradient becomes 0), or `replace`.
        group_size: number of examples of one user; bounded by mixtures, not by the group lemma.

    Guarantees:
        Epsilon and delta are never below the truth, floating point included.
            [test_upper_is_above_every_lower_bound]
    """

    name: ClassVar[str] = "pld"

    @cached_property
    def _memos(self) -> list[PrefixMemo]:
        """Sums over the first events of a long history, one memo for each of `_directions`."""
        return [PrefixMemo() for _ in range(4)]

    def _epsilon(self, delta: float, rtol: float) -> float:
        """Smallest of the lattice bound, the bound without sampling, and the pure one.

        Each bound grows with every step and every worse setting, hence so does the smallest.
        """
        events = self._composed()
        if not events or delta == 1:
            return 0.0
        if any(_reveals(event) for event, _ in events):
            return math.inf
        pure = _pure_epsilon(events, self._sensitivity())
        if delta == 0:
            return pure
        if (log_delta := self._closed_form(events)) is not None:
            return smallest_epsilon(log_delta, math.log(delta)) * (1 + closed_forms.MARGIN)
        if delta < MIN_DELTA:
            raise AccountingError(
                f"delta={delta!r} is below {MIN_DELTA}, the least that is resolved here. "
                "Use a larger delta, or delta=0 for the pure bound."
            )
        directions = self._directions(events, delta)
        best = upper_epsilon(directions, delta)
        if rtol < RTOL:
            best = min(best, upper_epsilon(directions, delta, rtol))
        if best > _LARGE and (renyi := self._renyi()) is not None:
            best = min(best, renyi.get_epsilon(delta=delta))
        best = min(best, pure)
        mu = self._mu(events, unsampled=True)
        if mu is None or not closed_forms.gaussian_log_delta(mu, best) < math.log(delta):
            return best
        return min(best, closed_forms.gaussian_epsilon(mu, delta) * (1 + closed_forms.MARGIN))

    def get_delta(self, *, epsilon: float) -> float:
        """Return a certified upper bound on delta at `epsilon`."""
        target = _validate.non_negative("epsilon", epsilon)
        events = self._composed()
        if any(_reveals(event) for event, _ in events):
            return 1.0
        if not events or target >= _pure_epsilon(events, self._sensitivity()):
            return 0.0
        if (log_delta := self._closed_form(events)) is not None:
            rounding = 1e-9 if self._mu(events) is None else 1e-11
            return min(1.0, math.exp(log_delta(target)) * (1 + rounding))
        mu = self._mu(events, unsampled=True)
        best = 1.0 if mu is None else math.exp(closed_forms.gaussian_log_delta(mu, target))
        for assumed in (1e-5, 1e-12):  # balls-in-bins is discretized for an assumed delta
            directions = self._directions(events, assumed)
            best = min(best, max(upper_delta(direction, target) for direction in directions))
            if not any(isinstance(e, mechanisms.BallsInBinsGaussian) for e, _ in events):
                break
        renyi = self._renyi()  # smaller far below 1e-100
        return best if renyi is None else min(best, renyi.get_delta(epsilon=target))

    def _composed(self) -> Events:
        """Events that release anything, each with how often it is composed."""
        return [
            (event, number)
            for event, count in self._counts.items()
            if (number := num_epochs(event, count)) and getattr(event, "sample_rate", 1.0) > 0
        ]

    def _closed_form(self, events: Events) -> Callable[[float], float] | None:
        """Epsilon -> log delta of plain Gaussians, or of a single subsampled step; else None."""
        mu = self._mu(events)
        if mu is not None:
            return partial(closed_forms.gaussian_log_delta, mu)
        match events:
            case [(mechanisms.PoissonSubsampledGaussian() as step, 1)] if self._sensitivity() == 1:
                setting = _noise(step), step.sample_rate
                return lambda epsilon: max(closed_forms.single_step_log_delta(*setting, epsilon))
        return None

    def _mu(self, events: Events, *, unsampled: bool = False) -> float | None:
        """Mu of the history if all events are plain Gaussians, else None; see `as_gaussian`."""
        sigmas = [as_gaussian(event, unsampled=unsampled) for event, _ in events]
        if None in sigmas:
            return None
        counts = np.array([number for _, number in events], dtype=float)
        return self._sensitivity() * closed_forms.gaussian_mu(np.array(sigmas), counts)

    def _renyi(self) -> RDPAccountant | None:
        """Renyi accountant of the same history, nearly tight for a very large epsilon."""
        if any(getattr(event, "sample_rate", 1.0) < _MIN_RATE for event in self._counts):
            return None
        other = RDPAccountant(neighboring_relation=self._relation, group_size=self._group_size)
        with contextlib.suppress(AccountingError):  # it has no bound for an event
            other.merge(self)
            return other
        return None

    def _directions(self, events: Events, delta: float) -> list[Direction]:
        """Composed pairs (P, Q) and (Q, P), under `replace` also the exact one: the worst decides.

        `tail` is rounded down to a power of ten, so that it seldom changes as a history grows.
        """
        tail = 1e-4 * delta / sum(number for _, number in events)
        tail = 10.0 ** math.floor(math.log10(tail))
        families = self._families(events, tail)
        sides = [(families, False), (families, True)]  # (families, is (Q, P))
        if self._relation == "replace":
            sides.append((self._families(events, tail, exact=True), False))
            if any(isinstance(event, mechanisms.MassTable) for event, _ in events):
                sides.append((sides[-1][0], True))  # a table need not be its own reverse
        truncation = _truncation(events, self._group_size)
        memos = self._memos if len(events) > _MANY else [PrefixMemo() for _ in sides]
        return [
            Direction([pairs.Term(*family, flipped) for family in side], truncation, memo)
            for (side, flipped), memo in zip(sides, memos, strict=False)
        ]

    def _families(self, events: Events, tail: float, *, exact: bool = False) -> list[Family]:
        """Pairs of all events; those of subsampled Gaussians share a family.

        `exact` takes the exact pair of one replaced example under Poisson sampling.
        """
        found: list[Family] = []
        poisson: list[tuple[float, float, float]] = []
        fixed_size: list[tuple[float, float, float]] = []
        factor = self._sensitivity()
        for event, number in events:
            if (sigma := as_gaussian(event)) is not None:
                poisson.append((min(sigma, _MAX_NOISE) / factor, 1.0, number))
            elif isinstance(event, _POISSON) and self._group_size == 1 and not exact:
                poisson.append((_noise(event) / factor, _rate(event), number))
            elif isinstance(event, mechanisms.FixedSizeSubsampledGaussian):
                fixed_size.append((_noise(event) / factor, _rate(event), number))
            else:
                found.append((self._pair(event, tail, exact), np.array([float(number)])))
        for rows in filter(None, (poisson, fixed_size)):
            sigmas, rates, counts = np.array(rows, dtype=float).T
            one = pairs.Subsampled(sigmas, rates)
            found.append((one if rows is poisson else pairs.FixedSize(one), counts))
        return found

    def _pair(self, event: Mechanism, tail: float, exact: bool) -> pairs.PairFamily:
        """Dominating pair of one event that shares no family with others."""
        factor = self._sensitivity()
        match event:
            case mechanisms.Laplace(scale):
                return pairs.laplace(scale / factor)
            case mechanisms.DiscreteGaussian(sigma):
                return pairs.discrete_gaussian(sigma, int(factor))
            case mechanisms.RandomizedResponse(noise, buckets):
                return pairs.randomized_response(noise, buckets)
            case mechanisms.ApproximateDP(epsilon, delta):
                return pairs.black_box(epsilon, delta)
            case mechanisms.MassTable(p, q):
                return pairs.table(p, q)
            case mechanisms.BallsInBinsGaussian(sigma, bins, epochs):
                return balls_in_bins.one_epoch(sigma / math.sqrt(epochs), bins, tail)
            case _ if exact:
                return pairs.substitution(_noise(event), _rate(event))
            case _:
                return pairs.mixture(_noise(event), _rate(event), self._group_size)

    def _check(self, event: Mechanism) -> None:
        """Raise AccountingError if no bound is proved for the event in this accountant."""
        relation, group, name = self._relation, self._group_size, type(event).__name__
        match event:
            case _ if mechanisms.TYPES.get(name) is not type(event):
                why = f"{name} has no dominating pair here. Describe it as a MassTable."
            case mechanisms.FixedSizeSubsampledGaussian() if relation != "replace":
                why = (
                    "sampler='fixed_size' has no amplified bound under neighboring_relation="
                    f"{relation!r}: batches of fixed size change by a replacement. "
                    "Use neighboring_relation='replace', or sampler='poisson'."
                )
            case mechanisms.BallsInBinsGaussian(_, bins) if bins > 1 and self._sensitivity() > 1:
                why = (
                    "sampler='balls_in_bins' has a bound for one example added, removed or zeroed "
                    f"only, not for neighboring_relation={relation!r} with group_size={group}. "
                    "Use 'add_or_remove' and group_size=1, or sampler='poisson'."
                )
            case mechanisms.DiscreteGaussian(noise) if noise > MAX_DISCRETE:
                why = (
                    f"noise_multiplier={noise!r} of DiscreteGaussian is not resolved outcome by "
                    f"outcome. Expected at most {MAX_DISCRETE:g}, or use accountant='rdp'."
                )
            case _ if group > 1 and isinstance(event, _NO_GROUPS):
                why = f"group_size={group} for {name} has no proved bound here. Use group_size=1."
            case _ if group > 1000:
                why = f"group_size={group} is not resolved. Expected at most 1000."
            case _:
                return
        raise AccountingError(why)


def _noise(event: Any) -> float:
    """Noise multiplier, capped so that its square does not overflow; less noise is safe."""
    return min(float(event.noise_multiplier), _MAX_NOISE)


def _rate(event: Any) -> float:
    """Sampling rate, raised so that e^loss / rate does not overflow; a larger rate is safe."""
    return max(float(event.sample_rate), _MIN_RATE)


def _reveals(event: Mechanism) -> bool:
    """True if one release may reveal an example: no noise, or losses above 1e16."""
    is_certain = getattr(event, "noise_parameter", 1.0) == 0  # of a randomised response
    return is_certain or getattr(event, "noise_multiplier", 1.0) < 1e-8


def _pure_epsilon(events: Events, factor: float) -> float:
    """Return the sum of the pure epsilons, rounded up, or inf if an event has none."""
    total = 0.0
    for event, number in events:
        match event:
            case mechanisms.Laplace(scale):
                one = factor / scale
            case mechanisms.RandomizedResponse(noise, buckets):
                one = math.log1p((1 - noise) / (noise / buckets))
            case mechanisms.ApproximateDP(epsilon, delta) if delta == 0:
                one = epsilon
            case mechanisms.MassTable(p, q):
                uneven = [(a, b) for a, b in zip(p, q, strict=True) if a != b]
                losses = [abs(math.log(a / b)) if a and b else math.inf for a, b in uneven]
                one = max(losses, default=0.0)
            case _:
                return math.inf
        total += number * one
    return total * (1 + 1e-12)


def _truncation(events: Events, group: int) -> float:
    """Return T tau, for the (1 + e^epsilon) T tau that truncated Poisson batches add to delta.

    Truncation changes the output of each of T steps by at most tau = P(Binomial(n + k, q) > max) in
    total variation, on both data sets. The n + k covers the neighboring data set with k more
    examples.

    Source: after Chua et al. 2024 (arXiv 2411.04205), Theorem 3.3; docs/accounting.md, 2.5.
    """
    total = 0.0
    for event, number in events:
        if isinstance(event, mechanisms.TruncatedPoissonSubsampledGaussian):
            most = event.num_examples + group
            if event.max_batch_size < most:
                # The binomial tail by betainc: scipy's bdtrc takes 32-bit counts only.
                least = event.max_batch_size + 1
                tau = float(betainc(least, most - event.max_batch_size, event.sample_rate))
                total += number * tau * (1 + 1e-6)
    return total
