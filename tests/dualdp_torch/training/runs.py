# SPDX-License-Identifier: Apache-2.0
"""A run that stands at its first batch, and a loop with any loss."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from tests.dualdp_torch.loop import plan, start

# JAX, which other tests bring into this process, warns of every fork.
forks = pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")


class Open:
    """Engine, model, optimizer and loader of a run, what was `made` before, and its first batch."""

    def __init__(self, parts=None, make=None, **options):
        self.engine, self.model, self.optimizer, self.loader = start(
            parts, **{"plan": plan(), **options}
        )
        self.made = make and make(self.engine)
        self.batches = iter(self.loader)
        self.x, self.y, *self.more = next(self.batches)

    def loss(self):
        return F.cross_entropy(self.model(self.x), self.y)

    def step(self):
        self.loss().backward()
        self.optimizer.step()


def fit(model, optimizer, loader, loss_of):
    """The user's loop, with the loss `loss_of(model, *batch)`."""
    for batch in loader:
        optimizer.zero_grad()
        loss_of(model, *batch).backward()
        optimizer.step()


def sgd(model, loader, lr=0.1):
    """Parts of a run."""
    return model, torch.optim.SGD(model.parameters(), lr=lr), loader


def end_of(model):
    """Parameters, one array."""
    return torch.cat([p.detach().flatten() for p in model.parameters()])
