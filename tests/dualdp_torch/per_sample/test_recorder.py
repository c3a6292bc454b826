# SPDX-License-Identifier: Apache-2.0
"""The ambient form: one forward and one backward of a loop that the user owns."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dualdp_torch as dpt
from dualdp import ExactnessError, UnsupportedLayerError
from dualdp.plan.clipping import factors_for
from dualdp_torch.per_sample.call import METHODS
from dualdp_torch.rules import RULES
from tests.dualdp_torch.checks import data, ids, randomise
from tests.dualdp_torch.per_sample.loops import (
    Model,
    classified,
    linear,
    recorded,
    rule_with,
    scaled_rows,
    squares,
)

N = 5


def classify(n=N):
    """A small classifier, its inputs and targets."""
    model = randomise(nn.Sequential(nn.Linear(6, 5), nn.ReLU(inplace=True), nn.Linear(5, 3)))
    return model, data(N, 6)[:n], ids(3, N)[:n]


def assert_as_the_loop(model, *batch, loss=classified, **options):
    """Gradients of a record are those of the functional loop."""
    expected = dpt.per_sample_grads(loss, model, *batch, method="loop")
    found = recorded(model, *batch, loss=loss, **options).grads()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("n", [1, N])
def test_records_what_the_functional_form_gives(method, reduction, n):
    model, x, y = classify(n)
    expected = dpt.per_sample_grads(classified, model, x, y, method="loop")
    model[0].weight.grad = torch.ones(5, 6)
    with dpt.record_per_sample(model, loss_reduction=reduction, method=method) as record:
        F.cross_entropy(model(x), y, reduction=reduction).backward()
    torch.testing.assert_close(record.grads(), expected)
    norms = dpt.per_sample_norms(classified, model, x, y)
    torch.testing.assert_close(record.norms(), norms)
    parts = record.norms(per_parameter=True)
    torch.testing.assert_close(parts["2.bias"], expected["2.bias"].norm(dim=1))
    bound = float(norms.median())
    factors = factors_for("flat", norms, bound, xp=torch)
    for name, total in record.clipped_sum(max_grad_norm=bound).items():
        torch.testing.assert_close(total, torch.tensordot(factors, expected[name], 1))
    assert torch.equal(model[0].weight.grad, torch.ones(5, 6))
    assert model[2].weight.grad is None
    assert not {**model._forward_hooks, **model._forward_pre_hooks}
    F.cross_entropy(model(x), y).backward()  # nothing is left behind
    assert model[2].weight.grad is not None


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("asked_before", [False, True])
def test_what_a_record_hands_out_is_the_callers_own(method, asked_before):
    """Two layers whose outputs get one gradient, and a norm whose input has no positions."""
    layers = {"a": nn.Linear(6, 4), "b": nn.Linear(6, 4), "norm": nn.LayerNorm(4)}
    model = Model(lambda m, x: m.norm(m.a(x) + m.b(x)), **layers)
    record = recorded(model, data(N, 6), loss=lambda m, x: m(x).sum(1), method=method)
    if asked_before:
        record.norms()
    expected = {name: grad.clone() for name, grad in record.grads().items()}
    for name, grad in record.grads().items():
        assert grad.is_contiguous(), name
        grad.mul_(0.5)
    torch.testing.assert_close(record.grads(), expected, rtol=0, atol=0)
    total = {name: grad.sum(0) for name, grad in expected.items()}
    torch.testing.assert_close(record.clipped_sum(max_grad_norm=1e6), total)


def test_reading_too_early_is_refused():
    model, x, y = classify()
    with dpt.record_per_sample(model, loss_reduction="mean") as record:
        with pytest.raises(RuntimeError, match="No forward was recorded"):
            record.grads()
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(data(N, 7))
        loss = F.cross_entropy(model(x), y)  # a forward that failed can be tried again
        with pytest.raises(RuntimeError, match="No backward was recorded"):
            record.norms()
        loss.backward()
    assert record.norms().shape == (N,)
    assert torch.is_grad_enabled()


def test_a_second_backward_or_forward_is_refused():
    model, x, y = classify()
    with dpt.record_per_sample(model, loss_reduction="mean"):
        loss = F.cross_entropy(model(x), y)
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="backward ran twice"):
            loss.backward()
    with dpt.record_per_sample(model, loss_reduction="mean"):
        model(x)
        with pytest.raises(RuntimeError, match="called on 5 examples, then on 3, for one batch"):
            model(x[:3])
        with torch.no_grad():
            model(x[:3])


@pytest.mark.parametrize("method", METHODS)
def test_a_parameter_outside_the_forward_is_refused(method):
    model, x, y = classify()
    with dpt.record_per_sample(model, loss_reduction="mean", method=method):
        loss = F.cross_entropy(model(x), y) + model[0].weight.square().mean()
        with pytest.raises(UnsupportedLayerError, match="'0.weight' reached the loss outside"):
            loss.backward()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"loss_reduction": "average"}, "loss_reduction='average' is unknown"),
        ({"loss_reduction": "sum", "method": "ghost"}, "method='ghost' is unknown"),
    ],
)
def test_words_are_checked(options, match):
    with pytest.raises(ValueError, match=match), dpt.record_per_sample(linear(), **options):
        pass


def test_a_first_batch_of_one_example_is_compared(monkeypatch):
    """Its gradient is captured, too; and what it shows is taken for larger batches."""
    monkeypatch.setitem(RULES, F.linear, rule_with(scaled_rows(1.5)))
    with pytest.raises(ExactnessError, match="differs from plain autodiff"):
        recorded(*classify(1), loss=classified, method="book_keeping")


def test_inputs_that_change_before_they_are_read_are_refused():
    model, x, y = classify()
    record = recorded(model, x, y, loss=classified, check="off")
    x.zero_()
    for read in (record.grads, record.norms, lambda: record.clipped_sum(max_grad_norm=1.0)):
        with pytest.raises(dpt.ChangedInPlaceError, match="was changed in place after it was used"):
            read()


# ---------------------------------------------------------------------- by vmap


def raw(self, x):
    """A parameter used by a function without a rule."""
    return self.layer(x.abs().pow(self.power))


@pytest.mark.parametrize("sizes", [[N], [1], [1, N], [1, 1, N, 1]])
def test_functions_without_a_rule_go_through_vmap(sizes):
    """Also where the first batch holds one example, as with max_physical_batch_size=1."""
    model = Model(raw, layer=linear(), power=nn.Parameter(torch.ones(6)))
    for n in sizes:
        assert_as_the_loop(model, data(n, 6), ids(3, n))


class Angles(nn.Module):
    """Angles between data and weights, which no rule covers: it goes through vmap."""

    def __init__(self):
        super().__init__()
        self.first, self.head, self.scale = nn.Linear(6, 5), nn.Linear(5, 3), 1.0
        self.register_buffer("shift", torch.zeros(5))

    def forward(self, x):
        angles = torch.atan2(x[:, None], self.first.weight).sum(-1) + self.first.bias
        return self.head(torch.tanh(self.scale * angles + self.shift))


def write_weights(model, x, handle):
    with torch.no_grad():
        model.head.weight.mul_(0.9999)


# What plain PyTorch allows between backward() and optimizer.step().
CHANGES = {
    "inputs": lambda model, x, handle: x.zero_(),
    "weights": write_weights,
    "weights unseen": lambda model, x, handle: model.head.weight.data.mul_(0.9),
    "buffer": lambda model, x, handle: model.shift.fill_(1.0),
    "attribute": lambda model, x, handle: setattr(model, "scale", 2.0),
    "hook": lambda model, x, handle: handle.remove(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_vmap_computes_again_may_not_change_before(change):
    """Gradients are those of the weights, inputs and hooks at the forward, or none."""
    model, x, y = randomise(Angles()), data(N, 6), ids(3, N)
    handle = model.head.register_forward_pre_hook(lambda module, args: (3 * args[0],))
    record = recorded(model, x, y, loss=classified, method="vmap", check="off")
    CHANGES[change](model, x, handle)
    with pytest.raises(dpt.ChangedInPlaceError, match=r"changed between its forward and"):
        record.grads()


def test_outputs_of_vmap_may_be_written_to():
    def halved(model, x, y):
        out = model(x)
        out /= 2.0
        return F.cross_entropy(out, y, reduction="none")

    batch = data(N, 6), ids(3, N)
    assert_as_the_loop(randomise(Angles()), *batch, loss=halved, method="vmap")


@pytest.mark.parametrize("check", ["first", "off"])
def test_dropout_cannot_be_replayed_by_vmap(check):
    model, x, y = classify()
    model = nn.Sequential(nn.Dropout(0.5), model)
    with pytest.raises(UnsupportedLayerError, match="randomness"):
        recorded(model, x, y, loss=classified, method="vmap", check=check).grads()


# ---------------------------------------------------------------------- parameters and outputs


def test_parameters_without_a_gradient_of_their_own_are_refused():
    """Of a copied script they are no leaves, and gradients were zero; others have no numbers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        copied = copy.deepcopy(torch.jit.script(nn.Sequential(nn.Linear(6, 3))))
    complex_one = Model(lambda m, x: x, weight=nn.Parameter(torch.ones(6)))
    complex_one.weight = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    for method in ("auto", "loop", "vmap"):
        for model, error, match in (
            (copied, ValueError, "Parameter '0.weight' is no leaf"),
            (nn.Linear(6, 3, device="meta"), ValueError, "Parameter 'weight' has no numbers"),
            (complex_one, UnsupportedLayerError, "'weight' is torch.complex64. .*view_as_real"),
        ):
            with pytest.raises(error, match=match):
                dpt.per_sample_norms(squares, model, data(N, 6), method=method)


def test_keyword_inputs_and_time_first_models():
    def run(self, *, x, scale):
        return (self.layer(x.transpose(0, 1)).transpose(0, 1) * scale[:, None, None]).sum(1)

    def loss(model, x, scale, y):
        return F.cross_entropy(model(x=x, scale=scale), y, reduction="none")

    model = Model(run, layer=linear())
    assert_as_the_loop(model, data(N, N, 6), data(N), ids(3, N), loss=loss)
