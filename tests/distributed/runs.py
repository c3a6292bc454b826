# SPDX-License-Identifier: Apache-2.0
"""Whole runs of one process, of data-parallel processes, and of a sharded model."""

import functools

import torch
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from dualdp.plan import schedules
from dualdp.plan.correlated import strategies
from dualdp_torch.parallel import fsdp
from dualdp_torch.parallel.process_group import unwrapped

from . import models

STEPS = 6
#: Plan of 19 users with one to six of the 40 rows, of which a step draws at most three.
USERS = {"unit": "user", "rows_per_unit": 3, "num_examples": 19, "expected_batch_size": 5}
PAIRS = {"rows_per_unit": 2, "num_examples": 20, "expected_batch_size": 4}
BAND = {"sampler": "fixed_order", "correlation": strategies.band([1.0, 0.7, 0.2])}
ADAPTIVE = {"max_grad_norm": schedules.AdaptiveNorm(0.5, learning_rate=0.5)}
SCHEDULES = {
    "max_grad_norm": schedules.Linear(1.0, 0.3, STEPS),
    "noise_multiplier": schedules.Linear(0.3, 0.6, STEPS),
    "expected_batch_size": schedules.Linear(4, 16, STEPS),
}
WIDE, SINGLE = torch.float64, torch.float32
#: Name -> model, dtype, method, changes of the plan, options of DDP (None: no wrapper).
RUNS = {
    "schedules": ("mlp", WIDE, "auto", SCHEDULES, None),
    "small batches": ("mlp", SINGLE, "auto", ADAPTIVE | {"physical_batch_size": 2}, {}),
    "empty shares": ("mlp", WIDE, "book_keeping", {"expected_batch_size": 1}, {}),
    "by layer": (
        *("mlp", WIDE, "auto"),
        {"clipping": "per_layer", "sampler": "shuffle", "physical_batch_size": 3},
        {"static_graph": True},
    ),
    "two passes": ("broken", WIDE, "two_pass", BAND | {"physical_batch_size": 3}, {}),
    "cnn": ("cnn", SINGLE, "auto", {"noise": "portable"}, {"find_unused_parameters": True}),
    "gpt": ("gpt", WIDE, "auto", {"clipping": "automatic"}, {"gradient_as_bucket_view": True}),
    "tied": ("tied", WIDE, "auto", {"clipping": "per_layer", "expected_batch_size": 3}, {}),
    "pairs": ("gpt", WIDE, "auto", PAIRS | {"physical_batch_size": 2}, {}),
    "users": ("gpt", WIDE, "two_pass", USERS | {"physical_batch_size": 2}, {}),
    "users by layer": (
        *("mlp", WIDE, "auto"),
        USERS | {"clipping": "per_layer", "expected_batch_size": 1},
        None,
    ),
    "views": ("mlp", WIDE, "materialize", {"views": 3, "physical_batch_size": 2}, {}),
}
#: Number of processes -> what they run: everything by two.
SOME = {1: ["gpt"], 2: [*RUNS], 4: ["small batches", "cnn"]}
SUMS = ("empty shares", "cnn")  # whose loss is a sum
#: (40,) user of each row, who have five, three, two or one.
OWNERS = torch.cat([torch.arange(19), torch.arange(19) // 2, torch.zeros(2, dtype=torch.int64)])
OWNERS = OWNERS[torch.arange(40) * 7 % 40]


def named(way, size):
    """Names of the runs; a sharded model has no per-sample gradients of every layer at once."""
    return [name for name in SOME[size] if way == "ddp" or RUNS[name][2] in fsdp.METHODS]


def noisy(example, generator):
    """A view with noise on the inputs."""
    x, y = example
    return x + 0.1 * torch.randn(x.shape, generator=generator, dtype=x.dtype), y


def loss_of(name, out, y):
    if name == "pairs":
        losses = F.cross_entropy(out, y, reduction="none")
        return F.softplus(losses[::2] - losses[1::2].square()).mean()
    return F.cross_entropy(out, y, reduction="sum" if name in SUMS else "mean")


@functools.cache
def ended(name, way="alone"):
    """Parameters, epsilon and ledger at the end of a run."""
    kind, dtype, method, changes, wrapper = RUNS[name]
    model, data = models.build(kind, dtype)
    if way == "ddp" and wrapper is not None:
        model = DistributedDataParallel(model, **wrapper)
    if way == "fsdp":
        models.shard(model, reshard_after_forward=method != "two_pass")
    changes = dict(changes)
    options = {"loss_reduction": "sum" if name in SUMS else "mean"}
    if "views" in changes:
        options |= {"views": changes.pop("views"), "augment": noisy}
    run = models.plan(**{"num_steps": STEPS, **changes})
    if run.unit == "user":
        options["users"] = OWNERS
    if size := run.rows_per_item:
        data = TensorDataset(*[rows.unflatten(0, (-1, size)) for rows in data.tensors])
    engine, model, optimizer, loader = models.begin(model, data, run, method, **options)
    for x, y in loader:
        optimizer.zero_grad()
        loss_of(name, model(x), y).backward()
        optimizer.step()
    found = models.parameters(unwrapped(model)), engine.get_epsilon(), engine.ledger.to_json()
    engine.detach()
    return found


def runs(folder, way, *names):
    """Name -> what each of these runs ended with."""
    return {name: ended(name, way) for name in names}
