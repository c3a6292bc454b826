# SPDX-License-Identifier: Apache-2.0
"""The default accountant: privacy-loss distributions with a certificate on both sides."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, ClassVar

import numpy as np

from dualdp import _validate, mechanisms
from dualdp._validate import AccountingError
from dualdp.accountants import allocation, bracket, gaussian, pairs, scope, special
from dualdp.accountants.cells import Family, Subsampled
from dualdp.accountants.history import Accountant, as_gaussian, units
from dualdp.accountants.lattice import Part
from dualdp.accountants.memory import Memory, Rows
from dualdp.accountants.rdp import RDPAccountant
from dualdp.mechanisms import Mechanism

MIN_DELTA = 1e-150
_LARGE = 2e3  # above this, or where the lattice gives up, the Renyi bound may be smaller
_MANY = 64  # different mechanisms
_NOTHING = 1e-9  # below this an epsilon is rounding, and is not refined
_MAX_NOISE, _MIN_RATE = 1e100, 1e-47
_SAMPLED = (
    mechanisms.PoissonSubsampledGaussian,
    mechanisms.TruncatedPoissonSubsampledGaussian,
)


class PLDAccountant(Accountant):
    """Certified and tight: `get_epsilon` is an upper bound within about 1 % of the lower one.

    Full-batch Gaussians and a single subsampled step are closed forms; everything else is composed
    on a lattice (`lattice`, `compose`, `bounds`), in both directions of the relation.

    Args:
        neighboring_relation: `add_or_remove`, `zero_out` (the same pairs: the example's gradient
            becomes 0), or `replace`.
        group_size: examples of one user, by mixtures, not by the group lemma.

    Guarantees:
        lower <= epsilon <= upper, floating point included.
            [test_upper_is_above_every_lower_bound]
    """

    name: ClassVar[str] = "pld"

    def __init__(self, *, neighboring_relation: str = "add_or_remove", group_size: int = 1) -> None:
        super().__init__(neighboring_relation=neighboring_relation, group_size=group_size)
        self._rows, self._memory = Rows(), (Memory(), Memory())

    def epsilon_bounds(
        self, *, delta: float, rtol: float | None = None
    ) -> tuple[float, float, float]:
        """(lower, estimate, upper); the estimate is their middle.

        Args:
            delta: in [0, 1].
            rtol: refine both bounds until they are this close (relative to the upper one). None:
                the upper bound is that of `get_epsilon`, the lower one within about 1 % of it.
        """
        target = _validate.probability("delta", delta)
        if rtol is not None:
            rtol = _validate.positive("rtol", rtol)
        exact = self._exact(target)
        if exact is not None:
            return exact
        upper = self._upper(target)
        if upper < _NOTHING:
            return 0.0, upper, upper
        lower, upper = bracket.two_sided(
            self._directions(target, below=True),
            self._directions(target) if rtol is not None else [],
            target,
            rtol or 1e-2,
            upper,
        )
        middle = 0.5 * (lower + upper) if upper < math.inf else lower
        return lower, middle, upper

    def get_epsilon(self, *, delta: float) -> float:
        """Certified upper bound on epsilon at `delta`."""
        target = _validate.probability("delta", delta)
        rows = self._rows.of(self._counts) if self._grows() else None
        if rows is not None and MIN_DELTA <= target < 1:
            return self._upper_of_rows(rows, target)
        exact = self._exact(target)
        return self._upper(target) if exact is None else exact[2]

    def get_delta(self, *, epsilon: float) -> float:
        """Certified upper bound on delta at `epsilon`."""
        target = _validate.non_negative("epsilon", epsilon)
        units_ = self._units()
        if not units_:
            return 0.0
        if any(special.noiseless(event) or special.hopeless(event) for event, _ in units_):
            return 1.0
        mu = self._mu(units_)
        if mu is not None:
            return min(1.0, math.exp(gaussian.gaussian_log_delta(mu, target)) * (1 + 1e-11))
        pure = special.pure(units_, self._factor())
        if pure is not None and target >= pure:
            return 0.0
        step = self._only_step(units_)
        if step is not None:
            logs = gaussian.single_step_log_delta(_noise(step), step.sample_rate, target)
            return min(1.0, math.exp(max(logs)) * (1 + 1e-9))
        best = self._mu_without_sampling(units_)
        cap = 1.0 if best is None else math.exp(gaussian.gaussian_log_delta(best, target))
        best_delta = cap
        for share in (1e-5, 1e-12):  # an epoch of balls-in-bins is resolved for a certain delta
            directions = self._directions(share)
            best_delta = min(best_delta, max(bracket.upper_delta(d, target) for d in directions))
            if not any(isinstance(e, mechanisms.BallsInBinsGaussian) for e, _ in units_):
                break
        return best_delta

    def _units(self) -> list[tuple[Mechanism, int]]:
        """(event, units) that release anything."""
        pairs_ = [(event, units(event, count)) for event, count in self._counts.items()]
        return [
            (event, number)
            for event, number in pairs_
            if number and getattr(event, "sample_rate", 1.0) > 0
        ]

    def _factor(self) -> float:
        """How far one user moves a sum, in units of the clipping bound."""
        return self._group_size * (2.0 if self._relation == "replace" else 1.0)

    def _only_step(
        self, events: list[tuple[Mechanism, int]]
    ) -> mechanisms.PoissonSubsampledGaussian | None:
        """The one Poisson-subsampled step, if the history is no more than that."""
        if len(events) == 1 and events[0][1] == 1 and self._factor() == 1:
            event = events[0][0]
            if isinstance(event, mechanisms.PoissonSubsampledGaussian):
                return event
        return None

    def _mu(self, events: Iterable[tuple[Mechanism, int]]) -> float | None:
        """mu, if everything is a plain Gaussian."""
        rows = [(as_gaussian(event), number) for event, number in events]
        if any(sigma is None for sigma, _ in rows):
            return None
        sigmas = np.array([sigma for sigma, _ in rows], dtype=float)
        counts = np.array([number for _, number in rows], dtype=float)
        return self._factor() * gaussian.gaussian_mu(sigmas, counts)

    def _mu_without_sampling(self, events: Iterable[tuple[Mechanism, int]]) -> float | None:
        """Mu of the Gaussians without amplification (joint convexity): a bound that always ends."""
        rows = list(events)
        if not all(isinstance(event, scope.GAUSSIANS) for event, _ in rows):
            return None
        sigmas = [
            getattr(event, "noise_multiplier", 0.0)
            / math.sqrt(getattr(event, "epochs_per_assignment", 1))
            for event, _ in rows
        ]
        counts = np.array([number for _, number in rows], dtype=float)
        return self._factor() * gaussian.gaussian_mu(np.array(sigmas), counts)

    def _exact(self, delta: float) -> tuple[float, float, float] | None:
        """Bounds from a closed form, where one exists."""
        events = self._units()
        if not events or delta == 1:
            return 0.0, 0.0, 0.0
        if any(special.noiseless(event) for event, _ in events):
            certain = delta < special.surely_revealed(events)
            return (math.inf if certain else 0.0), math.inf, math.inf
        if any(special.hopeless(event) for event, _ in events):
            return 0.0, math.inf, math.inf
        if delta == 0:
            pure = special.pure(events, self._factor())
            if pure is None:
                return math.inf, math.inf, math.inf
            return 0.0, pure, pure
        mu = self._mu(events)
        if mu is not None:
            value = gaussian.gaussian_epsilon(mu, delta)
            return max(0.0, value * (1 - 1e-10)), value, value * (1 + gaussian.MARGIN)
        step = self._only_step(events)
        if step is not None:
            value = special.single_step(_noise(step), step.sample_rate, delta)
            return max(0.0, value * (1 - 1e-10)), value, value * (1 + gaussian.MARGIN)
        if delta < MIN_DELTA:
            raise AccountingError(
                f"delta={delta!r} is below {MIN_DELTA}, the least that is resolved here. "
                "Use a larger delta, or delta=0 for the pure bound."
            )
        return None

    def _upper(self, delta: float) -> float:
        """Certified upper bound, by the lattice and by the bounds that need none.

        Each of them grows with every step and every worse setting, hence so does the least.
        """
        events = self._units()
        best = bracket.worst(self._directions(delta), bracket.Accuracy(), delta)
        if best > _LARGE:
            best = min(best, self._renyi(delta))
        pure = special.pure(events, self._factor())
        if pure is not None:
            best = min(best, pure)
        mu = self._mu_without_sampling(events)
        if mu is not None and best > 0:
            plain = gaussian.gaussian_epsilon(mu, delta) * (1 + gaussian.MARGIN)
            best = min(best, plain)
        return best

    def _grows(self) -> bool:
        """Whether this may be a run with a schedule, asked again and again as it grows."""
        return len(self._counts) > _MANY and self._group_size == 1 and self._relation != "replace"

    def _upper_of_rows(self, rows: Rows, delta: float) -> float:
        """As `_upper`, of Poisson-subsampled Gaussians alone; what was composed before is kept."""
        part = [Part(Subsampled(rows.sigma, rows.rate), rows.counts, way) for way in (False, True)]
        directions = [
            bracket.Direction([one], memory=memory)
            for one, memory in zip(part, self._memory, strict=True)
        ]
        best = bracket.worst(directions, bracket.Accuracy(), delta)
        if best > _LARGE:
            best = min(best, self._renyi(delta))
        mu = gaussian.gaussian_mu(rows.sigma, rows.counts)
        return min(best, gaussian.gaussian_epsilon(mu, delta) * (1 + gaussian.MARGIN))

    def _renyi(self, delta: float) -> float:
        """Upper bound by the Renyi accountant, inf where it has none: nearly tight when huge."""
        other = RDPAccountant(neighboring_relation=self._relation, group_size=self._group_size)
        try:
            other.merge(self)
        except AccountingError:
            return math.inf
        return other.get_epsilon(delta=delta)

    def _directions(self, delta: float, *, below: bool = False) -> list[bracket.Direction]:
        """The composed pairs of which the worst decides.

        For a lower bound (`below`) only pairs that some data sets attain: balls-in-bins and
        sampling without replacement are left out, and `replace` is its exact pair alone.
        """
        events = self._units()
        if below:
            events = [(e, n) for e, n in events if not isinstance(e, scope.NOT_ATTAINED)]
            events = [(e, n) for e, n in events if getattr(e, "sample_rate", 1.0) >= _MIN_RATE]
            if not events:
                return []
        extra = special.truncation(events, self._group_size)
        tail = 1e-4 * delta / sum(number for _, number in events)
        tail = 10.0 ** math.floor(math.log10(tail))
        views = [("add_or_remove", False), ("add_or_remove", True)]
        if self._relation == "replace":
            views = [*([] if below else views), ("substitution", False)]
        return [
            bracket.Direction(self._parts(events, view, flipped, tail), extra)
            for view, flipped in views
        ]

    def _parts(
        self, events: list[tuple[Mechanism, int]], view: str, flipped: bool, tail: float
    ) -> list[Part]:
        """Families of all events for one direction; subsampled Gaussians share one family."""
        parts: list[Part] = []
        rows: dict[str, list[tuple[float, float, float]]] = {"poisson": [], "fixed_size": []}
        factor = self._factor()
        for event, number in events:
            sigma = as_gaussian(event)
            if sigma is not None:
                rows["poisson"].append((min(sigma, _MAX_NOISE) / factor, 1.0, number))
            elif isinstance(event, _SAMPLED) and self._group_size == 1 and view != "substitution":
                rows["poisson"].append((_noise(event) / factor, _rate(event), number))
            elif isinstance(event, mechanisms.FixedSizeSubsampledGaussian):
                rows["fixed_size"].append((_noise(event) / factor, _rate(event), number))
            else:
                family = self._family(event, view, tail)
                parts.append(Part(family, np.array([float(number)]), flipped))
        for kind, family_class in (("poisson", Subsampled), ("fixed_size", pairs.FixedSize)):
            if rows[kind]:
                sigmas, rates, counts = np.array(rows[kind], dtype=float).T
                parts.append(Part(family_class(sigmas, rates), counts, flipped))
        return parts

    def _family(self, event: Mechanism, view: str, tail: float) -> Family:
        """The pair of one event that does not share a family with others."""
        factor = self._factor()
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
                return allocation.one_epoch(sigma / math.sqrt(epochs), bins, tail)
            case mechanisms.PoissonSubsampledGaussian() | (
                mechanisms.TruncatedPoissonSubsampledGaussian()
            ):
                if view == "substitution":
                    return pairs.substitution(_noise(event), _rate(event))
                return pairs.mixture(_noise(event), _rate(event), self._group_size)
        raise AccountingError(f"{type(event).__name__} has no dominating pair here.")

    def _check(self, event: Mechanism) -> None:
        """Refuse what has no true statement under this relation and group size."""
        scope.refuse(event, self._relation, self._group_size)


def _noise(event: Any) -> float:
    """The noise multiplier, but not so large that its square overflows: less noise is safe."""
    return min(float(event.noise_multiplier), _MAX_NOISE)


def _rate(event: Any) -> float:
    """The sampling rate, but not so small that e^loss / rate overflows: a larger one is safe."""
    return max(float(event.sample_rate), _MIN_RATE)
