# SPDX-License-Identifier: Apache-2.0
"""Renyi accountant: fast, and 5 to 25 % looser than `pld` for DP-SGD."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from dualdp import _validate, mechanisms
from dualdp._validate import AccountingError
from dualdp.accountants import renyi
from dualdp.accountants.base import Accountant, as_gaussian, units
from dualdp.mechanisms import Mechanism

Array = npt.NDArray[Any]

_KNOWN = (mechanisms.Laplace, mechanisms.DiscreteGaussian, mechanisms.RandomizedResponse)
ORDERS: Array = np.array(
    [
        *(1 + x / 10 for x in range(1, 100)),
        *range(11, 64),
        *(64, 72, 80, 96, 112, 128, 160, 192, 256, 384, 512, 768, 1024, 1536, 2048, 4096),
    ]
)


def rdp_to_epsilon(orders: Array, rdp: Array, delta: float) -> tuple[float, float]:
    """Return (epsilon, order) at delta; order is nan where no order is used.

    epsilon = min over orders a of R_a + log1p(-1/a) - log(delta a)/(a - 1). It is 0 if some R_a,
    which is at least the Kullback-Leibler divergence, gives delta >= sqrt(1 - e^-R).

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
    """Return the smallest delta over the orders: `rdp_to_epsilon` solved for delta."""
    if np.any(rdp <= 0):
        return 0.0
    exponents = (orders - 1) * (rdp - epsilon + np.log1p(-1 / orders)) - np.log(orders)
    exponents = np.where(np.isnan(exponents), np.inf, exponents)
    least = min(0.0, float(np.min(exponents)), 0.5 * math.log(-math.expm1(-float(np.min(rdp)))))
    return math.exp(least)


class RDPAccountant(Accountant):
    """Accountant by Renyi divergences at orders up to 4,096.

    Its bounds are (0, e, e): a Renyi curve gives no lower bound.

    Args:
        neighboring_relation: str, see `Accountant`.
        group_size: int, see `Accountant`; must be 1 for all but plain Gaussians.

    Source: Mironov 2017; Mironov, Talwar & Zhang 2019; Zhu & Wang 2019.
    """

    name: ClassVar[str] = "rdp"

    def __init__(self, *, neighboring_relation: str = "add_or_remove", group_size: int = 1) -> None:
        super().__init__(neighboring_relation=neighboring_relation, group_size=group_size)
        self._cache: dict[Mechanism, Array] = {}

    def rdp(self) -> Array:
        """Return the (orders,) Renyi divergences of the whole history."""
        self._fill_cache()
        total = np.zeros_like(ORDERS)
        for event, count in self._counts.items():
            number = units(event, count)
            if number:
                total = total + number * self._cache[event]
        return total

    def epsilon_bounds(
        self, *, delta: float, rtol: float | None = None
    ) -> tuple[float, float, float]:
        """Return (0, epsilon, epsilon)."""
        epsilon, _ = rdp_to_epsilon(ORDERS, self.rdp(), _validate.probability("delta", delta))
        return 0.0, epsilon, epsilon

    def get_delta(self, *, epsilon: float) -> float:
        """Return an upper bound on delta at `epsilon`."""
        return rdp_to_delta(ORDERS, self.rdp(), _validate.non_negative("epsilon", epsilon))

    def _check(self, event: Mechanism) -> None:
        if as_gaussian(event) is not None:
            return
        if self._group_size > 1:
            raise AccountingError(
                f"group_size={self._group_size} for {type(event).__name__} has no Renyi bound "
                "here. Use accountant='pld', or group_size=1."
            )
        is_subsampled = isinstance(event, mechanisms.PoissonSubsampledGaussian)
        # A subclass may mean another mechanism.
        if not is_subsampled and type(event) not in _KNOWN:
            raise AccountingError(
                f"{type(event).__name__} has no Renyi bound here. Use accountant='pld'."
            )

    def _fill_cache(self) -> None:
        """Compute the Renyi curves of new events, all subsampled ones in one batch."""
        sensitivity = self._sensitivity()
        sampled: list[Any] = []
        for event in [event for event in self._counts if event not in self._cache]:
            gaussian = as_gaussian(event)
            match event:
                case _ if gaussian is not None:
                    curve = renyi.gaussian(gaussian / sensitivity, ORDERS)
                case mechanisms.Laplace(scale):
                    curve = renyi.laplace(scale / sensitivity, ORDERS)
                case mechanisms.DiscreteGaussian(sigma):
                    # obeys the Gaussian's curve: Canonne, Kamath & Steinke 2020, Theorem 7
                    curve = renyi.gaussian(sigma / sensitivity, ORDERS)
                case mechanisms.RandomizedResponse(noise, buckets):
                    curve = renyi.randomized_response(noise, buckets, ORDERS)
                case _:
                    sampled.append(event)
                    continue
            self._cache[event] = curve
        if sampled:
            sigmas = np.array([event.noise_multiplier for event in sampled])
            rates = np.array([event.sample_rate for event in sampled])
            curves = renyi.subsampled_gaussian(
                sigmas, rates, ORDERS, substitute=self._relation == "replace"
            )
            self._cache.update(zip(sampled, curves, strict=True))
