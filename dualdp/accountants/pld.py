# SPDX-License-Identifier: Apache-2.0
"""Default accountant: privacy-loss distributions with certified lower and upper bounds."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np
from scipy.special import betainc

from dualdp import _validate, mechanisms
from dualdp._validate import AccountingError
from dualdp.accountants import closed_forms
from dualdp.accountants.base import Accountant, as_gaussian, units
from dualdp.accountants.pld_engine import balls_in_bins, dominating_pairs
from dualdp.accountants.pld_engine import epsilon as certified
from dualdp.accountants.pld_engine.bounds import Extra
from dualdp.accountants.pld_engine.discretize import PairFamily, Term
from dualdp.accountants.pld_engine.prefix_cache import PoissonHistory, PrefixCache
from dualdp.accountants.pld_engine.window import Accuracy, Direction
from dualdp.accountants.rdp import RDPAccountant
from dualdp.mechanisms import Mechanism

MIN_DELTA = 1e-150
MAX_DISCRETE = 1e4  # largest noise multiplier of a discrete Gaussian: 800,000 outcomes
_LARGE = 2e3  # above this epsilon (inf if the lattice fails) the Renyi bound may be smaller
_MANY = 64  # distinct mechanisms, above which the sums of earlier calls are cached
_NOTHING = 1e-9  # a smaller epsilon is within rounding and is not refined
_MAX_NOISE, _MIN_RATE = 1e100, 1e-47

_GAUSSIANS = (
    mechanisms.Gaussian,
    mechanisms.PoissonSubsampledGaussian,
    mechanisms.FixedSizeSubsampledGaussian,
    mechanisms.ShuffledGaussian,
    mechanisms.BallsInBinsGaussian,
)
_POISSON = (
    mechanisms.PoissonSubsampledGaussian,
    mechanisms.TruncatedPoissonSubsampledGaussian,
)
_WITH_GROUPS = (
    *_POISSON,
    mechanisms.Gaussian,
    mechanisms.ShuffledGaussian,
    mechanisms.Laplace,
    mechanisms.DiscreteGaussian,
)
_KNOWN = (
    *_GAUSSIANS,
    *_WITH_GROUPS,
    mechanisms.RandomizedResponse,
    mechanisms.ApproximateDP,
    mechanisms.MassTable,
)
#: Mechanisms whose dominating pair no data set attains, so that it gives no lower bound.
_NOT_ATTAINED = (mechanisms.BallsInBinsGaussian, mechanisms.FixedSizeSubsampledGaussian)

Events = list[tuple[Mechanism, int]]


class PLDAccountant(Accountant):
    """Accountant with certified bounds: `get_epsilon` is at most about 1 % above the lower bound.

    Full-batch Gaussians and a single subsampled step have closed forms; everything else is composed
    on a lattice, in both directions of the relation.

    Args:
        neighboring_relation: `add_or_remove`, `zero_out` (same dominating pairs: the example's
            gradient becomes 0), or `replace`.
        group_size: number of examples of one user; bounded by mixtures, not by the group lemma.

    Guarantees:
        lower <= epsilon <= upper, floating point included.
            [test_upper_is_above_every_lower_bound]
    """

    name: ClassVar[str] = "pld"

    def __init__(self, *, neighboring_relation: str = "add_or_remove", group_size: int = 1) -> None:
        super().__init__(neighboring_relation=neighboring_relation, group_size=group_size)
        self._poisson, self._caches = PoissonHistory(), (PrefixCache(), PrefixCache())

    def epsilon_bounds(
        self, *, delta: float, rtol: float | None = None
    ) -> tuple[float, float, float]:
        """Return (lower bound, estimate, upper bound) of epsilon; the estimate is their mean.

        Args:
            delta: float in [0, 1].
            rtol: float, relative difference to which both bounds are refined. With None the upper
                bound is that of `get_epsilon`, and the lower one is within about 1 % of it.
        """
        target = _validate.probability("delta", delta)
        if rtol is not None:
            rtol = _validate.positive("rtol", rtol)
        events = self._units()
        exact = self._exact(events, target)
        if exact is not None:
            return exact
        upper = self._upper(events, target)
        if upper < _NOTHING:
            return 0.0, upper, upper
        lower, upper = certified.two_sided(
            self._directions(events, target, below=True),
            self._directions(events, target) if rtol is not None else [],
            target,
            rtol or 1e-2,
            upper,
        )
        middle = 0.5 * (lower + upper) if upper < math.inf else lower
        return lower, middle, upper

    def get_epsilon(self, *, delta: float) -> float:
        """Return a certified upper bound on epsilon at `delta`."""
        target = _validate.probability("delta", delta)
        if len(self._counts) > _MANY and self._sensitivity() == 1:
            # a growing run with a noise schedule asks again after every step
            poisson = self._poisson.read(self._counts)
            if poisson is not None and MIN_DELTA <= target < 1:
                pairs, counts = poisson
                directions = [
                    Direction([Term(pairs, counts, flipped)], cache=cache)
                    for flipped, cache in zip((False, True), self._caches, strict=True)
                ]
                mu = closed_forms.gaussian_mu(pairs.sigma, counts)
                return self._smallest(directions, target, mu, None)
        events = self._units()
        exact = self._exact(events, target)
        return self._upper(events, target) if exact is None else exact[2]

    def get_delta(self, *, epsilon: float) -> float:
        """Return a certified upper bound on delta at `epsilon`."""
        target = _validate.non_negative("epsilon", epsilon)
        events = self._units()
        if not events:
            return 0.0
        if any(_is_noiseless(event) or _overflows(event) for event, _ in events):
            return 1.0
        mu = self._mu(events)
        if mu is not None:
            return min(1.0, math.exp(closed_forms.gaussian_log_delta(mu, target)) * (1 + 1e-11))
        pure = _pure_epsilon(events, self._sensitivity())
        if pure is not None and target >= pure:
            return 0.0
        step = self._only_step(events)
        if step is not None:
            logs = closed_forms.single_step_log_delta(_noise(step), step.sample_rate, target)
            return min(1.0, math.exp(max(logs)) * (1 + 1e-9))
        mu = self._mu_without_sampling(events)
        best = 1.0 if mu is None else math.exp(closed_forms.gaussian_log_delta(mu, target))
        for assumed in (1e-5, 1e-12):  # balls-in-bins is discretized for an assumed delta
            directions = self._directions(events, assumed)
            best = min(best, max(certified.upper_delta(d, target) for d in directions))
            if not any(isinstance(e, mechanisms.BallsInBinsGaussian) for e, _ in events):
                break
        renyi = self._renyi()  # smaller far below 1e-100
        return best if renyi is None else min(best, renyi.get_delta(epsilon=target))

    def _units(self) -> Events:
        """(event, units) of the events that release anything."""
        return [
            (event, number)
            for event, count in self._counts.items()
            if (number := units(event, count)) and getattr(event, "sample_rate", 1.0) > 0
        ]

    def _only_step(self, events: Events) -> mechanisms.PoissonSubsampledGaussian | None:
        """Poisson-subsampled step that is the whole history, or None."""
        if len(events) == 1 and events[0][1] == 1 and self._sensitivity() == 1:
            event = events[0][0]
            if isinstance(event, mechanisms.PoissonSubsampledGaussian):
                return event
        return None

    def _mu(self, events: Events) -> float | None:
        """Mu of the history if all events are plain Gaussians, else None."""
        sigmas = [as_gaussian(event) for event, _ in events]
        if any(sigma is None for sigma in sigmas):
            return None
        counts = np.array([number for _, number in events], dtype=float)
        return self._sensitivity() * closed_forms.gaussian_mu(np.array(sigmas, dtype=float), counts)

    def _mu_without_sampling(self, events: Events) -> float | None:
        """Mu of the Gaussians without amplification (joint convexity), always an upper bound."""
        if not all(isinstance(event, _GAUSSIANS) for event, _ in events):
            return None
        sigmas = [
            getattr(event, "noise_multiplier", 0.0)
            / math.sqrt(getattr(event, "epochs_per_assignment", 1))
            for event, _ in events
        ]
        counts = np.array([number for _, number in events], dtype=float)
        return self._sensitivity() * closed_forms.gaussian_mu(np.array(sigmas), counts)

    def _exact(self, events: Events, delta: float) -> tuple[float, float, float] | None:
        """(lower, estimate, upper) from a closed form, or None."""
        if not events or delta == 1:
            return 0.0, 0.0, 0.0
        if any(_is_noiseless(event) for event, _ in events):
            is_certain = delta < _revealing_probability(events)
            return (math.inf if is_certain else 0.0), math.inf, math.inf
        if any(_overflows(event) for event, _ in events):
            return 0.0, math.inf, math.inf
        if delta == 0:
            pure = _pure_epsilon(events, self._sensitivity())
            return (math.inf, math.inf, math.inf) if pure is None else (0.0, pure, pure)
        mu, step, value = self._mu(events), self._only_step(events), None
        if mu is not None:
            value = closed_forms.gaussian_epsilon(mu, delta)
        elif step is not None:
            value = closed_forms.single_step_epsilon(_noise(step), step.sample_rate, delta)
        if value is not None:
            return max(0.0, value * (1 - 1e-10)), value, value * (1 + closed_forms.MARGIN)
        if delta < MIN_DELTA:
            raise AccountingError(
                f"delta={delta!r} is below {MIN_DELTA}, the least that is resolved here. "
                "Use a larger delta, or delta=0 for the pure bound."
            )
        return None

    def _upper(self, events: Events, delta: float) -> float:
        """Certified upper bound of any events."""
        return self._smallest(
            self._directions(events, delta),
            delta,
            self._mu_without_sampling(events),
            _pure_epsilon(events, self._sensitivity()),
        )

    def _smallest(
        self, directions: list[Direction], delta: float, mu: float | None, pure: float | None
    ) -> float:
        """Smallest of the lattice bound, the bound without sampling, and the pure one.

        Each bound grows with every step and every worse setting, hence so does the smallest.
        """
        best = certified.upper_epsilon(directions, Accuracy(), delta)
        if best > _LARGE and (renyi := self._renyi()) is not None:
            best = min(best, renyi.get_epsilon(delta=delta))
        if pure is not None:
            best = min(best, pure)
        if mu is not None and best > 0:
            plain = closed_forms.gaussian_epsilon(mu, delta) * (1 + closed_forms.MARGIN)
            best = min(best, plain)
        return best

    def _renyi(self) -> RDPAccountant | None:
        """Renyi accountant of the same history, nearly tight for a very large epsilon."""
        if any(getattr(event, "sample_rate", 1.0) < _MIN_RATE for event in self._counts):
            return None
        other = RDPAccountant(neighboring_relation=self._relation, group_size=self._group_size)
        try:
            other.merge(self)
        except AccountingError:  # it has no bound for an event
            return None
        return other

    def _directions(self, events: Events, delta: float, *, below: bool = False) -> list[Direction]:
        """The composed pairs (P, Q), of which the worst decides.

        A lower bound (`below`) uses only pairs that some data sets attain: balls-in-bins and
        sampling without replacement are left out, and `replace` uses its exact pair alone.
        """
        if below:
            events = [(e, n) for e, n in events if not isinstance(e, _NOT_ATTAINED)]
            events = [(e, n) for e, n in events if getattr(e, "sample_rate", 1.0) >= _MIN_RATE]
            if not events:
                return []
        extra = _truncation(events, self._group_size)
        tail = 1e-4 * delta / sum(number for _, number in events)
        tail = 10.0 ** math.floor(math.log10(tail))
        views = [("add_or_remove", False), ("add_or_remove", True)]
        if self._relation == "replace":
            views = [*([] if below else views), ("substitution", False)]
            if any(isinstance(event, mechanisms.MassTable) for event, _ in events):
                views.append(("substitution", True))  # a table need not be its own reverse
        return [
            Direction(self._terms(events, view, flipped, tail), extra) for view, flipped in views
        ]

    def _terms(self, events: Events, view: str, flipped: bool, tail: float) -> list[Term]:
        """Terms of all events in one direction; subsampled Gaussians share a family."""
        terms: list[Term] = []
        poisson: list[tuple[float, float, float]] = []
        fixed_size: list[tuple[float, float, float]] = []
        factor = self._sensitivity()
        for event, number in events:
            sigma = as_gaussian(event)
            if sigma is not None:
                poisson.append((min(sigma, _MAX_NOISE) / factor, 1.0, number))
            elif isinstance(event, _POISSON) and self._group_size == 1 and view != "substitution":
                poisson.append((_noise(event) / factor, _rate(event), number))
            elif isinstance(event, mechanisms.FixedSizeSubsampledGaussian):
                fixed_size.append((_noise(event) / factor, _rate(event), number))
            else:
                pairs = self._pair(event, view, tail)
                terms.append(Term(pairs, np.array([float(number)]), flipped))
        for rows, family in (
            (poisson, dominating_pairs.Subsampled),
            (fixed_size, dominating_pairs.FixedSize),
        ):
            if rows:
                sigmas, rates, counts = np.array(rows, dtype=float).T
                terms.append(Term(family(sigmas, rates), counts, flipped))
        return terms

    def _pair(self, event: Mechanism, view: str, tail: float) -> PairFamily:
        """Dominating pair of one event that shares no family with others."""
        factor = self._sensitivity()
        match event:
            case mechanisms.Laplace(scale):
                return dominating_pairs.laplace(scale / factor)
            case mechanisms.DiscreteGaussian(sigma):
                return dominating_pairs.discrete_gaussian(sigma, int(factor))
            case mechanisms.RandomizedResponse(noise, buckets):
                return dominating_pairs.randomized_response(noise, buckets)
            case mechanisms.ApproximateDP(epsilon, delta):
                return dominating_pairs.black_box(epsilon, delta)
            case mechanisms.MassTable(p, q):
                return dominating_pairs.table(p, q)
            case mechanisms.BallsInBinsGaussian(sigma, bins, epochs):
                return balls_in_bins.one_epoch(sigma / math.sqrt(epochs), bins, tail)
            case mechanisms.PoissonSubsampledGaussian() | (
                mechanisms.TruncatedPoissonSubsampledGaussian()
            ):
                if view == "substitution":
                    return dominating_pairs.substitution(_noise(event), _rate(event))
                return dominating_pairs.mixture(_noise(event), _rate(event), self._group_size)
        raise AccountingError(f"{type(event).__name__} has no dominating pair here.")

    def _check(self, event: Mechanism) -> None:
        """Raise AccountingError if no bound is proved for the event in this accountant."""
        relation, group = self._relation, self._group_size
        name = type(event).__name__
        if type(event) not in _KNOWN:
            raise AccountingError(
                f"{name} has no dominating pair here. Describe it as a MassTable or ApproximateDP."
            )
        if isinstance(event, mechanisms.FixedSizeSubsampledGaussian) and relation != "replace":
            raise AccountingError(
                f"sampler='fixed_size' has no amplified bound under neighboring_relation="
                f"{relation!r}: batches of fixed size change by a replacement. "
                "Use neighboring_relation='replace', or sampler='poisson'."
            )
        if isinstance(event, mechanisms.BallsInBinsGaussian) and event.num_bins > 1:
            if relation == "replace" or group > 1:
                raise AccountingError(
                    "sampler='balls_in_bins' has a bound for one example added, removed or zeroed "
                    f"only, not for neighboring_relation={relation!r} with group_size={group}. "
                    "Use 'add_or_remove' and group_size=1, or sampler='poisson'."
                )
        if isinstance(event, mechanisms.DiscreteGaussian) and event.noise_multiplier > MAX_DISCRETE:
            raise AccountingError(
                f"noise_multiplier={event.noise_multiplier!r} of DiscreteGaussian is not resolved "
                f"outcome by outcome. Expected at most {MAX_DISCRETE:g}, or use accountant='rdp'."
            )
        if group > 1 and type(event) not in _WITH_GROUPS:
            raise AccountingError(
                f"group_size={group} for {name} has no proved bound here. Use group_size=1."
            )
        if group > 1000:
            raise AccountingError(f"group_size={group} is not resolved. Expected at most 1000.")


def _noise(event: Any) -> float:
    """Noise multiplier, capped so that its square does not overflow; less noise is safe."""
    return min(float(event.noise_multiplier), _MAX_NOISE)


def _rate(event: Any) -> float:
    """Sampling rate, raised so that e^loss / rate does not overflow; a larger rate is safe."""
    return max(float(event.sample_rate), _MIN_RATE)


def _is_noiseless(event: Mechanism) -> bool:
    """True if one release without noise may reveal an example."""
    if isinstance(event, mechanisms.RandomizedResponse):
        return event.noise_parameter == 0
    return getattr(event, "noise_multiplier", 1.0) == 0


def _overflows(event: Mechanism) -> bool:
    """True if losses, above 1e16, would overflow the grid; epsilon is then reported as inf."""
    return getattr(event, "noise_multiplier", 1.0) < 1e-8


def _revealing_probability(events: Events) -> float:
    """Return the probability that a noiseless release used the example."""
    hidden = 1.0
    for event, number in events:
        truncated = isinstance(event, mechanisms.TruncatedPoissonSubsampledGaussian)
        if _is_noiseless(event) and not truncated:
            hidden *= (1 - getattr(event, "sample_rate", 1.0)) ** number
    return 1 - hidden


def _pure_epsilon(events: Events, factor: float) -> float | None:
    """Return the sum of the pure epsilons, rounded up, or None if an event has none."""
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
                pairs = [(a, b) for a, b in zip(p, q, strict=True) if a != b]
                losses = [abs(math.log(a / b)) if a and b else math.inf for a, b in pairs]
                one = max(losses, default=0.0)
            case _:
                return None
        total += number * one
    return total * (1 + 1e-12)


def _truncation(events: Events, group: int) -> Extra:
    """Return the term (1 + e^epsilon) sum of P(a Poisson batch is truncated) of delta.

    Truncation changes each output distribution by at most tau = P(Binomial(n + k, q) > max) in
    total variation, on both data sets: delta_cut(e) <= delta(e) + (1 + e^e) T tau. The n + k covers
    the neighboring data set with k more examples.

    Source: Chua et al. 2024 (arXiv 2411.04205), Theorem 3.3 in the same spirit.
    """
    total = 0.0
    for event, number in events:
        if isinstance(event, mechanisms.TruncatedPoissonSubsampledGaussian):
            most = event.num_examples + group
            if event.max_batch_size < most:
                # betainc counts in floats, and bdtrc in 32 bits
                least = event.max_batch_size + 1
                tau = float(betainc(least, most - event.max_batch_size, event.sample_rate))
                total += number * tau * (1 + 1e-6)
    return Extra(total, total)
