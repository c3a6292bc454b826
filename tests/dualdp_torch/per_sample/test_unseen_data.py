# SPDX-License-Identifier: Apache-2.0
"""Data that leave torch in a loop and come back: as arrays, numbers, decisions, tensors."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dualdp_torch as dpt
from dualdp import ExactnessError
from tests import reference
from tests.dualdp_torch.checks import data, randomise
from tests.dualdp_torch.loop import build, plan, start

REFUSALS = (ValueError, ExactnessError)


def run(loss, steps=6, engines=None, **options):
    """A run with `loss(out, x, y)` -> scalar; its engine is handed out in `engines`, too."""
    engine, model, optimizer, loader = start(plan=plan(num_steps=steps), **options)
    if engines is not None:
        engines.append(engine)
    for x, y, _ in loader:
        optimizer.zero_grad()
        loss(model(x), x, y).backward()
        optimizer.step()
    return engine


def each(out, y):
    return F.cross_entropy(out, y, reduction="none")


WRONG = {
    "counts of an array": lambda out, x, y: F.cross_entropy(
        out, y, weight=torch.tensor(1.0 / (1 + np.bincount(y.numpy(), minlength=3))).float()
    ),
    "the largest of a list": lambda out, x, y: each(out, y).mean() / max(x[:, 0].abs().tolist()),
}


@pytest.mark.parametrize("checks", [None, 1.0])
@pytest.mark.parametrize("loss", [pytest.param(f, id=name) for name, f in WRONG.items()])
def test_data_that_come_back_are_refused(loss, checks):
    """On the first batch, or as soon as a second one shows that they are data."""
    with pytest.raises(REFUSALS):
        run(loss, steps=12, checks=checks)


RIGHT = {
    "lists for the log": lambda out, x, y: (len(y.tolist()) and each(out, y)).mean(),
    "constants from NumPy": lambda out, x, y: (
        each(out, y) * torch.from_numpy(np.array([1.0, 0.5, 2.0]))[y]
    ).mean(),
    "a number of NumPy that stays": lambda out, x, y: each(out, y).mean() * np.float32(0.5),
    "a teacher that is detached": lambda out, x, y: (
        each(out, y) + (out - TEACHER(x).detach()).square().sum(1)
    ).mean(),
    "a mask of each row": lambda out, x, y: ((out * (x[:, :3] > 0)).square().sum(1)).mean(),
}
TEACHER = nn.Linear(6, 3)


@pytest.mark.parametrize("loss", [pytest.param(f, id=name) for name, f in RIGHT.items()])
def test_what_is_no_data_passes(loss):
    assert len(run(loss, checks=1.0).ledger) == 6


@pytest.mark.parametrize("n", [3, 4, 8, 12, 16])
def test_sizes_that_equal_the_number_of_rows_are_told_apart(n):
    """Positions, classes and rows: which is which is tried, each for itself."""
    model = randomise(nn.Sequential(nn.Embedding(16, 5), nn.Linear(5, 4)))
    words = torch.randint(16, (n, 8))

    def loop(model, words):
        out = model(words)
        rows, positions, classes = out.shape
        losses = F.cross_entropy(
            out.view(rows * positions, classes), words.view(rows * positions) % 4, reduction="none"
        )
        losses.view(rows, positions).mean(1).mean().backward()

    with dpt.record_per_sample(model, loss_reduction="mean") as record:
        loop(model, words)
    assert record.norms().shape == (n,)


@pytest.mark.parametrize("method", ["auto", "materialize", "vmap", "loop"])
def test_our_own_arithmetic_is_not_autocast(method):
    """Autocast around the call lowers the loss, not the norms and sums made of its gradients."""
    model, n = randomise(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))), 4
    mask = torch.arange(n) == 1
    with torch.autocast("cpu", torch.bfloat16):
        found = dpt.clipped_grad_sum(
            lambda m, x: m(x).float().square().sum((1, 2)),
            model,
            data(n, 9, 6),
            max_grad_norm=1e-2,
            mask=mask,
            method=method,
        )
    length = torch.stack([g.double().square().sum() for g in found.grads.values()]).sum().sqrt()
    assert 1e-2 * (1 - 3e-4) <= float(length) <= 1e-2


def test_norms_under_autocast_are_float32():
    with torch.autocast("cpu", torch.bfloat16):
        norms = dpt.per_sample_norms(reference.loss_fn, build()[0], data(5, 6))
    assert norms.dtype == torch.float32


# ---------------------------------------------------------------------- memory that is shared


def test_a_batch_that_is_read_after_its_loader_passes():
    engine, model, optimizer, loader = start(plan=plan(num_steps=2), checks=1.0)
    for _ in range(2):
        x, y, _ = next(iter(loader.remaining()))
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert len(engine.ledger) == 2


def test_arrays_that_are_read_and_changes_by_torch_pass():
    engine, model, optimizer, loader = start(plan=plan(num_steps=4), checks=1.0)
    for x, y, _ in loader:
        seen = [x.numpy().max()]
        x.mul_(0.37)
        out = model(x)
        seen.append(out.detach().numpy().max())
        optimizer.zero_grad()
        F.cross_entropy(out, y).backward()
        optimizer.step()
        assert np.isfinite(seen).all()
    assert len(engine.ledger) == 4
