# SPDX-License-Identifier: Apache-2.0
"""The ambient form: one forward and one backward of a loop that the user owns."""

import copy
import dataclasses
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dualdp_torch as dpt
from dualdp import ExactnessError, UnsupportedLayerError
from dualdp.plan.clipping import factors_for
from dualdp_torch.per_sample.call import METHODS
from dualdp_torch.rules import RULES
from tests import reference
from tests.dualdp_torch.checks import data, ids, randomise

N = 5


def classify():
    """A small classifier, its inputs and targets."""
    model = randomise(nn.Sequential(nn.Linear(6, 5), nn.ReLU(inplace=True), nn.Linear(5, 3)))
    return model, data(N, 6), ids(3, N)


def truth(model, x, y, method="loop"):
    """Per-sample gradients of the cross entropy."""
    return dpt.per_sample_grads(
        lambda m, x, y: F.cross_entropy(m(x), y, reduction="none"), model, x, y, method=method
    )


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("n", [1, 2, N])
def test_records_what_the_functional_form_gives(method, reduction, n):
    model, x, y = classify()
    x, y = x[:n], y[:n]
    expected = truth(model, x, y)
    model[0].weight.grad = torch.ones(5, 6)
    with dpt.record_per_sample(model, loss_reduction=reduction, method=method) as record:
        F.cross_entropy(model(x), y, reduction=reduction).backward()
    for name, grad in record.grads().items():
        torch.testing.assert_close(grad, expected[name])
    norms = dpt.per_sample_norms(
        lambda m, x, y: F.cross_entropy(m(x), y, reduction="none"), model, x, y
    )
    torch.testing.assert_close(record.norms(), norms)
    parts = record.norms(per_parameter=True)
    torch.testing.assert_close(parts["2.bias"], expected["2.bias"].norm(dim=1))
    bound = float(norms.median())
    factors = factors_for("flat", norms, bound, xp=torch)
    for name, total in record.clipped_sum(max_grad_norm=bound).items():
        torch.testing.assert_close(total, torch.tensordot(factors, expected[name], 1))
    assert torch.equal(model[0].weight.grad, torch.ones(5, 6))
    assert model[2].weight.grad is None


class Sum(nn.Module):
    """Two layers whose outputs get one gradient, and a norm whose input has no positions."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(6, 4), nn.Linear(6, 4), nn.LayerNorm(4)

    def forward(self, x):
        return self.norm(self.a(x) + self.b(x))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("asked_before", [False, True])
def test_what_a_record_hands_out_is_the_callers_own(method, reduction, asked_before):
    model, x = randomise(Sum()), data(N, 6)
    with dpt.record_per_sample(model, loss_reduction=reduction, method=method) as record:
        losses = model(x).sum(1)
        (losses.sum() if reduction == "sum" else losses.mean()).backward()
    if asked_before:
        record.norms()
    expected = {name: grad.clone() for name, grad in record.grads().items()}
    grads = record.grads()
    for name, grad in grads.items():
        assert grad.is_contiguous(), name
        torch.testing.assert_close(grad.mul_(0.5), expected[name] / 2, msg=name)
    for name, grad in record.grads().items():
        assert torch.equal(grad, expected[name]), name
    for name, total in record.clipped_sum(max_grad_norm=1e6).items():
        torch.testing.assert_close(total, expected[name].sum(0), msg=name)


def test_nothing_is_left_behind():
    model, x, y = classify()
    with dpt.record_per_sample(model, loss_reduction="mean"):
        F.cross_entropy(model(x), y).backward()
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    F.cross_entropy(model(x), y).backward()
    assert model[2].weight.grad is not None


@pytest.mark.parametrize(
    ("declared", "loss", "match"),
    [
        ("sum", lambda o, y: F.cross_entropy(o, y), "'sum', but the loss is a mean"),
        ("mean", lambda o, y: F.cross_entropy(o, y, reduction="sum"), "'mean', but the loss is a"),
        ("sum", lambda o, y: o.square().sum(1).mean(), "'sum', but the loss is a mean"),
        ("mean", lambda o, y: o.square().sum() + o.sum(), "'mean', but the loss is a sum"),
        ("sum", lambda o, y: F.mse_loss(o, o.detach() + 1), "'sum', but the loss is a mean"),
        (
            "mean",
            lambda o, y: F.cross_entropy(o, y, weight=torch.rand(3)),
            "The loss mixes the examples|What one example weighs",
        ),
        (
            "mean",
            lambda o, y: F.cross_entropy(o, y, ignore_index=int(y[0])),
            "The loss mixes the examples",
        ),
    ],
)
def test_a_loss_that_is_not_what_was_declared_is_refused(declared, loss, match):
    model, x, y = classify()
    with (
        pytest.raises(ValueError, match=match),
        dpt.record_per_sample(model, loss_reduction=declared),
    ):
        loss(model(x), y).backward()


def test_reading_too_early_is_refused():
    model, x, y = classify()
    with dpt.record_per_sample(model, loss_reduction="mean") as record:
        with pytest.raises(RuntimeError, match="No forward was recorded"):
            record.grads()
        loss = F.cross_entropy(model(x), y)
        with pytest.raises(RuntimeError, match="No backward was recorded"):
            record.norms()
        loss.backward()
    assert record.norms().shape == (N,)


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


def test_words_are_checked():
    model, _, _ = classify()
    with (
        pytest.raises(ValueError, match="loss_reduction='average' is unknown"),
        dpt.record_per_sample(model, loss_reduction="average"),
    ):
        pass
    with (
        pytest.raises(ValueError, match="method='ghost' is unknown"),
        dpt.record_per_sample(model, loss_reduction="sum", method="ghost"),
    ):
        pass


class Raw(nn.Module):
    """A parameter used by a function without a rule."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.power = nn.Parameter(torch.ones(6))

    def forward(self, x):
        return self.layer(x.abs().pow(self.power)), x


@pytest.mark.parametrize("sizes", [[N], [1], [1, N], [1, 1, N, 1]])
def test_functions_without_a_rule_go_through_vmap(sizes):
    """Also where the first batch holds one example, as with max_physical_batch_size=1."""
    model = randomise(Raw())
    for n in sizes:
        compare_with_the_loop(model, data(n, 6), ids(3, n))


def compare_with_the_loop(model, x, y):
    expected = dpt.per_sample_grads(
        lambda m, x, y: F.cross_entropy(m(x)[0], y, reduction="none"), model, x, y, method="loop"
    )
    with dpt.record_per_sample(model, loss_reduction="mean") as record:
        F.cross_entropy(model(x)[0], y).backward()
    for name, grad in record.grads().items():
        torch.testing.assert_close(grad, expected[name])


class Angles(nn.Module):
    """Angles between data and weights, which no rule covers: it goes through vmap."""

    def __init__(self):
        super().__init__()
        self.first, self.head, self.scale = nn.Linear(6, 5), nn.Linear(5, 3), 1.0
        self.register_buffer("shift", torch.zeros(5))

    def forward(self, x):
        angles = torch.atan2(x[:, None], self.first.weight).sum(-1) + self.first.bias
        return self.head(torch.tanh(self.scale * angles + self.shift))


def without_grad(change):
    with torch.no_grad():
        change()


# What plain PyTorch allows between backward() and optimizer.step().
CHANGES = {
    "inputs": lambda model, x, handle: x.zero_(),
    "inputs unseen": lambda model, x, handle: x.data.zero_(),
    "weights": lambda model, x, handle: without_grad(lambda: model.head.weight.mul_(0.9999)),
    "weights unseen": lambda model, x, handle: model.head.weight.data.mul_(0.9),
    "buffer": lambda model, x, handle: model.shift.fill_(1.0),
    "buffer replaced": lambda model, x, handle: setattr(model, "shift", torch.ones(5)),
    "attribute": lambda model, x, handle: setattr(model, "scale", 2.0),
    "hook": lambda model, x, handle: handle.remove(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_vmap_computes_again_may_not_change_before(change):
    """Gradients are those of the weights, inputs and hooks at the forward, or none."""
    model, x, y = randomise(Angles()), data(N, 6), ids(3, N)
    handle = model.head.register_forward_pre_hook(lambda module, args: (3 * args[0],))
    with dpt.record_per_sample(model, loss_reduction="mean", method="vmap", check="off") as record:
        F.cross_entropy(model(x), y).backward()
    CHANGES[change](model, x, handle)
    with pytest.raises(dpt.ChangedInPlaceError, match=r"changed between its forward and"):
        record.grads()


def test_outputs_of_vmap_may_be_written_to():
    model, x, y = randomise(Angles()), data(N, 6), ids(3, N)

    def losses(model, x, y):
        out = model(x)
        out /= 2.0
        return F.cross_entropy(out, y, reduction="none")

    expected = dpt.per_sample_grads(losses, model, x, y, method="loop")
    with dpt.record_per_sample(model, loss_reduction="mean", method="vmap") as record:
        losses(model, x, y).mean().backward()
    for name, grad in record.grads().items():
        torch.testing.assert_close(grad, expected[name])


def test_a_copy_of_a_scripted_module_is_refused():
    """Its parameters are no leaves, so that their gradients were taken for zero."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        model = copy.deepcopy(torch.jit.script(nn.Sequential(nn.Linear(6, 3))))
    for method in ("auto", "loop", "vmap"):
        with pytest.raises(ValueError, match="Parameter '0.weight' is no leaf"):
            dpt.per_sample_norms(reference.loss_fn, model, data(N, 6), method=method)


def test_dropout_cannot_be_replayed_by_vmap():
    model, x, y = classify()
    model = nn.Sequential(nn.Dropout(0.5), model)
    for check in ("first", "off"):
        with pytest.raises(UnsupportedLayerError, match="randomness"):
            grads_by_vmap(model, x, y, check)


def grads_by_vmap(model, x, y, check):
    with dpt.record_per_sample(model, loss_reduction="mean", method="vmap", check=check) as record:
        F.cross_entropy(model(x), y).backward()
    return record.grads()


def test_mixing_models_are_refused():
    class Mixes(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x):
            return self.layer(x - x.mean(0))

    model = Mixes()
    with (
        pytest.raises(UnsupportedLayerError, match="depend on other examples"),
        dpt.record_per_sample(model, loss_reduction="mean"),
    ):
        model(data(N, 6))


def test_outputs_without_the_batch_in_front_are_refused():
    class TimeFirst(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x):
            return self.layer(x).transpose(0, 1).mean()

    model = TimeFirst()
    with (
        pytest.raises(UnsupportedLayerError, match="Expected the examples on axis 0 of every"),
        dpt.record_per_sample(model, loss_reduction="mean"),
    ):
        model(data(N, 4, 6))


@pytest.mark.parametrize("method", [m for m in METHODS if m != "vmap"])
def test_dropout_is_that_of_the_forward(method):
    model, x, y = classify()
    model = nn.Sequential(nn.Dropout(0.5), model)
    torch.manual_seed(2)
    F.cross_entropy(model(x), y, reduction="sum").backward()
    for _ in range(2):
        torch.manual_seed(2)
        with dpt.record_per_sample(model, loss_reduction="sum", method=method) as record:
            F.cross_entropy(model(x), y, reduction="sum").backward()
        plain = record.clipped_sum(max_grad_norm=1e9)
        for name, p in model.named_parameters():
            torch.testing.assert_close(record.grads()[name].sum(0), p.grad)
            torch.testing.assert_close(plain[name], p.grad)


def test_keyword_inputs_and_time_first_models():
    class Keywords(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, *, x, scale):
            return (self.layer(x.transpose(0, 1)).transpose(0, 1) * scale[:, None, None]).sum(1)

    model, x, scale, y = randomise(Keywords()), data(N, N, 6), data(N), ids(3, N)
    with dpt.record_per_sample(model, loss_reduction="mean") as record:
        F.cross_entropy(model(x=x, scale=scale), y).backward()
    expected = dpt.per_sample_grads(
        lambda m, x, s, y: F.cross_entropy(m(x=x, scale=s), y, reduction="none"),
        model,
        x,
        scale,
        y,
        method="loop",
    )
    for name, grad in record.grads().items():
        np.testing.assert_allclose(grad, expected[name], rtol=1e-4, atol=1e-5)


def test_a_forward_that_failed_can_be_tried_again():
    model, x, y = classify()
    with dpt.record_per_sample(model, loss_reduction="mean") as record:
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(data(N, 7))
        F.cross_entropy(model(x), y).backward()
    assert record.norms().shape == (N,)
    assert torch.is_grad_enabled()


def test_layers_behind_a_closed_gate_are_examined_when_it_opens():
    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head = nn.Linear(6, 6), nn.Linear(6, 3)
            self.gate = nn.Parameter(torch.zeros(6))

        def forward(self, x):
            hidden = self.layer(x.transpose(0, 1)).transpose(0, 1)
            return self.head(x + self.gate * hidden).sum(1)

    model, x, y = randomise(Gated()), data(N, N, 6), ids(3, N)
    for gate in (0.0, 1.5):
        with torch.no_grad():
            model.gate.fill_(gate)
        expected = truth(model, x, y)
        with dpt.record_per_sample(model, loss_reduction="mean") as record:
            F.cross_entropy(model(x), y).backward()
        for name, grad in record.grads().items():
            torch.testing.assert_close(grad, expected[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["one-hot", "divided"])
def test_a_batch_as_long_as_a_constant_of_the_loss_is_known_code(kind):
    """The classes of an encoding are no number of examples, as other batches have shown."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16))
    for n in (12, 14, 16, 16, 13):
        x, y = torch.randn(n, 4), torch.zeros(n, dtype=torch.int64)
        with dpt.record_per_sample(model, loss_reduction="mean", check="always"):
            if kind == "one-hot":
                F.mse_loss(model(x), F.one_hot(y, 16).float()).backward()
            else:
                (model(x) / 16).square().mean().backward()
        model.zero_grad()


class Probe(nn.Module):
    """One trained layer, whose output the model's own loss takes."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x, labels):
        logits = self.layer(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def test_a_loss_inside_a_model_of_one_layer():
    torch.manual_seed(0)
    model, x, y = Probe(), torch.randn(6, 4), torch.arange(6) % 3
    with dpt.record_per_sample(model, loss_reduction="mean") as record:
        model(x, labels=y)["loss"].backward()
    found = record.grads()
    for k in range(len(x)):
        loss = model(x[k : k + 1], labels=y[k : k + 1])["loss"]
        expected = torch.autograd.grad(loss, list(model.parameters()))
        for ours, theirs in zip(found.values(), expected, strict=True):
            torch.testing.assert_close(ours[k], theirs)


def test_a_first_batch_of_one_example_is_compared(monkeypatch):
    """Its gradient is captured, too; and what it shows is taken for larger batches."""
    rule = RULES[F.linear]

    def wrong(acts, grads_out, **options):
        return 1.5 * rule.grads["weight"](acts, grads_out, **options)

    grads = {**rule.grads, "weight": wrong}
    changed = dataclasses.replace(rule, grads=grads, sq_norms={}, sums={})
    monkeypatch.setitem(RULES, F.linear, changed)
    model, x, y = randomise(nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))), data(1, 6), ids(3, 1)
    record = dpt.record_per_sample(model, loss_reduction="mean", method="book_keeping")
    with pytest.raises(ExactnessError, match="differs from plain autodiff"), record:
        F.cross_entropy(model(x), y).backward()
