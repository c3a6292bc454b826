# SPDX-License-Identifier: Apache-2.0
"""The peers of `accounting`, each asked in its own words; imported when called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Step = tuple[float, float, int]  # noise_multiplier, sample_rate, num_steps


def dp_accounting_pld(steps: Sequence[Step], delta: float) -> float:
    """dp-accounting's PLD accountant with its default grid."""
    import dp_accounting  # type: ignore[import-not-found,unused-ignore]

    return _dp_accounting(dp_accounting.pld.PLDAccountant(), steps, delta)


def dp_accounting_rdp(steps: Sequence[Step], delta: float) -> float:
    """dp-accounting's Renyi accountant."""
    import dp_accounting

    return _dp_accounting(dp_accounting.rdp.RdpAccountant(), steps, delta)


def _dp_accounting(accountant: Any, steps: Sequence[Step], delta: float) -> float:
    import dp_accounting

    for sigma, rate, count in steps:
        event = dp_accounting.GaussianDpEvent(sigma)
        if rate < 1:
            event = dp_accounting.PoissonSampledDpEvent(rate, event)
        accountant.compose(event, count)
    return float(accountant.get_epsilon(delta))


def opacus_prv(steps: Sequence[Step], delta: float) -> float:
    """Opacus' PRV accountant."""
    from opacus.accountants import PRVAccountant  # type: ignore[import-not-found,unused-ignore]

    accountant = PRVAccountant()
    accountant.history = list(steps)
    return float(accountant.get_epsilon(delta))


def opacus_rdp(steps: Sequence[Step], delta: float) -> float:
    """Opacus' Renyi accountant."""
    from opacus.accountants import RDPAccountant

    accountant = RDPAccountant()
    accountant.history = list(steps)
    return float(accountant.get_epsilon(delta))


def prv_accountant(steps: Sequence[Step], delta: float) -> float:
    """prv-accountant's upper estimate."""
    from prv_accountant import (  # type: ignore[import-not-found,unused-ignore]
        PoissonSubsampledGaussianMechanism,
        PRVAccountant,
    )

    mechanisms = [
        PoissonSubsampledGaussianMechanism(noise_multiplier=s, sampling_probability=q)
        for s, q, _ in steps
    ]
    counts = [count for _, _, count in steps]
    accountant = PRVAccountant(
        mechanisms, max_self_compositions=counts, eps_error=0.1, delta_error=delta / 1000
    )
    return float(accountant.compute_epsilon(delta, counts)[2])


PEERS: dict[str, Callable[[Sequence[Step], float], float]] = {
    "dp-accounting pld": dp_accounting_pld,
    "dp-accounting rdp": dp_accounting_rdp,
    "opacus prv": opacus_prv,
    "opacus rdp": opacus_rdp,
    "prv-accountant": prv_accountant,
}


def opacus_sigma(rate: float, steps: int, epsilon: float, delta: float) -> float:
    """Noise for a target by Opacus' PRV accountant."""
    from opacus.accountants.utils import (  # type: ignore[import-not-found,unused-ignore]
        get_noise_multiplier,
    )

    return float(
        get_noise_multiplier(
            target_epsilon=epsilon,
            target_delta=delta,
            sample_rate=rate,
            steps=steps,
            accountant="prv",
        )
    )


def dp_sigma(rate: float, steps: int, epsilon: float, delta: float) -> float:
    """Noise for a target by dp-accounting's PLD accountant."""
    import dp_accounting

    def event(sigma: float) -> Any:
        one = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(sigma))
        return dp_accounting.SelfComposedDpEvent(one, steps)

    return float(
        dp_accounting.calibrate_dp_mechanism(dp_accounting.pld.PLDAccountant, event, epsilon, delta)
    )
