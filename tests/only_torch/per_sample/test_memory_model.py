# SPDX-License-Identifier: Apache-2.0
"""`scaling.memory` against the bytes of live tensors in a step of one or two processes."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, TensorDataset

import dualdp.torch as dpt
from dualdp_tools import scaling
from tests.distributed.spawn import together

TOLERANCE = 0.08


class Alive(TorchDispatchMode):
    """Adds up the memory of tensors from when it is seen first to when it is freed."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self._held = {}

    def see(self, tensor):
        memory = getattr(tensor, "_local_tensor", tensor).untyped_storage()  # of a DTensor
        key = id(memory)
        if key not in self._held:
            size = memory.nbytes()
            self._held[key] = weakref.ref(memory, lambda _: self._freed(key, size))
            self.now += size
            self.peak = max(self.peak, self.now)

    def _freed(self, key, size):
        del self._held[key]
        self.now -= size

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if torch.is_tensor(leaf):
                self.see(leaf)
        return out


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.up, self.down = nn.Linear(d, 4 * d, bias=False), nn.Linear(4 * d, d, bias=False)

    def forward(self, x):
        n, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(n, t, 3, 4, d // 4).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(n, t, d))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """The model that `scaling.Transformer` describes."""

    def __init__(self, sizes):
        super().__init__()
        self.words = nn.Embedding(sizes.vocabulary, sizes.width)
        self.places = nn.Parameter(torch.zeros(sizes.positions, sizes.width))
        self.blocks = nn.Sequential(*(Block(sizes.width) for _ in range(sizes.layers)))
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)

    def forward(self, x):
        return self.head(self.blocks(self.words(x) + self.places))


def peak_of_a_step(method, sizes, n, ranks=1, checks=1e-9):
    """Bytes alive at the fullest moment of the second step; on several ranks the model is split.

    A checked step takes more than the model says, so by default only the first one is checked.
    """
    torch.manual_seed(0)
    words = torch.randint(sizes.vocabulary, (3 * n * ranks, sizes.positions + 1))
    model, data = GPT(sizes), TensorDataset(words[:, :-1], words[:, 1:])
    if ranks > 1:
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    loader = DataLoader(data, batch_size=n if method == "plain" else n * ranks)
    if method != "plain":
        by_layer = method == "per_layer"
        _, _, loader = dpt.PrivacyEngine().make_private(
            module=model,
            optimizer=optimizer,
            data_loader=loader,
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            poisson_sampling=False,
            grad_sample_mode="book_keeping" if by_layer else method,
            clipping="per_layer" if by_layer else "flat",
            checks=checks,
        )
    alive = Alive()
    for p in model.parameters():
        alive.see(p)
    with alive:
        for number, (x, y) in enumerate(loader):
            if number == 1:
                alive.peak = 0
            if number == 2:
                break
            assert len(x) == n
            optimizer.zero_grad()
            F.cross_entropy(model(x).transpose(1, 2), y, reduction="none").mean(1).mean().backward()
            optimizer.step()
    return alive.peak


SHAPES = {
    "examples": (scaling.Transformer(4, 128, 128, 1000), 8),
    "weights": (scaling.Transformer(3, 256, 16, 8000), 2),
}


@pytest.mark.slow
@pytest.mark.parametrize("method", scaling.METHODS)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_fullest_moment_of_a_step_is_the_models(method, shape):
    sizes, n = SHAPES[shape]
    model = sum(p.numel() for p in GPT(sizes).parameters())
    assert sizes.num_parameters == pytest.approx(model, rel=0.01)
    expected = sum(scaling.memory(method, sizes, physical_batch_size=n).values())
    assert peak_of_a_step(method, sizes, n) == pytest.approx(expected, rel=TOLERANCE)


def test_a_check_holds_nothing_after_its_step():
    """The first step is always checked; what it took is free in the second, uncollected."""
    sizes = scaling.Transformer(1, 32, 16, 200)
    gc.disable()
    try:
        with_checks, without = (
            peak_of_a_step("book_keeping", sizes, 8, checks=rate) for rate in (1e-9, 0)
        )
    finally:
        gc.enable()
    assert with_checks == pytest.approx(without, rel=0.02)


SHARDED = ["plain", "book_keeping", "per_layer", "two_pass"]  # what the engine takes in pieces


def sharded_peaks(folder):
    """Peaks of a process of two, by shape and method."""
    return [peak_of_a_step(m, *shape, ranks=2) for shape in SHAPES.values() for m in SHARDED]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
def test_the_fullest_moment_of_a_sharded_step_is_the_models(tmp_path):
    expected = [
        sum(scaling.memory(m, sizes, physical_batch_size=n, shards=2).values())
        for sizes, n in SHAPES.values()
        for m in SHARDED
    ]
    for peaks in together(sharded_peaks, 2, tmp_path):
        assert peaks == pytest.approx(expected, rel=TOLERANCE)
