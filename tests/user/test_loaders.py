# SPDX-License-Identifier: Apache-2.0
"""Loaders, optimizers and notebook habits of ordinary programs on PyTorch."""

import pytest
import torch
from torch.nn import functional as F

import dualdp
import dualdp.torch as dpt
from tests.user.parts import ROWS, loader_of, mlp, sgd, table

PLAN = {"noise_multiplier": 1.0, "max_grad_norm": 0.5, "num_steps": 3, "delta": 1e-5}


def private(wrap=lambda loader: loader, **options):
    """Engine, model, optimizer and loader of an ordinary program."""
    engine, model = dpt.PrivacyEngine(), mlp(6, 8, 3)
    given = {"module": model, "optimizer": sgd(model), "data_loader": wrap(loader_of(*table()))}
    return engine, *engine.make_private(**given, **{**PLAN, **options})


def train(model, optimizer, loader, backward=torch.Tensor.backward):
    for x, y in loader:
        optimizer.zero_grad()
        backward(F.cross_entropy(model(x), y))
        optimizer.step()


def test_a_cell_run_twice_takes_its_own_results():
    """The names model, optimizer and loader are bound again by each run of the cell."""
    plan = dualdp.PrivacyPlan(num_examples=ROWS, expected_batch_size=8, **PLAN)
    model = mlp(6, 8, 3)
    optimizer, loader = sgd(model), loader_of(*table())
    for _ in range(2):
        engine = dpt.PrivacyEngine()
        model, optimizer, loader = engine.make_private(
            module=model, optimizer=optimizer, data_loader=loader, plan=plan
        )
    train(model, optimizer, loader)
    assert len(engine.ledger) == 3


class Moved:
    """As in fastai and ignite, whose loaders move the batches of another one."""

    def __init__(self, loader):
        self.loader, self.dataset = loader, loader.dataset

    def __iter__(self):
        for batch in self.loader:
            yield [tensor.to("cpu") for tensor in batch]


def accelerate():
    accelerator = pytest.importorskip("accelerate").Accelerator(cpu=True)
    return accelerator.prepare, accelerator.prepare, accelerator.backward


def fabric():
    fabric = pytest.importorskip("lightning.fabric").Fabric(accelerator="cpu", devices=1)
    after = lambda *made: (*fabric.setup(*made[:2]), made[2])  # noqa: E731
    return fabric.setup_dataloaders, after, fabric.backward


def moved():
    return Moved, lambda *made: (*made[:2], Moved(made[2])), torch.Tensor.backward


@pytest.mark.parametrize(
    ("package", "error", "words"),
    [
        (accelerate, ValueError, "before it was wrapped: make_private first"),
        (fabric, TypeError, r"make_private first, then .* fabric.setup"),
        (moved, TypeError, "the DataLoader before it was wrapped"),
    ],
)
def test_private_parts_go_through_a_package(package, error, words):
    before, after, backward = package()
    with pytest.raises(error, match=words):
        private(before)
    engine, *made = private()
    train(*after(*made), backward)
    assert len(engine.ledger) == 3


def test_the_last_batch_of_a_pass_may_get_no_step():
    """A program that steps at the beginning of the next batch leaves the last one."""
    engine, model, optimizer, loader = private(num_steps=12)
    for _ in range(2):
        for k, (x, y) in enumerate(loader):
            F.cross_entropy(model(x), y).backward()
            if k < 5:
                optimizer.step()
                optimizer.zero_grad()
    assert len(engine.ledger) == 10


def test_accumulation_by_hand_names_physical_batches():
    engine, model, _, loader = private()
    batches = iter(loader)
    x, y = next(batches)
    F.cross_entropy(model(x), y).backward()
    with pytest.raises(RuntimeError, match="accumulate by a larger batch_size and max_physical_b"):
        next(batches)
    assert len(engine.ledger) == 0


def test_a_penalty_on_weights_says_where_it_goes():
    _, model, _, loader = private()
    x, y = next(iter(loader))
    penalty = sum(p.square().sum() for p in model.parameters())
    with pytest.raises(dualdp.UnsupportedLayerError, match="weight_decay, or is added to p.grad"):
        (F.cross_entropy(model(x), y) + 0.01 * penalty).backward()
    engine, model, optimizer, loader = private()

    def decay(optimizer, *_):
        for p in optimizer.param_groups[0]["params"]:
            p.grad.add_(p.detach(), alpha=0.02)

    optimizer.register_step_pre_hook(decay)
    train(model, optimizer, loader)
    assert len(engine.ledger) == 3
