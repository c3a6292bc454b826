# SPDX-License-Identifier: Apache-2.0
"""Runs whose unit of privacy has several rows: users, pairs and views of an example."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from dualdp import units
from dualdp.plan.batches import drawn_rows
from dualdp.randomness import SegmentBits
from dualdp_torch.training.loader import DrawnViews, Views
from tests.dualdp_torch import loop
from tests.dualdp_torch.checks import data, ids, randomise

K, C, USERS, PAIRS = 3, 0.5, 25, 40
MODES = ("auto", "book_keeping", "two_pass", "materialize", "vmap", "loop")
#: (60,) user of each row, in no order; most have one to three rows.
OWNERS = 2 * np.random.default_rng(3).permutation(
    [*range(USERS), *range(15), *([4] * 8), *([7] * 12)]
)


class Parts(nn.Module):
    """Layers whose rules take rows of a unit as positions, and some whose rules don't."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv1d(2, 4, 2), nn.GroupNorm(2, 4)
        self.scale, self.head = nn.Parameter(torch.zeros(4, 1)), nn.Linear(8, 3)

    def forward(self, x):
        hidden = self.norm(self.conv(x.view(-1, 2, 3))).tanh() * self.scale
        return self.head(hidden.flatten(1))


class Kind:
    """Data, arguments and loss of a kind of run; a batch is x, y and numbers of rows."""

    k = K  # rows of a unit
    middle = 0.8  # a norm among those of the units
    data = TensorDataset(data(60, 6).double(), ids(3, 60), torch.arange(60))
    settings: dict = {}  # of the plan
    options: dict = {}  # of make_private
    at_resume: dict = {}
    refused_at_resume: tuple = ()

    def parts(self, rows=None, model=None, **options):
        model = randomise(model or Parts()).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        return model, optimizer, DataLoader(rows or self.data, batch_size=8, **options)

    def plan(self, **changes):
        usual = {"expected_batch_size": 8, "num_steps": 3, "max_grad_norm": C}
        return loop.plan(**usual | self.settings | changes)

    def start(self, given=None, **options):
        options = {"plan": self.plan(), "checks": 1.0} | self.options | options
        return loop.start(given or self.parts(), **options)

    def losses(self, out, y):
        """(rows,) losses, or of the units."""
        return F.cross_entropy(out, y, reduction="none")

    def train(self, model, optimizer, loader, reduction="mean", losses=None):
        """The user's loop; returns the rows of each batch."""
        seen = []
        for x, y, rows in loader:
            optimizer.zero_grad()
            getattr((losses or self.losses)(model(x), y), reduction)().backward()
            optimizer.step()
            seen.append(rows.tolist())
        return seen

    def by_hand(self, model, run, losses=None):
        """Train by plain autograd: the mean loss of each unit's own rows, clipped once."""

        def loss_of(step, unit):
            x, y = self.rows_of(run, step, unit)
            return (losses or self.losses)(model(x), y).mean()

        loop.train_units(model, run, loss_of)

    def rows_of(self, run, step, unit):
        """Inputs and labels of a unit in a step."""
        return tuple(t[unit] for t in self.data.tensors[:2])

    def replaced(self, value):
        """The data with other inputs in all rows of one unit."""
        x, *more = self.data.tensors
        x = x.clone()
        x[7] = value
        return TensorDataset(x, *more)


class OfUsers(Kind):
    settings = {"unit": "user", "rows_per_unit": K, "num_examples": USERS}
    options = at_resume = {"users": OWNERS}
    refused_at_resume = (
        ({"users": None}, "users is missing"),
        ({"users": np.arange(len(OWNERS))}, "The data has"),
    )

    def drawn(self, run, step, users):
        bits, rows = SegmentBits(run.seed), units.user_rows(OWNERS)
        return drawn_rows(run, bits, step, np.array(users), rows, run.rows_per_unit)

    def rows_of(self, run, step, unit):
        drawn = self.drawn(run, step, [unit])
        return super().rows_of(run, step, drawn.rows[drawn.weights > 0])

    def replaced(self, value):
        x, *more = self.data.tensors
        x = x.clone()
        x[OWNERS == 2 * 4] = value  # of ten rows
        return TensorDataset(x, *more)


def score(out):
    return (out * torch.tensor([1.0, -2.0, 0.5])).sum(1).tanh()


def preference(out, y=None):
    """(2 u, 3) -> (u,) losses that join the rows of a pair, in no symmetric way."""
    chosen, rejected = score(out[::2]), score(out[1::2])
    return F.softplus(0.3 - chosen * rejected.exp())


def items(k):
    """Items of k rows."""
    x, rows = data(PAIRS * k, 6).double(), torch.arange(PAIRS * k)
    return TensorDataset(x.view(PAIRS, k, 6), rows.view(PAIRS, k) % 3, rows.view(PAIRS, k))


class OfPairs(Kind):
    middle = 0.9

    def __init__(self, k=2):
        self.k, self.data = k, items(k)
        self.settings = {"num_examples": PAIRS, "rows_per_unit": k}

    def losses(self, out, y):
        return preference(out)


def noisy(example, generator):
    """A view: the inputs with noise of the view's own generator."""
    x, *rest = example
    return x + 0.3 * torch.randn(x.shape, generator=generator), *rest


class OfViews(Kind):
    options = {"views": K, "augment": noisy}
    at_resume = {"augment": noisy}
    refused_at_resume = (({}, "views=3 came without augment"),)

    def rows_of(self, run, step, unit):
        (drawn,) = Views(K, noisy).keys(SegmentBits(run.seed), step, [unit])
        x, y, _ = zip(*DrawnViews(self.data, noisy)[drawn], strict=True)
        return torch.stack(x), torch.stack(y)


KINDS = {"users": OfUsers(), "pairs": OfPairs(), "views": OfViews()}
