# SPDX-License-Identifier: Apache-2.0
"""Our histories as events of dp-accounting, for comparisons with it."""

import dp_accounting as d

from dualdp import AccountingError, mechanisms


def to_dp_event(history):
    """`accountant.history` as a dp-accounting event; AccountingError where it has none."""
    events = [d.SelfComposedDpEvent(one(event), count) for event, count in history]
    return d.ComposedDpEvent(events)


def one(event):
    """Dp-accounting event of one mechanism."""
    match event:
        case mechanisms.Gaussian(sigma):
            return d.GaussianDpEvent(sigma)
        case mechanisms.PoissonSubsampledGaussian(sigma, rate):
            return d.PoissonSampledDpEvent(rate, d.GaussianDpEvent(sigma))
        case mechanisms.TruncatedPoissonSubsampledGaussian(sigma, rate, examples, cut):
            return d.dp_event.TruncatedSubsampledGaussianDpEvent(examples, rate, cut, sigma)
        case mechanisms.Laplace(scale):
            return d.LaplaceDpEvent(scale)
        case mechanisms.RandomizedResponse(noise, buckets):
            return d.dp_event.RandomizedResponseDpEvent(noise, buckets)
    raise AccountingError(
        f"dp-accounting has no event for {type(event).__name__} that means the same. Expected a "
        "history without it; epsilon_bounds of our accountants covers it."
    )
