# SPDX-License-Identifier: Apache-2.0
"""Contributions stay below C where norms cancel, overflow or vanish.

In batches of 8, all but one masked. Each is measured in float64 on what is summed, after a call
without a mask.
"""

import itertools
from unittest import mock

import pytest
import torch
from torch import nn

import dualdp_torch as dpt
from dualdp_torch.per_sample.call import METHODS
from dualdp_torch.rules import base
from dualdp_torch.rules.together import Product, table_of
from tests.dualdp_torch.checks import data

N = 8


def contributions(loss, model, *batch, max_grad_norm, **options):
    """(n,) norms of what each example alone adds to the sum, in units of C."""
    found = []
    for row in (None, *range(N)):
        mask = None if row is None else torch.arange(N) == row
        sums = dpt.clipped_grad_sum(
            loss, model, *batch, max_grad_norm=max_grad_norm, mask=mask, check="off", **options
        ).grads
        found.append(torch.stack([g.double().norm() for g in sums.values()]).norm())
    return torch.stack(found[1:]) / max_grad_norm


class Layer(nn.Module):
    """A linear layer whose input and output gradient are given, beside one with a huge gradient."""

    def __init__(self, size=48):
        super().__init__()
        self.large, self.small = nn.Linear(4, 1), nn.Linear(size, size, bias=False)

    def forward(self, x, inputs, grads_out, scale):
        return scale * self.large(x).squeeze(1) + (self.small(inputs) * grads_out).flatten(1).sum(1)


def loss(model, x, inputs, grads_out):
    return model(x, inputs, grads_out, 0.0)


def cancelling(distance, positions=48, size=48):
    """Inputs nearly equal at all positions, output gradients that sum to nearly nothing."""
    inputs = data(N, 1, size, seed=2) + distance * data(N, positions, size, seed=3)
    grads_out = data(N, positions, size, seed=4)
    return data(N, 4), inputs, grads_out - grads_out.mean(1, keepdim=True)


@pytest.mark.parametrize("way", ["gram", "keep", "discard"])
@pytest.mark.parametrize("bound", [1e-3, 1.0, 100.0])
@pytest.mark.parametrize("clipping", ["flat", "per_layer", "automatic"])
def test_positions_that_cancel_beside_a_layer_with_a_large_gradient(clipping, bound, way):
    """The error of a norm is judged by what the factor of its own group is made of."""

    def loss(model, x, inputs, grads_out):
        return model(x, inputs, grads_out, 1e4)

    for distance in (1e-3, 1e-5, 1e-7):
        with mock.patch.dict(base.FORCED, linear=way):
            found = contributions(
                loss, Layer(), *cancelling(distance), max_grad_norm=bound, clipping=clipping
            )
        assert (found <= 1).all()


def recorded(method, distance):
    """Record of a batch whose positions cancel."""
    torch.manual_seed(0)
    model, batch = Layer(), cancelling(distance)
    with dpt.record_per_sample(model, loss_reduction="sum", method=method) as record:
        loss(model, *batch).sum().backward()
    return record


@pytest.mark.parametrize("way", ["gram", "keep", "discard"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("distance", [1e-4, 1e-6])
def test_questions_to_a_record_may_be_repeated(distance, method, way):
    """What was formed for one answer is in no later one; norms are those of the bound asked for."""
    with mock.patch.dict(base.FORCED, linear=way):
        record = recorded(method, distance)
        for bound in (100.0, 1e-6, 100.0, 1e-6):
            record.norms()
            first = recorded(method, distance).clipped_sum(max_grad_norm=bound)
            for name, total in record.clipped_sum(max_grad_norm=bound).items():
                assert (total - first[name]).norm() <= 1e-6 * N * bound
            for row in range(N):
                mask = torch.arange(N) == row
                sums = record.clipped_sum(max_grad_norm=bound, mask=mask)
                assert torch.stack([g.double().norm() for g in sums.values()]).norm() <= bound


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("bound", [1e-4, 1.0])
def test_norms_that_are_all_rounding(method, bound):
    """What is summed is what was measured, where the whole gradient is the rounding of others."""
    for distance in (1e-4, 1e-6, 0.0):
        batch = cancelling(distance)
        found = contributions(loss, Layer(), *batch, max_grad_norm=bound, method=method)
        assert (found <= 1).all()


@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
@pytest.mark.parametrize("scale", [1e25, float("nan"), 0.0])
def test_an_example_whose_norm_is_computed_again_changes_no_other(scale, clipping):
    """Norms and sums of the others are the same to the last bit, also where it cancels (0)."""
    others, model = torch.arange(N) != 3, Layer()
    x, inputs, grads_out = data(N, 4), data(N, 6, 48), data(N, 6, 48, seed=2)
    changed = grads_out.clone()
    changed[3] = changed[3] * scale if scale else changed[3] - changed[3].mean(0)
    moved = inputs.clone()
    moved[3] = moved[3] if scale else 1 + 1e-6 * moved[3]
    options = {"max_grad_norm": 1.0, "clipping": clipping, "mask": others, "check": "off"}
    with mock.patch.dict(base.FORCED, linear="gram"):
        first = dpt.clipped_grad_sum(loss, model, x, inputs, grads_out, **options)
        second = dpt.clipped_grad_sum(loss, model, x, moved, changed, **options)
    assert torch.equal(first.norms, second.norms)
    assert all(torch.equal(first.grads[name], second.grads[name]) for name in first.grads)


SCALES = [
    *((1e-21, 1e18), (1e18, 1e-21), (1e-20, 1.0), (1e20, 1.0), (1.0, 1e20), (1e15, 1e15)),
    *((1e-20, 1e20), (1e10, 1e12), (1e-12, 1e-12)),
]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("positions", [None, 3, 48])
def test_squares_that_overflow_or_vanish(positions, method):
    """From above, and from below where the norm in float64 exceeds C."""
    shape = (N, 16) if positions is None else (N, positions, 16)
    model = Layer(16)
    model.large.requires_grad_(False)
    for input_scale, grad_scale in SCALES:
        inputs = data(*shape, seed=5) * input_scale
        grads_out = data(*shape, seed=6) * grad_scale
        pairs = zip(inputs.double(), grads_out.double(), strict=True)
        exact = torch.stack([torch.einsum("...i,...o->oi", a, g).norm() for a, g in pairs])
        for bound in (1e-4, 1.0, 100.0):
            found = contributions(
                loss, model, data(N, 4), inputs, grads_out, max_grad_norm=bound, method=method
            )
            assert (found <= 1).all(), (input_scale, grad_scale, bound)
            assert (found >= 1 - 3e-4)[exact > bound].all(), (input_scale, grad_scale, bound)


@pytest.mark.parametrize("method", METHODS)
def test_norms_whose_squares_overflow_are_told(method):
    model, x = nn.Linear(3, 2), data(4, 3) * 1e25
    found = dpt.per_sample_norms(lambda m, x: m(x).sum(1), model, x, method=method)
    assert found.dtype == torch.float32
    exact = (2 * (x.double().square().sum(1) + 1)).sqrt()
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=0)
    each = dpt.per_sample_norms(
        lambda m, x: m(x).sum(1), model, x, method=method, per_parameter=True
    )
    torch.testing.assert_close(each["weight"].double(), exact, rtol=1e-5, atol=0)


@pytest.mark.slow
def test_bfloat16_sums_move_by_no_more_than_c():
    """A table tied by its transpose: the sum of many examples is not rounded to bfloat16."""

    class Tied(nn.Module):
        def __init__(self, scale):
            super().__init__()
            self.table, self.scale = nn.Embedding(30, 8), scale

        def forward(self, tokens):
            table = self.table.weight.T
            return self.table(tokens).mean(1).tanh() @ (table * self.scale if self.scale else table)

    torch.manual_seed(0)
    tokens = torch.randint(30, (300, 5))
    tokens[1:] = tokens[1]
    first = torch.arange(300) == 0
    for scale in (None, 1.1):  # the second one rounds on its way to the table
        model = Tied(scale).bfloat16()
        for method in ("auto", "materialize"):
            sums = [
                dpt.clipped_grad_sum(
                    lambda m, i: (10 * m(i)).float().square().sum(1),
                    model,
                    tokens,
                    max_grad_norm=1.0,
                    mask=mask,
                    method=method,
                ).grads["table.weight"]
                for mask in (None, ~first)
            ]
            assert sums[0].dtype == torch.float32
            assert (sums[0] - sums[1]).double().norm() <= 1


class Mixed(nn.Module):
    """A layer of float32 before one of another dtype."""

    def __init__(self, last):
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 1).to(last)

    def forward(self, x):
        return self.last(self.first(x).to(self.last.weight.dtype))


@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
@pytest.mark.parametrize("last", [torch.float32, torch.float64])
def test_doubtful_norms_beside_wider_parameters(last, clipping):
    """Two tokens whose gradients almost cancel, so that the gradients are formed."""
    torch.manual_seed(0)
    x = torch.randn(5, 1, 3).repeat(1, 2, 1)
    x[:, 1] += 1e-5
    model = Mixed(last)

    def loss_fn(model, x):
        return (model(x)[..., 0] * torch.tensor([1.0, -1.0])).sum(1)

    options = {"max_grad_norm": 0.1, "clipping": clipping}
    found = dpt.clipped_grad_sum(loss_fn, model, x, **options)
    truth = dpt.clipped_grad_sum(loss_fn, model, x, method="loop", **options)
    # Below C a norm is as precise as the clip factors need: to 1e-4 C.
    torch.testing.assert_close(found.norms, truth.norms, rtol=1e-3, atol=1e-4 * 0.1)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 256.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_norms_of_moderate_lengths_are_finite_and_exact(dtype, scale):
    """Tables that pass by their largest length alone, with one example of any size or nan."""
    limits, passed = torch.finfo(dtype), []
    sizes = [0.0, *(limits.max**share for share in (0.0, 0.1, 0.2, 0.3, 0.45)), torch.nan]
    for acts, grads, kept in itertools.product(sizes, repeat=3):
        product = Product(data(4, 3).to(dtype), data(4, 2).to(dtype))
        product.acts[2] *= acts
        product.grads_out[2] *= grads
        known = {"kept": torch.tensor([1.0, kept, 1.0, 1.0], dtype=dtype)}
        found = table_of({"weight": product}, known, {"bias": "weight"}, n=4, scale=scale)
        for tolerated in (1e-14, 1e-4, 1.0):
            if found.are_moderate(tolerated):
                assert (found.errors().sum(0) <= tolerated).all()
                assert found.squares.sum(0).isfinite().all()
                passed.append((acts, grads, kept))
    assert (1.0, 1.0, 1.0) in passed
    assert max(map(max, passed)) > limits.max**0.15
