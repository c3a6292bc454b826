# SPDX-License-Identifier: Apache-2.0
"""What is asserted inside of tensor parallel calls, by every process."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import dualdp_torch as dpt
from dualdp import ExactnessError, UnsupportedLayerError
from dualdp.plan.plan import PrivacyPlan
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
#: Layer norms of pieces of the sequence.
SEQUENCE = {
    "words": ColwiseParallel(output_layouts=Shard(1)),
    "block.norm1": SequenceParallel(),
    "block.attention": PrepareModuleInput(
        input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
    ),
    **{f"block.attention.{name}": ColwiseParallel() for name in "qkv"},
    "block.attention.o": RowwiseParallel(output_layouts=Shard(1)),
    "block.norm2": SequenceParallel(),
    "block.mlp": PrepareModuleInput(
        input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
    ),
    "block.mlp.0": ColwiseParallel(),
    "block.mlp.2": RowwiseParallel(output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
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
    options = {"check": "always"} | options | {"max_grad_norm": FACTOR * float(norms.median())}
    expected = dpt.clipped_grad_sum(losses, model, *batch, **options | {"method": "loop"})
    each = dpt.per_sample_norms(losses, model, *batch, per_parameter=True)
    cut(model, PLANS[kind])
    near = (
        {"rtol": 1e-10, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-6}
    )
    found = dpt.clipped_grad_sum(losses, model, *batch, **options)
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


def ordinary_calls_agree_with_one_device():
    """One example, none, masked ones, a broken one, and activation checkpoints."""
    model, (x, y) = build("mlp")
    model = cut(model, PLANS["mlp"])
    broken = x.clone()
    broken[2] = torch.nan
    for rows, mask in (
        ((x[:1], y[:1]), None),
        ((x[:0], y[:0]), None),
        ((x, y), torch.zeros(7, dtype=torch.bool)),
        ((broken, y), None),
    ):
        options = {"max_grad_norm": 0.3, "mask": mask}
        expected = dpt.clipped_grad_sum(losses, build("mlp")[0], *rows, **options)
        found = dpt.clipped_grad_sum(losses, model, *rows, **options)
        _agree(found, expected)
    options = {"max_grad_norm": 0.3, "check": "always"}
    expected = dpt.clipped_grad_sum(losses, Checkpointed(), x, y, **options)
    plan = {"first": ColwiseParallel(), "second": RowwiseParallel()}
    _agree(dpt.clipped_grad_sum(losses, cut(Checkpointed(), plan), x, y, **options), expected)


class Checkpointed(nn.Module):
    """A cut part that runs again in the backward, once for each of its two uses."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second, self.head = nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(6, 3)
        self.double()

    def body(self, x):
        return self.second(self.first(x).tanh())

    def forward(self, x):
        return self.head(checkpoint(self.body, self.body(x), use_reentrant=False))


def _agree(found, expected):
    near = {"rtol": 1e-10, "atol": 1e-12, "equal_nan": True}
    torch.testing.assert_close(found.norms, expected.norms, **near)
    for name, total in expected.grads.items():
        torch.testing.assert_close(whole(found.grads[name]), total, **near)


def every_call_agrees_with_one_device():
    """On four processes the methods take turns."""
    mask = torch.tensor([True, False, True, True, True])
    apart = dist.get_world_size() // 2
    for turn, kind in enumerate(("megatron", "tables")):
        for method in tensor_parallel.METHODS[turn % apart :: apart]:
            agrees(kind, method=method)
        agrees(kind, clipping="per_layer")
        agrees(kind, clipping="automatic", mask=mask)
        agrees(kind, physical_batch_size=2)
        agrees(kind, dtype=torch.float32)
    agrees("mlp", physical_batch_size=1)


def a_loop_of_twenty_steps_ends_where_one_device_ends():
    """Each process draws the noise of the whole and takes its piece of the noisy mean."""
    ends = []
    for is_cut in (False, True):
        model, batch = build("tables")
        plan = PrivacyPlan(
            num_examples=5,
            expected_batch_size=5,
            num_steps=20,
            noise_multiplier=0.3,
            max_grad_norm=0.4,
            delta=1e-5,
            seed=7,
            noise="portable",
            sampler="shuffle",
        )
        if is_cut:
            cut(model, TABLES)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
        for step in range(20):
            sums = dpt.clipped_grad_sum(losses, model, *batch, max_grad_norm=0.4).grads
            mean = dpt.noisy_mean({n: whole(total) for n, total in sums.items()}, plan, step)
            for name, p in model.named_parameters():
                p.grad = mean[name]
                if hasattr(p, "placements"):
                    p.grad = distribute_tensor(mean[name], p.device_mesh, p.placements)
            optimizer.step()
        ends.append({name: whole(p).detach().clone() for name, p in model.named_parameters()})
    for name, value in ends[0].items():
        torch.testing.assert_close(ends[1][name], value, rtol=1e-9, atol=1e-11)


def planted_faults_are_seen(patch):
    """Norms of one piece alone, and whole parameters that count on every process."""
    pieces = tensor_parallel.TensorParallel
    faults = {
        "pieces": {"added": lambda self, of: {**of}},
        "whole": {"whole": property(lambda self: {}, lambda self, value: None)},
    }
    for fault in faults.values():
        with patch.context() as planted:
            for name, value in fault.items():
                planted.setattr(pieces, name, value, raising=False)
            with pytest.raises(AssertionError, match="not close"):
                agrees("megatron", check="off")
            with pytest.raises(ExactnessError):
                agrees("megatron")


def refused(kind, match, model, *batch, **options):
    options = {"max_grad_norm": 1.0} | options
    with pytest.raises(kind, match=match):
        dpt.clipped_grad_sum(losses, model, *batch, **options)


def what_cannot_be_done_is_refused():
    model, batch = build("mlp")
    cut(model, PLANS["mlp"])
    for method in ("vmap", "two_pass"):
        refused(
            ValueError, "tensor parallel model .parallelize_module.", model, *batch, method=method
        )
    with pytest.raises(UnsupportedLayerError, match="lie in pieces and are not handed out"):
        dpt.per_sample_grads(losses, model, *batch)
    refused(UnsupportedLayerError, "lie in pieces", model, *batch, max_grad_norm=1e-12)
    sums = dpt.clipped_grad_sum(losses, model, *batch, max_grad_norm=1.0).grads
    plan = PrivacyPlan(
        num_examples=40,
        expected_batch_size=10,
        num_steps=2,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        delta=1e-5,
        seed=1,
    )
    with pytest.raises(TypeError, match="is a DTensor, of which a process holds a piece"):
        dpt.noisy_mean(sums, plan, 0)
    rank = dist.get_rank()
    outputs, _ = build("mlp")
    cut(outputs, PLANS["mlp"] | {"2": RowwiseParallel(use_local_output=False)})
    with pytest.raises(TypeError, match="loss_fn returned a DTensor"):
        dpt.per_sample_norms(lambda m, x: m(x).square().sum(1), outputs, batch[0])
    with pytest.raises(UnsupportedLayerError, match="need vmap, which can't run a tensor parallel"):
        dpt.per_sample_norms(
            lambda m, x, y: losses(m, x, y) + whole(m[2].bias).sum(), model, *batch
        )
    with pytest.raises(UnsupportedLayerError, match="depend on other examples"):
        dpt.per_sample_norms(lambda m, x, y: losses(m, x, y) * x.mean(), model, *batch)
    others = batch[0] + rank, batch[1]
    refused(ValueError, "disagree: the batch.*same examples in the same order", model, *others)
    refused(ValueError, "disagree: the settings", model, *batch, check="off" if rank else "first")
    refused(ValueError, "disagree: max_grad_norm", model, *batch, max_grad_norm=1.0 + rank)
    with pytest.raises(TypeError, match="not covered by compile_clipped_grad_sum"):
        dpt.compile_clipped_grad_sum(losses, model)
    for kind, plan in (
        ("mlp", {"0": ColwiseParallel(), "2": ColwiseParallel(output_layouts=Replicate())}),
        ("tables", {"words": RowwiseParallel(input_layouts=Replicate())}),
    ):
        model, batch = build(kind)
        cut(model, plan)
        match = "pieces of unequal size" if kind == "mlp" else "embedding was called with trained"
        refused(TypeError if kind == "mlp" else UnsupportedLayerError, match, model, *batch)


class Dropped(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5)), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.body(x))


class Adapted(nn.Module):
    """A base that is cut and frozen, and a small part beside it that is trained."""

    def __init__(self):
        super().__init__()
        self.base = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        self.adapter = nn.Linear(6, 4)
        self.up = nn.Linear(4, 3)

    def forward(self, x):
        return self.base(x) + self.up(self.adapter(x).tanh())


def frozen_pieces_and_several_views_agree():
    """Whole parameters beside a frozen base that is cut; units of two rows."""
    _, (x, y) = build("mlp")
    torch.manual_seed(2)
    model, rows = Adapted().double(), (x.repeat(2, 1), y.repeat(2))
    model.base.requires_grad_(False)
    options = {"max_grad_norm": 0.3, "rows_per_unit": 2}
    expected = dpt.clipped_grad_sum(losses, model, *rows, **options)
    cut(model.base, PLANS["mlp"])
    found = dpt.clipped_grad_sum(losses, model, *rows, check="always", **options)
    for name, total in expected.grads.items():
        torch.testing.assert_close(found.grads[name], total, rtol=1e-10, atol=1e-12)


def dropout_needs_one_seed():
    _, batch = build("mlp")
    model = Dropped().double()
    cut(model, {"body.0": ColwiseParallel(), "head": RowwiseParallel()})
    torch.manual_seed(5)
    dpt.clipped_grad_sum(losses, model, *batch, max_grad_norm=1.0, check="always")
    torch.manual_seed(5 + dist.get_rank())
    refused(ValueError, "state of torch's generators.*torch.manual_seed alike", model, *batch)


def sequence_parallel_agrees_with_one_device():
    """Layer norms of pieces of the sequence: what they saw is gathered."""
    model, batch = build("megatron")
    expected = dpt.clipped_grad_sum(losses, model, *batch, max_grad_norm=0.4)
    cut(model, SEQUENCE)
    found = dpt.clipped_grad_sum(losses, model, *batch, max_grad_norm=0.4, check="always")
    torch.testing.assert_close(found.norms, expected.norms, rtol=1e-10, atol=1e-12)
    for name, total in expected.grads.items():
        torch.testing.assert_close(whole(found.grads[name]), total, rtol=1e-10, atol=1e-12)
