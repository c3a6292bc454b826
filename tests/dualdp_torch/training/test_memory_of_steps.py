# SPDX-License-Identifier: Apache-2.0
"""A step leaves nothing of its recorded forward in memory."""

import gc
import weakref

import torch
from torch import nn

from dualdp_torch.per_sample.one_forward import Forward
from tests.dualdp_torch.checks import data, ids
from tests.dualdp_torch.loop import plan, start


class Sequence(nn.Module):
    """An LSTM, whose captured outputs are leaves."""

    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


def forwards_in_memory():
    gc.collect()
    return sum(isinstance(kept, Forward) for kept in gc.get_objects())


def test_forwards_are_let_go_after_their_step():
    model, before = Sequence(), forwards_in_memory()
    inputs = torch.utils.data.TensorDataset(data(60, 6, 4), ids(3, 60))
    parts = model, torch.optim.SGD(model.parameters(), lr=0.1), torch.utils.data.DataLoader(inputs)
    _, model, optimizer, loader = start(parts, checks=0, plan=plan(num_steps=5))
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert forwards_in_memory() <= before + 1


def test_a_loop_that_ends_before_its_step_leaves_nothing():
    def stopped_run():
        model = Sequence()
        inputs = torch.utils.data.TensorDataset(data(60, 6, 4), ids(3, 60))
        parts = (
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            torch.utils.data.DataLoader(inputs),
        )
        _, model, _, loader = start(parts, checks=0, plan=plan(num_steps=5))
        x, y = next(iter(loader))
        nn.functional.cross_entropy(model(x), y).backward()
        return weakref.ref(model)

    before = forwards_in_memory()
    model = stopped_run()
    assert forwards_in_memory() <= before
    assert model() is None
