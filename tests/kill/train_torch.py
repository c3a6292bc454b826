# SPDX-License-Identifier: Apache-2.0
"""A small torch run that goes on from its last checkpoint, if there is one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import torch._dynamo  # noqa: F401  which every optimizer imports; here it is done once for all runs
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import dualdp_torch as dpt
from tests.kill import notes

EVERY = 3  # steps between two checkpoints


def data() -> TensorDataset:
    """Inputs and classes."""
    rng = np.random.default_rng(1)
    x = torch.from_numpy(rng.normal(size=(notes.NUM_EXAMPLES, 6))).float()
    return TensorDataset(x, torch.from_numpy(rng.integers(0, 3, notes.NUM_EXAMPLES)))


def main(folder: str, die: tuple[str, int] | None = None) -> None:
    """Train to the plan's end in a folder that `notes.prepare` made.

    Args:
        folder: holds plan, checkpoint and notes.
        die: where the process kills itself, see `notes.die_at`.
    """
    torch.set_num_threads(1)
    notes.die_at(die)
    path = Path(folder, "run.safetensors")
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loader = DataLoader(data(), batch_size=16)
    if path.exists():
        engine = dpt.load_checkpoint(path, model=model, optimizer=optimizer)
        notes.write(folder, resumed=engine.ledger.position, epsilon=engine.get_epsilon())
        model, optimizer, loader = engine.resume(data_loader=loader)
    else:
        engine = dpt.PrivacyEngine()
        model, optimizer, loader = engine.make_private(
            module=model, optimizer=optimizer, data_loader=loader, plan=notes.plan(folder)
        )
        dpt.save_checkpoint(path, model=model, optimizer=optimizer, engine=engine)
        notes.write(folder, started=True)
    notes.watch_noise(folder, "dualdp_torch.training.step")
    for x, y in loader.remaining():
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if engine.ledger.position % EVERY == 0:
            dpt.save_checkpoint(path, model=model, optimizer=optimizer, engine=engine)
    arrays = {name: p.detach().numpy() for name, p in model.named_parameters()}
    notes.finish(folder, arrays, engine.ledger)
