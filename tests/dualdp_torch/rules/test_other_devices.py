# SPDX-License-Identifier: Apache-2.0
"""What is computed in fewer calls on devices other than the host, on the host."""

import copy
from unittest import mock

import pytest
import torch
from torch import nn

import dualdp_torch as dpt
from dualdp_torch.rules import base, conv, conv_forms, embedding, rnn
from tests import reference
from tests.dualdp_torch.checks import assert_exact, data, randomise

FAST = ("auto", "book_keeping", "materialize")


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch):
    """Every device is taken for one where calls are dear."""
    monkeypatch.setattr(base, "HOSTS", set())


class Table(nn.Module):
    """Ids, some of them equal and some padding, then a head that may be tied."""

    def __init__(self, *, tied):
        super().__init__()
        self.table, self.head = nn.Embedding(7, 3, padding_idx=2), nn.Linear(3, 7)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids):
        return self.head(self.table(ids).tanh())


TWICE = nn.GroupNorm(2, 4)
CASES = {
    "group_norm": (nn.Sequential(nn.Conv2d(4, 6, 3), nn.GroupNorm(3, 6)), (4, 5, 6)),
    "group_norm_of_vectors": (nn.Sequential(nn.Linear(5, 6), nn.GroupNorm(2, 6)), (5,)),
    "group_norm_twice": (nn.Sequential(nn.Linear(5, 3), TWICE, nn.Tanh(), TWICE), (4, 5)),
    "instance_norm": (nn.Sequential(nn.Conv1d(2, 3, 3), nn.InstanceNorm1d(3, affine=True)), (2, 7)),
    "channels_last": (
        nn.Sequential(nn.Conv2d(4, 6, 3), nn.GroupNorm(3, 6)).to(memory_format=torch.channels_last),
        (4, 5, 6),
    ),
    "layer_norm": (nn.Sequential(nn.LayerNorm((3, 4)), nn.Tanh(), nn.LayerNorm(4)), (2, 3, 4)),
    "strides": (nn.Conv2d(3, 4, (3, 2), stride=(2, 1), dilation=(1, 2), padding=(0, 2)), (3, 6, 5)),
    "groups": (nn.Conv2d(4, 6, 2, groups=2, padding="same"), (4, 5, 4)),
    "one_axis": (nn.Conv1d(3, 5, 3, stride=2, padding=1), (3, 7)),
}  # fmt: skip


@pytest.mark.parametrize("form", ["gram", None])
@pytest.mark.parametrize("case", CASES)
def test_layers(case, form):
    layer, shape = CASES[case]
    model = randomise(nn.Sequential(layer, nn.Tanh()))
    for n in (1, 3):
        if form is None:
            assert_exact(model, data(n, *shape), methods=FAST)
        else:
            with mock.patch.dict(base.FORCED, linear=form, convolution=form):
                assert_exact(model, data(n, *shape), methods=FAST)


MANY = {
    "more_positions": (nn.Conv2d(3, 4, 3, padding=1), (3, 9, 8), "unfold"),
    "more_channels": (nn.Conv2d(40, 50, 3), (40, 4, 3), "gram"),
    "groups": (nn.Conv2d(4, 6, (2, 3), groups=2, padding="same", dilation=2), (4, 8, 9), "unfold"),
    "one_channel_a_group": (nn.Conv1d(4, 4, 3, groups=4, stride=2), (4, 17), "unfold"),
    "one_axis": (nn.Conv1d(3, 5, 3, padding=1, padding_mode="circular"), (3, 30), "unfold"),
    "three_axes": (nn.Conv3d(2, 3, 2), (2, 3, 4, 3), "folded"),
    "transposed": (nn.ConvTranspose2d(3, 4, 3, stride=2), (3, 4, 5), "folded"),
}


@pytest.mark.parametrize("case", MANY)
@pytest.mark.parametrize("at_once", [1, 1 << 28])
def test_convolutions_with_many_numbers(monkeypatch, case, at_once):
    """Patches of one example at a time, or of all."""
    monkeypatch.setattr(conv, "FORMED", 0)
    monkeypatch.setattr(conv_forms, "UNFOLDED_ELSEWHERE", at_once)
    layer, shape, expected = MANY[case]
    taken, choose = set(), base.choose
    monkeypatch.setattr(base, "choose", lambda *a: (taken.add(a[:2]), choose(*a))[1])
    model = randomise(nn.Sequential(layer, nn.Tanh()))
    for n in (1, 3):
        assert_exact(model, data(n, *shape), methods=FAST)
    assert taken == {("convolution", expected)}


@pytest.mark.parametrize("offset", [0.0, 50.0])
def test_norms_of_units(offset):
    """Rows of a unit are examples of their own for a norm, whose gradients are added."""
    model = randomise(nn.Sequential(nn.GroupNorm(2, 6), nn.Tanh(), nn.Linear(5, 3)))
    x = data(6, 6, 5) + offset
    truth = dpt.per_sample_grads(
        reference.loss_fn, copy.deepcopy(model).double(), x.double(), method="loop", rows_per_unit=2
    )
    for method in FAST:
        grads = dpt.per_sample_grads(reference.loss_fn, model, x, method=method, rows_per_unit=2)
        for name, expected in truth.items():
            apart = float((grads[name] - expected).norm() / expected.norm())
            assert apart < 1e-6 * (1 + offset), (method, name)


@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_equal_ids(tied):
    torch.manual_seed(0)
    for positions in (1, 5, 40):  # of which the last are too many for products of all pairs
        ids = torch.randint(7, (3, positions))
        assert_exact(randomise(Table(tied=tied)), ids, methods=FAST)
        by_columns = ids.T.contiguous().T
        assert_exact(randomise(Table(tied=tied)), by_columns, methods=FAST)


@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-6), (torch.float64, 1e-10)])
def test_norms_of_many_positions(dtype, near):
    """The same as the host's, with an error bound that grows where gradients cancel."""
    ids, g = torch.randint(30, (5, 100)), torch.randn(5, 100, 3, dtype=dtype)
    ids[0], ids[1] = torch.arange(100), 7  # each once; one only
    g[1, 50:] = -g[1, :50]
    for padding in (None, -1):
        options = {"shape": torch.Size([100, 3]), "padding_idx": padding}
        squares, errors = embedding.weight_sq_norms(ids, g, **options)
        expected = embedding.weight_grads(ids, g, **options).square().sum((1, 2))
        assert (squares - expected).abs().le(near * expected + near**2).all()
        assert errors[0] == 0
        assert errors[1:].min() > 0


class Last(nn.Module):
    """The last outputs and states of a recurrent layer, behind weights of its own."""

    def __init__(self, layer, *, first):
        super().__init__()
        self.first, self.layer = first, layer

    def forward(self, x):
        out, (h, c) = self.layer(self.first(x))
        return out[:, -1] + (h * c.tanh()).sum(0).sum(1, keepdim=True)


@pytest.mark.parametrize("has_bias", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_fused_lstm(monkeypatch, has_bias):
    calls, fused = [], rnn._fused_lstm
    monkeypatch.setattr(rnn, "_fused_lstm", lambda *a: (calls.append(a), fused(*a))[1])
    layer = nn.LSTM(4, 3, 2, bias=has_bias, bidirectional=True, batch_first=True)
    for first in (nn.Identity(), nn.Linear(4, 4)):
        calls.clear()
        assert_exact(randomise(Last(layer, first=first)), data(3, 5, 4), methods=FAST)
        assert calls
    assert_exact(
        randomise(Last(nn.LSTM(4, 3, batch_first=True), first=nn.Identity())), data(3, 1, 4)
    )
