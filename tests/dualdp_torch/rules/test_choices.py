# SPDX-License-Identifier: Apache-2.0
"""The way that a layer takes: forced, or chosen by the cost model. Each way alone: tests/grid."""

import time
from unittest import mock

import pytest
import torch
from torch import nn

import dualdp_torch as dpt
from dualdp import UnsupportedLayerError
from dualdp_torch.rules import base, conv_forms, linear, together
from tests import reference
from tests.dualdp_torch.checks import data, randomise


def norms_of(layer, *shape, n=3):
    """Norms of a model with this layer, without checks."""
    model = randomise(nn.Sequential(layer, nn.Tanh()))
    return dpt.per_sample_norms(reference.loss_fn, model, data(n, *shape), check="off")


@pytest.mark.parametrize(
    ("layer", "shape", "way", "ways"),
    [
        (nn.Conv3d(2, 4, 2, groups=2), (2, 4, 3, 5), "crb", "folded, gram"),
        (nn.ConvTranspose2d(4, 6, 3, stride=2), (4, 3, 4), "gram", "folded"),
        (
            nn.Sequential(nn.Flatten(0, 1), nn.Conv2d(3, 4, 2), nn.Unflatten(0, (-1, 5))),
            (5, 3, 4, 3),
            "unfold",
            "crb, folded",
        ),
    ],
    ids=["3d", "transposed", "frames"],
)
def test_a_way_that_a_convolution_lacks_is_refused(layer, shape, way, ways):
    match = f"convolution='{way}' is forced, but .* Expected one of {ways}"
    with mock.patch.dict(base.FORCED, convolution=way):
        with pytest.raises(UnsupportedLayerError, match=match):
            norms_of(layer, *shape)


@pytest.mark.parametrize("form", conv_forms.FORMS)
def test_a_forced_form_is_the_one_that_runs(form, monkeypatch):
    ran = []
    for name, function in conv_forms.FORMS.items():

        def noted(*given, name=name, function=function, **options):
            ran.append(name)
            return function(*given, **options)

        monkeypatch.setitem(conv_forms.FORMS, name, noted)
    for way, expected in ((form, [form]), ("gram", [])):
        ran.clear()
        with mock.patch.dict(base.FORCED, convolution=way):
            norms_of(nn.Conv2d(5, 6, 3), 5, 4, 4)
        assert ran == expected


@pytest.mark.parametrize("groups", [1, 3])
def test_patches_are_written_out_piece_by_piece(monkeypatch, groups):
    """Not those of all examples at once: they are as many times larger as the kernel is."""
    acts, grads_out = data(7, 6, 9, 8), data(7, 9, 7, 6)
    options = {"shape": torch.Size((9, 6 // groups, 3, 3)), "groups": groups}
    whole = conv_forms.by_unfolding(acts, grads_out, **options)
    sizes, patches = [], conv_forms.patches

    def noted(x, **given):
        sizes.append(len(x))
        return patches(x, **given)

    monkeypatch.setattr(conv_forms, "patches", noted)
    monkeypatch.setattr(conv_forms, "UNFOLDED", 2 * 6 * 9 * 7 * 6 * acts.element_size())
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    pieces = conv_forms.by_unfolding(acts, grads_out, **options)
    assert sizes == [4, 3]
    torch.testing.assert_close(pieces, whole, rtol=1e-12, atol=1e-12)


def test_sizes_alone_decide_and_no_clock(monkeypatch):
    """known_failures 56: all processes, and a run that is repeated, take the same form."""
    layers = nn.Sequential(nn.Conv2d(3, 4, 2), nn.Conv2d(4, 6, 2, groups=2), nn.Linear(4, 3))
    chosen, choose = [], base.choose

    def noted(*arguments):
        chosen.append(choose(*arguments))
        return chosen[-1]

    def refused():
        raise AssertionError("a clock was read")

    monkeypatch.setattr(base, "choose", noted)
    for clock in ("time", "perf_counter", "monotonic", "process_time"):
        monkeypatch.setattr(time, clock, refused)
    norms_of(layers, 3, 7, 6)
    first = chosen.copy()
    norms_of(layers, 3, 7, 6)
    assert len(first) >= 3
    assert chosen == 2 * first


@pytest.mark.parametrize(("t", "width"), [(2, 3000), (3, 33), (40, 512)])
def test_the_gram_form_errs_less_than_its_bound(width, t):
    """known_failures 51: positive numbers lose the most digits; the gradients cancel."""
    a = data(64, t, width).abs()
    g = data(64, t, 37, seed=2)
    g -= g.mean(1, keepdim=True)
    exact = (g.double().mT @ a.double()).square().sum((1, 2))
    with mock.patch.dict(base.FORCED, linear="gram"):
        found, bound = together.sq_norms_of(linear.weight_sq_norms(a, g), 64)
    error = (found.double() - exact).abs()
    assert error.max() > 0
    assert (error <= bound.double()).all()
