# SPDX-License-Identifier: Apache-2.0
"""Gaussian differential privacy by the central limit theorem: an approximation, no guarantee."""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np

from dualdp import _validate, mechanisms
from dualdp._validate import AccountingError
from dualdp.accountants.gaussian import gaussian_epsilon, gaussian_log_delta
from dualdp.accountants.history import Accountant, as_gaussian, units
from dualdp.mechanisms import Mechanism


class GDPAccountant(Accountant):
    """mu of the central limit theorem; epsilon may lie far BELOW the truth (75 times were seen).

    Every number must be asked for as an approximation: `get_epsilon(delta=..., approximate=True)`.
    Its bounds are (0, e, inf): nothing is certified.

    Source: Dong, Roth & Su 2022; Bu, Dong, Long & Su 2020, equation (6).
    """

    name: ClassVar[str] = "gdp"

    def mu(self) -> float:
        """sqrt(sum q^2 (e^{1/sigma^2} - 1)), with full batches exact: sum 1/sigma^2."""
        shift = self._group_size * (2.0 if self._relation == "replace" else 1.0)
        total = 0.0
        for event, count in self._counts.items():
            number = units(event, count)
            sigma = as_gaussian(event)
            rate = 1.0 if sigma is not None else event.sample_rate  # type: ignore[attr-defined]
            sigma = event.noise_multiplier if sigma is None else sigma  # type: ignore[attr-defined]
            if number and rate:
                total += number * _variance(sigma / shift, rate)
        return math.sqrt(total)

    def get_epsilon(self, *, delta: float, approximate: bool = False) -> float:
        """The approximation at `delta`; refused unless approximate=True."""
        if not approximate:
            raise AccountingError(REFUSAL)
        return self.epsilon_bounds(delta=delta)[1]

    def get_delta(self, *, epsilon: float, approximate: bool = False) -> float:
        """The approximation at `epsilon`; refused unless approximate=True."""
        if not approximate:
            raise AccountingError(REFUSAL)
        mu = self.mu()
        value = _validate.non_negative("epsilon", epsilon)
        return 1.0 if math.isinf(mu) else math.exp(gaussian_log_delta(mu, value))

    def epsilon_bounds(
        self, *, delta: float, rtol: float | None = None
    ) -> tuple[float, float, float]:
        """(0, approximation, inf)."""
        return 0.0, gaussian_epsilon(self.mu(), _validate.probability("delta", delta)), math.inf

    def _check(self, event: Mechanism) -> None:
        poisson = isinstance(event, mechanisms.PoissonSubsampledGaussian)
        if as_gaussian(event) is None and not poisson:
            raise AccountingError(
                f"{type(event).__name__} has no central limit approximation here. "
                "Use accountant='pld'."
            )


REFUSAL = (
    "accountant='gdp' is an approximation that can lie far below the true epsilon. "
    "Pass approximate=True to see it, or use accountant='pld' for a bound."
)


def _variance(sigma: float, rate: float) -> float:
    """Variance of one step's privacy loss in the limit."""
    if sigma == 0:
        return math.inf
    if rate == 1:
        return sigma**-2
    return rate**2 * float(np.expm1(min(sigma**-2, 700.0)))
