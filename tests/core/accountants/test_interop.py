# SPDX-License-Identifier: Apache-2.0
"""Histories of Opacus and events of dp-accounting, read and written."""

import sys
import types

import pytest

from dualdp import AccountingError, accountants, mechanisms
from dualdp.accountants import interop


def fake(name, **fields):
    """An object whose class has a peer's name."""
    return type(name, (types.SimpleNamespace,), {})(**fields)


def test_opacus_histories_round_trip():
    history = [(1.1, 0.01, 100), (2.0, 1.0, 3)]
    made = accountants.create("pld")
    made.compose(interop.from_opacus(history))
    assert len(made) == 103
    assert interop.to_opacus(made.history) == history
    made.compose(mechanisms.Gaussian(4.0))
    assert interop.to_opacus(made.history)[-1] == (4.0, 1.0, 1)
    made.compose(mechanisms.Laplace(1.0))
    with pytest.raises(AccountingError, match="Opacus' history cannot hold Laplace"):
        interop.to_opacus(made.history)
    with pytest.raises(ValueError, match="Expected triples"):
        interop.from_opacus([(1.0, 0.1)])


def test_dp_events_are_read_by_name():
    gaussian = fake("GaussianDpEvent", noise_multiplier=1.5)
    sampled = fake("PoissonSampledDpEvent", sampling_probability=0.01, event=gaussian)
    event = fake(
        "ComposedDpEvent",
        events=[
            fake("SelfComposedDpEvent", event=sampled, count=10),
            gaussian,
            fake("LaplaceDpEvent", noise_multiplier=2.0),
            fake("RandomizedResponseDpEvent", noise_parameter=0.5, num_buckets=3),
            fake("NoOpDpEvent"),
            fake(
                "SampledWithoutReplacementDpEvent",
                source_dataset_size=100,
                sample_size=10,
                event=gaussian,
            ),
            fake(
                "TruncatedSubsampledGaussianDpEvent",
                dataset_size=100,
                sampling_probability=0.1,
                truncated_batch_size=20,
                noise_multiplier=1.0,
            ),
        ],
    )
    assert interop.from_dp_event(event).events == (
        (mechanisms.PoissonSubsampledGaussian(1.5, 0.01), 10),
        (mechanisms.Gaussian(1.5), 1),
        (mechanisms.Laplace(2.0), 1),
        (mechanisms.RandomizedResponse(0.5, 3), 1),
        (mechanisms.FixedSizeSubsampledGaussian(1.5, 0.1), 1),
        (mechanisms.TruncatedPoissonSubsampledGaussian(1.0, 0.1, 100, 20), 1),
    )
    for unknown in (
        fake("ZCDpEvent", rho=1.0),
        fake("PoissonSampledDpEvent", sampling_probability=0.1, event=event),
    ):
        with pytest.raises(AccountingError, match="has no counterpart here"):
            interop.from_dp_event(unknown)


def test_writing_needs_dp_accounting(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(ModuleNotFoundError, match="pip install dp-accounting"):
        interop.to_dp_event([(mechanisms.Gaussian(1.0), 1)])
