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
from tests.dualdp_torch.checks import data, randomise, truth_of
from tests.dualdp_torch.per_sample.loops import Model, recorded, squares


def moving(way):
    """Two layers with rows moved in between by `way`, by the data `by`."""
    layers = {"first": nn.Linear(3, 4), "second": nn.Linear(4, 2)}
    return Model(lambda m, x, by: way(m.second, torch.tanh(m.first(x)), by), **layers)


def sorted_by(take, put=None):
    """Rows taken in the order of the data, and put back."""

    def way(layer, h, by):
        order = by.argsort(descending=True)
        return (put or take)(layer(take(h, order)), order if put else order.argsort())

    return way


def scattered(y, order):
    return torch.zeros_like(y).scatter(0, order[:, None].expand_as(y), y)


def added(y, order):
    return torch.zeros_like(y).index_add(0, order, y)


def multiplied(y, order):
    return F.one_hot(order, len(order)).to(y) @ y


with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)

    @torch.jit.script
    def scripted(h: torch.Tensor, order: torch.Tensor):
        """Rows in an order, where nobody sees it."""
        return h[order]


def rolled(layer, h, by):
    first = int(by.argmax())
    return layer(h.roll(-first, 0)).roll(first, 0)


def masked(layer, h, by):
    mask = torch.arange(h.shape[1]) < by[:, None]
    return h.new_zeros(*mask.shape, 2).masked_scatter(mask[..., None], layer(h[mask])).sum(1)


def joined(layer, h, by):
    rows = layer(torch.cat([h[i, :length] for i, length in enumerate(by.tolist())]))
    return torch.stack([part.sum(0) for part in rows.split(by.tolist())])


#: Name -> how rows are moved.
SORTED = {
    "indexed": sorted_by(lambda h, order: h[order]),
    "scattered": sorted_by(lambda h, order: h[order], scattered),
    "gathered": sorted_by(lambda h, order: torch.gather(h, 0, order[:, None].expand_as(h))),
    "added": sorted_by(added, lambda y, order: y[order]),
    "multiplied": sorted_by(multiplied),
    "a list": sorted_by(lambda h, order: torch.stack([h[k] for k in order.tolist()])),
    "rolled": rolled,
    "an operator": sorted_by(lambda h, order: torch.ops.aten.index.Tensor(h, [order])),
    "a scripted function": sorted_by(scripted),
}
IN_ORDER, OUT_OF_ORDER = torch.tensor([9, 7, 5, 2]), torch.tensor([1, 7, 5, 2])
EVEN, UNEVEN = torch.tensor([2, 2, 2, 2]), torch.tensor([1, 3, 2, 2])  # as many in all
MOVED = {name: (way, (4, 3), IN_ORDER, OUT_OF_ORDER) for name, way in SORTED.items()}
MOVED |= {way.__name__: (way, (4, 3, 3), EVEN, UNEVEN) for way in (masked, joined)}


def assert_exact(found, model, batch):
    truth = truth_of(model, squares, *batch)
    assert_grads_close({name: g.numpy() for name, g in found.items()}, truth, "float32")


def assert_right_or_refused(gradients, model, batch):
    """Gradients are the loop's, or the model is refused."""
    try:
        found = gradients()
    except (UnsupportedLayerError, ExactnessError):
        return "refused"
    assert_exact(found, model, batch)
    return "right"


def functional(model, *batch, **options):
    return dpt.per_sample_grads(squares, model, *batch, **options)


def in_a_record(model, *batch, **options):
    return recorded(model, *batch, **options).grads()


@pytest.mark.parametrize("name", MOVED)
@pytest.mark.parametrize("call", [functional, in_a_record])
def test_rows_that_move_after_the_proof(call, name):
    """The first batch is regular, so that the examples are found where they are no more.

    Rows that are sorted are seen in the first batch backwards, those that a mask picks by a check
    of every batch; where Python numbers move them, only on batches that are checked.
    """
    way, shape, *orders = MOVED[name]
    model, check = moving(way), "always" if way is joined else "first"
    found = [
        assert_right_or_refused(lambda: call(model, *batch, check=check), model, batch)  # noqa: B023
        for batch in [(data(*shape), by) for by in orders]
    ]
    assert found[0] == "right" or (call, way) != (functional, masked)


def packed(self, x, lengths):
    """Recurrent layers over packed sequences, one after the other; (n, t, 3) -> (n, t, 2)."""
    packed = pack_padded_sequence(x.transpose(0, 1), lengths, enforce_sorted=False)
    packed, last = self.second(self.first(packed)[0])
    out, _ = pad_packed_sequence(packed, total_length=x.shape[1])
    return self.head(out).transpose(0, 1) + last[0].unsqueeze(1)


@pytest.mark.parametrize("call", [functional, in_a_record])
def test_the_order_of_packed_sequences_is_followed(call, monkeypatch):
    monkeypatch.setattr(calls, "by_vmap", None)  # the fast way is taken
    model = Model(packed, first=nn.LSTM(3, 4), second=nn.GRU(4, 2), head=nn.Linear(2, 2))
    for lengths in ([5, 4, 3, 1], [1, 5, 3, 4]):
        batch = data(4, 5, 3), torch.tensor(lengths)
        assert_exact(call(model, *batch), model, batch)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["indexed", "masked"])
def test_a_call_leaves_no_tensor_to_the_garbage_collector(name):
    """Activations in a cycle would stay for many steps."""
    way, shape, by, _ = MOVED[name]
    model, batch = moving(way), (data(*shape), by)
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


# ---------------------------------------------------------------------- second order


def slope(self, x):
    """The gradient of a network by its input, with a graph; (n, 3) -> (n, 3)."""
    with torch.enable_grad():
        x = x.clone().requires_grad_()
        return torch.autograd.grad(self.body(x).sum(), x, create_graph=True)[0]


def transformed(self, x):
    """The same by torch.func."""
    return torch.func.vmap(torch.func.grad(lambda one: self.body(one).sum()))(x)


def energy(run):
    return Model(run, body=nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)))


@pytest.mark.parametrize("run", [slope, transformed])
@pytest.mark.parametrize("method", dpt.METHODS)
def test_forwards_that_differentiate_are_right_or_refused(run, method):
    model, x = energy(run), data(5, 3)
    found = assert_right_or_refused(lambda: functional(model, x, method=method), model, (x,))
    assert found == "right" or (run is slope and method != "loop")
    with pytest.raises(UnsupportedLayerError, match=r"inside the forward.*method=\"loop\"|vmap"):
        in_a_record(model, x)


def test_a_penalty_of_a_later_step_goes_through_the_loop():
    model, x = randomise(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))), data(5, 3)
    penalise = [False]

    def loss(model, x):
        x = x.clone().requires_grad_()
        losses = (out := model(x)).square().sum(1)
        if penalise[0]:
            (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            losses = losses + (slope**2).sum(1)
        return losses

    dpt.per_sample_grads(loss, model, x)
    penalise[0] = True
    with pytest.raises(UnsupportedLayerError, match='Use method="loop"'):
        dpt.per_sample_grads(loss, model, x, method="materialize")
    found = dpt.per_sample_grads(loss, model, x)
    torch.testing.assert_close(found, dpt.per_sample_grads(loss, model, x, method="loop"))


def test_real_parameters_seen_as_complex_numbers():
    def run(self, x):
        weight = torch.view_as_complex(self.weight)
        return torch.view_as_real(torch.fft.fft(self.layer(x)) * weight)

    model = Model(run, layer=nn.Linear(3, 3), weight=nn.Parameter(torch.ones(3, 2)))
    assert_exact(functional(model, x := data(4, 3)), model, (x,))
