# SPDX-License-Identifier: Apache-2.0
"""What is asserted inside of tensor parallel calls, by every process."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor import Replicate, Shard
from torch.nn import functional as F

import dualdp_torch as dpt
from dualdp import UnsupportedLayerError
from dualdp_torch.parallel import tensor_parallel

FACTOR = 0.5  # C as a share of the median norm


class Attention(nn.Module):
    """Causal attention whose heads are those that are here."""

    def __init__(self, d, heads):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(d, d) for _ in range(4))
        self.width = d // heads

    def forward(self, x):
        q, k, v = (
            part(x).unflatten(-1, (-1, self.width)).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm1, self.norm2, self.attention = nn.LayerNorm(d), nn.LayerNorm(d), Attention(d, 4)
        self.mlp = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Language(nn.Module):
    """One block between a table of words and a head."""

    def __init__(self, d=8, words=12):
        super().__init__()
        self.words, self.block = nn.Embedding(words, d), Block(d)
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, words, bias=False)

    def forward(self, x):
        return self.head(self.norm(self.block(self.words(x))))


MEGATRON = {
    **{f"block.attention.{name}": ColwiseParallel() for name in "qkv"},
    "block.attention.o": RowwiseParallel(),
    "block.mlp.0": ColwiseParallel(),
    "block.mlp.2": RowwiseParallel(),
}
TABLES = MEGATRON | {
    "words": ColwiseParallel(output_layouts=Replicate()),
    "head": ColwiseParallel(output_layouts=Replicate()),
}
PLANS = {
    "mlp": {"0": ColwiseParallel(), "2": RowwiseParallel()},
    "megatron": MEGATRON,
    "tables": TABLES,
}


def build(kind, dtype=torch.float64):
    """A model and its batch, the same in every process."""
    torch.manual_seed(3)
    if kind == "mlp":
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        return model.to(dtype), (torch.randn(7, 6, dtype=dtype), torch.randint(3, (7,)))
    return Language().to(dtype), (torch.randint(12, (5, 6)), torch.randint(12, (5, 6)))


def cut(model, plan):
    return parallelize_module(model, init_device_mesh("cpu", (dist.get_world_size(),)), plan)


def losses(model, x, y):
    out = model(x)
    each = F.cross_entropy(out.flatten(0, -2), y.flatten(), reduction="none")
    return each.view(len(x), -1).mean(1)


def whole(tensor):
    return getattr(tensor, "full_tensor", lambda: tensor)()


def agrees(kind, dtype=torch.float64, **options):
    """Norms, sums and losses of pieces are those of one device."""
    model, batch = build(kind, dtype)
    norms = dpt.per_sample_norms(losses, model, *batch, method="loop")
    options |= {"max_grad_norm": FACTOR * float(norms.median())}
    expected = dpt.clipped_grad_sum(losses, model, *batch, **options | {"method": "loop"})
    each = dpt.per_sample_norms(losses, model, *batch, per_parameter=True)
    cut(model, PLANS[kind])
    near = {"rtol": 1e-10, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-6}
    found = dpt.clipped_grad_sum(losses, model, *batch, check="always", **options)
    torch.testing.assert_close(found.norms, expected.norms, **near)
    torch.testing.assert_close(found.losses, expected.losses, **near)
    pieces = 0
    for name, p in model.named_parameters():
        assert type(found.grads[name]) is type(p.data)
        assert found.grads[name].shape == p.shape
        pieces += hasattr(p, "placements") and p.placements[0].is_shard()
        torch.testing.assert_close(whole(found.grads[name]), expected.grads[name], **near)
    assert pieces > 2
    ours = dpt.per_sample_norms(losses, model, *batch, per_parameter=True)
    for name in each:
        torch.testing.assert_close(ours[name], each[name], **near)


def an_mlp_agrees_with_one_device():
    agrees("mlp")


def every_call_agrees_with_one_device():
    mask = torch.tensor([True, False, True, True, True])
    for kind in ("megatron", "tables"):
        for method in tensor_parallel.METHODS:
            agrees(kind, method=method)
        agrees(kind, clipping="per_layer")
        agrees(kind, clipping="automatic", mask=mask)
        agrees(kind, physical_batch_size=2)
        agrees(kind, dtype=torch.float32)
    agrees("mlp", physical_batch_size=1)


def passed(folder, *names):
    """Run these checks; their names."""
    for name in names:
        check = globals()[name]
        with pytest.MonkeyPatch.context() as patch:
            check(*[patch][: check.__code__.co_argcount])
    return names
