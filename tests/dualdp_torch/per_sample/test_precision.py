# SPDX-License-Identifier: Apache-2.0
"""What one example adds is at most C in every precision that a user may choose, on any device.

A product of float32 in TF32 (on a GPU) and an autocast model are wrong by up to 1e-2, in the loop
too. But what is summed is measured in float64 here, and must be within the bound all the same.
"""

import contextlib

import numpy as np
import pytest
import torch
from torch import nn

import dualdp_torch as dpt
from dualdp.plan.clipping import MARGIN
from tests.conftest import DEVICE

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
    """Autocast."""
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


def length(grads):
    """L2 norm of all gradients together, in float64."""
    return float(np.sqrt(sum(float(g.double().square().sum()) for g in grads.values())))


@pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous chunk")
@pytest.mark.parametrize("method", dpt.METHODS)
@pytest.mark.parametrize("precision", [tf32, bfloat16, in_bfloat16])
def test_no_example_adds_more_than_the_bound(method, precision):
    model, batch = problem()
    with precision(model):
        for k in range(N):
            one = [part[k : k + 1] for part in batch]
            found = dpt.clipped_grad_sum(loss, model, *one, max_grad_norm=BOUND, method=method)
            assert float(found.norms) > BOUND
            assert 0.99 * BOUND < length(found.grads) <= BOUND * (1 + 1e-4)


@pytest.mark.parametrize(
    "method", [one for one in dpt.METHODS if one != "vmap"]
)  # no autocast LSTM
@pytest.mark.parametrize("precision", [tf32, bfloat16])
def test_norms_are_those_of_float64_to_the_precision_of_the_model(method, precision):
    model, batch = problem()
    truth = dpt.per_sample_norms(loss, model.double(), *batch, method="loop")
    model.float()
    full = dpt.per_sample_norms(loss, model, *batch, method=method)
    torch.testing.assert_close(full.double(), truth, rtol=MARGIN["float32"], atol=0)
    with precision(model):
        found = dpt.per_sample_norms(loss, model, *batch, method=method)
    torch.testing.assert_close(found.double(), truth, rtol=2e-2, atol=0)


def test_settings_of_the_user_are_left_as_they_were():
    model, batch = problem()
    with tf32(model):
        dpt.clipped_grad_sum(loss, model, *batch, max_grad_norm=BOUND)
        assert torch.get_float32_matmul_precision() == "high"
    assert torch.get_float32_matmul_precision() == "highest"
