# SPDX-License-Identifier: Apache-2.0
"""What a number of a loop may mean for one example."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import dualdp_torch as dpt
from dualdp_torch.per_sample.checks.readings import as_count, as_multiple


@pytest.mark.parametrize("n", [1, 2, 4, 5, 10, 20, 25, 50, 100])
def test_a_negative_number_is_no_count(n):
    """Such as -100, the index of ignored labels, or -1, a size that torch finds."""
    for value in (-100, -1, -n, -2.0 * n):
        assert as_count(value, n, 1) == as_multiple(value, n, 1) == value


def test_counts_and_multiples_of_examples_are_read_for_one():
    assert as_count(20, 20, 1) == as_multiple(20, 20, 1) == 1
    assert (as_count(60, 20, 1), as_multiple(60, 20, 1)) == (60, 3)
    assert as_count(0.05, 20, 1) == 1
    assert as_count(40, 20, 2) == 2


@pytest.mark.parametrize("n", [20, 50])
def test_a_sum_is_refused_beside_an_index_that_n_divides(n):
    model, data = nn.Linear(6, 4), TensorDataset(torch.randn(n, 6), torch.randint(4, (n,)))
    engine = dpt.PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=n),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
    )

    def first_step():
        x, y = next(iter(loader))
        logits = model(x).view(-1, 4)
        log_probs = F.log_softmax(logits, -1)
        summed = F.nll_loss(log_probs, y, ignore_index=-100, reduction="sum")
        more = F.cross_entropy(logits, y, ignore_index=-100, reduction="sum")
        (summed + more).backward()
        optimizer.step()

    with pytest.raises(ValueError, match="Declare loss_reduction='sum'"):
        first_step()
