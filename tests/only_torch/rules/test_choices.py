# SPDX-License-Identifier: Apache-2.0
"""Which way a layer goes: every forced way is exact, measured ones are recorded and used again."""

import itertools
import json

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import dualdp_torch as dpt
from dualdp import UnsupportedLayerError
from dualdp.plan.plan import PrivacyPlan
from dualdp_torch.rules import choices, conv_forms
from tests import reference
from tests.only_torch.checks import METHODS, assert_exact, data, ids, randomise

CONVOLUTIONS = {
    "1d": (nn.Conv1d(4, 6, 3, stride=2, padding=1, groups=2), (4, 11)),
    "2d": (nn.Conv2d(3, 4, (3, 2), dilation=(1, 2), padding=(2, 0), bias=False), (3, 6, 7)),
    "same": (nn.Conv2d(5, 3, 2, padding="same", padding_mode="circular"), (5, 4, 5)),
    "uneven": (nn.Conv1d(5, 3, 4, padding="same"), (5, 9)),
    "valid": (nn.Conv2d(5, 3, 2, padding="valid", stride=(2, 3)), (5, 6, 9)),
    "depthwise": (nn.Conv2d(3, 9, 3, groups=3, padding=1, stride=2), (3, 5, 4)),
    "reflected": (nn.Conv2d(3, 4, 3, padding=2, padding_mode="reflect"), (3, 5, 4)),
    "one by one": (nn.Conv2d(4, 6, 1, stride=3, groups=2), (4, 5, 4)),
    "rest": (nn.Conv2d(2, 3, 3, stride=3, dilation=2, padding=1), (2, 9, 10)),
    "large": (nn.Conv2d(2, 3, (5, 4), padding=(3, 4)), (2, 3, 4)),
}
ONLY = {  # what has fewer ways
    "3d": (nn.Conv3d(2, 4, 2, groups=2), (2, 4, 3, 5), ("folded", "gram")),
    "transposed": (
        nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1, groups=2),
        (4, 3, 4),
        ("folded",),
    ),
}
FORCED = ("auto", "book_keeping", "materialize", "two_pass")


@pytest.mark.parametrize("way", choices.OPERATIONS["linear"])
@pytest.mark.parametrize("shape", [(6,), (7, 6)])
def test_every_forced_way_of_a_product_is_that_of_the_loop(shape, way):
    model = randomise(nn.Sequential(nn.Linear(6, 5), nn.Tanh()))
    with choices.forced(linear=way):
        assert_exact(model, data(3, *shape), methods=FORCED)


@pytest.mark.parametrize("way", choices.OPERATIONS["convolution"])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_every_forced_way_of_a_convolution_is_that_of_the_loop(name, way):
    layer, shape = CONVOLUTIONS[name]
    model = randomise(nn.Sequential(layer, nn.Tanh()))
    with choices.forced(convolution=way):
        assert_exact(model, data(3, *shape), methods=FORCED)


@pytest.mark.parametrize("way", choices.OPERATIONS["convolution"])
@pytest.mark.parametrize("name", [*ONLY, "frames"])
def test_a_way_that_a_convolution_lacks_is_refused(name, way):
    layer, shape, ways = ONLY.get(name, (nn.Conv2d(3, 4, 2), (5, 3, 4, 3), ("folded",)))
    if name == "frames":
        layer = nn.Sequential(nn.Flatten(0, 1), layer, nn.Unflatten(0, (-1, 5)))
    model, x = randomise(nn.Sequential(layer, nn.Tanh())), data(3, *shape)
    with choices.forced(convolution=way):
        if way in ways:
            assert_exact(model, x, methods=FORCED)
            return
        match = f"convolution='{way}' is forced, but .* Expected one of {', '.join(ways)}"
        with pytest.raises(UnsupportedLayerError, match=match):
            dpt.per_sample_grads(reference.loss_fn, model, x)


def test_the_naive_and_the_multi_way_are_methods():
    """Rochette et al. 2019 call them so: one example at a time, and a batch of models."""
    assert {"loop", "vmap"} <= set(METHODS)
    assert set(conv_forms.FORMS) | {"gram"} == set(choices.OPERATIONS["convolution"])


@pytest.fixture
def ran(monkeypatch):
    """Names of the forms of convolutions, as they run."""
    names = []
    for name, function in conv_forms.FORMS.items():
        monkeypatch.setitem(
            conv_forms.FORMS,
            name,
            lambda *a, n=name, f=function, **o: (names.append(n), f(*a, **o))[1],
        )
    return names


@pytest.mark.parametrize("form", conv_forms.FORMS)
def test_a_forced_form_is_the_one_that_runs(ran, form):
    model, x = randomise(nn.Sequential(nn.Conv2d(5, 6, 3), nn.Tanh())), data(3, 5, 4, 4)
    dpt.per_sample_norms(reference.loss_fn, model, x)
    ran.clear()
    with choices.forced(convolution=form):
        dpt.per_sample_norms(reference.loss_fn, model, x)
    assert ran == [form]
    with choices.forced(convolution="gram"):
        dpt.per_sample_norms(reference.loss_fn, model, x)
    assert ran == [form]


@pytest.mark.parametrize("groups", [1, 3])
def test_patches_are_written_out_piece_by_piece(monkeypatch, groups):
    """Not those of all examples at once: they are as many times larger as the kernel is."""
    acts, grads_out = data(7, 6, 9, 8), data(7, 9, 7, 6)
    shape = torch.Size((9, 6 // groups, 3, 3))
    whole = conv_forms.by_unfolding(acts, grads_out, shape=shape, groups=groups)
    sizes, patches = [], conv_forms.patches
    monkeypatch.setattr(
        conv_forms, "patches", lambda x, **o: (sizes.append(len(x)), patches(x, **o))[1]
    )
    monkeypatch.setattr(conv_forms, "UNFOLDED", 2 * 6 * 9 * 7 * 6 * acts.element_size())
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    pieces = conv_forms.by_unfolding(acts, grads_out, shape=shape, groups=groups)
    assert sizes == [4, 3]
    torch.testing.assert_close(pieces, whole, rtol=1e-12, atol=1e-12)


def test_channels_that_fill_no_block_are_unfolded_on_a_processor(ran):
    for channels, out, form in ((16, 8, "folded"), (16, 12, "unfold"), (3, 8, "crb")):
        model = randomise(nn.Sequential(nn.Conv2d(channels, out, 3), nn.Tanh()))
        dpt.per_sample_grads(reference.loss_fn, model, data(2, channels, 8, 8))
        assert ran.pop() == form


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

    ticks = (0.5**k for k in itertools.count())  # later is faster: the last way wins
    monkeypatch.setattr(choices, "_seconds", seconds)
    return timed


def both():
    """A model with both kinds of layers."""
    return randomise(
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Flatten(2), nn.Linear(6, 5), nn.Tanh())
    )


def test_ways_are_measured_once_and_recorded(clock):
    model, x, table = both(), data(9, 3, 4, 5), {}
    expected = dpt.per_sample_norms(reference.loss_fn, model, x, method="loop")
    with choices.recorded(table, measure=True):
        torch.testing.assert_close(dpt.per_sample_norms(reference.loss_fn, model, x), expected)
        assert {key.split()[0]: way for key, way in table.items()} == {
            "convolution": "crb",
            "linear": "discard",
        }
        measured = len(clock)
        assert measured > 0
        for n in (9, 8, 2):  # of every size
            dpt.per_sample_norms(reference.loss_fn, model, x[:n])
    assert len(clock) == measured
    again = json.loads(json.dumps(table))
    with choices.recorded(again, measure=True):
        dpt.per_sample_norms(reference.loss_fn, model, x)
    assert len(clock) == measured
    assert again == table


def test_too_few_examples_are_not_measured(clock):
    model, x, table = both(), data(9, 3, 4, 5), {}
    with choices.recorded(table, measure=True):
        dpt.per_sample_norms(reference.loss_fn, model, x[:7])
        assert not table
        assert not clock
        dpt.per_sample_norms(reference.loss_fn, model, x)
    assert len(table) == 2


def test_the_usual_way_stays_unless_it_is_clearly_beaten(monkeypatch):
    seconds = {"gram": 1.0, "keep": 0.95, "discard": 2.0}
    monkeypatch.setattr(choices, "_seconds", lambda call, device: call())
    ways = {way: (lambda s=s: s) for way, s in seconds.items()}
    assert choices._fastest(ways, "gram", torch.device("cpu")) == "gram"
    assert choices._fastest(ways, "discard", torch.device("cpu")) == "keep"


@pytest.mark.parametrize(
    ("seeded", "decides", "measures", "fills"),
    [(False, True, True, True), (True, True, False, True), (False, False, False, False)],
)
def test_who_chooses_in_a_run(clock, seeded, decides, measures, fills):
    model, x, table = both(), data(9, 3, 4, 5), {}
    with choices.of_run(table, seeded=seeded, decides=decides):
        dpt.per_sample_norms(reference.loss_fn, model, x)
    assert bool(clock) == measures
    assert bool(table) == fills


def test_other_processes_follow_the_table(clock, monkeypatch):
    model, x, table = both(), data(9, 3, 4, 5), {}
    with choices.of_run(table, seeded=True):
        dpt.per_sample_norms(reference.loss_fn, model, x)
    conv = next(key for key in table if key.startswith("convolution"))
    told, ran = {conv: "unfold"}, []
    unfold = conv_forms.FORMS["unfold"]
    monkeypatch.setitem(
        conv_forms.FORMS, "unfold", lambda *a, **o: (ran.append(1), unfold(*a, **o))[1]
    )
    with choices.of_run(told, seeded=False, decides=False):
        dpt.per_sample_norms(reference.loss_fn, model, x)
    assert ran == [1]
    assert told == {conv: "unfold"}


@pytest.mark.parametrize("seed", [None, 1])
def test_an_engine_measures_unless_its_plan_has_a_seed(clock, seed):
    model = nn.Sequential(both(), nn.Flatten(), nn.Linear(20, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(data(36, 3, 4, 5), ids(3, 36)), batch_size=30)
    plan = PrivacyPlan(
        num_examples=36,
        expected_batch_size=30,  # Poisson batches hold more than eight
        num_steps=3,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        delta=1e-5,
        seed=seed,
        accountant="rdp",
    )
    engine = dpt.PrivacyEngine()
    parts = engine.make_private(module=model, optimizer=optimizer, data_loader=loader, plan=plan)
    counts = []
    for x, y in parts[2]:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        counts.append(len(clock))
    assert counts == [counts[0]] * 3, "once"
    assert bool(counts[0]) == (seed is None)
    table = engine.settings_to_save(model, optimizer).choices
    assert {key.split()[0] for key in table} == {"convolution", "linear"}


def test_without_measuring_the_cost_model_fills_the_table(clock):
    model, x, table = both(), data(9, 3, 4, 5), {}
    with choices.recorded(table, measure=False):
        dpt.per_sample_norms(reference.loss_fn, model, x)
    assert not clock
    assert len(table) == 2
    dpt.per_sample_norms(reference.loss_fn, model, x)  # no table: nothing is measured
    assert not clock


def test_a_recorded_way_is_taken(clock, monkeypatch):
    model, x, table = both(), data(9, 3, 4, 5), {}
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
    """Products of 300 positions with each other, for a weight of 2,000 numbers."""
    model, table = randomise(nn.Sequential(nn.Linear(1000, 2), nn.Tanh())), {}
    with choices.recorded(table, measure=True):
        dpt.per_sample_norms(reference.loss_fn, model, data(8, 300, 1000))
    assert table
    assert len(clock) == 4


def test_seconds_are_those_of_the_call():
    assert choices._seconds(lambda: None, torch.device("cpu")) >= 0
