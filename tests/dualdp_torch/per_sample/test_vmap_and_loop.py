# SPDX-License-Identifier: Apache-2.0
"""`grad_sample_mode="loop"`: models that nothing else can treat, held to plain autograd by hand."""

import copy

import pytest
import torch
from torch import nn

import dualdp_torch as dpt
from dualdp import UnsupportedLayerError
from tests.dualdp_torch.checks import data, randomise
from tests.dualdp_torch.per_sample.loops import (
    C,
    Model,
    by_hand,
    held_to_plain_autograd,
    linear,
    loss,
    rows,
    trained,
    words,
)


def routed(self, x):
    """Experts that are given the rows routed to them by `nonzero`."""
    gates = self.route(x).softmax(1)
    chosen, out = gates.argmax(1), x.new_zeros(len(x), 3)
    for i, expert in enumerate(self.experts):
        rows = (chosen == i).nonzero().flatten()
        out = out.index_add(0, rows, expert(x[rows]) * gates[rows, i, None])
    return out


def masked_in_place(self, words):
    """Positions of one word become a learned vector, in place."""
    x = self.table(words).clone()
    x[words == 0] = self.token
    return self.head(torch.tanh(x).mean(1))


def by_example(self, x):
    """Another layer for some of the examples, chosen in Python."""
    rows = [self.second(torch.tanh(self.first(r))) if r[0] > 0 else self.other(r) for r in x]
    return torch.stack(rows)


def differentiates(self, x):
    """The gradient of an energy, as force fields return it."""
    x = x.clone().requires_grad_()
    energy = torch.tanh(self.first(x)).square().sum()
    return self.second(torch.autograd.grad(energy, x, create_graph=True)[0])


def experts():
    return Model(routed, route=linear(2), experts=nn.ModuleList([linear(), linear()]))


#: Name -> (model, its rows, a mode that names the loop).
KINDS = {
    "experts": lambda: (experts(), rows(), None),
    "assigned mask": lambda: (
        Model(
            masked_in_place,
            table=nn.Embedding(9, 6),
            token=nn.Parameter(torch.zeros(6)),
            head=linear(),
        ),
        words(),
        None,
    ),
    "branches": lambda: (
        Model(by_example, first=linear(6), second=linear(), other=linear()),
        rows(),
        "functorch",
    ),
    "second order": lambda: (
        Model(differentiates, first=linear(), second=linear()),
        rows(),
        "auto",
    ),
}


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("kind", KINDS)
def test_models_without_another_method_are_plain_autograd(kind, reduction):
    model, items, other = KINDS[kind]()
    held_to_plain_autograd(model, items, loss(reduction), reduction=reduction)
    if other is not None:
        with pytest.raises(UnsupportedLayerError, match='grad_sample_mode="loop"'):
            list(trained(model, items, loss(), mode=other))


class Drawing(nn.Module):
    """Draws in a way of its own; what it drew is an output."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])

    def through(self, x, drawn):
        for layer, weight in zip(self.layers, drawn, strict=True):
            x = x + weight * torch.tanh(layer(x)) if weight > 0.8 else x
        return x

    def forward(self, x):
        drawn = (torch.rand(3) < 0.5).float() + torch.randn(3).abs() + 0.1
        return self.through(x, drawn), drawn.expand(len(x), 3)


def test_gradients_are_those_of_the_numbers_that_were_drawn():
    model, x = randomise(Drawing()), data(5, 6)
    torch.manual_seed(4)
    with dpt.record_per_sample(model, loss_reduction="sum", method="loop") as record:
        out, drawn = model(x)
        out.square().sum().backward()
    assert len(set(drawn[:, 0].tolist())) == 5
    for row in range(5):
        model.zero_grad()
        z = model.through(x[row], drawn[row])
        torch.testing.assert_close(out[row], z)
        if z.requires_grad:  # some layer was drawn
            z.square().sum().backward()
        for name, p in model.named_parameters():
            expected = torch.zeros_like(p) if p.grad is None else p.grad
            torch.testing.assert_close(record.grads()[name][row], expected, msg=name)


class Counting(nn.Module):
    """Counts its forwards in a buffer, and in an attribute; the counts enter the output."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.calls = linear(4), nn.Linear(4, 3), 0
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count += 1
        self.calls += 1
        return self.second(torch.tanh(self.first(x)) * self.count * self.calls)


@pytest.mark.parametrize("mode", ["loop", "auto"])
def test_a_count_is_that_of_batches_and_not_of_examples(mode):
    """A check repeats a forward with the numbers that the modules held before it."""
    model = randomise(Counting())
    exact = copy.deepcopy(model).double()
    for before, batch, engine in trained(model, rows(), loss(), mode=mode):
        calls, expected = model.calls, {}
        for row in range(len(batch[0])):  # every example alone sees the same count
            exact.load_state_dict(before)
            exact.calls = calls - 1
            one = [batch[0][row : row + 1].double(), batch[1][row : row + 1]]
            for name, total in by_hand(exact, one, loss())[1].items():
                expected[name] = expected.get(name, 0) + total
        for name, total in expected.items():
            assert (engine.stages().unprotected_sum[name] - total).norm() <= 1e-5 * C * len(
                batch[0]
            ), name
    assert model.count == model.calls == 2


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (lambda x: object(), "a object that differs between examples"),
        (lambda x: x.new_zeros(len(x), 2 + int(x[0, 0] > 0)), r"\(1, \d\) for one example and of"),
        (lambda x: [x] * (1 + int(x[0, 0] > 0)), "another structure"),
    ],
    ids=["object", "lengths", "structure"],
)
def test_outputs_that_cannot_be_joined_are_refused(value, message):
    model = Model(lambda self, x: (self.layer(x), value(x)), layer=linear())
    with (
        pytest.raises(UnsupportedLayerError, match=message),
        dpt.record_per_sample(model, loss_reduction="sum", method="loop"),
    ):
        model(data(6, 6))
