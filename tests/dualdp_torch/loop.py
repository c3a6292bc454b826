# SPDX-License-Identifier: Apache-2.0
"""A small private run as a user would write it, and the same by hand."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import dualdp_torch as dpt
from dualdp.plan.plan import PrivacyPlan
from tests.closeness import factors_of
from tests.dualdp_torch.checks import data, ids, randomise

NUM = 60


def dataset(num=NUM):
    """Inputs, classes and the row number of every example."""
    return TensorDataset(data(num, 6), ids(3, num), torch.arange(num))


def build():
    """Model, optimizer, loader."""
    model = randomise(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    return model, optimizer, DataLoader(dataset(), batch_size=12)


def plan(**changes):
    """A small plan with a fixed key."""
    arguments = {
        "num_examples": NUM,
        "expected_batch_size": 12,
        "num_steps": 6,
        "noise_multiplier": 0.8,
        "max_grad_norm": 0.5,
        "delta": 1e-5,
        "seed": 1,
        "accountant": "rdp",
    }
    return PrivacyPlan(**{**arguments, **changes})


def start(parts=None, **options):
    """An engine around a fresh model; with a plan, one pass of the loader is the whole plan."""
    model, optimizer, loader = parts or build()
    engine = dpt.PrivacyEngine(accountant=None if "plan" in options else "rdp")
    *trained, loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=loader, **options
    )
    return engine, *trained, loader.remaining() if "plan" in options else loader


def train(model, optimizer, loader, reduction="mean"):
    """The user's loop; returns the rows that were seen."""
    rows = []
    for x, y, row in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y, reduction=reduction).backward()
        optimizer.step()
        rows.append(row.tolist())
    return rows


def by_hand(model, run, steps, lr=0.5):
    """DP-SGD from the functional pieces."""
    x, y, _ = dataset().tensors
    for step in range(steps):
        rows = torch.from_numpy(run.batch_indices(step))
        found = dpt.clipped_grad_sum(
            lambda m, x, y: F.cross_entropy(m(x), y, reduction="none"),
            model,
            x[rows],
            y[rows],
            max_grad_norm=run.clipping_bounds(run.max_grad_norm_at(step)),
            clipping=run.clipping,
        )
        mean = dpt.noisy_mean(found.grads, run, step)
        with torch.no_grad():
            for name, gradient in mean.items():
                model.get_parameter(name).sub_(lr * gradient)


def assert_same(model, expected, **tolerance):
    """Parameters are those of another model."""
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, **tolerance)


def assert_by_hand(model, run, before=None, rtol=1e-4, atol=1e-5):
    """A trained model is where DP-SGD by hand ends, from `before` or the usual model."""
    expected = build()[0] if before is None else before
    by_hand(expected, run, run.num_steps)
    assert_same(model, expected, rtol=rtol, atol=atol)


def train_units(model, run, loss_of, lr=0.5):
    """Train by plain autograd: `loss_of(step, unit)` of each unit of a batch, clipped once."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for step in range(run.num_steps):
        total = {name: torch.zeros_like(p) for name, p in named.items()}
        for unit in run.batch_indices(step):
            grads = torch.autograd.grad(loss_of(step, unit), list(named.values()))
            norm = float(torch.cat([g.flatten() for g in grads]).norm())
            factor = float(factors_of(norm, run.max_grad_norm_at(step), "float64"))
            for name, grad in zip(named, grads, strict=True):
                total[name] += factor * grad
        mean = dpt.noisy_mean(total, run, step)
        with torch.no_grad():
            for name, p in named.items():
                p -= lr * mean[name]


def first_batch(loader):
    """An iterator and its first batch."""
    batches = iter(loader)
    return batches, *next(batches)[:2]
