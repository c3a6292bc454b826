# SPDX-License-Identifier: Apache-2.0
"""Worker: a sharded run of which one process kills itself inside a step."""

import os
import signal
import time
import traceback
from pathlib import Path

import torch.distributed as dist

from dualdp_torch.noise.noise import NoiseSource
from dualdp_torch.parallel.fsdp import Shards
from tests.kill import notes

from . import sharded_models as models

MODEL, STEPS = "mlp", 6


def call_before(owner, name, act):
    """Make a function of a module or class act first."""
    real = getattr(owner, name)

    def both(*args, **options):
        act()
        return real(*args, **options)

    setattr(owner, name, both)


def train(folder, die=None):
    """Steps until the end, or until another process is lost.

    Args:
        folder: for the ledger of rank 0 and everybody's notes.
        die: (rank, place, step), the place being "gather" in the forward, "reduce", or "noise".
    """
    rank, at = dist.get_rank(), [0]
    model, data = models.build(MODEL)
    models.shard(model)

    def reached(place):
        if die == (rank, place, at[0]):
            Path(folder, "died").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)

    ledger = str(Path(folder, "run.ledger")) if rank == 0 else None
    engine, model, optimizer, loader = models.begin(
        model, data, models.plan(num_steps=STEPS), ledger=ledger
    )
    list(model)[2].register_forward_pre_hook(lambda *_: reached("gather"))
    call_before(Shards, "reduce", lambda: reached("reduce"))
    call_before(NoiseSource, "noisy_mean", lambda: reached("noise"))
    notes.watch_noise(str(folder), "dualdp_torch.training.step")
    said = {"stopped": None}
    try:
        for batch in loader:
            models.step(model, optimizer, batch)
            at[0] += 1
    except RuntimeError as error:
        died = float(Path(folder, "died").read_text())
        said = {"stopped": "".join(traceback.format_exception(error)), "late": time.time() - died}
    engine.ledger.close()
    return said | {"steps": at[0]}
