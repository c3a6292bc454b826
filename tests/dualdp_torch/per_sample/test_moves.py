# SPDX-License-Identifier: Apache-2.0
"""Rows that the data move after the proof was made, and forwards that differentiate themselves."""

from __future__ import annotations

import gc
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import dualdp_torch as dpt
from dualdp import ExactnessError, UnsupportedLayerError
from dualdp_torch.per_sample import call as calls
from tests.closeness import assert_grads_close
from tests.dualdp_torch.checks import data, ids, randomise, truth_of


def squares(model, *batch):
    """One loss per example."""
    return model(*batch).flatten(1).square().sum(1)


class Two(nn.Module):
    """Two layers with rows moved in between by `way`."""

    def __init__(self, way):
        super().__init__()
        self.first, self.second, self.way = nn.Linear(3, 4), nn.Linear(4, 2), way

    def forward(self, x, by):
        """(n, ..., 3), by the data `by`."""
        return self.way(self.second, torch.tanh(self.first(x)), by)


def sorted_rows(layer, h, by):
    order = by.argsort(descending=True)
    return layer(h[order])[order.argsort()]


def selected_rows(layer, h, by):
    order = by.argsort(descending=True)
    out = h.new_empty(len(h), 2)
    out[order] = layer(h.index_select(0, order))
    return out


def gathered_rows(layer, h, by):
    order = by.argsort(descending=True)[:, None]
    y = layer(torch.gather(h, 0, order.expand_as(h)))
    return torch.zeros_like(y).scatter(0, order.expand_as(y), y)


def added_rows(layer, h, by):
    order = by.argsort(descending=True)
    return layer(torch.zeros_like(h).index_add(0, order, h))[order]


def multiplied_rows(layer, h, by):
    order = F.one_hot(by.argsort(descending=True), len(by)).to(h)
    return order.T @ layer(order @ h)


def contracted_rows(layer, h, by):
    order = F.one_hot(by.argsort(descending=True), len(by)).to(h)
    return torch.einsum("ij,id->jd", order, layer(torch.einsum("ij,jd->id", order, h)))


def listed_rows(layer, h, by):
    order = by.argsort(descending=True).tolist()
    y = layer(torch.stack([h[k] for k in order]))
    return torch.stack([y[order.index(k)] for k in range(len(order))])


def unbound_rows(layer, h, by):
    order, rows = by.argsort(descending=True).tolist(), h.unbind(0)
    y = layer(torch.stack([rows[k] for k in order])).unbind(0)
    return torch.stack([y[order.index(k)] for k in range(len(order))])


def rolled_rows(layer, h, by):
    first = int(by.argmax())
    return layer(h.roll(-first, 0)).roll(first, 0)


def rows_of_an_operator(layer, h, by):
    order = by.argsort(descending=True)
    pick = torch.ops.aten.index.Tensor
    return pick(layer(pick(h, [order])), [order.argsort()])


def rows_of_a_scripted_function(layer, h, by):
    order = by.argsort(descending=True)
    return scripted(layer(scripted(h, order)), order.argsort())


with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)

    @torch.jit.script
    def scripted(h: torch.Tensor, order: torch.Tensor):
        """Rows in an order, where nobody sees it."""
        return h[order]


def masked_rows(layer, h, by):
    mask = torch.arange(h.shape[1]) < by[:, None]
    return h.new_zeros(*mask.shape, 2).masked_scatter(mask[..., None], layer(h[mask])).sum(1)


def joined_rows(layer, h, by):
    rows = layer(torch.cat([h[i, :length] for i, length in enumerate(by.tolist())]))
    return torch.stack([part.sum(0) for part in rows.split(by.tolist())])


SORTED = [
    *(sorted_rows, selected_rows, gathered_rows, added_rows, multiplied_rows, contracted_rows),
    *(listed_rows, unbound_rows, rolled_rows, rows_of_an_operator, rows_of_a_scripted_function),
]
IN_ORDER, OUT_OF_ORDER = torch.tensor([9, 7, 5, 2]), torch.tensor([1, 7, 5, 2])
EVEN, UNEVEN = torch.tensor([2, 2, 2, 2]), torch.tensor([1, 3, 2, 2])  # as many in all
MOVED = [(way, (4, 3), IN_ORDER, OUT_OF_ORDER) for way in SORTED]
MOVED += [(way, (4, 3, 3), EVEN, UNEVEN) for way in (masked_rows, joined_rows)]


def assert_right_or_refused(gradients, model, batch):
    """Gradients are the loop's, or the model is refused."""
    truth = truth_of(model, squares, *batch)
    try:
        found = gradients()
    except (UnsupportedLayerError, ExactnessError):
        return "refused"
    assert_grads_close({name: g.numpy() for name, g in found.items()}, truth, "float32")
    return "right"


def recorded(model, batch, check="first"):
    """Gradients of a recorded loop."""
    with dpt.record_per_sample(model, loss_reduction="sum", check=check) as record:
        squares(model, *batch).sum().backward()
    return record.grads()


@pytest.mark.parametrize(("way", "shape", "first", "then"), MOVED, ids=lambda v: str(v)[:20])
@pytest.mark.parametrize("how", ["function", "record"])
def test_rows_that_move_after_the_proof(how, way, shape, first, then):
    """The first batch is regular, so that the examples are found where they are no more.

    Rows that are sorted are seen in the first batch backwards, those that a mask picks by a check
    of every batch; where Python numbers move them, only on batches that are checked.
    """
    model, check = randomise(Two(way)), "always" if way is joined_rows else "first"
    for by in (first, then):
        batch = data(*shape), by

        def gradients(batch=batch):
            if how == "record":
                return recorded(model, batch, check)
            return dpt.per_sample_grads(squares, model, *batch, check=check)

        assert_right_or_refused(gradients, model, batch)


def test_a_regular_batch_of_such_a_model_is_right():
    model, batch = randomise(Two(masked_rows)), (data(4, 3, 3), EVEN)
    found = assert_right_or_refused(
        lambda: dpt.per_sample_grads(squares, model, *batch), model, batch
    )
    assert found == "right"


class Packed(nn.Module):
    """Recurrent layers over packed sequences, one after the other."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.first, self.second = nn.LSTM(3, 4), nn.GRU(4, 2)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(2, 2)

    def forward(self, x, lengths):
        """(n, t, 3), (n,) -> (n, t, 2)."""
        packed = pack_padded_sequence(x.transpose(0, 1), lengths, enforce_sorted=False)
        packed, _ = self.first(packed)
        if self.dropout.p:
            packed = packed._replace(data=self.dropout(packed.data))
        packed, last = self.second(packed)
        out, _ = pad_packed_sequence(packed, total_length=x.shape[1])
        return self.head(out).transpose(0, 1) + last[0].unsqueeze(1)


LENGTHS = [torch.tensor([5, 4, 3, 1]), torch.tensor([1, 5, 3, 4])]


@pytest.mark.parametrize("how", ["function", "record"])
def test_the_order_of_packed_sequences_is_followed_through_layers(how, monkeypatch):
    monkeypatch.setattr(calls, "by_vmap", None)  # the fast way is taken
    model = randomise(Packed())
    for lengths in LENGTHS:
        batch = data(4, 5, 3), lengths
        if how == "record":
            found = recorded(model, batch)
        else:
            found = dpt.per_sample_grads(squares, model, *batch)
        truth = truth_of(model, squares, *batch)
        assert_grads_close({name: g.numpy() for name, g in found.items()}, truth, "float32")


class Usual(nn.Module):
    """What models do with indices and masks that permutations no example."""

    def __init__(self):
        super().__init__()
        self.table, self.rnn = nn.Embedding(20, 8), nn.LSTM(8, 8, batch_first=True)
        self.attention = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens):
        """(n, t) -> (n, 3)."""
        padding = tokens == 0
        if padding.all():
            raise ValueError("nothing but padding")
        lengths = (~padding).sum(1)
        h, _ = self.rnn(self.table(tokens))
        h = self.attention(h, src_key_padding_mask=padding & False)
        q, k, v = h.split(h.shape[-1] // 2, dim=-1)[0], h[:, :2], h[..., -1:].contiguous()
        last = h[torch.arange(len(h)), lengths - 1] + h.gather(
            1, (lengths - 1).view(-1, 1, 1).expand(-1, 1, 8)
        ).squeeze(1)
        return (
            self.head(last)
            + q.sum((1, 2))[:, None]
            + k.sum((1, 2))[:, None]
            + v.sum((1, 2))[:, None]
        )


def test_usual_models_take_the_fast_way(monkeypatch):
    monkeypatch.setattr(calls, "by_vmap", None)
    tokens = ids(20, 6, 5).clamp(min=1)
    tokens[2, 3:] = 0
    model = randomise(Usual())
    loss = lambda m, x: m(x).square().sum(1)  # noqa: E731
    found = dpt.per_sample_grads(loss, model, tokens)
    truth = truth_of(model, loss, tokens)
    assert_grads_close({name: g.numpy() for name, g in found.items()}, truth, "float32")


def test_axes_turned_another_way_are_examined_again():
    class Turned(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.turn = nn.Linear(4, 4), False

        def forward(self, x):
            x = self.layer(x)
            if self.turn:
                return self.layer(x.transpose(0, 1)).transpose(0, 1)
            return self.layer(x)

    model, x = randomise(Turned()), data(4, 4, 4)
    for model.turn in (False, True):
        found = dpt.per_sample_grads(squares, model, x)
        truth = truth_of(model, squares, x)
        assert_grads_close({name: g.numpy() for name, g in found.items()}, truth, "float32")


@pytest.mark.slow
@pytest.mark.parametrize(("way", "shape", "by"), [MOVED[0][:3], MOVED[-2][:3]])
def test_a_call_leaves_no_tensor_to_the_garbage_collector(way, shape, by):
    """Activations in a cycle would stay for many steps."""
    model, batch = randomise(Two(way)), (data(*shape), by)
    dpt.clipped_grad_sum(squares, model, *batch, max_grad_norm=1.0)
    for _ in range(3):  # what the compiled models of other tests leave goes piece by piece
        gc.collect()
    gc.disable()
    try:
        dpt.clipped_grad_sum(squares, model, *batch, max_grad_norm=1.0)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        left = [o for o in gc.garbage if issubclass(type(o), torch.Tensor)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert not left


class Slope(nn.Module):
    """The gradient of a network by its input, with a graph."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))

    def forward(self, x):
        """(n, 3) -> (n, 3)."""
        with torch.enable_grad():
            x = x.clone().requires_grad_()
            return torch.autograd.grad(self.body(x).sum(), x, create_graph=True)[0]


class Transformed(Slope):
    """The same by torch.func."""

    def forward(self, x):
        """(n, 3) -> (n, 3)."""
        return torch.func.vmap(torch.func.grad(lambda one: self.body(one).sum()))(x)


@pytest.mark.parametrize("build", [Slope, Transformed])
@pytest.mark.parametrize("method", dpt.METHODS)
def test_forwards_that_differentiate_are_right_or_refused(build, method):
    model, x = randomise(build()), data(5, 3)
    found = assert_right_or_refused(
        lambda: dpt.per_sample_grads(squares, model, x, method=method), model, (x,)
    )
    assert found == "right" or (build is Slope and method != "loop")


def test_a_penalty_of_a_later_step_goes_through_the_loop():
    model, x = randomise(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))), data(5, 3)
    penalise = [False]

    def loss(model, x):
        x = x.clone().requires_grad_()
        out = model(x)
        slope = 0
        if penalise[0]:
            (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out.square().sum(1) + (slope**2).sum(1) if penalise[0] else out.square().sum(1)

    dpt.per_sample_grads(loss, model, x)
    penalise[0] = True
    with pytest.raises(UnsupportedLayerError, match='Use method="loop"'):
        dpt.per_sample_grads(loss, model, x, method="materialize")
    found = dpt.per_sample_grads(loss, model, x)
    torch.testing.assert_close(found, dpt.per_sample_grads(loss, model, x, method="loop"))


@pytest.mark.parametrize("build", [Slope, Transformed])
def test_a_recorded_forward_that_differentiates_is_refused(build):
    model = randomise(build())
    with pytest.raises(UnsupportedLayerError, match=r"inside the forward.*method=\"loop\"|vmap"):
        recorded(model, (data(5, 3),))


def test_complex_parameters_are_refused_by_name():
    model = nn.Module()
    model.weight = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    with pytest.raises(UnsupportedLayerError, match=r"'weight' is torch.complex64. .*view_as_real"):
        dpt.per_sample_norms(squares, model, data(4, 3))


def test_real_parameters_seen_as_complex_numbers():
    class Filter(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.weight = nn.Linear(3, 3), nn.Parameter(torch.ones(3, 2))

        def forward(self, x):
            return torch.view_as_real(
                torch.fft.fft(self.layer(x)) * torch.view_as_complex(self.weight)
            )

    model, x = randomise(Filter()), data(4, 3)
    assert (
        assert_right_or_refused(lambda: dpt.per_sample_grads(squares, model, x), model, (x,))
        == "right"
    )


def test_gradient_hooks_are_refused_by_name():
    model = nn.Linear(3, 2)
    handle = model.weight.register_hook(lambda grad: grad * 0.5)
    with pytest.raises(UnsupportedLayerError, match="'weight' has a gradient hook"):
        dpt.per_sample_norms(squares, model, data(4, 3))
    handle.remove()
    dpt.per_sample_norms(squares, model, data(4, 3))
    hooked = lambda m, x: (m.weight.register_hook(lambda g: -g), squares(m, x))[1]  # noqa: E731
    with pytest.raises(UnsupportedLayerError, match="'weight' has a gradient hook"):
        dpt.per_sample_norms(hooked, model, data(4, 3))
