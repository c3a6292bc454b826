# SPDX-License-Identifier: Apache-2.0
"""Worker: a run of several ranks of which one may kill itself, and which goes on from a file."""

import datetime
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import dualdp_torch as dpt
from dualdp import checkpoint
from dualdp.ledger.ledger import Ledger
from dualdp_torch.noise.noise import NoiseSource
from dualdp_torch.parallel.process_group import Group
from tests.kill import notes
from tests.kill.train_torch import EVERY, data

#: Where a rank can die; a name that ends in "ed" is after the call.
PLACES = {
    **dict.fromkeys(("record", "recorded"), (Ledger, "record")),
    **dict.fromkeys(("reduce", "reduced"), (Group, "summed")),
    **dict.fromkeys(("noise", "noised"), (NoiseSource, "noisy_mean")),
    **dict.fromkeys(("write", "replaced"), (checkpoint.os, "replace")),
}


def die_at(folder, place, left):
    """Make this process kill itself where it passes a place for the `left`-th time, from 0."""
    owner, name = PLACES[place]
    real, count = getattr(owner, name), [left]

    def die():
        Path(folder, "died").write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)

    def passed(*args, **options):
        count[0] -= 1
        if count[0] < 0 and not place.endswith("ed"):
            die()
        found = real(*args, **options)
        if count[0] < 0:
            die()
        return found

    setattr(owner, name, passed)


def build(dropout=0.2):
    """Model, optimizer, loader: the same on every rank."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    return model, optimizer, DataLoader(data(), batch_size=16)


def train(folder, die=None, dropout=0.2, stop=None):
    """Train to the plan's end, or to step `stop`, in a folder that `notes.prepare` made.

    Returns:
        Parameters, what epsilon was at each turn, and what stopped the run, if something did.
    """
    several = dist.is_initialized()
    rank = dist.get_rank() if several else 0
    if die is not None and die[0] == rank:
        die_at(folder, *die[1:])
    path, loader = Path(folder, "run.safetensors"), None
    model, optimizer, loader = build(dropout)
    torch.manual_seed(100 + rank)
    module = DistributedDataParallel(model) if several else model
    said = {}
    try:
        if path.exists():
            engine = dpt.load_checkpoint(path, model=module, optimizer=optimizer)
            said["resumed"] = engine.ledger.position, engine.get_epsilon()
            module, optimizer, loader = engine.resume(data_loader=loader)
        else:
            engine = dpt.PrivacyEngine()
            module, optimizer, loader = engine.make_private(
                module=module, optimizer=optimizer, data_loader=loader, plan=notes.plan(folder)
            )
            dpt.save_checkpoint(path, model=module, optimizer=optimizer, engine=engine)
        notes.watch_noise(str(folder), "dualdp_torch.training.step")
        for x, y in loader.remaining():
            optimizer.zero_grad()
            F.cross_entropy(module(x), y).backward()
            optimizer.step()
            if engine.is_between_steps and engine.ledger.position % EVERY == 0:
                dpt.save_checkpoint(path, model=module, optimizer=optimizer, engine=engine)
            if engine.is_between_steps and engine.ledger.position == stop:
                break
    except RuntimeError as error:
        late = time.time() - float(Path(folder, "died").read_text())
        return {**said, "stopped": str(error), "late": late}
    return {
        **said,
        "parameters": {name: p.detach().clone() for name, p in model.named_parameters()},
        "epsilon": engine.get_epsilon(),
        "ledger": engine.ledger.to_json(),
        "releases": len(engine.ledger),
    }


PATIENCE = 2.0  # seconds that `hangs` waits


def hangs(folder):
    """Rank 1 does not come to a collective; what rank 0 says to it, and when."""
    limit = datetime.timedelta(seconds=PATIENCE)
    group = Group(dist.new_group(timeout=limit))
    start, said = time.monotonic(), "nothing"
    if group.is_first:
        try:
            group.gather("a test", None)
        except RuntimeError as error:
            said = str(error)
    waited = time.monotonic() - start
    dist.barrier()
    return said, waited
