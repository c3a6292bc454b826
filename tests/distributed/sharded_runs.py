# SPDX-License-Identifier: Apache-2.0
"""Whole runs of sharded models, and of the same models on one device."""

import torch

from dualdp.plan.correlated import strategies
from dualdp.plan.schedules import AdaptiveNorm

from . import parallel
from . import sharded_models as models

STEPS = 10
CORRELATED = {"sampler": "fixed_order", "num_steps": 8}
WINDOW, BAND = strategies.window([1.0, -0.6, 0.3]), strategies.band([1.0, 0.7, 0.2])
BLT = strategies.blt(decays=[0.8, 0.3], scales=[0.5, 0.2])
#: Name -> model, dtype, method, changes of the plan, options of fully_shard.
RUNS = {
    "mlp": ("mlp", torch.float64, "auto", {}, {}),
    "mlp small batches": ("mlp", torch.float32, "auto", {"physical_batch_size": 2}, {}),
    "mlp empty shares": ("mlp", torch.float64, "book_keeping", {"expected_batch_size": 1}, {}),
    "mlp two passes": ("mlp", torch.float64, "two_pass", {}, {"reshard_after_forward": False}),
    "mlp by layer": (
        "mlp",
        torch.float64,
        "auto",
        {"clipping": "per_layer", "physical_batch_size": 3},
        {},
    ),
    "cnn": ("cnn", torch.float64, "auto", {}, {"reshard_after_forward": True}),
    "cnn portable": ("cnn", torch.float32, "auto", {"noise": "portable"}, {}),
    "gpt": ("gpt", torch.float64, "auto", {}, {}),
    "gpt single": ("gpt", torch.float32, "auto", {"expected_batch_size": 3}, {}),
    "gpt two passes": ("gpt", torch.float64, "two_pass", {"expected_batch_size": 2}, {}),
    "gpt by layer": ("gpt", torch.float64, "auto", {"clipping": "per_layer"}, {}),
    "tied": ("tied", torch.float64, "auto", {}, {}),
    "tied by layer": ("tied", torch.float64, "auto", {"clipping": "per_layer"}, {}),
    "one broken example": ("broken", torch.float64, "two_pass", {}, {}),
    "window": ("mlp", torch.float64, "auto", CORRELATED | {"correlation": WINDOW}, {}),
    "band": ("gpt", torch.float32, "auto", CORRELATED | {"correlation": BAND}, {}),
    "blt portable": (
        "mlp",
        torch.float64,
        "two_pass",
        CORRELATED | {"correlation": BLT, "noise": "portable", "physical_batch_size": 3},
        {},
    ),
    "users": (*("gpt", torch.float64, "two_pass"), parallel.USERS | {"physical_batch_size": 2}, {}),
    "users by layer": (
        *("mlp", torch.float64, "auto"),
        parallel.USERS | {"clipping": "per_layer", "expected_batch_size": 1},
        {},
    ),
    "pairs by layer": (
        *("gpt", torch.float64, "auto"),
        parallel.PAIRS | {"clipping": "per_layer", "physical_batch_size": 2},
        {},
    ),
    "adaptive": ("mlp", torch.float64, "auto", {"max_grad_norm": AdaptiveNorm(0.5)}, {}),
}


def run(name, sharded):
    """Parameters and epsilon of one run."""
    kind, dtype, method, changes, options = RUNS[name]
    model, data = models.build(kind, dtype)
    if sharded:
        models.shard(model, **options)
    users = {"users": parallel.OWNERS} if "unit" in changes else {}
    plan = models.plan(**{"num_steps": STEPS, **changes})
    return models.train(model, parallel.items(data, plan), plan, method, **users)


def relu_steps():
    """(parameters before, parameters after) of a few steps of a model with kinks."""
    model, data = models.build("relu")
    models.shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    engine, model, optimizer, loader = models.begin(model, data, models.plan(), optimizer=optimizer)
    seen = []
    for _, batch in zip(range(6), loader, strict=False):
        before = models.parameters(model)
        models.step(model, optimizer, batch)
        seen.append((before, models.parameters(model)))
    engine.detach()
    return seen


def runs(folder, *names):
    """Name -> what each of these runs ended with, sharded."""
    return {name: relu_steps() if name == "relu" else run(name, sharded=True) for name in names}
