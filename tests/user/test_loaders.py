# SPDX-License-Identifier: Apache-2.0
"""Loaders, optimizers and notebook habits of ordinary programs on PyTorch."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import dualdp
import dualdp.torch as dpt

ROWS = 40
PLAN = {"noise_multiplier": 1.0, "max_grad_norm": 0.5, "num_steps": 3, "delta": 1e-5}


def parts(model=None):
    torch.manual_seed(0)
    model = model or nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    data = TensorDataset(torch.randn(ROWS, 6), torch.arange(ROWS) % 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, DataLoader(data, batch_size=8, shuffle=True)


def private(model, optimizer, loader, **options):
    engine = dpt.PrivacyEngine()
    arguments = {"module": model, "optimizer": optimizer, "data_loader": loader}
    return engine, *engine.make_private(**arguments, **{**PLAN, **options})


def train(model, optimizer, loader, backward=lambda loss: loss.backward()):
    for x, y in loader:
        optimizer.zero_grad()
        backward(F.cross_entropy(model(x), y))
        optimizer.step()


def test_a_cell_run_twice_takes_its_own_results():
    """The names model, optimizer and loader are bound again by each run of the cell."""
    model, optimizer, loader = parts()
    plan = dualdp.PrivacyPlan(num_examples=ROWS, expected_batch_size=8, **PLAN)
    for _ in range(2):
        engine = dpt.PrivacyEngine()
        model, optimizer, loader = engine.make_private(
            module=model, optimizer=optimizer, data_loader=loader, plan=plan
        )
    train(model, optimizer, loader)
    assert len(engine.ledger) == 3


def test_private_parts_go_through_accelerate():
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    model, optimizer, loader = parts()
    with pytest.raises(ValueError, match="before it was wrapped: make_private first"):
        private(model, optimizer, accelerator.prepare(loader))
    engine, *made = private(model, optimizer, loader)
    train(*accelerator.prepare(*made), accelerator.backward)
    assert len(engine.ledger) == 3


def test_private_parts_go_through_fabric():
    fabric = pytest.importorskip("lightning.fabric").Fabric(accelerator="cpu", devices=1)
    model, optimizer, loader = parts()
    with pytest.raises(TypeError, match=r"make_private first, then .* fabric.setup"):
        private(model, optimizer, fabric.setup_dataloaders(loader))
    engine, model, optimizer, loader = private(model, optimizer, loader)
    train(*fabric.setup(model, optimizer), loader, fabric.backward)
    assert len(engine.ledger) == 3


def test_a_wrapper_around_the_private_loader_is_free():
    """As in fastai and ignite, whose loaders move the batches of another one."""

    class Moved:
        def __init__(self, loader):
            self.loader, self.dataset = loader, loader.dataset

        def __iter__(self):
            for batch in self.loader:
                yield [tensor.to("cpu") for tensor in batch]

    model, optimizer, loader = parts()
    with pytest.raises(TypeError, match="the DataLoader before it was wrapped"):
        private(model, optimizer, Moved(loader))
    engine, model, optimizer, loader = private(model, optimizer, loader)
    train(model, optimizer, Moved(loader))
    assert len(engine.ledger) == 3


def test_the_last_batch_of_a_pass_may_get_no_step():
    """A program that steps at the beginning of the next batch leaves the last one."""
    engine, model, optimizer, loader = private(*parts(), num_steps=10)
    for _ in range(2):
        for k, (x, y) in enumerate(loader):
            F.cross_entropy(model(x), y).backward()
            if k < 4:
                optimizer.step()
                optimizer.zero_grad()
    assert len(engine.ledger) == 8


def test_accumulation_by_hand_names_physical_batches():
    engine, model, optimizer, loader = private(*parts())
    batches = iter(loader)
    x, y = next(batches)
    F.cross_entropy(model(x), y).backward()
    with pytest.raises(RuntimeError, match="accumulate by a larger batch_size and max_physical_b"):
        next(batches)
    assert len(engine.ledger) == 0


def test_a_penalty_on_weights_says_where_it_goes():
    _, model, optimizer, loader = private(*parts())
    x, y = next(iter(loader))
    penalty = sum(p.square().sum() for p in model.parameters())
    with pytest.raises(dualdp.UnsupportedLayerError, match="weight_decay, or is added to p.grad"):
        (F.cross_entropy(model(x), y) + 0.01 * penalty).backward()
    engine, model, optimizer, loader = private(*parts())

    def decay(optimizer, *_):
        for p in optimizer.param_groups[0]["params"]:
            p.grad.add_(p.detach(), alpha=0.02)

    optimizer.register_step_pre_hook(decay)
    train(model, optimizer, loader)
    assert len(engine.ledger) == 3
