# SPDX-License-Identifier: Apache-2.0
"""Whole runs of tensor parallel models, and of the same models on one device."""

import json

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import dualdp_torch as dpt
from dualdp.plan.correlated import strategies
from dualdp.plan.plan import PrivacyPlan
from dualdp.plan.schedules import AdaptiveNorm
from dualdp.randomness import RootKey
from dualdp_torch.parallel.process_group import fingerprints

from . import parallel
from . import sharded_models as models
from .tensor_checks import SEQUENCE, TABLES, Checkpointed, Language, cut, whole

STEPS = 20
PORTABLE = {"noise": "portable"}
SHORT = {"num_steps": 5}
MLP = {"body.0": ColwiseParallel(), "body.2": RowwiseParallel()}


class MLP2(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))

    def forward(self, x):
        return self.body(x)


class Frozen(Language):
    """Layers that are cut are frozen: one of a pair, and a table."""

    def __init__(self):
        super().__init__()
        self.words.requires_grad_(False)
        self.block.mlp[2].requires_grad_(False)


class Beside(nn.Module):
    """A base that is cut and frozen, and a small part beside it that is trained whole."""

    def __init__(self):
        super().__init__()
        self.base, self.down, self.up = MLP2().requires_grad_(False), nn.Linear(6, 2), Tied(2, 5)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x).tanh())


class Tied(nn.Module):
    """Two uses of one layer."""

    def __init__(self, d, k):
        super().__init__()
        self.inner, self.outer = nn.Linear(d, d), nn.Linear(d, k)

    def forward(self, x):
        return self.outer(self.inner(self.inner(x)).tanh())


#: Name -> model and how it is cut.
MODELS = {
    "tables": (Language, TABLES),
    "frozen": (Frozen, TABLES),
    "sequence": (Language, SEQUENCE),
    "checkpointed": (Checkpointed, {"first": ColwiseParallel(), "second": RowwiseParallel()}),
    "mlp": (MLP2, MLP),
    "adapted": (Beside, {f"base.{name}": style for name, style in MLP.items()}),
}
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.2, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.02),
    "adam_bc": lambda p: dpt.AdamBC(p, lr=0.02, weight_decay=0.1),
    "ema": lambda p: dpt.with_ema(torch.optim.SGD(p, lr=0.2), decay=0.9),
}
#: Name -> model, method, optimizer, changes of the plan.
RUNS = {
    "portable": ("tables", "auto", "adamw", PORTABLE),
    "short": ("mlp", "auto", "sgd", PORTABLE | SHORT),
    "small batches": ("tables", "materialize", "sgd", {"physical_batch_size": 3} | SHORT),
    "sequence": ("sequence", "auto", "sgd", PORTABLE | SHORT),
    "frozen": ("frozen", "book_keeping", "sgd", {"clipping": "automatic"} | SHORT),
    "by layer": ("tables", "auto", "adam_bc", {"clipping": "per_layer"} | SHORT),
    "loop": ("tables", "loop", "ema", PORTABLE | SHORT),
    "checkpointed": ("checkpointed", "auto", "sgd", SHORT),
    "adapted": ("adapted", "auto", "sgd", PORTABLE | SHORT),
    "two forwards": ("mlp", "auto", "sgd", {"clipping": "automatic"} | SHORT),
    "adaptive": ("mlp", "auto", "sgd", {"max_grad_norm": AdaptiveNorm(0.5)}),
    "empty draws": ("tables", "auto", "sgd", {"expected_batch_size": 1}),
    "secure": ("mlp", "auto", "sgd", {"noise": "secure", "seed": None, "key": "fixed"} | SHORT),
    "window": (
        *("tables", "auto", "sgd"),
        {"sampler": "fixed_order", "correlation": strategies.window([1.0, -0.6, 0.3])} | SHORT,
    ),
    "band": (
        *("mlp", "auto", "sgd"),
        {"sampler": "fixed_order", "correlation": strategies.band([1.0, 0.7, 0.2])} | SHORT,
    ),
    "users": ("mlp", "auto", "sgd", parallel.USERS | {"physical_batch_size": 2} | SHORT),
    "pairs": ("mlp", "auto", "sgd", parallel.PAIRS | PORTABLE | SHORT),
    "views": ("mlp", "auto", "sgd", {"views": 3, "physical_batch_size": 2} | SHORT),
}


def build(kind):
    """A model and its data, the same in every process."""
    torch.manual_seed(3)
    model, plan = MODELS[kind]
    model = model().double()
    if plan in (TABLES, SEQUENCE):
        return model, TensorDataset(torch.randint(12, (40, 6)), torch.randint(12, (40, 6)))
    classes = 3 if kind == "checkpointed" else 5
    return model, TensorDataset(torch.randn(40, 6).double(), torch.randint(classes, (40,)))


def begin(name, is_cut, **options):
    """Engine and the three parts of one of the runs."""
    kind, mode, optimizer, changes = RUNS[name]
    model, data = build(kind)
    if is_cut:
        cut(model, MODELS[kind][1])
    views, changes = changes.get("views", 1), {k: v for k, v in changes.items() if k != "views"}
    if changes.get("key") == "fixed":
        changes = changes | {"key": RootKey(b"key of cut runs!")}
    plan = models.plan(**{"num_steps": STEPS} | changes)
    if plan.unit == "user":
        options["users"] = parallel.OWNERS
    augment = parallel.noisy if views > 1 else None
    optimizer = OPTIMIZERS[optimizer](model.parameters())
    data = parallel.items(data, plan)
    return models.begin(model, data, plan, mode, optimizer, views=views, augment=augment, **options)


def loss_of(name, model, x, y):
    """Loss of a physical batch, as a user writes it."""
    if name == "pairs":
        losses = F.cross_entropy(model(x), y, reduction="none")
        return F.softplus(losses[::2] - losses[1::2].square()).mean()
    if name == "two forwards":
        return F.cross_entropy(model(x), y) + (model(2 * x) - model(x)).square().mean()
    return F.cross_entropy(model(x).flatten(0, -2), y.flatten())


def step(name, model, optimizer, batch):
    """One physical batch."""
    optimizer.zero_grad()
    loss_of(name, model, *batch).backward()
    optimizer.step()


def releases(ledger):
    """What the ledger accounts, without the digests of sums, which differ in the last bits."""
    lines = [json.loads(line) for line in ledger.to_json().splitlines()[1:]]
    hidden = {"digest", "previous", "hash", "link", "noisy_fraction", "time"}
    shown = [{k: v for k, v in line.items() if k not in hidden} for line in lines]
    # Several processes note that a check passed after the release of its step.
    return sorted(shown, key=lambda line: line["kind"] == "note")


def run(name, is_cut, **options):
    """What a run ended with: parameters, averages, epsilon, releases, and the ledger."""
    engine, model, optimizer, loader = begin(name, is_cut, **options)
    for batch in loader:
        step(name, model, optimizer, batch)
    ledger, epsilon = engine.ledger, engine.get_epsilon()
    engine.detach()
    ended = models.parameters(model)
    states = ((n, optimizer.state.get(p, {})) for n, p in model.named_parameters())
    ended |= {f"{n}.ema": whole(s["ema"]).clone() for n, s in states if "ema" in s}
    return ended, epsilon, releases(ledger), ledger.to_json()


def runs(folder, *names):
    """Name -> what each of these runs ended with, cut, the same bits on all processes."""
    found = {}
    for name in names:
        found[name] = run(name, is_cut=True, ledger=folder / f"{name}.ledger")
        prints = [None] * dist.get_world_size()
        dist.all_gather_object(prints, fingerprints(found[name][0].values()))
        assert all(p == prints[0] for p in prints), "processes ended with other parameters"
    return found


def ported(folder, start, layout, plan):
    """Parameters at the end of a run from given ones, with the noise of a JAX model."""
    model, data = build("mlp")
    model.load_state_dict(start)
    plan = PrivacyPlan.from_json(plan)
    cut(model, MLP)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    engine, model, optimizer, loader = models.begin(model, data, plan, optimizer=optimizer)
    engine.noise_layout = layout
    for batch in loader:
        step("mlp", model, optimizer, batch)
    epsilon, found = engine.get_epsilon(), releases(engine.ledger)
    engine.detach()
    return models.parameters(model), epsilon, found
