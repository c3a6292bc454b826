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
    """Pre-norm attention."""

    def __init__(self, d, heads):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(d), nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.heads = heads

    def forward(self, x):
        each = self.qkv(self.norm(x)).unflatten(-1, (3 * self.heads, -1))  # (n, t, 3 h, d / h)
        mixed = F.scaled_dot_product_attention(*each.transpose(1, 2).chunk(3, 1), is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


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


def mlp():
    """Rows that no number of processes divides: 17, 9 and 3."""
    layers = nn.Linear(6, 17), nn.Tanh(), nn.Linear(17, 9), nn.Tanh(), nn.Linear(9, 3)
    return nn.Sequential(*layers)


def cnn():
    body = nn.Conv2d(1, 5, 3), nn.GroupNorm(1, 5), nn.Tanh(), nn.Conv2d(5, 3, 3, stride=2)
    return nn.Sequential(*body, nn.Tanh(), nn.Flatten(), nn.Linear(12, 3))


MODELS = {"mlp": mlp, "broken": mlp, "cnn": cnn, "gpt": GPT, "tied": lambda: GPT(tied=True)}


def build(kind="mlp", dtype=torch.float32):
    """A model and its data, the same in every process; of "broken" one example is nan."""
    torch.manual_seed(11)
    model = MODELS[kind]().to(dtype)
    if kind in ("gpt", "tied"):
        return model, TensorDataset(torch.randint(13, (40, 7)), torch.randint(13, (40,)))
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
    usual = {"num_examples": 40, "expected_batch_size": 10, "num_steps": 50, "delta": 1e-5}
    usual |= {"noise_multiplier": 0.4, "max_grad_norm": 0.5, "seed": 5, "accountant": "rdp"}
    return PrivacyPlan(**{**usual, **changes})


def begin(model, data, run=None, mode="auto", optimizer=None, **options):
    """Engine and the three parts of a private run; one pass of the loader is the whole plan."""
    run = run or plan()
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    engine = dpt.PrivacyEngine()
    loader = DataLoader(data, batch_size=int(run.expected_batch_size_at(0)))
    parts = {"module": model, "optimizer": optimizer, "data_loader": loader, "plan": run}
    *trained, loader = engine.make_private(**parts, grad_sample_mode=mode, **options)
    return engine, *trained, loader.remaining()


def step(model, optimizer, batch):
    """One physical batch."""
    x, y = batch
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def parameters(model):
    """Name -> whole parameter."""
    return {
        name: getattr(p, "full_tensor", lambda p=p: p)().detach().clone()
        for name, p in model.named_parameters()
    }


def distance(found, expected):
    """Largest difference relative to the largest number of each parameter."""
    assert found.keys() == expected.keys()
    return max(float((found[name] - p).abs().max() / p.abs().max()) for name, p in expected.items())
