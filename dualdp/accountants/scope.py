# SPDX-License-Identifier: Apache-2.0
"""Which mechanisms, relations and groups the PLD accountant has a proved statement for."""

from __future__ import annotations

from dualdp import mechanisms
from dualdp._validate import AccountingError
from dualdp.mechanisms import Mechanism

GAUSSIANS = (
    mechanisms.Gaussian,
    mechanisms.PoissonSubsampledGaussian,
    mechanisms.FixedSizeSubsampledGaussian,
    mechanisms.ShuffledGaussian,
    mechanisms.BallsInBinsGaussian,
)
_KNOWN = (
    *GAUSSIANS,
    mechanisms.TruncatedPoissonSubsampledGaussian,
    mechanisms.Laplace,
    mechanisms.DiscreteGaussian,
    mechanisms.RandomizedResponse,
    mechanisms.ApproximateDP,
    mechanisms.MassTable,
)
MAX_DISCRETE = 1e4  # standard deviations in whole numbers: 800,000 outcomes
NOT_ATTAINED = (mechanisms.BallsInBinsGaussian, mechanisms.FixedSizeSubsampledGaussian)
_GROUPS = (
    mechanisms.Gaussian,
    mechanisms.PoissonSubsampledGaussian,
    mechanisms.TruncatedPoissonSubsampledGaussian,
    mechanisms.ShuffledGaussian,
    mechanisms.Laplace,
    mechanisms.DiscreteGaussian,
)


def refuse(event: Mechanism, relation: str, group: int) -> None:
    """Raise AccountingError if nothing is proved for the event under a relation and group size."""
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
    if isinstance(event, mechanisms.BallsInBinsGaussian):
        if (relation == "replace" or group > 1) and event.num_bins > 1:
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
    if group > 1 and type(event) not in _GROUPS:
        raise AccountingError(
            f"group_size={group} for {name} has no proved bound here. Use group_size=1."
        )
    if group > 1000:
        raise AccountingError(f"group_size={group} is not resolved. Expected at most 1000.")
