# SPDX-License-Identifier: Apache-2.0
"""Ordinary models and loops whose gradients were wrong without a word (known_failures, part F)."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dualdp_torch as dpt
from dualdp import ExactnessError, UnsupportedLayerError
from tests import reference
from tests.dualdp_torch.checks import data, randomise, truth_of
from tests.dualdp_torch.loop import build, plan, start
from tests.dualdp_torch.per_sample.checks.test_twin import RUNS, engine_loop
from tests.dualdp_torch.per_sample.test_api import Block
from tests.dualdp_torch.per_sample.test_loop_checks import once

N = 8
MODES = ("auto", "hooks", "ghost", "functorch")


# ---------------------------------------------------------------------- 61


@pytest.mark.parametrize("mode", MODES)
def test_reversible_blocks_are_refused_in_the_loop(mode):
    """61: a step after the refusal does not use what the block left in `p.grad` either."""
    model = randomise(Block())
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    engine, model, optimizer, loader = start(
        (model, torch.optim.SGD(model.parameters(), lr=0.1), build()[2]),
        plan=plan(),
        grad_sample_mode=mode,
    )
    match = "outside the recorded forward|torch.func.vmap can't run this model"
    for x, y, _ in loader:
        with pytest.raises(UnsupportedLayerError, match=match):
            once(model, optimizer, x, y % 2)
        assert all(p.grad is None for p in model.parameters())
        with pytest.raises((RuntimeError, UnsupportedLayerError)):
            optimizer.step()
        break
    engine.detach()
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
    assert len(engine.ledger) == 0


# ---------------------------------------------------------------------- 64


class Balanced(nn.Module):
    """Gated classes; the gate's load is a term of the loss, kept or returned."""

    def __init__(self, returns):
        super().__init__()
        self.gate, self.head, self.returns = nn.Linear(6, 3), nn.Linear(6, 3), returns

    def forward(self, x):
        gate = self.gate(x).softmax(1)
        load = gate.square().sum(1)
        self.load = load.mean()
        logits = self.head(x) * gate
        return (logits, load) if self.returns else logits


@pytest.mark.parametrize(
    ("mode", "match"),
    [("auto", "does not come from what the model returned"), ("hooks", "spot"), ("ghost", "spot")],
)
def test_a_term_that_forward_keeps_is_refused_and_returned_it_is_right(mode, match):
    """64: it is in the captured gradients, and in no definition by outputs; "auto" dropped it."""
    for returns in (False, True):
        model = randomise(Balanced(returns))
        engine, model, optimizer, loader = start(
            (model, torch.optim.SGD(model.parameters(), lr=0.1), build()[2]),
            plan=plan(),
            grad_sample_mode=mode,
        )
        x, y, _ = next(iter(loader))
        out, load = model(x) if returns else (model(x), model.load)
        (F.cross_entropy(out, y % 3) + load.mean()).backward()
        if returns:
            optimizer.step()
        else:
            with pytest.raises(ExactnessError, match=match):
                optimizer.step()
        assert len(engine.ledger) == returns
        engine.detach()


# ---------------------------------------------------------------------- 65


class Experts(nn.Module):
    """Two experts, each of which takes the first two examples that come to it."""

    def __init__(self):
        super().__init__()
        self.first, self.gate = nn.Linear(6, 6), nn.Linear(6, 2)
        self.experts = nn.Parameter(torch.zeros(2, 6, 3))

    def forward(self, x):
        h = self.first(x)
        chosen = self.gate(h).argmax(1)[:, None] == torch.arange(2)
        kept = chosen * (chosen.cumsum(0) <= 2)
        return torch.einsum("ni,ne,eio->no", h, kept.to(h.dtype), self.experts)


@pytest.mark.parametrize("method", dpt.METHODS)
def test_experts_with_a_capacity_are_refused(method):
    """65: float64 repeated the norms alone, and the refusal was taken back."""
    with pytest.raises((UnsupportedLayerError, ExactnessError)):
        dpt.clipped_grad_sum(
            reference.loss_fn, randomise(Experts()), data(N, 6), max_grad_norm=0.1, method=method
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


class LowPrecision(nn.Module):
    """Its backward is that of training in few bits."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.second(Quantised.apply(self.first(x)).tanh())


@pytest.mark.parametrize("method", dpt.METHODS)
def test_a_gradient_rounded_by_the_largest_of_the_batch_is_refused_or_right(method):
    """67: `two_pass` multiplies the loss by the clip factor, and gave up to 4.3 C."""
    model, x = randomise(LowPrecision()), data(N, 6)
    call = {"max_grad_norm": 0.1, "method": method}
    if method not in ("auto", "loop"):
        with pytest.raises((UnsupportedLayerError, ExactnessError)):
            dpt.clipped_grad_sum(reference.loss_fn, model, x, **call)
        return
    truth = truth_of(model, reference.loss_fn, x)
    norms = dpt.clipped_grad_sum(reference.loss_fn, model, x, **call).norms
    for k in range(N):
        exact = sum((grad[k] ** 2).sum() for grad in truth.values()) ** 0.5
        assert float(norms[k]) == pytest.approx(exact, rel=1e-4)


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "auto"])
def test_such_a_gradient_stops_the_loop(mode):
    """67, in the user's loop; "auto" goes on with each example alone."""
    with pytest.raises((UnsupportedLayerError, ExactnessError, RuntimeError, ValueError)):
        engine_loop(
            lambda m, x, y, step: F.cross_entropy(m(x), y).backward(),
            randomise(LowPrecision()),
            grad_sample_mode=mode,
        )


# ---------------------------------------------------------------------- 71


def variance(target):
    return torch.ones_like(target)


#: Losses that broadcast (n, 1) against (n,) to (n, n), most of them without a warning.
BROADCAST = {
    "mse": F.mse_loss,
    "by hand": lambda o, t: ((o - t) ** 2).mean(),
    "poisson": lambda o, t: F.poisson_nll_loss(o, t.abs()),
    "gaussian": lambda o, t: F.gaussian_nll_loss(o, t, variance(t)),
    "smooth l1": F.smooth_l1_loss,
    "huber": F.huber_loss,
}


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("name", BROADCAST)
def test_outputs_that_were_not_squeezed_are_refused(name, run):
    """71: of 24 examples, one that is replaced moved the sum by 47 C."""

    def loop(model, x, y, step):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            BROADCAST[name](model(x)[:, :1], y.float()).backward()

    with pytest.raises(ValueError, match="The loss mixes the examples"):
        run(loop)


#: Targets that the loop sets to "ignored", after the batch was handed out.
IGNORED = {
    "where": lambda x, y: torch.where(y == 0, -100, y),
    "in place": lambda x, y: y.masked_fill_(y == 0, -100),
    "by index": lambda x, y: y.index_put((torch.where(y == 0)[0],), torch.tensor(-100)),
    "by the inputs": lambda x, y: y.where(x[:, 0] > 0, -100),
    "by a random mask": lambda x, y: y.masked_fill(torch.rand(len(y)) < 0.4, -100),
}


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("name", IGNORED)
def test_targets_that_the_loop_ignores_are_refused(name, run):
    """71: the mean is over those that are left."""
    torch.manual_seed(0)

    def loop(model, x, y, step):
        F.cross_entropy(model(x), IGNORED[name](x, y.clone())).backward()

    match = "The loss mixes the examples|What one example weighs"
    with pytest.raises((ValueError, ExactnessError), match=match):
        run(loop)
