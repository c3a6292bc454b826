# SPDX-License-Identifier: Apache-2.0
"""The second pass of "two_pass" is the same network as the first, or its sum is not taken (60)."""

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
from tests.dualdp_torch.per_sample.loops import size_of, squares

N = 8


def largest_contribution(model, x, loss=squares):
    """Largest norm of what one example adds to the sum, in units of C; masks are another draw."""
    masks = [None, *(torch.arange(N) == row for row in range(N))]
    options = {"max_grad_norm": 0.01, "method": "two_pass", "check": "off"}
    found = [dpt.clipped_grad_sum(loss, model, x, mask=mask, **options).grads for mask in masks]
    return max(map(size_of, found[1:])) / 0.01


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


@pytest.mark.parametrize(
    "kind", ["dropout", "torch generator", "random", "numpy", "own random", "own numpy", "no rule"]
)
def test_random_numbers_are_those_of_the_first_pass(kind, monkeypatch):
    """By a second pass; else this would be book-keeping under another name."""
    made, real = [], call.replace
    monkeypatch.setattr(
        dpt.per_sample.api, "replace", lambda c, **o: made.append(o) or real(c, **o)
    )
    torch.manual_seed(0)
    assert largest_contribution(Random(kind), 100 * data(N, 6)) <= 1
    assert not [options for options in made if options.get("method") == "book_keeping"]


SECRET = random.Random(1)


class Hidden(Random):
    """Draws from a generator that no module holds, from the moment that the class has `draws`."""

    draws, is_normalised = 0, False

    def mask(self, shape):
        draw = SECRET.random if self.draws else lambda: 0.0
        return torch.tensor([[draw() < 0.5 for _ in range(32)] for _ in range(shape[0])])

    def forward(self, x):
        out = super().forward(x)
        return F.layer_norm(out, (3,)) if self.is_normalised else out


@pytest.mark.parametrize("is_normalised", [False, True])
def test_draws_that_can_not_be_repeated_are_told_by_the_losses(is_normalised, monkeypatch):
    """Or by the smallest parameters, where a normalised output hides them from the losses."""
    torch.manual_seed(0)
    monkeypatch.setattr(Hidden, "is_normalised", is_normalised)
    x, model = 100 * data(N, 6), Hidden("hidden")
    dpt.clipped_grad_sum(squares, model, x, max_grad_norm=1.0, method="two_pass")
    monkeypatch.setattr(Hidden, "draws", 1)  # after a first call, which would refuse it
    assert largest_contribution(model, x) <= 1
    if not is_normalised:
        with pytest.raises(UnsupportedLayerError, match="The loss of an example is another one"):
            dpt.per_sample_norms(squares, Hidden("hidden"), x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_outputs_of_another_forward_are_told_apart(dtype):
    """Also where the sum of their sizes exceeds the largest number of the dtype."""
    outputs = torch.linspace(-4, 4, 1_000_000).to(dtype)
    assert is_same_forward(outputs, outputs.clone())
    assert not is_same_forward(outputs, outputs.roll(1000))
