# SPDX-License-Identifier: Apache-2.0
"""Events: which one a sampler is, what they refuse, and that they travel as plain data."""

import json

import numpy as np
import pytest

from dualdp import AccountingError, mechanisms
from dualdp.mechanisms import event, num_steps_of
from tests.mistakes import refused

ALL = [
    mechanisms.Gaussian(1.0),
    mechanisms.PoissonSubsampledGaussian(1.0, 0.1),
    mechanisms.TruncatedPoissonSubsampledGaussian(1.0, 0.1, 100, 20),
    mechanisms.FixedSizeSubsampledGaussian(1.0, 0.1),
    mechanisms.BallsInBinsGaussian(1.0, 10, 2),
    mechanisms.ShuffledGaussian(1.0, 10),
    mechanisms.Laplace(2.0),
    mechanisms.DiscreteGaussian(2.0),
    mechanisms.RandomizedResponse(0.3, 4),
    mechanisms.ApproximateDP(1.0, 1e-6),
    mechanisms.MassTable((0.5, 0.5), (0.25, 0.75)),
]


@pytest.mark.parametrize("one", ALL, ids=lambda one: type(one).__name__)
def test_events_travel_as_json(one):
    again = mechanisms.from_dict(json.loads(json.dumps(mechanisms.to_dict(one))))
    assert again == one
    assert hash(again) == hash(one)


def test_every_sampler_is_its_own_event():
    run = {"noise_multiplier": 1.5, "sample_rate": 0.02}
    own = {"truncated_poisson": {"num_examples": 1000, "max_batch_size": 40}}
    made = {name: event(sampler=name, **run, **own.get(name, {})) for name in mechanisms.SAMPLERS}
    assert len({type(one) for one in made.values()}) == len(made) == 5
    assert made["balls_in_bins"] == mechanisms.BallsInBinsGaussian(1.5, 50)
    assert made["shuffle"].releases == 50
    assert made["poisson"].releases == 1
    # fewer batches in a pass are more participations: rounded down
    assert event(sampler="shuffle", noise_multiplier=1, sample_rate=0.3).num_batches == 3


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"sampler": "weighted"}, ValueError, "Expected one of balls_in_bins, fixed_size"),
        ({"sampler": "truncated_poisson"}, TypeError, "num_examples=None. Expected an integer"),
        ({"sampler": "balls_in_bins", "sample_rate": 0.03}, AccountingError, "Use 1/33 or 1/34"),
        ({"sampler": "balls_in_bins", "sample_rate": 0.0}, AccountingError, "is not 1 /"),
        ({"sampler": "shuffle", "sample_rate": 0.0}, AccountingError, "is not 1 /"),
        ({"sample_rate": -0.1}, ValueError, "sample_rate=-0.1 is not a probability"),
        ({"noise_multiplier": float("inf")}, ValueError, "noise_multiplier=inf is out of range"),
        ({"noise_multiplier": True}, TypeError, "noise_multiplier=True is a bool"),
        ({"noise_multiplier": np.True_}, TypeError, "noise_multiplier=.*True.* is a .*bool"),
    ],
)
def test_events_refuse(arguments, error, text):
    given = {"noise_multiplier": 1.0, "sample_rate": 0.1} | arguments
    refused(lambda: event(**given), error, text)


def test_tables_and_records_refuse():
    table, read = mechanisms.MassTable, mechanisms.from_dict
    for call, words in (
        (lambda: table((0.5, 0.5), (1.0,)), "p has 2 outcomes but q has 1"),
        (lambda: table((0.5, 0.5), (0.4, 0.5)), "q sums to 0.9"),
        (lambda: table((1.5, -0.5), (0.5, 0.5)), "is not a probability"),
        (lambda: mechanisms.RandomizedResponse(2), "noise_parameter=2 is not a probability"),
        (lambda: mechanisms.BallsInBinsGaussian(1.0, 0), "num_bins=0 is out of range"),
        (lambda: read({"mechanism": "Cauchy"}), "mechanism='Cauchy' is unknown"),
        (lambda: read({"mechanism": "Gaussian", "sigma": 1.0}), "written by another version"),
    ):
        refused(call, ValueError, words)


def test_epochs_become_steps_in_one_place():
    for epochs, examples, size, steps in (
        (1, 93 * 32, 32, 93),
        (1, 93 * 32 - 5, 32, 93),
        (2.5, 100, 10, 25),
        (0, 100, 10, 0),
    ):
        assert num_steps_of(epochs=epochs, num_examples=examples, batch_size=size) == steps
