# SPDX-License-Identifier: Apache-2.0
"""Renyi differential privacy: cheap, universal, 5 to 25 % looser than `pld` for DP-SGD."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from dualdp import _validate, mechanisms
from dualdp._validate import AccountingError
from dualdp.accountants import renyi
from dualdp.accountants.history import Accountant, as_gaussian, units
from dualdp.mechanisms import Mechanism

Array = npt.NDArray[Any]

DEFAULT_ORDERS: tuple[float, ...] = (
    *(1 + x / 10 for x in range(1, 100)),
    *map(float, range(11, 64)),
    *map(float, (64, 72, 80, 96, 112, 128, 160, 192, 256, 384, 512, 768, 1024, 1536, 2048, 4096)),
)


def rdp_to_epsilon(orders: Array, rdp: Array, delta: float) -> tuple[float, float]:
    """(epsilon, order) at delta; order is nan when the bound comes from the divergence itself.

    epsilon = R_a + log1p(-1/a) - log(delta a)/(a - 1), the least over the orders. And 0, where some
    R_a, which is never below the Kullback-Leibler divergence, gives delta >= sqrt(1 - e^-R).

    Source: Canonne, Kamath & Steinke 2020, Proposition 12; Bretagnolle & Huber 1979.
    """
    if np.any(rdp <= 0) or delta >= 1:
        return 0.0, math.nan
    if delta == 0:
        return math.inf, math.nan
    if np.any(delta * delta > -np.expm1(-rdp)):
        return 0.0, math.nan
    with np.errstate(over="ignore"):
        values = rdp + np.log1p(-1 / orders) - (math.log(delta) + np.log(orders)) / (orders - 1)
    values = np.where(np.isnan(values), np.inf, values)
    best = int(np.argmin(values))
    return max(0.0, float(values[best])), float(orders[best])


def rdp_to_delta(orders: Array, rdp: Array, epsilon: float) -> float:
    """Least delta over the orders: the conversion of `rdp_to_epsilon` solved for delta."""
    if np.any(rdp <= 0):
        return 0.0
    exponents = (orders - 1) * (rdp - epsilon + np.log1p(-1 / orders)) - np.log(orders)
    exponents = np.where(np.isnan(exponents), np.inf, exponents)
    least = min(0.0, float(np.min(exponents)), 0.5 * math.log(-math.expm1(-float(np.min(rdp)))))
    return math.exp(least)


class RDPAccountant(Accountant):
    """Renyi accountant: orders up to 4,096, all histories, curves of the user's own.

    Its bounds are (0, e, e): the Renyi curve knows no lower bound.

    Args:
        orders: Renyi orders, each > 1.
        neighboring_relation: as in `Accountant`.
        group_size: as in `Accountant`; only 1 where sampling is involved.

    Source: Mironov 2017; Mironov, Talwar & Zhang 2019; Zhu & Wang 2019.
    """

    name: ClassVar[str] = "rdp"
    _takes_curves: ClassVar[bool] = True

    def __init__(
        self,
        *,
        neighboring_relation: str = "add_or_remove",
        group_size: int = 1,
        orders: Sequence[float] | None = None,
    ) -> None:
        super().__init__(neighboring_relation=neighboring_relation, group_size=group_size)
        values = DEFAULT_ORDERS if orders is None else orders
        checked = [_validate.positive(f"orders[{i}]", order) for i, order in enumerate(values)]
        if not checked or min(checked) <= 1:
            raise ValueError(f"orders={orders!r} must not be empty. Expected numbers > 1.")
        self._orders = np.array(checked, dtype=float)
        self._extra = np.zeros_like(self._orders)
        self._cache: dict[Mechanism, Array] = {}

    @property
    def orders(self) -> tuple[float, ...]:
        """The Renyi orders."""
        return tuple(self._orders.tolist())

    def copy(self) -> RDPAccountant:
        """An independent accountant with the same orders, curves and history."""
        fresh = super().copy()
        fresh._orders, fresh._extra = self._orders.copy(), self._extra.copy()
        return fresh

    def compose_curve(self, curve: Callable[[float], float], count: int = 1) -> None:
        """Add `count` releases of a mechanism of which only the Renyi curve is known.

        Args:
            curve: order -> Renyi divergence (an upper bound, under this accountant's relation).
            count: how many times.
        """
        number = _validate.integer("count", count)
        values = [_divergence(f"curve({order})", curve(order)) for order in self.orders]
        if number:
            self._extra = self._extra + number * np.array(values)

    def rdp(self) -> Array:
        """(orders,) Renyi divergence of the whole history."""
        self._fill_cache()
        total = self._extra.copy()
        for event, count in self._counts.items():
            number = units(event, count)
            if number:
                total = total + number * self._cache[event]
        return total

    def epsilon_bounds(
        self, *, delta: float, rtol: float | None = None
    ) -> tuple[float, float, float]:
        """(0, epsilon, epsilon)."""
        epsilon, _ = rdp_to_epsilon(self._orders, self.rdp(), _validate.probability("delta", delta))
        return 0.0, epsilon, epsilon

    def best_order(self, *, delta: float) -> float:
        """The order at which the conversion is tightest (nan when none was needed)."""
        return rdp_to_epsilon(self._orders, self.rdp(), _validate.probability("delta", delta))[1]

    def get_delta(self, *, epsilon: float) -> float:
        """Upper bound on delta at `epsilon`."""
        return rdp_to_delta(self._orders, self.rdp(), _validate.non_negative("epsilon", epsilon))

    def state_dict(self) -> dict[str, Any]:
        """The history, the orders and the sum of the user's own curves."""
        return super().state_dict() | {"orders": list(self.orders), "curve": self._extra.tolist()}

    def load_state_dict(self, state: Any) -> None:
        """As `Accountant.load_state_dict`; the orders come with the state."""
        known = state if isinstance(state, Mapping) else {}
        fresh = RDPAccountant(orders=known.get("orders"))
        curve = known.get("curve", fresh._extra)
        if len(curve) != len(fresh._orders):
            raise ValueError(
                f"state has {len(curve)} curve values for {len(fresh._orders)} orders. "
                "Expected as many."
            )
        extra = [_divergence(f"curve[{i}]", value) for i, value in enumerate(curve)]
        super().load_state_dict(state)
        self._orders, self._extra = fresh._orders, np.array(extra)
        self._cache = {}

    def merge(self, other: Accountant) -> None:
        """As `Accountant.merge`; the user's own curves must have been given at the same orders."""
        extra = other._extra if isinstance(other, RDPAccountant) else np.zeros(0)
        if np.any(extra) and other.orders != self.orders:  # type: ignore[attr-defined]
            raise AccountingError(
                "The histories hold curves at different orders. Expected the same orders= in both."
            )
        super().merge(other)
        if np.any(extra):
            self._extra = self._extra + extra

    def _has_curves(self) -> bool:
        return bool(np.any(self._extra))

    def _check(self, event: Mechanism) -> None:
        subsampled = isinstance(event, mechanisms.PoissonSubsampledGaussian)
        if self._group_size > 1 and as_gaussian(event) is None:
            raise AccountingError(
                f"group_size={self._group_size} for {type(event).__name__} has no Renyi bound "
                "here. Use accountant='pld', or group_size=1."
            )
        if as_gaussian(event) is None and not subsampled and type(event) not in _CURVES:
            raise AccountingError(
                f"{type(event).__name__} has no Renyi bound here. Use accountant='pld'."
            )

    def _fill_cache(self) -> None:
        """Renyi curves of the events not seen before, all subsampled ones in one batch."""
        new = [event for event in self._counts if event not in self._cache]
        sampled = [e for e in new if as_gaussian(e) is None and hasattr(e, "sample_rate")]
        for event in new:
            if as_gaussian(event) is not None or type(event) in _CURVES:
                self._cache[event] = self._curve(event)
        if sampled:
            sigma = np.array([event.noise_multiplier for event in sampled])  # type: ignore[attr-defined]
            rate = np.array([event.sample_rate for event in sampled])
            substitute = self._relation == "replace"
            curves = renyi.subsampled_gaussian(sigma, rate, self._orders, substitute=substitute)
            self._cache.update(zip(sampled, curves, strict=True))

    def _curve(self, event: Mechanism) -> Array:
        """(orders,) curve of an event in closed form."""
        doubled = 2.0 if self._relation == "replace" else 1.0
        sigma = as_gaussian(event)
        if sigma is not None:
            shift = doubled * self._group_size
            return renyi.gaussian(sigma / shift, self._orders)
        curve: Array = _CURVES[type(event)](event, doubled, self._orders)
        return curve


def _divergence(name: str, value: Any) -> float:
    """The checked value of a Renyi curve."""
    checked = _validate.real(name, value)
    if checked < 0:
        raise ValueError(f"{name}={value!r} is negative. Expected a divergence.")
    return checked


_CURVES: dict[type[Mechanism], Callable[[Any, float, Array], Array]] = {
    mechanisms.Laplace: lambda e, d, orders: renyi.laplace(e.noise_multiplier / d, orders),
    # Canonne, Kamath & Steinke 2020, Theorem 7: the discrete Gaussian obeys the Gaussian's curve.
    mechanisms.DiscreteGaussian: lambda e, d, orders: renyi.gaussian(
        e.noise_multiplier / d, orders
    ),
    mechanisms.RandomizedResponse: lambda e, d, orders: renyi.randomized_response(
        e.noise_parameter, e.num_buckets, orders
    ),
}
