# SPDX-License-Identifier: Apache-2.0
"""Forms of a convolution's gradients: random options and shapes, frames, chunks."""

from unittest import mock

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import nn

import dualdp_torch as dpt
from dualdp_torch.rules import conv, conv_forms
from dualdp_torch.rules.conv_forms import FORMS
from tests.dualdp_torch.checks import assert_exact, data, randomise

FAST = ("auto", "book_keeping", "materialize")
CONVOLVE = (nn.functional.conv1d, nn.functional.conv2d, nn.functional.conv3d)


@st.composite
def convolutions(draw):
    """A convolution of one to three axes, and the shape of one example."""
    axes, groups = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 3]))
    channels, out = (groups * draw(st.integers(1, 3)) for _ in range(2))

    def sizes(low, high):
        return tuple(draw(st.integers(low, high)) for _ in range(axes))

    kernel, dilation = sizes(1, 3), sizes(1, 2)
    options = {"stride": sizes(1, 3), "padding": sizes(0, 2), "dilation": dilation}
    options |= {"groups": groups, "bias": draw(st.booleans())}
    options["padding_mode"] = draw(st.sampled_from(["zeros", "circular", "replicate"]))
    reach = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    size = (max(r, 2) + more for r, more in zip(reach, sizes(0, 5), strict=True))
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[axes - 1]
    return kind(channels, out, kernel, **options), (channels, *size)


@pytest.mark.slow
@hypothesis.settings(max_examples=30)
@hypothesis.given(convolutions(), st.integers(2, 5), st.booleans())
def test_convolutions(case, n, is_first):
    layer, shape = case
    first = nn.Identity() if is_first else nn.Sequential(nn.GroupNorm(1, shape[0]), nn.Tanh())
    model = randomise(nn.Sequential(first, layer, nn.Tanh()))
    assert_exact(model, data(n, *shape), methods=FAST)


@hypothesis.settings(max_examples=40)
@hypothesis.given(convolutions(), st.integers(1, 5))
def test_every_form_of_a_convolutions_gradient_is_the_same(case, n):
    """Of single inputs, and of two frames of each example."""
    layer, shape = case
    x, is_flat = data(n, *shape), len(shape) < 4
    options = {name: getattr(layer, name) for name in ("stride", "padding", "dilation", "groups")}
    g = torch.randn_like(CONVOLVE[len(shape) - 2](x, layer.weight, **options))
    options["shape"] = layer.weight.shape
    one, two = (FORMS["folded"](a, b, **options) for a, b in ((x, g), (x.flip(0), 2 * g)))
    frames = torch.stack([x, x.flip(0)], 1), torch.stack([g, 2 * g], 1)
    for name, wide in (("folded", 7), ("unfold", 7), ("crb", 7), ("crb", 1))[: 4 if is_flat else 1]:
        with mock.patch.object(conv_forms, "WIDE", wide):
            found = FORMS[name](x, g, **options)
            torch.testing.assert_close(found, one, rtol=1e-4, atol=1e-4)
            if name != "unfold":
                found = FORMS[name](*frames, **options)
                torch.testing.assert_close(found, one + two, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("how", ["whole", "part", "traced"])
def test_scripted_models_are_right(how):
    """Their parameters are seen to reach the loss in a way of their own, and go through vmap."""
    body, x = randomise(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))), data(4, 6)

    def loss(model, x):
        return model(x).square().sum(1)

    expected = dpt.per_sample_norms(loss, body, x, method="loop")
    model = torch.jit.trace(body, x) if how == "traced" else torch.jit.script(body)
    model = nn.Sequential(model, nn.Identity()) if how == "part" else model
    for method in dpt.METHODS:
        torch.testing.assert_close(dpt.per_sample_norms(loss, model, x, method=method), expected)


@pytest.mark.parametrize(
    ("few", "layer"),
    [
        (1 << 20, nn.Conv2d(3, 4, (3, 2), stride=(2, 1), dilation=(1, 2), padding=(0, 2))),
        (0, nn.Conv2d(3, 4, 4, padding="same")),
        (1 << 20, nn.Conv2d(3, 4, 4, padding="same")),
        (1 << 20, nn.Conv2d(8, 6, 2, groups=2)),
        (1 << 20, nn.Conv1d(3, 5, 3, stride=2, padding=1)),
    ],
    ids=str,
)
def test_convolutions_whose_sum_is_one_product(monkeypatch, layer, few):
    monkeypatch.setattr(conv, "FEW", few)
    summed, patches = [], conv.patches
    monkeypatch.setattr(conv, "patches", lambda *x, **o: (summed.append(x), patches(*x, **o))[1])
    shape = (3, layer.in_channels, 4, 4)[: len(layer.weight.shape)]
    assert_exact(randomise(nn.Sequential(layer, nn.Tanh())), data(*shape), methods=FAST)
    assert bool(summed) == bool(few and layer.groups == 1)


@pytest.mark.parametrize("n", [0, 1, 5])
def test_examples_are_folded_whole_or_in_chunks(monkeypatch, n):
    acts, grads_out, shape = data(n, 2, 5, 5), data(n, 4, 3, 3, seed=2), torch.Size((4, 2, 3, 3))
    whole = conv_forms.by_folding(acts, grads_out, shape=shape)
    monkeypatch.setattr(conv_forms, "_at_once", lambda *_: 2)
    both = conv_forms.by_folding(acts, grads_out, shape=shape, has_bias=True)
    assert whole.shape == (n, *shape)
    torch.testing.assert_close(both, (whole, grads_out.sum((2, 3))))
