# SPDX-License-Identifier: Apache-2.0
"""Default accountant: closed forms, and privacy-loss distributions with a certified upper bound."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, ClassVar

import numpy as np
from scipy.special import betainc, erfcx, log_ndtr

from dualdp import _validate, mechanisms
from dualdp._validate import AccountingError
from dualdp.accountants.base import Accountant, as_gaussian, bracket, last_within, num_epochs
from dualdp.accountants.pld_engine import balls_in_bins, pairs
from dualdp.accountants.pld_engine.composition import (
    RTOL,
    Direction,
    PrefixMemo,
    upper_delta,
    upper_epsilon,
)
from dualdp.accountants.pld_engine.pairs import Array, U
from dualdp.accountants.rdp import RDPAccountant
from dualdp.mechanisms import Mechanism

MIN_DELTA = 1e-150
MAX_DISCRETE = 1e4  # largest noise multiplier of a discrete Gaussian: 800,000 outcomes
_LARGE = 2e3  # above this epsilon (inf if the lattice fails) the Renyi bound may be smaller
_MANY = 64  # distinct mechanisms, above which sums over them are reused by later calls
_MAX_NOISE, _MIN_RATE = 1e100, 1e-47
MARGIN = 1e-12  # relative, added to every epsilon of a closed form
_EXACT = 1e-15  # relative width of a closed form's bracket
_UP = 1 + 1e-15  # covers the rounding of mu
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(8)
_FAR = 15.0  # above: ten terms of the asymptotic series of Mills' ratio are exact to rounding

_POISSON = (mechanisms.PoissonSubsampledGaussian, mechanisms.TruncatedPoissonSubsampledGaussian)
_NO_GROUPS = (mechanisms.RandomizedResponse, mechanisms.ApproximateDP, mechanisms.MassTable)

Events = list[tuple[Mechanism, int]]
Family = tuple[pairs.PairFamily, Array]  # pairs, and how often each


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
            return smallest_epsilon(log_delta, math.log(delta)) * (1 + MARGIN)
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
        if mu is None or not gaussian_log_delta(mu, best) < math.log(delta):
            return best
        return min(best, gaussian_epsilon(mu, delta) * (1 + MARGIN))

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
        best = 1.0 if mu is None else math.exp(gaussian_log_delta(mu, target))
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
            return partial(gaussian_log_delta, mu)
        match events:
            case [(mechanisms.PoissonSubsampledGaussian() as step, 1)] if self._sensitivity() == 1:
                setting = _noise(step), step.sample_rate
                return lambda epsilon: max(single_step_log_delta(*setting, epsilon))
        return None

    def _mu(self, events: Events, *, unsampled: bool = False) -> float | None:
        """Mu of the history, rounded up, if all events are plain Gaussians; see `as_gaussian`.

        Source: Dong, Roth & Su 2022, Corollary 3.3 (Gaussian mechanisms compose exactly).
        """
        sigmas = [as_gaussian(event, unsampled=unsampled) for event, _ in events]
        if None in sigmas:
            return None
        counts = np.array([number for _, number in events], dtype=float)
        inverse = 1 / np.array(sigmas, dtype=float)
        return self._sensitivity() * float(np.sqrt(np.sum(counts * inverse * inverse))) * _UP

    def _renyi(self) -> RDPAccountant | None:
        """Renyi accountant of the same history, nearly tight for a very large epsilon."""
        if any(getattr(event, "sample_rate", 1.0) < _MIN_RATE for event in self._counts):
            return None
        other = RDPAccountant(
            neighboring_relation=self.neighboring_relation, group_size=self.group_size
        )
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
        if self.neighboring_relation == "replace":
            sides.append((self._families(events, tail, exact=True), False))
            if any(isinstance(event, mechanisms.MassTable) for event, _ in events):
                sides.append((sides[-1][0], True))  # a table need not be its own reverse
        truncation = _truncation(events, self.group_size)
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
            elif isinstance(event, _POISSON) and self.group_size == 1 and not exact:
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
                return pairs.mixture(_noise(event), _rate(event), self.group_size)

    def _check(self, event: Mechanism) -> None:
        """Raise AccountingError if no bound is proved for the event in this accountant."""
        relation, group, name = self.neighboring_relation, self.group_size, type(event).__name__
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


def gaussian_log_delta(mu: float, epsilon: float) -> float:
    """Return log delta of N(mu, 1) against N(0, 1), rounded up.

    delta = Phi(mu/2 - epsilon/mu) - e^epsilon Phi(-mu/2 - epsilon/mu). With s = epsilon/mu - mu/2,
    the density phi and Mills' ratio R(x) = Phi(-x) / phi(x), delta = phi(s) [R(s) - R(s + mu)].
    Where mu is small (noise multiplier 1e8) both differences cancel completely; the second one is
    then computed as the integral of -R'(x) = 1 - x R(x) over [s, s + mu].

    Guarantees:
        Never below the truth, for noise multipliers from 1e-2 to 1e12.
            [test_closed_forms_are_never_below_the_truth]

    Source: Balle & Wang 2018, Theorem 8.
    """
    if mu == 0:
        return -math.inf
    quotient = epsilon / mu
    s = quotient - mu / 2
    if math.isinf(quotient):
        return -math.inf
    # One rounding error in epsilon, mu or s changes log delta by |s| (epsilon/mu + mu + |s|) ulps.
    doubt = 1e-14 + 16 * U * (1 + abs(s)) * (quotient + mu + abs(s))
    if s < -5:  # so mu > 10, and the second term is no more than e^-50 of the first
        first, second = float(log_ndtr(-s)), epsilon + float(log_ndtr(-s - mu))
        return first + math.log(-math.expm1(second - first)) + doubt
    if mu < 0.5:
        x = s + 0.5 * mu * (1 + _NODES)
        difference = 0.5 * mu * float(_WEIGHTS @ mills_slope(x))
    else:
        difference = float(_mills(s) - _mills(s + mu))
    log_density = -0.5 * s * s - 0.5 * math.log(2 * math.pi)
    return log_density + math.log(difference) + doubt


def _mills(x: Any) -> Any:
    """Mills' ratio Phi(-x) / phi(x), x >= -6."""
    return math.sqrt(0.5 * math.pi) * erfcx(x * math.sqrt(0.5))


def mills_slope(x: Array) -> Array:
    """-R'(x) = 1 - x R(x) > 0, minus the derivative of Mills' ratio."""
    series, term = np.zeros_like(x), 1 / np.maximum(x, _FAR) ** 2
    for k in range(1, 11):  # 1/x^2 - 3/x^4 + 15/x^6 - ...
        series += term
        term = -term * (2 * k + 1) / np.maximum(x, _FAR) ** 2
    return np.where(x < _FAR, 1 - x * _mills(np.minimum(x, _FAR)), series)


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Return epsilon of N(mu, 1) against N(0, 1) at delta > 0: to 1e-13, never below the truth.

    mu = sqrt(sum of 1 / noise_multiplier^2) for a composition of full-batch Gaussians.

    >>> round(gaussian_epsilon(1.0, 1e-5), 12)
    4.377178095681
    """
    if mu == 0 or mu == math.inf or delta == 0:
        return 0.0 if mu == 0 else math.inf
    return smallest_epsilon(lambda epsilon: gaussian_log_delta(mu, epsilon), math.log(delta))


def single_step_log_delta(sigma: float, rate: float, epsilon: float) -> tuple[float, float]:
    """Return log delta (remove, add) of one Poisson-subsampled Gaussian step, 0 < rate < 1.

    The mixture (1-q) N(0) + q N(1) exceeds e^epsilon N(0) where the likelihood ratio of N(1) to
    N(0) exceeds a = 1 + (e^epsilon - 1)/q. N(0) exceeds e^epsilon times the mixture where that
    ratio is below b = 1 + (e^-epsilon - 1)/q. Both follow from the plain Gaussian's delta:
        remove: q delta(log a);    add: q e^epsilon b delta(-log b).

    Source: Balle, Barthe & Gaboardi 2018, Theorem 2 (advanced joint convexity), with equality.
    """
    log_rate = math.log(rate)
    # log a without overflow
    log_a = (
        math.log1p(math.expm1(epsilon) / rate)
        if epsilon < 30
        else epsilon - log_rate + math.log1p(-(1 - rate) * math.exp(-epsilon))
    )
    remove = log_rate + gaussian_log_delta(1 / sigma, log_a)
    less = math.expm1(-epsilon) / rate  # b - 1
    if less <= -1:
        return remove, -math.inf
    log_b = math.log1p(less)
    return remove, log_rate + epsilon + log_b + gaussian_log_delta(1 / sigma, -log_b)


def smallest_epsilon(log_delta: Callable[[float], float], target: float) -> float:
    """Return the smallest epsilon >= 0 with log_delta(epsilon) <= target, rounded up, or inf."""

    def height(epsilon: float) -> float:
        return max(log_delta(epsilon) - target, -1e300)

    if height(0.0) <= 0:
        return 0.0
    bad, good = bracket(lambda epsilon: height(epsilon) <= 0, 0.0, 1.0, 2.0, 1e300)
    return last_within(good, bad, height, width=_EXACT) if good <= 1e300 else math.inf
