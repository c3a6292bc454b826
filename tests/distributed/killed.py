# SPDX-License-Identifier: Apache-2.0
"""Worker: runs of which one rank may kill itself; one goes on from a file, one is sharded."""

import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import dualdp_torch as dpt
from dualdp import checkpoint
from dualdp.ledger.ledger import Ledger
from dualdp_torch.noise.noise import NoiseSource
from dualdp_torch.parallel.fsdp import Shards
from dualdp_torch.parallel.process_group import Group
from tests.kill import notes
from tests.kill.train_torch import EVERY, data

from . import models

#: Where a rank can die: before the call, or after that of a name that ends in "ed".
PLACES = {
    "record": (Ledger, "record"),
    "reduce": (Group, "summed"),
    "shard": (Shards, "reduce"),
    "noised": (NoiseSource, "noisy_mean"),
    "write": (checkpoint.os, "replace"),
}


def die_at(rank, place, left):
    """Make this rank kill itself where it passes a place for the `left`-th time, from 0."""
    owner, name = PLACES[place]
    real, count = getattr(owner, name), [left]

    def passed(*args, **options):
        count[0] -= 1
        if count[0] < 0 and not place.endswith("ed"):
            os.kill(os.getpid(), signal.SIGKILL)
        found = real(*args, **options)
        if count[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    if dist.get_rank() == rank:
        setattr(owner, name, passed)


def train(folder, die=None, dropout=0.2, stop=None):
    """Train to the plan's end, or to step `stop`, in a folder that `notes.prepare` made.

    Returns:
        Parameters, what epsilon was at each turn, and what stopped the run, if something did.
    """
    if die is not None:
        die_at(*die)
    path, said = Path(folder, "run.safetensors"), {}
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 3))
    parts = {
        "model": DistributedDataParallel(model),
        "optimizer": torch.optim.Adam(model.parameters(), lr=0.01),
    }
    torch.manual_seed(100 + dist.get_rank())
    loader = DataLoader(data(), batch_size=16)
    try:
        if path.exists():
            engine = dpt.load_checkpoint(path, **parts)
            said["resumed"] = engine.ledger.position, engine.get_epsilon()
            *_, loader = engine.resume(data_loader=loader)
        else:
            engine = dpt.PrivacyEngine()
            module, optimizer = parts.values()
            *_, loader = engine.make_private(
                module=module, optimizer=optimizer, data_loader=loader, plan=notes.plan(folder)
            )
            dpt.save_checkpoint(path, engine=engine, **parts)
        notes.watch_noise(str(folder), "dualdp_torch.training.step")
        for batch in loader.remaining():
            models.step(*parts.values(), batch)
            if engine.is_between_steps and engine.ledger.position % EVERY == 0:
                dpt.save_checkpoint(path, engine=engine, **parts)
            if engine.is_between_steps and engine.ledger.position == stop:
                break
    except RuntimeError as error:
        return {**said, "stopped": str(error)}
    ended = {"epsilon": engine.get_epsilon(), "releases": len(engine.ledger)}
    return said | ended | {"parameters": models.parameters(model)}


def train_sharded(folder, die):
    """Steps of a sharded model until another process is lost."""
    die_at(*die)
    ledger = str(folder / "run.ledger") if dist.get_rank() == 0 else None
    model, rows = models.build()
    engine, model, optimizer, loader = models.begin(models.shard(model), rows, ledger=ledger)
    notes.watch_noise(str(folder), "dualdp_torch.training.step")
    try:
        for batch in loader:
            models.step(model, optimizer, batch)
    except RuntimeError as error:
        engine.ledger.close()
        return {"stopped": str(error)}
