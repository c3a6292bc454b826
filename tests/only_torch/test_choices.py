# SPDX-License-Identifier: Apache-2.0
"""Which way a layer goes: every forced way is exact, measured ones are recorded and used again."""

import itertools
import json

import pytest
import torch
from torch import nn

import dualdp_torch as dpt
from dualdp_torch import choices
from dualdp_torch.rules import conv_forms
from tests import reference
from tests.only_torch.checks import METHODS, assert_exact, data, randomise

LAYERS = {
    "linear": (nn.Linear(6, 5), (6,)),
    "positions": (nn.Linear(6, 5), (7, 6)),
    "conv1d": (nn.Conv1d(4, 6, 3, stride=2, padding=1, groups=2), (4, 11)),
    "conv2d": (nn.Conv2d(3, 4, (3, 2), dilation=(1, 2), padding=(2, 0), bias=False), (3, 6, 7)),
    "conv3d": (nn.Conv3d(2, 3, 2), (2, 4, 3, 5)),
    "same": (nn.Conv2d(5, 3, 2, padding="same", padding_mode="circular"), (5, 4, 5)),
    "transposed": (nn.ConvTranspose2d(3, 4, 2, stride=2), (3, 3, 4)),
}
WAYS = [(operation, way) for operation, ways in choices.OPERATIONS.items() for way in ways]


@pytest.mark.parametrize(("operation", "way"), WAYS, ids=":".join)
@pytest.mark.parametrize("name", LAYERS)
def test_every_forced_way_is_that_of_the_loop(name, operation, way):
    layer, shape = LAYERS[name]
    model = randomise(nn.Sequential(layer, nn.Tanh()))
    methods = ("auto", "book_keeping", "materialize", "two_pass")
    with choices.forced(**{operation: way}):
        assert_exact(model, data(3, *shape), methods=methods)


def test_the_naive_and_the_multi_way_are_methods():
    """Rochette et al. 2019 call them so: one example at a time, and a batch of models."""
    assert {"loop", "vmap"} <= set(METHODS)
    assert set(conv_forms.FORMS) | {"gram"} == set(choices.OPERATIONS["convolution"])


@pytest.mark.parametrize("form", conv_forms.FORMS)
def test_a_forced_form_is_the_one_that_runs(monkeypatch, form):
    ran = []
    for name, function in conv_forms.FORMS.items():
        monkeypatch.setitem(
            conv_forms.FORMS,
            name,
            lambda *a, n=name, f=function, **o: (ran.append(n), f(*a, **o))[1],
        )
    model, x = randomise(nn.Sequential(nn.Conv2d(5, 6, 3), nn.Tanh())), data(3, 5, 4, 4)
    dpt.per_sample_norms(reference.loss_fn, model, x)
    ran.clear()
    with choices.forced(convolution=form):
        dpt.per_sample_norms(reference.loss_fn, model, x)
    assert ran == [form]
    with choices.forced(convolution="gram"):
        dpt.per_sample_norms(reference.loss_fn, model, x)
    assert ran == [form]


@pytest.mark.parametrize(
    ("ways", "match"),
    [
        ({"linaer": "gram"}, "operation='linaer' is unknown. Expected one of convolution, linear"),
        ({"linear": "crb"}, "linear='crb' is unknown. Expected one of discard, gram, keep"),
    ],
)
def test_unknown_words_are_refused(ways, match):
    with pytest.raises(ValueError, match=match), choices.forced(**ways):
        pass


@pytest.fixture
def clock(monkeypatch):
    """A clock by which one way, and only that, is fast; counts what was timed."""
    timed = []

    def seconds(call, device):
        call()
        timed.append(call)
        return next(ticks)

    ticks = itertools.count(100, -1)  # later is faster: the last way wins
    monkeypatch.setattr(choices, "_seconds", seconds)
    return timed


def both():
    """A model with both kinds of layers."""
    return randomise(
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Flatten(2), nn.Linear(6, 5), nn.Tanh())
    )


def test_ways_are_measured_once_and_recorded(clock):
    model, x, table = both(), data(4, 3, 4, 5), {}
    expected = dpt.per_sample_norms(reference.loss_fn, model, x, method="loop")
    with choices.recorded(table, measure=True):
        torch.testing.assert_close(dpt.per_sample_norms(reference.loss_fn, model, x), expected)
        assert {key.split()[0]: way for key, way in table.items()} == {
            "convolution": "crb",
            "linear": "discard",
        }
        measured = len(clock)
        assert measured > 0
        for n in (4, 3, 2):  # of every size
            dpt.per_sample_norms(reference.loss_fn, model, x[:n])
    assert len(clock) == measured
    again = json.loads(json.dumps(table))
    with choices.recorded(again, measure=True):
        dpt.per_sample_norms(reference.loss_fn, model, x)
    assert len(clock) == measured
    assert again == table


def test_without_measuring_the_cost_model_fills_the_table(clock):
    model, x, table = both(), data(4, 3, 4, 5), {}
    with choices.recorded(table, measure=False):
        dpt.per_sample_norms(reference.loss_fn, model, x)
    assert not clock
    assert len(table) == 2
    dpt.per_sample_norms(reference.loss_fn, model, x)  # no table: nothing is measured
    assert not clock


def test_a_recorded_way_is_taken(clock, monkeypatch):
    model, x, table = both(), data(4, 3, 4, 5), {}
    with choices.recorded(table, measure=False):
        dpt.per_sample_norms(reference.loss_fn, model, x)
    conv = next(key for key in table if key.startswith("convolution"))
    ran = []
    unfold = conv_forms.FORMS["unfold"]
    monkeypatch.setitem(
        conv_forms.FORMS, "unfold", lambda *a, **o: (ran.append(1), unfold(*a, **o))[1]
    )
    with choices.recorded(table | {conv: "unfold"}, measure=True):
        dpt.per_sample_norms(reference.loss_fn, model, x)
    assert ran == [1]


def test_hopeless_ways_are_not_measured(clock):
    """Products of 900 positions with each other, for a weight of 2,000 numbers."""
    model, table = randomise(nn.Sequential(nn.Linear(1000, 2), nn.Tanh())), {}
    with choices.recorded(table, measure=True):
        dpt.per_sample_norms(reference.loss_fn, model, data(2, 900, 1000))
    assert table
    assert 0 < len(clock) < 6


def test_seconds_are_those_of_the_call():
    assert choices._seconds(lambda: None, torch.device("cpu")) >= 0
