# SPDX-License-Identifier: Apache-2.0
"""A collate function makes each row of a batch from that row alone; padding may depend on all."""

import pickle
import random
from collections import UserDict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, default_collate

from dualdp_torch.per_sample.checks.collate_check import CheckedCollate
from tests.only_torch.loop import build, dataset, plan, start
from tests.only_torch.training.test_data import forks


def stacked(rows):
    return torch.stack([r[0] for r in rows]), torch.stack([r[1] for r in rows])


def standardised(rows):
    x, y = stacked(rows)
    return (x - x.mean(0)) / (x.std(0) + 1e-3), y


def scaled(rows):
    x, y = stacked(rows)
    return x / x.abs().amax(), y


def mixed_up(rows):
    x, y = stacked(rows)
    return 0.7 * x + 0.3 * x[torch.randperm(len(x))], y


def mixed_by_python(rows):
    x, y = stacked(rows)
    order = list(range(len(x)))
    random.shuffle(order)
    return 0.7 * x + 0.3 * x[order], y


def sorted_by_size(rows):
    return stacked(sorted(rows, key=lambda r: float(r[0].sum())))


def weighed_by_counts(rows):
    x, y = stacked(rows)
    return x, y, 1 / torch.bincount(y, minlength=3)[y]


def with_a_mean(rows):
    x, y = stacked(rows)
    return {"x": x, "y": y, "centre": x.mean(0)}


def told_from_the_first(rows):
    """The classes are told from that of the first row."""
    x, y = stacked(rows)
    return x, y * (y != y[0])


MIXING = [
    *(standardised, scaled, mixed_up, mixed_by_python, sorted_by_size, weighed_by_counts),
    *(with_a_mean, told_from_the_first),
]


@pytest.mark.parametrize("collate", MIXING)
def test_rows_that_are_made_from_others_are_refused(collate):
    """known_failures 71: the engine would move by 33 C."""
    model, optimizer, _ = build()
    loader = DataLoader(dataset(), batch_size=12, collate_fn=collate)
    _, _, _, loader = start((model, optimizer, loader), plan=plan())
    with pytest.raises(ValueError, match="collate_fn makes a row of the batch from the other rows"):
        next(iter(loader))


@pytest.mark.parametrize("collate", MIXING)
def test_without_checks_nobody_looks(collate):
    model, optimizer, _ = build()
    loader = DataLoader(dataset(), batch_size=12, collate_fn=collate)
    _, _, _, loader = start((model, optimizer, loader), plan=plan(), checks=0)
    next(iter(loader))


def words(rows):
    """Lists of tokens of their own lengths."""
    return [list(range(1, 3 + int(r[1]))) for r in rows]


def padded(rows):
    longest = max(map(len, found := words(rows)))
    tokens = torch.tensor([w + [0] * (longest - len(w)) for w in found])
    return {"ids": tokens, "mask": (tokens > 0).long(), "x": stacked(rows)[0]}


def padded_before(rows):
    longest = max(map(len, found := words(rows)))
    return torch.tensor([[0] * (longest - len(w)) + w for w in found]), stacked(rows)[0]


def masked_words(rows):
    """As language models are trained: words are hidden at random."""
    batch = padded(rows)
    hidden = torch.bernoulli(torch.full(batch["ids"].shape, 0.3)).bool() & (batch["ids"] > 0)
    labels = batch["ids"].masked_fill(~hidden, -100)
    return {**batch, "ids": batch["ids"].masked_fill(hidden, 9), "labels": labels}


def noisy(rows):
    x, y = stacked(rows)
    return x + 0.1 * torch.randn_like(x), y


def noisy_by_numpy(rows):
    x, y = stacked(rows)
    return x + torch.from_numpy(np.random.randn(*x.shape)).float(), y  # noqa: NPY002


def one_by_one(rows):
    """Each row by its own draws, as augmentations are written."""
    rows = [(r[0] * (1 + random.random()), r[1]) for r in rows]
    return stacked(rows)


def pops(rows):
    """Takes its rows apart, as some do."""
    rows = [dict(x=r[0], y=r[1]) for r in rows]
    y = torch.stack([r.pop("y") for r in rows])
    return UserDict(x=torch.stack([r["x"] for r in rows]), y=y, names=[str(v) for v in y])


def as_objects(rows):
    x, y = stacked(rows)
    return SimpleNamespace(x=x.numpy(), y=y, names=[f"row {int(v)}" for v in y], number=3)


def time_first(rows):
    x, y = stacked(rows)
    return x.t().contiguous(), y


OWN = [
    *(stacked, default_collate, padded, padded_before, masked_words, noisy, noisy_by_numpy),
    *(one_by_one, pops, as_objects, time_first),
]


@pytest.mark.parametrize("collate", OWN)
def test_rows_that_are_made_one_by_one_pass_and_nothing_is_drawn_twice(collate):
    """With a check and without, the same batches: the generators stand where they would."""
    rows = [dataset()[k] for k in range(12)]
    seen = []
    for period in (0, 1):
        torch.manual_seed(1), random.seed(1), np.random.seed(1)  # noqa: NPY002
        checked = CheckedCollate(collate, period)
        batches = [checked(list(rows)) for _ in range(3)]
        drawn = torch.rand(1).item(), random.random(), np.random.rand()  # noqa: NPY002
        seen.append((repr(batches), drawn))
    assert seen[0] == seen[1]


def test_one_batch_in_many_is_looked_at():
    calls = []

    def counted(rows):
        calls.append(len(rows))
        return stacked(rows)

    checked = CheckedCollate(counted, 5)
    rows = [dataset()[k] for k in range(4)]
    checked(rows[:1])  # of one row nothing can be seen
    assert calls == [1]
    for _ in range(10):
        checked(rows)
    assert calls.count(4) == 10
    assert calls.count(1) == 1 + 2 * 4
    assert pickle.loads(pickle.dumps(CheckedCollate(stacked, 5)))(rows)[0].shape == (4, 6)


def test_mixing_that_begins_later_is_found():
    state = {"on": False}

    def later(rows):
        return standardised(rows) if state["on"] else stacked(rows)

    model, optimizer, _ = build()
    loader = DataLoader(dataset(), batch_size=12, collate_fn=later)
    parts = (model, optimizer, loader)
    engine, model, optimizer, loader = start(parts, plan=plan(num_steps=40), checks=1 / 5)

    def loop():
        for step, (x, y) in enumerate(loader):
            state["on"] = step >= 11
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

    with pytest.raises(ValueError, match="collate_fn makes a row"):
        loop()
    assert 11 <= len(engine.ledger) <= 17


@pytest.mark.slow
@forks
def test_workers_look_too():
    model, optimizer, _ = build()
    loader = DataLoader(dataset(), batch_size=12, collate_fn=standardised, num_workers=1)
    _, _, _, loader = start((model, optimizer, loader), plan=plan())
    with pytest.raises(ValueError, match="collate_fn makes a row of the batch"):
        next(iter(loader))
