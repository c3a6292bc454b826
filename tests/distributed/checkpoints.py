# SPDX-License-Identifier: Apache-2.0
"""A sharded model that is trained and saved after some of ten steps, and that goes on."""

import torch

from dualdp.plan.correlated import strategies
from dualdp_torch.checkpoint.sharded import load_sharded_checkpoint, save_sharded_checkpoint

from . import models

PLAN = {"num_steps": 10, "expected_batch_size": 6, "physical_batch_size": 4}
#: Noise that depends on all steps before, which no checkpoint holds.
PLAN |= {"sampler": "fixed_order", "correlation": strategies.band([1.0, 0.7, 0.2])}


def optimizer_of(model):
    """Adam, whose state has tensors in pieces and plain ones."""
    return torch.optim.Adam(model.parameters(), lr=0.01)


def save(folder, run, steps, sharded=True):
    """Train and save as `run`; what was saved before, at half of the steps, is replaced."""
    model, data = models.build(dtype=torch.float64)
    if sharded:
        models.shard(model)
    engine, model, optimizer, loader = models.begin(
        model, data, models.plan(**PLAN), optimizer=optimizer_of(model)
    )
    for batch in loader:
        models.step(model, optimizer, batch)
        if engine.is_between_steps and engine.ledger.position in (steps // 2, steps):
            save_sharded_checkpoint(run, model=model, optimizer=optimizer, engine=engine)
        if engine.ledger.position == steps:
            break
    engine.detach()


def go_on(folder, run, sharded=True, load=load_sharded_checkpoint):
    """Load into a model of other weights and run the rest; parameters, epsilon, releases."""
    model, data = models.build(dtype=torch.float64)
    if sharded:
        models.shard(model)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)
    optimizer = optimizer_of(model)
    engine = load(run, model=model, optimizer=optimizer)
    loader = torch.utils.data.DataLoader(data, batch_size=6)
    for batch in engine.resume(data_loader=loader)[2].remaining():
        models.step(model, optimizer, batch)
    ended = models.parameters(model), engine.get_epsilon(), len(engine.ledger)
    engine.detach()
    return ended
