# SPDX-License-Identifier: Apache-2.0
"""Peers of `accounting`, each called by its own API and imported when called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

Step = tuple[float, float, int]  # noise_multiplier, sample_rate, num_steps


def dp_accounting(steps: Sequence[Step], delta: float, name: str) -> float:
    """Return the bound of dp-accounting's "pld" accountant with its default grid, or of "rdp"."""
    import dp_accounting  # type: ignore[import-not-found,unused-ignore]

    if name == "pld":
        accountant = dp_accounting.pld.PLDAccountant()
    else:
        accountant = dp_accounting.rdp.RdpAccountant()
    for sigma, rate, count in steps:
        event = dp_accounting.GaussianDpEvent(sigma)
        if rate < 1:
            event = dp_accounting.PoissonSampledDpEvent(rate, event)
        accountant.compose(event, count)
    return float(accountant.get_epsilon(delta))


def opacus(steps: Sequence[Step], delta: float, name: str) -> float:
    """Return the bound of Opacus' PRV or RDP accountant."""
    from opacus import accountants  # type: ignore[import-not-found,unused-ignore]

    accountant = accountants.create_accountant(name)
    accountant.history = list(steps)
    return float(accountant.get_epsilon(delta))


def prv_accountant(steps: Sequence[Step], delta: float) -> float:
    """Return prv-accountant's upper estimate."""
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
    "dp-accounting pld": partial(dp_accounting, name="pld"),
    "dp-accounting rdp": partial(dp_accounting, name="rdp"),
    "opacus prv": partial(opacus, name="prv"),
    "opacus rdp": partial(opacus, name="rdp"),
    "prv-accountant": prv_accountant,
}


def opacus_sigma(rate: float, steps: int, epsilon: float, delta: float) -> float:
    """Return the noise multiplier for a target by Opacus' PRV accountant."""
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
    """Return the noise multiplier for a target by dp-accounting's PLD accountant."""
    import dp_accounting

    def event(sigma: float) -> Any:
        one = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(sigma))
        return dp_accounting.SelfComposedDpEvent(one, steps)

    return float(
        dp_accounting.calibrate_dp_mechanism(dp_accounting.pld.PLDAccountant, event, epsilon, delta)
    )
