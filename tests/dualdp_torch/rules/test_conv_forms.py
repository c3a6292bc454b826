# SPDX-License-Identifier: Apache-2.0
"""Random options and shapes of the layers whose rules have the most of them."""

from unittest import mock

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import nn

import dualdp_torch as dpt
from dualdp_torch.rules import conv, conv_forms
from tests.dualdp_torch.checks import assert_exact, data, randomise

FAST = ("auto", "book_keeping", "materialize")
few = hypothesis.settings(max_examples=40)


@st.composite
def convolutions(draw):
    """A convolution of one to three axes, and the shape of one example."""
    axes = draw(st.integers(1, 3))
    groups = draw(st.sampled_from([1, 2, 3]))
    channels = groups * draw(st.integers(1, 3))
    out = groups * draw(st.integers(1, 3))
    kernel = tuple(draw(st.integers(1, 3)) for _ in range(axes))
    dilation = tuple(draw(st.integers(1, 2)) for _ in range(axes))
    stride = tuple(draw(st.integers(1, 3)) for _ in range(axes))
    padding = tuple(draw(st.integers(0, 2)) for _ in range(axes))
    mode = draw(st.sampled_from(["zeros", "circular", "replicate"]))
    reach = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    size = tuple(max(r, 2) + draw(st.integers(0, 5)) for r in reach)
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[axes - 1]
    layer = kind(
        channels,
        out,
        kernel,
        stride=stride,
        padding=padding,
        dilation=dilation,
        groups=groups,
        bias=draw(st.booleans()),
        padding_mode=mode,
    )
    return layer, (channels, *size)


@pytest.mark.slow
@few
@hypothesis.given(convolutions(), st.integers(2, 5), st.booleans())
def test_convolutions(case, n, is_first):
    layer, shape = case
    first = nn.Identity() if is_first else nn.Sequential(nn.GroupNorm(1, shape[0]), nn.Tanh())
    model = randomise(nn.Sequential(first, layer, nn.Tanh()))
    assert_exact(model, data(n, *shape), methods=FAST)


@pytest.mark.slow
@few
@hypothesis.given(
    st.sampled_from([nn.LSTM, nn.GRU, nn.RNN]),
    st.integers(2, 4),
    st.integers(1, 6),
    st.integers(1, 4),
    st.integers(1, 5),
    st.booleans(),
    st.booleans(),
    st.integers(1, 2),
)
def test_recurrent_layers(kind, n, steps, width, hidden, bias, both, layers):
    rnn = kind(width, hidden, layers, bias=bias, bidirectional=both, batch_first=True)

    class Outputs(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = rnn

        def forward(self, x):
            return self.rnn(x)[0]

    assert_exact(randomise(Outputs()), data(n, steps, width), methods=FAST)


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


@few
@hypothesis.given(convolutions(), st.integers(1, 5))
def test_every_form_of_a_convolutions_gradient_is_the_same(case, n):
    from dualdp_torch.rules.conv_forms import FORMS

    layer, shape = case
    axes = len(shape) - 1
    x = data(n, *shape)
    options = {name: getattr(layer, name) for name in ("stride", "padding", "dilation", "groups")}
    g = torch.randn_like(
        (nn.functional.conv1d, nn.functional.conv2d, nn.functional.conv3d)[axes - 1](
            x, layer.weight, **options
        )
    )
    expected = FORMS["folded"](x, g, shape=layer.weight.shape, **options)
    for name in ("unfold", "crb") if axes < 3 else ():
        found = FORMS[name](x, g, shape=layer.weight.shape, **options)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    units = (x, g), (x.flip(0), 2 * g)
    frames = [torch.stack(parts) for parts in zip(*units, strict=True)]
    each = [FORMS["folded"](*unit, shape=layer.weight.shape, **options) for unit in units]
    expected = torch.stack(each).sum(1)
    for name, wide in (("folded", 7), ("crb", 7), ("crb", 1)) if axes < 3 else (("folded", 7),):
        with mock.patch.object(conv_forms, "WIDE", wide):
            found = FORMS[name](*frames, shape=layer.weight.shape, **options)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("few", [0, 1 << 20])
@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(3, 4, (3, 2), stride=(2, 1), dilation=(1, 2), padding=(0, 2)),
        nn.Conv2d(3, 4, 4, padding="same"),
        nn.Conv2d(8, 6, 2, groups=2),
        nn.Conv1d(3, 5, 3, stride=2, padding=1),
        nn.Conv1d(6, 5, 1),
    ],
    ids=str,
)
def test_convolutions_whose_sum_is_one_product(monkeypatch, layer, few):
    monkeypatch.setattr(conv, "FEW", few)
    shape = (3, layer.in_channels, 4, 4)[: len(layer.weight.shape)]
    summed = []
    patches = conv.patches
    monkeypatch.setattr(conv, "patches", lambda *x, **o: (summed.append(x), patches(*x, **o))[1])
    assert_exact(randomise(nn.Sequential(layer, nn.Tanh())), data(*shape), methods=FAST)
    assert bool(summed) == bool(few and layer.groups == 1)


@pytest.mark.parametrize("n", [0, 1, 5])
def test_examples_are_folded_whole_or_in_chunks(monkeypatch, n):
    acts, grads_out, shape = data(n, 2, 5, 5), data(n, 4, 3, 3, seed=2), torch.Size((4, 2, 3, 3))
    whole = conv_forms.by_folding(acts, grads_out, shape=shape)
    monkeypatch.setattr(conv_forms, "_at_once", lambda *_: 2)
    chunks = conv_forms.by_folding(acts, grads_out, shape=shape)
    assert whole.shape == (n, *shape)
    torch.testing.assert_close(whole, chunks)
    both = conv_forms.by_folding(acts, grads_out, shape=shape, has_bias=True)
    torch.testing.assert_close(both, (whole, grads_out.sum((2, 3))))
