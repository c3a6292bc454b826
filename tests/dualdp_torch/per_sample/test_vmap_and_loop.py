# SPDX-License-Identifier: Apache-2.0
"""`grad_sample_mode="loop"`: models that nothing else can treat, held to plain autograd by hand."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import dualdp_torch as dpt
from dualdp import UnsupportedLayerError
from tests.dualdp_torch.checks import data, ids, randomise

N, C = 24, 0.1


class Model(nn.Module):
    """A forward given as a function, and its layers."""

    def __init__(self, run, **layers):
        super().__init__()
        self.run = run
        for name, layer in layers.items():
            setattr(self, name, layer)
        randomise(self)

    def forward(self, *args, **kwargs):
        return self.run(self, *args, **kwargs)


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


def linear(d_out=3):
    return nn.Linear(6, d_out)


KINDS = {
    "experts": lambda: Model(routed, route=linear(2), experts=nn.ModuleList([linear(), linear()])),
    "assigned mask": lambda: Model(
        masked_in_place,
        table=nn.Embedding(9, 6),
        token=nn.Parameter(torch.zeros(6)),
        head=linear(),
    ),
    "branches": lambda: Model(by_example, first=linear(6), second=linear(), other=linear()),
    "second order": lambda: Model(differentiates, first=linear(), second=linear()),
}


def trained(model, items, loop, reduction="mean", mode="loop", steps=2, **changes):
    """Run a few checked steps; yields (model before the step, batch, stages, engine)."""
    engine = dpt.PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(items, batch_size=6),
        noise_multiplier=1.0,
        max_grad_norm=C,
        loss_reduction=reduction,
        grad_sample_mode=mode,
        num_steps=steps,
        delta=1e-5,
        seed=3,
        checks=1.0,
        **changes,
    )
    for batch in loader:
        before = {name: value.clone() for name, value in model.state_dict().items()}
        loop(model, batch).backward()
        optimizer.step()
        yield before, batch, engine.stages(), engine
    engine.detach()


def by_hand(model, batch, loop):
    """Norms, and the sum of clipped gradients of each example's own loss, in float64."""
    norms, sums = [], {name: 0 for name, p in model.named_parameters() if p.requires_grad}
    for row in range(len(batch[0])):
        model.zero_grad()
        loop(model, [t[row : row + 1] for t in batch]).backward()
        grads = {
            name: p.grad.to_dense() for name, p in model.named_parameters() if p.grad is not None
        }
        norms.append(float(torch.stack([g.square().sum() for g in grads.values()]).sum().sqrt()))
        factor = min(1.0, C / ((1 + 1e-4) * norms[-1]))
        sums |= {name: sums[name] + factor * g for name, g in grads.items()}
    return torch.tensor(norms, dtype=torch.float64), sums


def loss(reduction, **wide):
    def loop(model, batch):
        inputs = batch[0].to(**wide) if batch[0].is_floating_point() else batch[0]
        return F.cross_entropy(model(inputs), batch[1], reduction=reduction)

    return loop


def inputs(kind):
    return ids(9, N, 5) if kind == "assigned mask" else data(N, 6)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("kind", KINDS)
def test_models_without_another_method_are_plain_autograd(kind, reduction):
    model = KINDS[kind]()
    exact = copy.deepcopy(model).double()
    items = TensorDataset(inputs(kind), ids(3, N))
    for before, batch, stages, engine in trained(  # noqa: B007
        model, items, loss(reduction), reduction
    ):
        exact.load_state_dict(before)
        norms, sums = by_hand(exact, batch, loss(reduction, dtype=torch.float64))
        torch.testing.assert_close(stages.unprotected_norms.double(), norms, rtol=2e-5, atol=0)
        assert stages.unprotected_sum.keys() == sums.keys()
        for name, total in sums.items():
            assert (stages.unprotected_sum[name] - total).norm() <= 1e-5 * C * len(norms), name
    assert engine.ledger.last_check == 1


@pytest.mark.parametrize(("kind", "mode"), [("branches", "functorch"), ("second order", "auto")])
def test_the_other_methods_name_the_loop(kind, mode):
    items = TensorDataset(inputs(kind), ids(3, N))
    with pytest.raises(UnsupportedLayerError, match='grad_sample_mode="loop"'):
        list(trained(KINDS[kind](), items, loss("mean"), mode=mode))


def test_a_record_may_be_a_loop():
    model, x, y = KINDS["experts"](), data(N, 6), ids(3, N)
    with dpt.record_per_sample(model, loss_reduction="mean", method="loop") as record:
        loss("mean")(model, (x, y)).backward()
    norms, sums = by_hand(copy.deepcopy(model).double(), (x.double(), y), loss("mean"))
    torch.testing.assert_close(record.norms().double(), norms, rtol=2e-5, atol=0)
    found = record.clipped_sum(max_grad_norm=C)
    assert all((found[name] - total).norm() <= 1e-5 * C * N for name, total in sums.items())
    assert all(p.grad is None for p in model.parameters())


class Drawing(nn.Module):
    """Draws in a way of its own; what it drew is an output."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])

    def forward(self, x):
        drawn = (torch.rand(3) < 0.5).float() + torch.randn(3).abs() + 0.1
        for layer, weight in zip(self.layers, drawn, strict=True):
            x = x + weight * torch.tanh(layer(x)) if weight > 0.8 else x
        return x, drawn.expand(len(x), 3)


def test_gradients_are_those_of_the_numbers_that_were_drawn():
    model, x = randomise(Drawing()), data(5, 6)
    torch.manual_seed(4)
    with dpt.record_per_sample(model, loss_reduction="sum", method="loop") as record:
        out, drawn = model(x)
        out.square().sum().backward()
    assert len(set(drawn[:, 0].tolist())) == 5
    found = record.grads()
    for row in range(5):
        model.zero_grad()
        z = x[row]
        for layer, weight in zip(model.layers, drawn[row], strict=True):
            z = z + weight * torch.tanh(layer(z)) if weight > 0.8 else z
        torch.testing.assert_close(out[row], z)
        if z.requires_grad:  # some layer was drawn
            z.square().sum().backward()
        for name, p in model.named_parameters():
            expected = torch.zeros_like(p) if p.grad is None else p.grad
            torch.testing.assert_close(found[name][row], expected, msg=name)
    model.zero_grad()


class Counting(nn.Module):
    """Counts its forwards in a buffer, and in an attribute; the count enters the output."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 4), nn.Linear(4, 3)
        self.register_buffer("count", torch.zeros(()))
        self.calls = 0

    def forward(self, x):
        self.count += 1
        self.calls += 1
        return self.second(torch.tanh(self.first(x)) * self.count)


@pytest.mark.parametrize("mode", ["loop", "auto"])
def test_a_count_is_that_of_batches_and_not_of_examples(mode):
    model, items = randomise(Counting()), TensorDataset(data(N, 6), ids(3, N))
    exact = copy.deepcopy(model).double()
    for before, batch, stages, _ in trained(model, items, loss("mean"), mode=mode):
        sums = {}
        for row in range(len(batch[0])):  # every example alone sees the same count
            exact.load_state_dict(before)
            one = [batch[0][row : row + 1].double(), batch[1][row : row + 1]]
            for name, total in by_hand(exact, one, loss("mean"))[1].items():
                sums[name] = sums.get(name, 0) + total
        for name, total in sums.items():
            assert (stages.unprotected_sum[name] - total).norm() <= 1e-5 * C * len(batch[0]), name
    assert model.count == 2


def test_a_count_that_is_no_buffer_counts_the_loops_forwards():
    """A check repeats a forward with the numbers that the modules held before it."""

    def counted(self, x):
        self.calls += 1
        return self.layer(x) * self.calls

    model = Model(counted, layer=linear())
    model.calls = 0
    items = TensorDataset(data(N, 6), ids(3, N))
    steps = len(list(trained(model, items, loss("mean"), mode="auto")))
    assert model.calls == steps


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
