# SPDX-License-Identifier: Apache-2.0
"""What the capture sees, keeps and leaves alone."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import dualdp_torch as dpt
from tests import reference
from tests.dualdp_torch.checks import Ways, assert_exact, data, ids, randomise

N = 4


class InPlace(nn.Module):
    """In-place operations on outputs, which module hooks refuse."""

    def __init__(self, relu, residual):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.relu, self.residual = relu, residual

    def forward(self, x):
        hidden = self.first(x)
        if self.relu:
            hidden = F.relu(hidden, inplace=True)
        out = self.second(hidden)
        if self.residual:
            out += x
        return out


@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("residual", [True, False])
def test_in_place_changes_of_outputs_are_right(relu, residual, monkeypatch):
    model = randomise(InPlace(relu, residual))
    assert_exact(model, data(N, 6))
    ways = Ways(monkeypatch)
    dpt.per_sample_norms(reference.loss_fn, model, data(N, 6))
    assert ways.taken == ["Captured"]


class Overwrites(nn.Module):
    """Changes a layer's saved input after use; plain autograd would refuse."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        hidden = self.first(x) * 1
        out = self.second(hidden)
        hidden.mul_(3)
        return out + hidden


def test_a_saved_input_that_was_overwritten_is_never_used():
    """Plain autograd refuses this model; ours must not be wrong about it."""
    model = randomise(Overwrites())
    x = data(N, 6)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        reference.loss_fn(model, x).sum().backward()
    for method in ("auto", "materialize", "book_keeping", "vmap"):
        with pytest.raises((RuntimeError, ValueError), match="modified by an inplace operation"):
            dpt.per_sample_grads(reference.loss_fn, model, x, method=method)


class Shapes(TorchDispatchMode):
    """Shapes of every tensor that is made."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if torch.is_tensor(tensor) and not func.is_view:
                self.seen.add(tuple(tensor.shape))
        return out


@pytest.mark.parametrize("t", [(), (3,)], ids=["one_position", "three_positions"])
def test_book_keeping_forms_no_parameter_gradient(t):
    model = randomise(nn.Sequential(nn.Linear(61, 67), nn.Tanh(), nn.Linear(67, 71)))
    x = data(N, *t, 61)
    dpt.per_sample_norms(reference.loss_fn, model, x, method="book_keeping")
    with Shapes() as shapes:
        dpt.per_sample_norms(reference.loss_fn, model, x, method="book_keeping")
    weights = {(67, 61), (61, 67), (71, 67), (67, 71)}
    assert not weights & shapes.seen
    assert not {(N, *shape) for shape in weights} & shapes.seen
    with Shapes() as shapes:
        dpt.clipped_grad_sum(reference.loss_fn, model, x, max_grad_norm=1.0, method="book_keeping")
    assert not {(N, *shape) for shape in weights} & shapes.seen


def test_embeddings_form_no_table_per_example():
    model = randomise(nn.Sequential(nn.Embedding(97, 5), nn.Linear(5, 3)))
    x = ids(97, N, 8)
    dpt.per_sample_norms(reference.loss_fn, model, x)
    with Shapes() as shapes:
        dpt.clipped_grad_sum(reference.loss_fn, model, x, max_grad_norm=1.0)
    assert (97, 5) in shapes.seen
    assert not {(N, 97, 5), (N, 97), (N * 97, 5), (N, 8, 97)} & shapes.seen


def test_nothing_of_the_users_is_touched():
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 3))
    x = data(N, 6).requires_grad_()
    model[0].weight.grad = torch.ones(6, 6)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    attributes = set(vars(model[0].weight)), set(vars(model)), set(vars(model[0]))
    torch.manual_seed(3)
    expected = torch.rand(3)
    for method in dpt.METHODS:
        torch.manual_seed(3)
        dpt.per_sample_grads(lambda m, x: m(x).sum(1) * 0, model.eval(), x, method=method)
        assert torch.equal(torch.rand(3), expected)
    assert torch.equal(model[0].weight.grad, torch.ones(6, 6))
    assert model[2].weight.grad is None
    assert x.grad is None
    assert attributes == (set(vars(model[0].weight)), set(vars(model)), set(vars(model[0])))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("method", ["auto", "materialize", "book_keeping", "two_pass"])
def test_dropout_masks_are_those_of_the_plain_forward(method):
    """With a huge bound the clipped sum is the plain gradient under the same random numbers."""
    model = randomise(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Tanh(), nn.Linear(6, 3)))
    x = data(8, 6)
    torch.manual_seed(5)
    reference.loss_fn(model, x).sum().backward()
    for _ in range(2):  # the first call examines the model, without using up random numbers
        torch.manual_seed(5)
        found = dpt.clipped_grad_sum(reference.loss_fn, model, x, max_grad_norm=1e9, method=method)
        for name, p in model.named_parameters():
            torch.testing.assert_close(found.grads[name], p.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", dpt.METHODS)
def test_dropout_differs_between_examples(method):
    model = nn.Sequential(nn.Linear(6, 50), nn.Dropout(0.5))
    x = data(1, 6).expand(6, 6)
    grads = dpt.per_sample_grads(lambda m, x: m(x).sum(1), model, x, method=method)["0.bias"]
    assert len({tuple(row.tolist()) for row in grads}) == 6


def test_noise_drawn_inside_the_model_is_no_mixing():
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x):
            return self.layer(x + 0.1 * torch.randn_like(x)) * torch.rand(len(x), 1)

    grads = dpt.per_sample_grads(reference.loss_fn, randomise(Noisy()), data(N, 6))
    assert grads["layer.weight"].shape == (N, 6, 6)


class Cancels(nn.Module):
    """Equal activations at all positions, output gradients that sum to nearly nothing."""

    def __init__(self, t):
        super().__init__()
        self.layer = nn.Linear(64, 64)
        signs = torch.tensor([1.0, -1.0]).repeat(t // 2)
        self.register_buffer("weights", signs * 1e3)

    def forward(self, x):
        return (self.layer(x) * self.weights[:, None]).sum(1)


@pytest.mark.parametrize("method", dpt.METHODS)
def test_gram_norms_do_not_cancel(method):
    t = 8
    model = randomise(Cancels(t))
    x = data(N, 1, 64).expand(N, t, 64) + 1e-4 * data(N, t, 64, seed=2)

    def loss_fn(model, x):
        return model(x).sum(1)

    exact = dpt.per_sample_norms(loss_fn, randomise(Cancels(t)).double(), x.double(), method="loop")
    norms = dpt.per_sample_norms(loss_fn, model, x, method=method)
    torch.testing.assert_close(norms.double(), exact, rtol=2e-3, atol=0)
    for k in range(N):
        pair = torch.stack([x[k], x[k]])
        mask = torch.tensor([True, False])
        found = dpt.clipped_grad_sum(
            loss_fn, model, pair, max_grad_norm=1.0, mask=mask, method=method
        )
        size = sum(g.double().square().sum() for g in found.grads.values()).sqrt()
        assert float(size) <= 1 + 1e-4


@pytest.mark.parametrize("method", ["auto", "book_keeping", "two_pass"])
def test_gram_norms_of_convolutions_do_not_cancel(method):
    class Map(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(64, 64, 3)
            signs = torch.tensor([1.0, -1.0]).repeat(8).view(4, 4)
            self.register_buffer("signs", signs * 1e3)

        def forward(self, x):
            return self.conv(x) * self.signs

    def loss_fn(model, x):
        return model(x).sum((1, 2, 3))

    x = data(N, 64, 1, 1).expand(N, 64, 6, 6) + 1e-4 * data(N, 64, 6, 6, seed=2)
    exact = dpt.per_sample_norms(loss_fn, randomise(Map()).double(), x.double(), method="loop")
    model = randomise(Map())
    norms = dpt.per_sample_norms(loss_fn, model, x, method=method)
    torch.testing.assert_close(norms.double(), exact, rtol=2e-3, atol=0)
    found = dpt.clipped_grad_sum(
        loss_fn, model, x, max_grad_norm=1.0, mask=torch.arange(N) == 2, method=method
    )
    size = sum(g.double().square().sum() for g in found.grads.values()).sqrt()
    assert 0 < float(size) <= 1 + 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("method", dpt.METHODS)
def test_low_precision_models_are_clipped_in_float32(dtype, method):
    model = randomise(nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(8)))).to(dtype)
    x = data(N, 16).to(dtype)
    found = dpt.clipped_grad_sum(
        lambda m, x: m(x).float().square().sum(1), model, x, max_grad_norm=1e-3, method=method
    )
    assert found.norms.dtype == torch.float32
    assert all(g.dtype == torch.float32 for g in found.grads.values())
    size = sum(g.double().square().sum() for g in found.grads.values()).sqrt()
    assert 0 < float(size) <= N * 1e-3 * (1 + 1e-4)
    grads = dpt.per_sample_grads(lambda m, x: m(x).float().sum(1), model, x, method=method)
    assert all(g.dtype == dtype for g in grads.values())


@pytest.mark.parametrize("autocast", [False, True])
def test_a_second_pass_forms_no_sum_in_low_precision(autocast):
    """Its rounding would depend on the other examples, and move a sum by more than C."""
    model = randomise(nn.Linear(16, 4)).to(torch.float32 if autocast else torch.bfloat16)
    x = 3 * data(64, 16).to(model.weight.dtype)

    def loss_fn(model, x):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return model(x).float().square().sum(1)

    sums = [
        dpt.clipped_grad_sum(loss_fn, model, x, max_grad_norm=1.0, method=method).grads
        for method in ("two_pass", "book_keeping")
    ]
    for ours, theirs in zip(*(s.values() for s in sums), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)

    def narrow_losses(model, x):
        return model(x.to(model.weight.dtype)).square().sum(1).bfloat16()

    alone = dpt.clipped_grad_sum(
        narrow_losses, model.float(), x[:1].float(), max_grad_norm=0.3, method="two_pass"
    )
    size = sum(g.double().square().sum() for g in alone.grads.values()).sqrt()
    assert float(size) <= 0.3 * (1 + 1e-4)


def test_parameters_in_two_precisions():
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3).double())

    def loss_fn(model, x):
        return model[2](model[1](model[0](x)).double()).sum(1)

    for method in dpt.METHODS:
        found = dpt.clipped_grad_sum(loss_fn, model, data(N, 6), max_grad_norm=0.5, method=method)
        assert found.norms.dtype == torch.float64
        assert {g.dtype for g in found.grads.values()} == {torch.float32, torch.float64}


def test_tied_tables_form_no_table_per_example():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.body = nn.Embedding(97, 5), nn.Linear(5, 5)

        def forward(self, x):
            return F.linear(self.body(self.words(x)).tanh(), self.words.weight)

    model, x = randomise(Tied()), ids(97, N, 8)
    assert_exact(model, x)
    with Shapes() as shapes:
        dpt.clipped_grad_sum(reference.loss_fn, model, x, max_grad_norm=1.0)
    assert not {(N, 97, 5), (N * 97, 5)} & shapes.seen


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 5))

    def forward(self, x):
        return x * self.scale


def test_float32_parameters_of_float64_inputs():
    model, x = Scaled(), data(6, 5).double()
    found = [
        dpt.clipped_grad_sum(
            lambda m, x: m(x).sin().sum(1), model, x, max_grad_norm=100.0, method=method
        )
        for method in ("auto", "loop")
    ]
    torch.testing.assert_close(
        found[0].grads, found[1].grads, rtol=1e-5, atol=1e-6, check_dtype=False
    )
