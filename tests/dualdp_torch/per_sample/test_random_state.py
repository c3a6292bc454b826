# SPDX-License-Identifier: Apache-2.0
"""The second pass of "two_pass" is the same network as the first, or its sum is not taken."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dualdp_torch as dpt
from dualdp import UnsupportedLayerError
from dualdp_torch.per_sample import call
from dualdp_torch.per_sample.vmap_and_loop import is_same_forward
from tests.dualdp_torch.checks import data

N = 8


def squares(model, x):
    return model(x).flatten(1).square().sum(1)


def largest_contribution(model, x, loss=squares):
    """Largest norm of what one example adds to the sum, in units of C; masks are another draw."""
    bound, found = 0.01, []
    for row in (None, *range(N)):
        mask = None if row is None else torch.arange(N) == row
        sums = dpt.clipped_grad_sum(
            loss, model, x, max_grad_norm=bound, mask=mask, method="two_pass", check="off"
        ).grads
        found.append(torch.stack([g.double().norm() for g in sums.values()]).norm() / bound)
    return float(max(found[1:]))


class Random(nn.Module):
    """A mask on the hidden layer, by a generator of some kind."""

    def __init__(self, kind):
        super().__init__()
        self.first, self.second = nn.Linear(6, 32), nn.Linear(32, 3)
        self.kind, self.own = kind, torch.Generator()
        self.rng, self.python = np.random.default_rng(0), random.Random(0)
        self.offset = nn.Parameter(torch.zeros(32))

    def mask(self, shape):
        if self.kind in ("dropout", "no rule"):
            return F.dropout(torch.ones(shape), 0.5)
        if self.kind == "torch generator":
            return torch.bernoulli(torch.full(shape, 0.5), generator=self.own)
        draw = {
            "random": random.random,
            "numpy": np.random.rand,  # noqa: NPY002
            "own random": self.python.random,
            "own numpy": self.rng.random,
        }[self.kind]
        return torch.tensor([[draw() < 0.5 for _ in range(shape[1])] for _ in range(shape[0])])

    def forward(self, x):
        h = self.first(x)
        if self.kind == "no rule":
            h = torch.atan2(h, self.offset + 1)
        return self.second(h.tanh() * self.mask(h.shape))


KINDS = ("dropout", "torch generator", "random", "numpy", "own random", "own numpy", "no rule")


@pytest.mark.parametrize("kind", KINDS)
def test_random_numbers_are_those_of_the_first_pass(kind):
    torch.manual_seed(0)
    assert largest_contribution(Random(kind), 100 * data(N, 6)) <= 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_pass_is_taken_where_draws_can_be_repeated(kind, monkeypatch):
    """Else this would be book-keeping under another name; what no rule covers goes through vmap."""
    made, real = [], call.replace
    monkeypatch.setattr(
        dpt.per_sample.api, "replace", lambda c, **o: made.append(o) or real(c, **o)
    )
    dpt.clipped_grad_sum(squares, Random(kind), data(N, 6), max_grad_norm=0.1, method="two_pass")
    assert not [options for options in made if options.get("method") == "book_keeping"]


SECRET = random.Random(1)


class Hidden(Random):
    """Draws from a generator that no module holds, from the moment that the class has `draws`."""

    draws = 0

    def mask(self, shape):
        draw = SECRET.random if self.draws else lambda: 0.0
        return torch.tensor([[draw() < 0.5 for _ in range(32)] for _ in range(shape[0])])


def begin_to_draw(model, x, monkeypatch):
    """After a first call, which would refuse it; a module that is set to draw is examined again."""
    dpt.clipped_grad_sum(squares, model, x, max_grad_norm=1.0, method="two_pass")
    monkeypatch.setattr(Hidden, "draws", 1)
    return model


def test_draws_that_can_not_be_repeated_are_told_by_the_losses(monkeypatch):
    torch.manual_seed(0)
    x = 100 * data(N, 6)
    begun = Hidden("hidden")
    begun.draws = 1
    with pytest.raises(UnsupportedLayerError, match="The loss of an example is another one"):
        dpt.per_sample_norms(squares, begun, x)
    assert largest_contribution(begin_to_draw(Hidden("hidden"), x, monkeypatch), x) <= 1


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_transformer_layers_with_dropout(p):
    """Attention is captured as other functions, which draw their masks in the same order.

    A normalised output has the same squares whatever the masks are: losses alone would not tell.
    """
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=p, batch_first=True)
    weights = data(16)
    x = data(N, 5, 16)
    assert largest_contribution(layer, x) <= 1
    assert largest_contribution(layer, x, lambda m, x: (m(x) @ weights).sum(1)) <= 1


def test_masks_that_the_losses_hide_are_told_by_the_smallest_parameters(monkeypatch):
    class Normalised(Hidden):
        def forward(self, x):
            return F.layer_norm(super().forward(x), (3,))

    torch.manual_seed(0)
    x = 100 * data(N, 6)
    assert largest_contribution(begin_to_draw(Normalised("hidden"), x, monkeypatch), x) <= 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_outputs_of_another_forward_are_told_apart(dtype):
    """Also where the sum of their sizes exceeds the largest number of the dtype."""
    outputs = torch.linspace(-4, 4, 1_000_000).to(dtype)
    assert is_same_forward(outputs, outputs.clone())
    assert not is_same_forward(outputs, outputs.roll(1000))
