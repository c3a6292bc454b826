# SPDX-License-Identifier: Apache-2.0
"""Histories: what is refused changes nothing, states travel and merge; names; the root finder."""

import json
import math

import pytest

from dualdp import AccountingError, accountants, mechanisms
from dualdp.accountants.base import largest_count, last_within, smallest_scale
from dualdp.accountants.solve import get_epsilon
from tests.dualdp.accountants.test_pld import account


def test_an_epoch_of_bins_has_one_noise():
    made = account((1.0, 0.1, 5), sampler="balls_in_bins")
    before = made.state_dict()
    with pytest.raises(AccountingError, match="starts inside the unfinished epoch"):
        made.step(noise_multiplier=2.0, sample_rate=0.1, sampler="balls_in_bins")
    assert made.state_dict() == before
    made.step(noise_multiplier=1.0, sample_rate=0.1, num_steps=5, sampler="balls_in_bins")
    made.step(noise_multiplier=2.0, sample_rate=0.1, sampler="balls_in_bins")
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
    with pytest.raises(error, match=text):
        made.step(**step)
    assert made.state_dict() == before
    with pytest.raises(TypeError, match="Expected a mechanism of"):
        made.compose("gaussian")
    with pytest.raises(TypeError, match="unexpected keyword"):
        made.step(noise_multiplier=1.0, sample_rate=0.1, sampel="poisson")
    assert made.state_dict() == before


def test_state_travels_as_json_and_histories_merge():
    made = account((1.0, 0.01, 100), (1.1, 0.02, 5))
    made.compose(mechanisms.MassTable((0.6, 0.4), (0.4, 0.6)), 2)
    loaded = accountants.create("pld")
    loaded.load_state_dict(json.loads(json.dumps(made.state_dict())))
    assert loaded.state_dict() == made.state_dict()
    assert loaded.get_epsilon(delta=1e-5) == made.get_epsilon(delta=1e-5)
    merged = account((1.0, 0.01, 50))
    merged.merge(account((1.0, 0.01, 50), (1.1, 0.02, 5)))
    assert merged.state_dict() == account((1.0, 0.01, 100), (1.1, 0.02, 5)).state_dict()
    half = account((1.0, 0.1, 5), sampler="balls_in_bins")
    half.merge(account((1.0, 0.1, 5), sampler="balls_in_bins"))
    assert len(half) == 15  # the first half epoch counts whole
    with pytest.raises(AccountingError, match="Expected the same for both"):
        made.merge(account(relation="replace"))
    with pytest.raises(TypeError, match="Expected an accountant"):
        made.merge([])
    before = made.state_dict()
    with pytest.raises(ValueError, match=r"Expected what state_dict\(\)"):
        made.load_state_dict({})
    with pytest.raises(ValueError, match="was written by another version"):
        made.load_state_dict(before | {"history": [[{"mechanism": "Laplace", "scale": 1.0}, 1]]})
    assert made.state_dict() == before
    assert "105 releases" in repr(account((1.0, 0.01, 100), (1.1, 0.02, 5)))


def test_a_stored_history_is_read_whole_or_refused():
    made = accountants.create("pld")
    one = [mechanisms.to_dict(mechanisms.Gaussian(2.0)), 3]
    state = made.state_dict()
    made.load_state_dict(state | {"history": [one, one]})
    assert made.history == ((mechanisms.Gaussian(2.0), 6),)
    before = made.state_dict()
    for history, text in (
        (7, "Expected pairs"),
        ([one[:1]], "Expected pairs"),
        ([["Gaussian", 1]], "is no event"),
        ([[{"mechanism": "Gaussian"}, 1]], "A stored Gaussian has the fields"),
        ([[one[0], -1]], "count=-1 is out of range"),
    ):
        with pytest.raises(ValueError, match=text):
            made.load_state_dict(state | {"history": history})
    with pytest.raises(TypeError, match="count='3' is a str"):
        made.load_state_dict(state | {"history": [[one[0], "3"]]})
    assert made.state_dict() == before


def test_another_accountant_can_be_registered():
    class Twice(accountants.PLDAccountant):
        name = "twice"

        def get_epsilon(self, *, delta):
            return 2 * super().get_epsilon(delta=delta)

    accountants.register("twice", Twice)
    try:
        run = {"noise_multiplier": 1.0, "sample_rate": 0.1, "num_steps": 10, "delta": 1e-5}
        assert get_epsilon(**run, accountant="twice") == 2 * get_epsilon(**run)
        with pytest.raises(ValueError, match="name='twice' is taken"):
            accountants.register("twice", Twice)
        with pytest.raises(TypeError, match="lacks step, compose"):
            accountants.register("thrice", object)
        with pytest.raises(TypeError, match="is not a name"):
            accountants.register("", Twice)
    finally:
        del accountants.base.TABLE["twice"]
    assert type(accountants.create("prv")) is accountants.PLDAccountant


def test_a_search_evaluates_what_it_returns():
    asked = []

    def spent(noise):
        asked.append(noise)
        return 3 / noise if noise else math.inf

    for target in (1e-3, 0.7, 3.0, 90.0):
        asked.clear()
        found = smallest_scale(spent, target, 1e-5)
        assert found in asked
        assert len(asked) == len(set(asked)) < 25
        assert 3 / found <= target <= 3 / found * (1 + 1e-9)
    assert smallest_scale(lambda noise: 0.0, 1.0, 1e-5) == 0
    assert smallest_scale(lambda noise: 1e-9 / noise if noise else math.inf, 1e9, 0.1) < 1e-8


def test_whole_numbers_are_found_to_the_last():
    """The largest that is affordable, for every budget up to a hundred."""
    for budget in range(1, 100):
        asked = []

        def height(k, budget=budget, asked=asked):
            asked.append(k)
            return math.log(k / (budget + 0.5))

        assert last_within(1, 1000, height, whole=True) == budget
        assert len(asked) < 40
        assert largest_count(lambda k, most=budget + 0.5: k / most, 1.0, 1e9) == budget
    assert largest_count(lambda k: k, 0.5, 1e9) == 0
    assert largest_count(lambda k: 0.0, 1.0, 1e9) is None
