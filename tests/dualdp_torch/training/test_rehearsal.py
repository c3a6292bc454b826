# SPDX-License-Identifier: Apache-2.0
"""`engine.rehearse`: the user's loss on other rows, which sees what no twin can follow."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from tests.dualdp_torch.loop import dataset, plan, start
from tests.dualdp_torch.training.runs import end_of

BATCH = tuple(part[:8] for part in dataset().tensors[:2])


def each(model, x, y):
    return F.cross_entropy(model(x), y, reduction="none")


RIGHT = {
    "plain": lambda model, x, y: each(model, x, y).mean(),
    "rows through NumPy": lambda model, x, y: (
        each(model, torch.from_numpy(x.numpy() * 2), y)
        * torch.from_numpy(np.array([1.0, 2.0, 0.5], np.float32)[y.numpy()])
    ).mean(),
    "a loop over rows": lambda model, x, y: (
        sum(F.cross_entropy(out, c) for out, c in zip(model(x), y, strict=True)) / len(x)
    ),
    "noise": lambda model, x, y: (each(model, x, y) * torch.rand(len(x))).mean(),
}
WRONG = {
    "a number of Python": lambda model, x, y: (
        each(model, x, y).mean() * (1 + x.std().item() ** 2 / 3)
    ),
    "weights through NumPy": lambda model, x, y: (
        each(model, x, y) * torch.from_numpy(1 / np.bincount(y.numpy(), minlength=3))[y]
    ).mean(),
    "decided by the batch": lambda model, x, y: (
        each(model, x, y).sum() / (8 if len(x) > 4 else 1) * float(y.numpy().mean() + 1)
    ),
    "a sum": lambda model, x, y: each(model, x, y).sum(),
}


def rehearsed(loss):
    engine, model, _, _ = start(plan=plan())
    found = engine.rehearse(lambda batch: loss(model, *batch), BATCH)
    assert len(engine.ledger) == 0
    return found


@pytest.mark.parametrize("name", [*RIGHT, *WRONG])
def test_what_depends_on_other_examples_is_said(name):
    found = rehearsed({**RIGHT, **WRONG}[name])
    said = [sentence for sentence in found if "its loss depends on other examples" in sentence]
    assert bool(said) == (name in WRONG)
    assert said == found or name in WRONG


def test_a_loss_that_can_not_be_computed_alone_is_said():
    found = rehearsed(lambda model, x, y: each(model, x, y).topk(3).values.mean())
    assert any("alone can't be computed" in sentence for sentence in found)


def test_the_run_goes_on_as_if_there_had_been_no_rehearsal():
    ends = []
    for tries in (0, 2):
        torch.manual_seed(0)
        engine, model, optimizer, loader = start(plan=plan(num_steps=3))
        for x, y, _ in loader:
            for _ in range(tries):
                engine.rehearse(lambda batch, m=model: each(m, *batch).mean(), (x, y))
            each(model, F.dropout(x, 0.1), y).mean().backward()
            optimizer.step()
        ends.append(end_of(model))
    assert torch.equal(*ends)


def test_a_single_example_is_too_few():
    engine, model, _, _ = start(plan=plan())
    with pytest.raises(ValueError, match="The batch has 1 examples"):
        engine.rehearse(lambda batch: each(model, *batch).mean(), tuple(p[:1] for p in BATCH))
