# SPDX-License-Identifier: Apache-2.0
"""Worker: private steps of data-parallel and sharded models, and the bytes that each sent."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import TensorDataset

from . import sharded_models as models
from .wire import bytes_sent

RANKS_SHARE = 16  # expected batch size over all ranks
STEPS = 5
#: What a case may say, and what holds where it does not.
USUAL = {
    "sharding": "data",
    "method": "book_keeping",
    "clipping": "flat",
    "physical_batch_size": None,
    "compute_bytes": 4,
    "root": False,  # whether all layers but one are gathered with the whole model
}


def built():
    """Layers whose rows 4 divides, the same in every process."""
    torch.manual_seed(3)
    layers = [nn.Linear(16, 256), nn.Tanh()]
    for _ in range(3):
        layers += [nn.Linear(256, 256), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(256, 8))


def prepared(case):
    """The model of a case."""
    model = built()
    if case["sharding"] == "full":
        dtype = torch.bfloat16 if case["compute_bytes"] == 2 else None
        policy = MixedPrecisionPolicy(param_dtype=dtype)
        layers = [layer for layer in model if isinstance(layer, nn.Linear)]
        for layer in layers[2:3] if case["root"] else layers:
            fully_shard(layer, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
    return model


def counted(case):
    """Bytes that this process sent in each step, and its physical batches in one step."""
    model = prepared(case)
    data = TensorDataset(torch.randn(64, 16), torch.randint(8, (64,)))
    run = models.plan(
        num_examples=64,
        expected_batch_size=RANKS_SHARE,
        sampler="shuffle",
        num_steps=STEPS,
        clipping=case["clipping"],
        physical_batch_size=case["physical_batch_size"],
    )
    engine, model, optimizer, loader = models.begin(model, data, run, case["method"])
    sent, before, chunks = [], bytes_sent(), 0
    for batch in loader:
        models.step(model, optimizer, batch)
        chunks += 1
        if engine.is_between_steps:
            sent.append(bytes_sent() - before)
            before = bytes_sent()
    dist.barrier()
    engine.detach()
    return {"sent": sent, "chunks": chunks / len(sent)}


def counts(folder, cases):
    """What this process counted, case by case."""
    return [counted(USUAL | case) for case in cases]
