# SPDX-License-Identifier: Apache-2.0
"""Gaussian differential privacy by the central limit theorem: an approximation, not a bound."""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np

from dualdp import _validate, mechanisms
from dualdp._validate import AccountingError
from dualdp.accountants.base import Accountant, as_gaussian, units
from dualdp.accountants.closed_forms import gaussian_epsilon, gaussian_log_delta
from dualdp.mechanisms import Mechanism


class GDPAccountant(Accountant):
    """Accountant by the central limit theorem; its epsilon can be far BELOW the truth (75 times).

    Results are given only on explicit request: `get_epsilon(delta=..., approximate=True)`.
    Its bounds are (0, e, inf): nothing is certified.

    Source: Dong, Roth & Su 2022; Bu, Dong, Long & Su 2020, equation (6).
    """

    name: ClassVar[str] = "gdp"

    def mu(self) -> float:
        """Return sqrt(sum q^2 (e^{1/sigma^2} - 1)), with the exact 1/sigma^2 for full batches."""
        total = 0.0
        for event, count in self._counts.items():
            number, sigma, rate = units(event, count), as_gaussian(event), 1.0
            if sigma is None:
                sigma, rate = event.noise_multiplier, event.sample_rate  # type: ignore[attr-defined]
            noise = sigma / self._sensitivity()
            if not number or not rate:
                continue
            if noise == 0:
                return math.inf
            precision = noise**-2
            one = precision if rate == 1 else rate**2 * float(np.expm1(min(precision, 700.0)))
            total += number * one
        return math.sqrt(total)

    def get_epsilon(self, *, delta: float, approximate: bool = False) -> float:
        """Return the approximate epsilon at `delta`; raises unless approximate=True."""
        if not approximate:
            raise AccountingError(REFUSAL)
        return self.epsilon_bounds(delta=delta)[1]

    def get_delta(self, *, epsilon: float, approximate: bool = False) -> float:
        """Return the approximate delta at `epsilon`; raises unless approximate=True."""
        if not approximate:
            raise AccountingError(REFUSAL)
        mu = self.mu()
        value = _validate.non_negative("epsilon", epsilon)
        return 1.0 if math.isinf(mu) else math.exp(gaussian_log_delta(mu, value))

    def epsilon_bounds(
        self, *, delta: float, rtol: float | None = None
    ) -> tuple[float, float, float]:
        """Return (0, approximate epsilon, inf)."""
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
