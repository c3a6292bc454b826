# SPDX-License-Identifier: Apache-2.0
"""Attention with a trained bias that all examples share, as the relative positions of T5."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dualdp.torch as dpt

N, LENGTH, WIDTH = 6, 5, 8


class Relative(nn.Module):
    """Self-attention twice, with tables of relative positions, and a mask of each example's own."""

    def __init__(self, *, is_masked, heads=2):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(2 * LENGTH, heads) for _ in range(2))
        self.projections = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))
        self.out = nn.Linear(WIDTH, 3)
        self.is_masked, self.heads = is_masked, heads

    def forward(self, x, lengths):
        places = torch.arange(LENGTH)
        for i, (table, project) in enumerate(zip(self.tables, self.projections, strict=True)):
            bias = table(places[:, None] - places + LENGTH).permute(2, 0, 1)[None]  # (1, h, l, l)
            if self.is_masked and i:
                hidden = places[None, None, None] >= lengths[:, None, None, None]
                bias = torch.where(hidden, -1e9, bias)
            q, k, v = project(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
            x = x + F.scaled_dot_product_attention(q, k, v, attn_mask=bias).mT.reshape(x.shape)
        return self.out(x.mean(1))


def losses(model, x, lengths, y):
    return F.cross_entropy(model(x, lengths), y, reduction="none")


@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize("method", ["auto", "book_keeping", "two_pass", "materialize"])
def test_a_shared_trained_mask_is_clipped_as_in_the_loop(method, is_masked):
    """The uses are captured: no method falls back."""
    torch.manual_seed(0)
    model = Relative(is_masked=is_masked).double()
    batch = torch.randn(N, LENGTH, WIDTH).double(), torch.randint(2, 6, (N,)), torch.arange(N) % 3
    assert dpt.explain(losses, model, *batch)["way"] == "uses"
    ours, truth = (
        dpt.clipped_grad_sum(losses, model, *batch, max_grad_norm=0.1, method=way)
        for way in (method, "loop")
    )
    torch.testing.assert_close(ours.norms, truth.norms, rtol=1e-9, atol=1e-12)
    for name, total in truth.grads.items():
        torch.testing.assert_close(ours.grads[name], total, rtol=1e-7, atol=1e-10)


def test_a_shared_trained_mask_of_one_example():
    """In a loop that records, where a batch of one is not run by the loop."""
    torch.manual_seed(0)
    model = Relative(is_masked=False)
    x, lengths, y = torch.randn(1, LENGTH, WIDTH), torch.tensor([3]), torch.tensor([1])
    with dpt.record_per_sample(model, loss_reduction="mean", check="off") as record:
        F.cross_entropy(model(x, lengths), y).backward()
    model.zero_grad()
    F.cross_entropy(model(x, lengths), y).backward()
    for name, grads in record.grads().items():
        torch.testing.assert_close(grads[0], model.get_parameter(name).grad)
