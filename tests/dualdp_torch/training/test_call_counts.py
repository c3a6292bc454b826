# SPDX-License-Identifier: Apache-2.0
"""What a small model's step costs in Python: calls of our own functions, and files they lie in."""

import sys
from collections import Counter
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import dualdp
import dualdp.torch as dpt
import dualdp_torch

FOLDERS = tuple(str(Path(module.__file__).parent) for module in (dualdp, dualdp_torch))


def calls_of_steps(num_steps):
    """Calls by file in each step of an MLP, from the batch to the end of `optimizer.step()`."""
    x, y = torch.randn(256, 784), torch.arange(256) % 10
    layers = [nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)]
    model = nn.Sequential(*layers)
    model, optimizer, loader = dpt.PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=32),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        num_steps=num_steps,
        seed=1,
    )
    batches, found = iter(loader.remaining()), []
    for _ in range(num_steps):
        calls = Counter()

        def count(frame, event, _, calls=calls):
            if event == "call" and frame.f_code.co_filename.startswith(FOLDERS):
                calls[frame.f_code.co_filename] += 1

        before = sys.getprofile()
        sys.setprofile(count)
        try:
            images, labels = next(batches)
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
        finally:
            sys.setprofile(before)
        found.append(calls)
    return found


def test_calls_and_files_of_a_step():
    first, *later = calls_of_steps(5)
    least = min(later, key=Counter.total)  # a step without checks
    assert first.total() <= 3_910  # aim: 1,500
    assert least.total() <= 460  # aim: 200
    assert len(least) <= 37  # aim: 14
