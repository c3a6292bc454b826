# SPDX-License-Identifier: Apache-2.0
"""Matrix products by either library, and the rules made of them, at sizes that use both."""

from unittest import mock

import pytest
import torch
from torch import nn

from dualdp_torch.rules import (
    base,
    conv,
    conv_forms,
    linear,
    matmul,
    rnn_backward,
    together,
)
from tests.dualdp_torch.checks import assert_exact, data, randomise

FAST = ("auto", "book_keeping", "materialize")


def always(monkeypatch):
    """Let oneDNN multiply everything that it can, however small and on whatever processor."""
    for least in ("SMALL", "COLUMNS", "EACH", "ADDED"):
        monkeypatch.setattr(matmul, least, 0)


@pytest.fixture(params=["either", "onednn", "plain"])
def library(request, monkeypatch):
    """Sizes as they come, every product by oneDNN, or none of them."""
    if request.param == "onednn":
        if not matmul.by_onednn(torch.ones(1)):
            pytest.skip("this build of torch has no oneDNN")
        always(monkeypatch)
    if request.param == "plain":
        monkeypatch.setattr(matmul, "_HAS_ONEDNN", False)
    return request.param


def close(found, expected):
    """Equal to float64 up to the rounding of float32."""
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4)


def strided(*shape):
    """The same numbers in rows, in columns, and with gaps in both."""
    x = data(*shape)
    gaps = torch.zeros(*shape[:-1], 2 * shape[-1])[..., ::2].copy_(x)
    return [x, x.mT.contiguous().mT, gaps]


@pytest.mark.parametrize("sizes", [(5, 7, 3), (1, 1, 1), (0, 4, 3), (70, 90, 65)])
def test_products_are_those_of_float64(library, sizes):
    m, k, o = sizes
    bias = data(o, seed=3)
    for x in strided(m, k):
        for weight in strided(o, k):
            expected = x.double() @ weight.double().T
            close(matmul.product(x, weight), expected)
            close(matmul.product(x, weight, bias), expected + bias.double())
            add = matmul.adder(weight, m)
            close(add(data(m, o, seed=4), x), expected + data(m, o, seed=4).double())
    for x in strided(3, m, k):
        for y in strided(3, o, k):
            close(matmul.products(x, y), x.double() @ y.double().mT)
            close(matmul.products(y, x), y.double() @ x.double().mT)


def test_a_product_with_a_graph_keeps_it(monkeypatch):
    always(monkeypatch)
    x = data(4, 3).requires_grad_()
    matmul.product(x, data(5, 3)).sum().backward()
    torch.testing.assert_close(x.grad, data(5, 3).sum(0).expand(4, 3))


class Last(nn.Module):
    """The outputs of a recurrent layer."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)[0]


@pytest.mark.parametrize("steps", [1, 1 << 19])
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_recurrent_layers(library, monkeypatch, kind, steps):
    monkeypatch.setattr(rnn_backward, "_CHUNK", steps)  # one step at a time, or all of them
    layer = getattr(nn, kind)(4, 3, 2, bidirectional=True, batch_first=True)
    assert_exact(randomise(Last(layer)), data(3, 5, 4), methods=FAST)


def test_a_linear_layer_with_positions(library):
    model = randomise(nn.Sequential(nn.Linear(6, 11), nn.Tanh(), nn.Linear(11, 2)))
    for t in (1, 2, 40):
        assert_exact(model, data(3, t, 6), methods=FAST)


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
def test_convolutions_whose_sum_is_one_product(library, monkeypatch, layer, few):
    monkeypatch.setattr(conv, "FEW", few)
    shape = (3, layer.in_channels, 4, 4)[: len(layer.weight.shape)]
    summed = []
    monkeypatch.setattr(conv, "product", lambda *x: (summed.append(x), matmul.product(*x))[1])
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


@pytest.mark.parametrize("t", [2, 3, 40])
@pytest.mark.parametrize("width", [33, 512, 3000])
def test_the_gram_form_errs_less_than_its_bound(library, width, t):
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
