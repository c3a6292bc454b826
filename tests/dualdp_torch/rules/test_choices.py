# SPDX-License-Identifier: Apache-2.0
"""Every exact way of a layer, forced, and the way that the cost model takes."""

import time
from unittest import mock

import pytest
import torch
from torch import nn

import dualdp_torch as dpt
from dualdp import UnsupportedLayerError
from dualdp_torch.rules import base, conv_forms, linear, together
from tests import reference
from tests.dualdp_torch.checks import assert_exact, data, randomise

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


@pytest.mark.parametrize("way", base.OPERATIONS["convolution"])
@pytest.mark.parametrize("name", [*ONLY, "frames"])
def test_a_way_that_a_convolution_lacks_is_refused(name, way):
    layer, shape, ways = ONLY.get(name, (nn.Conv2d(3, 4, 2), (5, 3, 4, 3), ("crb", "folded")))
    if name == "frames":
        layer = nn.Sequential(nn.Flatten(0, 1), layer, nn.Unflatten(0, (-1, 5)))
    model, x = randomise(nn.Sequential(layer, nn.Tanh())), data(3, *shape)
    with mock.patch.dict(base.FORCED, convolution=way):
        if way in ways:
            assert_exact(model, x, methods=FORCED)
            return
        match = f"convolution='{way}' is forced, but .* Expected one of {', '.join(ways)}"
        with pytest.raises(UnsupportedLayerError, match=match):
            dpt.per_sample_grads(reference.loss_fn, model, x)


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
    with mock.patch.dict(base.FORCED, convolution=form):
        dpt.per_sample_norms(reference.loss_fn, model, x)
    assert ran == [form]
    with mock.patch.dict(base.FORCED, convolution="gram"):
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


@pytest.mark.parametrize("name", [*CONVOLUTIONS, *ONLY])
def test_sizes_alone_decide_and_no_clock(name, monkeypatch):
    """So that all processes, and a run that is repeated, take the same form."""
    layer, shape = (CONVOLUTIONS.get(name) or ONLY[name])[:2]
    model, chosen = randomise(nn.Sequential(layer, nn.Tanh())), []
    choose = base.choose

    def noted(*arguments):
        chosen.append(choose(*arguments))
        return chosen[-1]

    def refused():
        raise AssertionError("a clock was read")

    monkeypatch.setattr(base, "choose", noted)
    for clock in ("time", "perf_counter", "monotonic", "process_time"):
        monkeypatch.setattr(time, clock, refused)
    found = []
    for seed in range(2):
        torch.manual_seed(seed)
        dpt.per_sample_norms(reference.loss_fn, model, torch.randn(4, *shape), check="off")
        found.append(tuple(chosen))
        chosen.clear()
    assert found[0] == found[1] != ()


@pytest.mark.parametrize("t", [2, 3, 40])
@pytest.mark.parametrize("width", [33, 512, 3000])
def test_the_gram_form_errs_less_than_its_bound(width, t):
    """Positive numbers, whose products lose the most digits; the gradients cancel."""
    a = data(64, t, width).abs()
    g = data(64, t, 37, seed=2)
    g -= g.mean(1, keepdim=True)
    exact = (g.double().mT @ a.double()).square().sum((1, 2))
    with mock.patch.dict(base.FORCED, linear="gram"):
        found, bound = together.sq_norms_of(linear.weight_sq_norms(a, g), 64)
    error = (found.double() - exact).abs()
    assert error.max() > 0
    assert (error <= bound.double()).all()
