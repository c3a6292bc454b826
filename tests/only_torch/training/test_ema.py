# SPDX-License-Identifier: Apache-2.0
"""Average of the parameters, kept by the optimizer and read as a model for evaluation."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dualdp_torch as dpt
from dualdp._validate import AccountingError
from tests.only_torch import loop

DECAY = 0.3


def parts(kind=torch.optim.SGD, **options):
    model, _, loader = loop.build()
    return model, dpt.with_ema(kind(model.parameters(), lr=0.1, **options), DECAY), loader


def train(model, optimizer, loader, stop=None):
    """Train; return the parameters before the first step and after each that released."""
    seen = [[p.detach().clone() for p in model.parameters()]]
    for x, y, _ in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if next(model.parameters()).grad is not None:
            seen.append([p.detach().clone() for p in model.parameters()])
        if len(seen) == stop:
            break
    return seen


def by_hand(seen):
    """Average of each parameter over the steps, in float64."""
    average = [p.double() for p in seen[0]]
    for t, parameters in enumerate(seen[1:]):
        d = min(DECAY, (1 + t) / (10 + t))
        average = [d * a + (1 - d) * p for a, p in zip(average, parameters, strict=True)]
    return average


def assert_averaged(model, seen):
    for p, expected in zip(model.parameters(), by_hand(seen), strict=True):
        torch.testing.assert_close(p.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("size", [None, 5])
def test_the_average_is_that_of_the_steps(kind, size):
    engine, model, optimizer, loader = loop.start(parts(kind), plan=loop.plan())
    seen = train(model, optimizer, loader if size is None else loader.limited(size))
    assert len(seen) == 7
    found = engine.ema()
    assert_averaged(found, seen)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), seen[-1], strict=True))
    assert not found.training
    x = loop.dataset().tensors[0]
    assert not torch.allclose(found(x), model(x))  # and neither is recorded
    engine.detach()
    found(x).sum().backward()


def test_the_trained_parameters_are_those_without_an_average():
    ends = []
    for given in (loop.build(), parts()):
        if len(ends) == 0:
            given = (given[0], torch.optim.SGD(given[0].parameters(), lr=0.1), given[2])
        ends.append(train(*loop.start(given, plan=loop.plan())[1:])[-1])
    assert all(torch.equal(p, q) for p, q in zip(*ends, strict=True))


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_an_average_goes_on_from_a_checkpoint(tmp_path, kind):
    engine, *whole = loop.start(parts(kind), plan=loop.plan())
    train(*whole)
    expected = engine.ema()
    engine.detach()
    engine, model, optimizer, loader = loop.start(parts(kind), plan=loop.plan())
    train(model, optimizer, loader, stop=4)
    dpt.save_checkpoint(tmp_path / "run", model=model, optimizer=optimizer, engine=engine)
    engine.detach()
    model, optimizer, data = parts(kind)
    engine = dpt.load_checkpoint(tmp_path / "run", model=model, optimizer=optimizer)
    *_, loader = engine.resume(data_loader=data)
    train(model, optimizer, loader.remaining())
    pairs = zip(engine.ema().parameters(), expected.parameters(), strict=True)
    assert all(torch.equal(p, q) for p, q in pairs)


def test_an_average_that_nobody_continues_is_refused(tmp_path):
    engine, model, optimizer, loader = loop.start(parts(), plan=loop.plan())
    train(model, optimizer, loader, stop=4)
    dpt.save_checkpoint(tmp_path / "run", model=model, optimizer=optimizer, engine=engine)
    engine.detach()
    model, _, data = loop.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # without with_ema
    engine = dpt.load_checkpoint(tmp_path / "run", model=model, optimizer=optimizer)
    engine.resume(data_loader=data)
    with pytest.raises(ValueError, match=r"Expected with_ema\(optimizer.*load_checkpoint"):
        engine.ema()


def test_wrong_averages_are_refused():
    model, optimizer, data = loop.build()
    for decay in (1, 1.5, -0.1, float("nan")):
        with pytest.raises(ValueError, match="decay="):
            dpt.with_ema(optimizer, decay)
    with pytest.raises(TypeError, match="optimizer is a"):
        dpt.with_ema(model)
    dpt.with_ema(optimizer)
    with pytest.raises(ValueError, match="keeps an average already"):
        dpt.with_ema(optimizer)
    half = nn.Linear(2, 2).bfloat16()
    with pytest.raises(ValueError, match="parameters below float32"):
        dpt.with_ema(torch.optim.SGD(half.parameters(), lr=0.1))
    engine = dpt.PrivacyEngine()
    with pytest.raises(AccountingError, match="not attached"):
        engine.ema()
    engine, *_ = loop.start((model, optimizer, data), plan=loop.plan())
    with pytest.raises(ValueError, match="no average of every trained parameter"):
        engine.ema()
