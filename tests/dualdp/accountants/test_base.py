# SPDX-License-Identifier: Apache-2.0
"""Histories: what is refused changes nothing, states travel and merge; names; the root finder."""

import json
import math

import pytest

from dualdp import AccountingError, accountants, mechanisms
from dualdp.accountants.base import largest_count, last_within, smallest_scale
from dualdp.accountants.solve import get_epsilon
from tests.dualdp.accountants.test_pld import account
from tests.mistakes import refused


def test_an_epoch_of_bins_has_one_noise():
    run = {"sample_rate": 0.1, "sampler": "balls_in_bins"}
    made = account((1.0, 0.1, 5), sampler="balls_in_bins")
    before, words = made.state_dict(), "starts inside the unfinished epoch"
    refused(lambda: made.step(noise_multiplier=2.0, **run), AccountingError, words)
    assert made.state_dict() == before
    made.step(noise_multiplier=1.0, num_steps=5, **run)
    made.step(noise_multiplier=2.0, **run)
    assert len(made) == 11


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"noise_multiplier": -1.0}, ValueError, "noise_multiplier=-1.0 is out of range"),
        ({"noise_multiplier": math.nan}, ValueError, "noise_multiplier=nan is not a number"),
        ({"noise_multiplier": "1"}, TypeError, "noise_multiplier='1' is a str"),
        ({"sample_rate": 1.3}, ValueError, "sample_rate=1.3 is not a probability"),
        ({"num_steps": -1}, ValueError, "num_steps=-1 is out of range"),
        ({"num_steps": 1.5}, TypeError, "num_steps=1.5 is a float"),
        ({"sampler": "possion"}, ValueError, "sampler='possion' is unknown. Expected one of balls"),
    ],
)
def test_a_refused_step_changes_nothing(arguments, error, text):
    made = account((1.0, 0.1, 3))
    before = made.state_dict()
    step = {"noise_multiplier": 1.0, "sample_rate": 0.1} | arguments
    refused(lambda: made.step(**step), error, text)
    assert made.state_dict() == before


def test_state_travels_as_json_and_histories_merge():
    made = account((1.0, 0.01, 100), (1.1, 0.02, 5))
    assert "105 releases" in repr(made)
    merged = account((1.0, 0.01, 50))
    merged.merge(account((1.0, 0.01, 50), (1.1, 0.02, 5)))
    assert merged.state_dict() == made.state_dict()
    half = account((1.0, 0.1, 5), sampler="balls_in_bins")
    half.merge(account((1.0, 0.1, 5), sampler="balls_in_bins"))
    assert len(half) == 15  # the first half epoch counts whole
    made.compose(mechanisms.MassTable((0.6, 0.4), (0.4, 0.6)), 2)
    loaded = accountants.create("pld")
    loaded.load_state_dict(json.loads(json.dumps(made.state_dict())))
    assert loaded.state_dict() == made.state_dict()
    assert loaded.get_epsilon(delta=1e-5) == made.get_epsilon(delta=1e-5)


def test_a_stored_history_is_read_whole_or_refused():
    made, gaussian = accountants.create("pld"), mechanisms.to_dict(mechanisms.Gaussian(2.0))
    one, state = [gaussian, 3], made.state_dict()
    made.load_state_dict(state | {"history": [one, one]})
    assert made.history == ((mechanisms.Gaussian(2.0), 6),)
    before, load = made.state_dict(), made.load_state_dict
    for history, error, text in (
        (7, ValueError, "Expected pairs"),
        ([one[:1]], ValueError, "Expected pairs"),
        ([["Gaussian", 1]], ValueError, "is no event"),
        ([[{"mechanism": "Gaussian"}, 1]], ValueError, "A stored Gaussian has the fields"),
        ([[gaussian | {"scale": 1.0}, 1]], ValueError, "was written by another version"),
        ([[gaussian, -1]], ValueError, "count=-1 is out of range"),
        ([[gaussian, "3"]], TypeError, "count='3' is a str"),
    ):
        refused(lambda: load(state | {"history": history}), error, text)  # noqa: B023
    refused(lambda: load({}), ValueError, r"Expected what state_dict\(\)")
    refused(lambda: made.compose("gaussian"), TypeError, "Expected a mechanism of")
    other = account(relation="replace")
    refused(lambda: made.merge(other), AccountingError, "Expected the same for both")
    refused(lambda: made.merge([]), TypeError, "Expected an accountant")
    assert made.state_dict() == before


def test_another_accountant_can_be_registered(monkeypatch):
    class Twice(accountants.PLDAccountant):
        name = "twice"

        def get_epsilon(self, *, delta):
            return 2 * super().get_epsilon(delta=delta)

    monkeypatch.setattr(accountants.base, "TABLE", dict(accountants.base.TABLE))
    register = accountants.register
    register("twice", Twice)
    run = {"noise_multiplier": 1.0, "sample_rate": 0.1, "num_steps": 10, "delta": 1e-5}
    assert get_epsilon(**run, accountant="twice") == 2 * get_epsilon(**run)
    refused(lambda: register("twice", Twice), ValueError, "name='twice' is taken")
    refused(lambda: register("thrice", object), TypeError, "lacks step, compose")
    refused(lambda: register("", Twice), TypeError, "is not a name")
    assert type(accountants.create("prv")) is accountants.PLDAccountant


@pytest.mark.parametrize("target", [1e-3, 0.7, 90.0, 1e4])
def test_a_search_evaluates_what_it_returns(target):
    asked = []

    def spent(noise):
        asked.append(noise)
        return 3 / noise if noise else math.inf

    found = smallest_scale(spent, target, 1e-5)
    assert found in asked
    assert len(asked) == len(set(asked)) < 25
    assert 3 / found <= target <= 3 / found * (1 + 1e-9)
    assert smallest_scale(lambda noise: 0.0, 1.0, 1e-5) == 0
    assert smallest_scale(lambda noise: 1e-9 / noise if noise else math.inf, 1e9, 0.1) < 1e-8


@pytest.mark.parametrize("most", [1, 2, 7, 64, 99])
def test_whole_numbers_are_found_to_the_last(most):
    assert last_within(1, 1000, lambda k: math.log(k / (most + 0.5)), whole=True) == most
    assert largest_count(lambda k: k / (most + 0.5), 1.0, 1e9) == most
    assert largest_count(lambda k: k, 0.5, 1e9) == 0
