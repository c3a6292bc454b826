# SPDX-License-Identifier: Apache-2.0
"""Matrix products by either library, and the rules made of them, at sizes that use both."""

import pytest
import torch
from torch import nn

from dualdp_torch.rules import (
    choices,
    conv,
    conv_forms,
    linear,
    matmul,
    rnn_backward,
    together,
    workspace,
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


def test_a_processor_is_known_by_its_family():
    """Who is narrow there is told by the kind of processor, so that a run can be repeated."""
    described = "processor\t: 0\nvendor_id\t: AuthenticAMD\ncpu family\t: 26\nmodel\t\t: 2\n"
    assert matmul.amd_family(described) == 26
    assert matmul.amd_family(described.replace("AuthenticAMD", "GenuineIntel")) == 0
    assert matmul.amd_family("Hardware: an ARM\n\nBogoMIPS") == 0


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


def test_onednn_gets_no_strides_that_it_is_slow_with(monkeypatch):
    given = []
    always(monkeypatch)
    monkeypatch.setattr(matmul, "by_onednn", lambda *_: True)
    monkeypatch.setattr(matmul, "_multiply", lambda x, w, b=None: (given.append(w), x @ w.T)[1])
    every_second = data(6, 4, 8)[:, ::2, ::2]
    matmul.product(data(5, 4), every_second[0])
    matmul.products(every_second, every_second)
    assert len(given) == 7
    assert all(w.is_contiguous() or w.T.is_contiguous() for w in given)


def test_of_two_operands_in_columns_the_smaller_one_is_copied(monkeypatch):
    first = []
    always(monkeypatch)
    monkeypatch.setattr(matmul, "by_onednn", lambda *_: True)
    monkeypatch.setattr(matmul, "_multiply", lambda x, w, b=None: (first.append(x), x @ w.T)[1])
    few, many = data(4, 3), data(4, 7, seed=2)
    for x, weight in ((few, many), (many, few)):
        found = matmul.product(x.T, weight.T)
        torch.testing.assert_close(found, x.T @ weight)
        assert found.is_contiguous()
        assert len(first.pop()) == 3


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


SIZES = [(1, 3, 4, 5), (7, 2, 3, 33), (9, 3, 5, 64), (5, 2, 300, 100)]


@pytest.mark.parametrize(("steps", "n", "inputs", "width"), SIZES)
def test_the_workspace_begins_with_the_gates(steps, n, inputs, width):
    """Rows of several paddings; the input in another order than oneDNN takes for granted."""
    x, h, c = data(n, steps, inputs).transpose(0, 1), data(n, width), data(n, width, seed=2)
    shapes = ((4 * width, inputs), (4 * width, width), (4 * width,), (4 * width,))
    weights = tuple(data(*shape, seed=k) * 0.2 for k, shape in enumerate(shapes))
    found = workspace.lstm_with_gates(x, h, c, weights)
    if found is None:
        assert not matmul.by_onednn(x)
        pytest.skip("this build of torch has no oneDNN")
    out, last_h, last_c, gates = found
    cell = rnn_backward.Cell("lstm", *weights, None, None)
    for ours, torchs in zip((out, last_h, last_c), cell.fused(x, h, c, weights), strict=True):
        torch.testing.assert_close(ours, torchs)
    sums = cell.gate_sums(x, torch.cat([h[None], out[:-1]]))
    torch.testing.assert_close(gates, rnn_backward.lstm_gates(sums.clone(), None))
    assert workspace.are_gates(gates, rnn_backward.lstm_cells(gates, c), last_c, sums[-1])


@pytest.mark.parametrize("row", [lambda n: n, lambda n: n + 16, lambda n: 1 << 40])
def test_a_workspace_of_another_layout_is_not_used(monkeypatch, row):
    monkeypatch.setattr(workspace, "_row", row)
    layer = nn.LSTM(4, 33, batch_first=True)
    assert_exact(randomise(Last(layer)), data(3, 5, 4), methods=FAST)


def test_gates_are_not_computed_again(monkeypatch):
    """Of all steps, only the last one's are, to be compared."""
    steps, sums = [], rnn_backward.Cell.gate_sums
    monkeypatch.setattr(
        rnn_backward.Cell, "gate_sums", lambda *a: (steps.append(len(a[1])), sums(*a))[1]
    )
    model, x = randomise(Last(nn.LSTM(4, 3, batch_first=True))), data(3, 5, 4)
    assert_exact(model, x, methods=("auto",))
    assert set(steps) == ({1} if matmul.by_onednn(x) else {5})


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
    with choices.forced(linear="gram"):
        found, bound = together.sq_norms_of(linear.weight_sq_norms(a, g), 64)
    error = (found.double() - exact).abs()
    assert error.max() > 0
    assert (error <= bound.double()).all()
