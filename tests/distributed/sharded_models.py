# SPDX-License-Identifier: Apache-2.0
"""Small models, their data and their plans, for one process and for several."""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import dualdp_torch as dpt
from dualdp.plan.plan import PrivacyPlan


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, d, heads):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.mlp = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))
        self.heads = heads

    def forward(self, x):
        n, t, d = x.shape
        q, k, v = (
            part.view(n, t, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(n, t, d))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Two blocks, a table of positions that is sliced, 13 words."""

    def __init__(self, d=12, words=13, tied=False):
        super().__init__()
        self.tokens = nn.Embedding(words, d)
        self.places = nn.Parameter(0.1 * torch.randn(9, d))
        self.blocks = nn.ModuleList([Block(d, 3), Block(d, 3)])
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, words, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, x):
        x = self.tokens(x) + self.places[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, -1]))


def mlp(smooth=True):
    act = nn.Tanh if smooth else nn.ReLU
    return nn.Sequential(nn.Linear(6, 17), act(), nn.Linear(17, 9), act(), nn.Linear(9, 3))


def cnn():
    return nn.Sequential(
        nn.Conv2d(1, 5, 3),
        nn.GroupNorm(1, 5),
        nn.Tanh(),
        nn.Conv2d(5, 3, 3, stride=2),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(12, 3),
    )


MODELS = {
    "mlp": mlp,
    "relu": lambda: mlp(smooth=False),
    "cnn": cnn,
    "gpt": GPT,
    "broken": mlp,
    "tied": lambda: GPT(tied=True),
}


def build(kind, dtype=torch.float32):
    """A model and its data, the same in every process."""
    torch.manual_seed(11)
    model = MODELS[kind]().to(dtype)
    if kind in ("gpt", "tied"):
        x, y = torch.randint(13, (40, 7)), torch.randint(13, (40,))
    else:
        shape = (1, 8, 8) if kind == "cnn" else (6,)
        x, y = torch.randn(40, *shape, dtype=dtype), torch.randint(3, (40,))
    if kind == "broken":
        x[7] = torch.nan
    return model, TensorDataset(x, y)


def shard(model, **options):
    """`fully_shard` on every layer with parameters of its own, then on the rest; same object."""
    layers = [layer for layer in model.children() if next(layer.parameters(), None) is not None]
    for block in getattr(model, "blocks", layers):
        fully_shard(block, **options)
    fully_shard(model, **options)
    return model


def plan(**changes):
    arguments = {
        "num_examples": 40,
        "expected_batch_size": 10,
        "num_steps": 50,
        "noise_multiplier": 0.4,
        "max_grad_norm": 0.5,
        "delta": 1e-5,
        "seed": 5,
        "accountant": "rdp",
    }
    return PrivacyPlan(**{**arguments, **changes})


def begin(model, data, run, mode="auto", optimizer=None, **options):
    """Engine and the three parts of a private run; one pass of the loader is the whole plan."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    engine = dpt.PrivacyEngine()
    loader = DataLoader(data, batch_size=int(run.expected_batch_size_at(0)))
    *trained, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        plan=run,
        grad_sample_mode=mode,
        **options,
    )
    return engine, *trained, loader.remaining()


def step(model, optimizer, batch):
    """One physical batch."""
    x, y = batch
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def train(model, data, run, mode="auto", num_steps=None, **options):
    """Parameters and epsilon at the end of a run."""
    engine, model, optimizer, loader = begin(model, data, run, mode, **options)
    for number, batch in enumerate(loader, 1):
        step(model, optimizer, batch)
        if number == num_steps:
            break
    epsilon = engine.get_epsilon()
    engine.detach()
    return parameters(model), epsilon


def parameters(model):
    """Name -> whole parameter."""
    return {
        name: getattr(p, "full_tensor", lambda p=p: p)().detach().clone()
        for name, p in model.named_parameters()
    }
