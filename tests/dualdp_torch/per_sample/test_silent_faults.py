# SPDX-License-Identifier: Apache-2.0
"""Ordinary models whose gradients were wrong without a word (known_failures 61, 64, 65, 67)."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dualdp_torch as dpt
from dualdp import ExactnessError, UnsupportedLayerError
from tests import reference
from tests.dualdp_torch.checks import data, truth_of
from tests.dualdp_torch.per_sample.loops import Model, engine_loop, linear, once, private, size_of

N = 8


# ---------------------------------------------------------------------- 61


class Reversible(torch.autograd.Function):
    """x + f(x), whose backward computes f again and differentiates it by itself."""

    @staticmethod
    def forward(ctx, x, f):
        ctx.f = f
        ctx.save_for_backward(x)
        with torch.no_grad():
            return x + f(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = x + ctx.f(x)
        torch.autograd.backward(y, grad)
        return x.grad, None


def block():
    """Three layers, the middle one inside a reversible block."""

    def run(self, x):
        h = self.first(x)
        return self.last(h + self.inner(h) if self.plain else Reversible.apply(h, self.inner))

    inner, last = nn.Linear(5, 5), nn.Linear(5, 2)
    return Model(run, first=linear(5), inner=inner, last=last, plain=False)


@pytest.mark.parametrize("method", dpt.METHODS)
def test_functions_that_differentiate_by_themselves(method):
    """Their parameters' gradients go to `p.grad`, which no capture sees: only the loop is right."""
    model, x = block(), data(N, 6)
    model.inner.weight.grad = torch.ones(5, 5)
    if method == "loop":
        found = dpt.per_sample_grads(reference.loss_fn, model, x, method=method)
        model.plain = True
        for name, grad in truth_of(model, reference.loss_fn, x).items():
            torch.testing.assert_close(
                found[name].double(), torch.from_numpy(grad), rtol=1e-5, atol=1e-6
            )
    else:
        with pytest.raises(UnsupportedLayerError, match='Use method="loop" .*which is exact'):
            dpt.per_sample_grads(reference.loss_fn, model, x, method=method)
    assert torch.equal(model.inner.weight.grad, torch.ones(5, 5))
    assert model.inner.bias.grad is None


@pytest.mark.parametrize("mode", ["auto", "ghost", "functorch"])
def test_reversible_blocks_are_refused_in_the_loop(mode):
    """A step after the refusal does not use what the block left in `p.grad` either."""
    engine, model, optimizer, loader = private(block(), mode)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    x, y, _ = next(iter(loader))
    match = "outside the recorded forward|torch.func.vmap can't run this model"
    with pytest.raises(UnsupportedLayerError, match=match):
        once(model, optimizer, x, y % 2)
    assert all(p.grad is None for p in model.parameters())
    with pytest.raises((RuntimeError, UnsupportedLayerError)):
        optimizer.step()
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
    assert len(engine.ledger) == 0


# ---------------------------------------------------------------------- 64


def balanced(self, x):
    """Gated classes; the gate's load is a term of the loss, kept or returned."""
    gate = self.gate(x).softmax(1)
    load = gate.square().sum(1)
    self.load = load.mean()
    logits = self.head(x) * gate
    return (logits, load) if self.returns else logits


@pytest.mark.parametrize(
    ("mode", "match"),
    [("auto", "does not come from what the model returned"), ("hooks", "spot"), ("ghost", "spot")],
)
def test_a_term_that_forward_keeps_is_refused(mode, match):
    """It is in the captured gradients, and in no definition by outputs; "auto" dropped it."""
    for returns in (False, True):
        model = Model(balanced, gate=linear(), head=linear(), returns=returns)
        engine, model, optimizer, loader = private(model, mode)
        x, y, _ = next(iter(loader))
        out, load = model(x) if returns else (model(x), model.load)
        (F.cross_entropy(out, y % 3) + load.mean()).backward()
        if returns:
            optimizer.step()
        else:
            with pytest.raises(ExactnessError, match=match):
                optimizer.step()
        assert len(engine.ledger) == returns


# ---------------------------------------------------------------------- 65


def experts(self, x):
    """Two experts, each of which takes the first two examples that come to it."""
    h = self.first(x)
    chosen = self.gate(h).argmax(1)[:, None] == torch.arange(2)
    kept = chosen * (chosen.cumsum(0) <= 2)
    return torch.einsum("ni,ne,eio->no", h, kept.to(h.dtype), self.experts)


@pytest.mark.parametrize("method", dpt.METHODS)
def test_experts_with_a_capacity_are_refused(method):
    """float64 repeated the norms alone, and the refusal was taken back."""
    layers = {"first": linear(6), "gate": linear(2), "experts": nn.Parameter(torch.zeros(2, 6, 3))}
    with pytest.raises((UnsupportedLayerError, ExactnessError)):
        dpt.clipped_grad_sum(
            reference.loss_fn,
            Model(experts, **layers),
            data(N, 6),
            max_grad_norm=0.1,
            method=method,
        )


# ---------------------------------------------------------------------- 67


class Quantised(torch.autograd.Function):
    """Rounds the gradient to four bits of the batch's largest one."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        step = grad.abs().amax().clamp(min=1e-30) / 7
        return (grad / step).round() * step


def low_precision():
    """A model whose backward is that of training in few bits."""
    run = lambda m, x: m.second(Quantised.apply(m.first(x)).tanh())  # noqa: E731
    return Model(run, first=linear(5), second=nn.Linear(5, 3))


@pytest.mark.parametrize("method", dpt.METHODS)
def test_a_gradient_rounded_by_the_batch_is_refused_or_right(method):
    """`two_pass` multiplies the loss by the clip factor, and gave up to 4.3 C."""
    model, x = low_precision(), data(N, 6)
    call = {"max_grad_norm": 0.1, "method": method}
    if method not in ("auto", "loop"):
        with pytest.raises((UnsupportedLayerError, ExactnessError)):
            dpt.clipped_grad_sum(reference.loss_fn, model, x, **call)
        return
    truth = truth_of(model, reference.loss_fn, x)
    norms = dpt.clipped_grad_sum(reference.loss_fn, model, x, **call).norms
    for k in range(N):
        exact = size_of({name: torch.from_numpy(grad[k]) for name, grad in truth.items()})
        assert float(norms[k]) == pytest.approx(exact, rel=1e-4)


@pytest.mark.parametrize("mode", ["hooks", "ghost", "functorch"])
def test_such_a_gradient_stops_the_loop(mode):
    """In the user's loop; "auto" goes on with each example alone."""
    with pytest.raises((UnsupportedLayerError, ExactnessError, RuntimeError, ValueError)):
        engine_loop(
            lambda m, x, y, step: F.cross_entropy(m(x), y).backward(), low_precision(), mode=mode
        )
