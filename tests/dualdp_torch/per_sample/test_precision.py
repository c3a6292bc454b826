# SPDX-License-Identifier: Apache-2.0
"""What one example adds is at most C in every precision that a user may choose, on any device.

A product of float32 in TF32 (on a GPU) and an autocast model are wrong by up to 1e-2, in the loop
too. But what is summed is measured in float64 here, and must be within the bound all the same.
"""

import contextlib

import pytest
import torch
from torch import nn

import dualdp_torch as dpt
from tests.conftest import DEVICE
from tests.dualdp_torch.per_sample.loops import BY_METHOD, size_of, slow

N, BOUND = 6, 0.3


class TokenNet(nn.Module):
    """Embedding, convolution, attention, LSTM and normalisation."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.conv = nn.Conv1d(16, 32, 3, padding=1)
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.norm = nn.LayerNorm(32)
        self.lstm = nn.LSTM(32, 16, batch_first=True)
        self.head = nn.Linear(16, 7)

    def forward(self, x):
        x = self.conv(self.embedding(x).transpose(1, 2)).transpose(1, 2)
        x = self.norm(x + self.attention(x, x, x, need_weights=False)[0])
        return self.head(self.lstm(x)[0].mean(1))


@contextlib.contextmanager
def tf32(module):
    """TF32 where the device has it."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def bfloat16(module):
    """Autocast, which lowers the loss, and not the norms and sums made of its gradients."""
    return torch.autocast(DEVICE, torch.bfloat16)


def in_bfloat16(module):
    """All parameters are bfloat16."""
    module.to(torch.bfloat16)
    return contextlib.nullcontext()


def loss(model, x, y):
    return nn.functional.cross_entropy(model(x).float(), y, reduction="none")


def problem():
    torch.manual_seed(0)
    model = TokenNet().to(DEVICE)
    batch = torch.randint(0, 50, (N, 12)), torch.randint(0, 7, (N,))
    return model, [part.to(DEVICE) for part in batch]


@pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous chunk")
@pytest.mark.parametrize("method", BY_METHOD)
@pytest.mark.parametrize("precision", [bfloat16, *slow(tf32, in_bfloat16)])
def test_no_example_adds_more_than_the_bound(method, precision):
    """Settings of the user are left as they were."""
    model, batch = problem()
    with precision(model):
        before = torch.get_float32_matmul_precision()
        for k in range(N):
            mask = torch.arange(N, device=DEVICE) == k
            options = {"max_grad_norm": BOUND, "method": method, "mask": mask}
            if (method, precision) == ("vmap", bfloat16):  # which has no LSTM
                batch, options["mask"] = [part[k : k + 1] for part in problem()[1]], None
            found = dpt.clipped_grad_sum(loss, model, *batch, **options)
            assert float(found.norms.max()) > BOUND
            assert found.norms.dtype == torch.float32
            assert 0.99 * BOUND < size_of(found.grads) <= BOUND * (1 + 1e-4)
        assert torch.get_float32_matmul_precision() == before
