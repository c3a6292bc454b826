# SPDX-License-Identifier: Apache-2.0
"""Worker: whole data-parallel runs, with and without DistributedDataParallel."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import dualdp_torch as dpt
from dualdp.plan import schedules
from dualdp.plan.correlated import strategies
from dualdp_torch.parallel.process_group import fingerprints, unwrapped

from . import sharded_models as models

STEPS = 20
#: Plan of 19 users with one to six of the 40 rows, of which a step draws at most three.
USERS = {"unit": "user", "rows_per_unit": 3, "num_examples": 19, "expected_batch_size": 5}
PAIRS = {"rows_per_unit": 2, "num_examples": 20, "expected_batch_size": 4}
#: Name -> model, dtype, how it is wrapped, method, changes of the plan, and views.
RUNS = {
    "mlp": ("mlp", torch.float64, None, "auto", {}),
    "mlp small batches": ("mlp", torch.float32, {}, "auto", {"physical_batch_size": 2}),
    "mlp empty shares": ("mlp", torch.float64, {}, "auto", {"expected_batch_size": 1}),
    "mlp empty small": (
        *("mlp", torch.float64, None, "book_keeping"),
        {"expected_batch_size": 2, "physical_batch_size": 1},
    ),
    "mlp adaptive": (
        *("mlp", torch.float64, {}, "auto"),
        {"max_grad_norm": schedules.AdaptiveNorm(0.5, learning_rate=0.5)},
    ),
    "mlp schedules": (
        *("mlp", torch.float64, None, "materialize"),
        {
            "max_grad_norm": schedules.Linear(1.0, 0.3, STEPS),
            "noise_multiplier": schedules.Linear(0.3, 0.6, STEPS),
            "expected_batch_size": schedules.Linear(4, 16, STEPS),
        },
    ),
    "mlp by layer": (
        *("mlp", torch.float64, {"static_graph": True}, "auto"),
        {"clipping": "per_layer"},
    ),
    "mlp automatic": ("mlp", torch.float64, None, "vmap", {"clipping": "automatic"}),
    "mlp two passes": ("mlp", torch.float64, {}, "two_pass", {"physical_batch_size": 3}),
    "mlp shuffled": ("mlp", torch.float64, None, "auto", {"sampler": "shuffle"}),
    "mlp correlated": (
        *("mlp", torch.float64, {}, "auto"),
        {"sampler": "fixed_order", "correlation": strategies.band([1.0, 0.7, 0.2])},
    ),
    "cnn": ("cnn", torch.float64, {"find_unused_parameters": True}, "auto", {}),
    "cnn single": ("cnn", torch.float32, None, "auto", {"noise": "portable"}),
    "gpt": ("gpt", torch.float64, {"gradient_as_bucket_view": True}, "auto", {}),
    "gpt single": ("gpt", torch.float32, None, "two_pass", {"physical_batch_size": 3}),
    "tied": ("tied", torch.float64, {}, "auto", {}),
    "mlp views": ("mlp", torch.float64, {}, "auto", {"views": 3, "physical_batch_size": 2}),
    "mlp pairs": (
        *("mlp", torch.float64, {}, "auto"),
        PAIRS,
    ),
    "mlp users": ("mlp", torch.float64, {}, "auto", USERS | {"physical_batch_size": 2}),
    "mlp users empty shares": (
        "mlp",
        torch.float64,
        {},
        "auto",
        USERS | {"expected_batch_size": 1},
    ),
}
#: (40,) user of each row, who have five, three, two or one.
OWNERS = torch.cat([torch.arange(19), torch.arange(19) // 2, torch.zeros(2, dtype=torch.int64)])
OWNERS = OWNERS[torch.arange(40) * 7 % 40]
#: Runs whose loss is a sum.
SUMS = ("mlp empty shares", "cnn")


def begin(name, wrap=False):
    """Engine and parts of one of the runs."""
    kind, dtype, options, method, changes = RUNS[name]
    model, data = models.build(kind, dtype)
    if wrap and options is not None:
        model = DistributedDataParallel(model, **options)
    views, changes = changes.get("views", 1), {k: v for k, v in changes.items() if k != "views"}
    run = models.plan(**{"num_steps": STEPS, **changes})
    options = {"loss_reduction": "sum" if name in SUMS else "mean", "views": views}
    if run.unit == "user":
        options["users"] = OWNERS
    return models.begin(
        model, items(data, run), run, method, augment=noisy if views > 1 else None, **options
    )


def items(data, run):
    """The data as items of the plan's rows."""
    size = run.rows_per_item
    return TensorDataset(
        *[rows.unflatten(0, (-1, size)) if size else rows for rows in data.tensors]
    )


def noisy(example, generator):
    """A view with noise on the inputs."""
    x, y = example
    return x + 0.1 * torch.randn(x.shape, generator=generator, dtype=x.dtype), y


def step(name, model, optimizer, batch):
    """One physical batch, as a user writes it."""
    optimizer.zero_grad()
    x, y = batch
    if name == "mlp pairs":
        losses = F.cross_entropy(model(x), y, reduction="none")
        loss = F.softplus(losses[::2] - losses[1::2].square()).mean()
    else:
        loss = F.cross_entropy(model(x), y, reduction="sum" if name in SUMS else "mean")
    loss.backward()
    optimizer.step()


def whole(name, wrap=False):
    """Parameters and epsilon at the end of a run."""
    engine, model, optimizer, loader = begin(name, wrap)
    assert len(loader) >= STEPS
    for batch in loader:
        step(name, model, optimizer, batch)
    assert engine.ledger.position == STEPS
    epsilon, ledger = engine.get_epsilon(), engine.ledger.to_json()
    engine.detach()
    return models.parameters(unwrapped(model)), epsilon, ledger


def runs(folder, *names):
    """All of these runs; every rank says what it ended with."""
    found = {}
    for name in names:
        found[name] = whole(name, wrap=True)
        prints = [None] * dist.get_world_size()
        dist.all_gather_object(prints, fingerprints(found[name][0].values()))
        assert all(p == prints[0] for p in prints), "ranks ended with other parameters"
    return found


def put(model, values):
    """Set the parameters."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(values[name])


def relu_model():
    """A model with kinks, and its data."""
    model, data = models.build("relu")
    return nn.Sequential(*model, nn.ReLU(), nn.Linear(3, 3)), data


def relu_steps(folder=None, path=None):
    """Parameters after each step; with a path each step starts from what is there."""
    torch.manual_seed(4)
    model, data = relu_model()
    before = torch.load(path) if path else None
    if path:
        model = DistributedDataParallel(model)
    engine, model, optimizer, loader = models.begin(model, data, models.plan(num_steps=STEPS))
    for group in optimizer.param_groups:
        group["momentum"] = 0.0
    inner, found = unwrapped(model), []
    found.append(models.parameters(inner))
    for number, batch in enumerate(loader):
        if before:
            put(inner, before[number])
        models.step(model, optimizer, batch)
        found.append(models.parameters(inner))
    engine.detach()
    return found


def managed(folder=None):
    """A run under BatchMemoryManager, from a plain loader or one with a DistributedSampler."""
    model, data = models.build("mlp", torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    sampler, size = None, 8
    if folder is not None:
        model = DistributedDataParallel(model)
        sampler = torch.utils.data.DistributedSampler(data)
        size = 8 // dist.get_world_size()
    engine = dpt.PrivacyEngine()
    run = models.plan(expected_batch_size=8, num_steps=None, seed=9)
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(data, batch_size=size, sampler=sampler),
        plan=run,
    )
    count = 0
    with dpt.BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=2, optimizer=optimizer
    ) as small:
        promised = len(small)
        for batch in small:
            models.step(model, optimizer, batch)
            count += 1
    assert count == promised
    assert engine.ledger.position == 5
    return models.parameters(unwrapped(model)), count
