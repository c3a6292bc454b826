# SPDX-License-Identifier: Apache-2.0
"""What a first call finds out and later calls use: memory."""

from unittest import mock

import pytest
import torch
from torch import nn

import dualdp_torch as dpt
from dualdp_torch.per_sample import call
from dualdp_torch.rules import base, conv_forms
from tests import reference
from tests.dualdp_torch.checks import data, randomise
from tests.dualdp_torch.per_sample.loops import recorded

loss_fn = reference.loss_fn


def test_the_device_bounds_the_memory_when_nobody_else_does(monkeypatch):
    sizes, x = [], data(64, 64)
    loss = lambda m, x: sizes.append(len(x)) or loss_fn(m, x)  # noqa: E731
    wide = randomise(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)))

    def clipped(free):
        monkeypatch.setattr(call, "free_memory", lambda device: free)
        return dpt.clipped_grad_sum(loss, wide, x, max_grad_norm=1.0, method="materialize").grads

    whole = clipped(2**40)
    assert sizes[-1] == 64
    clipped(1 << 20)
    assert sizes[-1] == 64, "too little for the device to be asked"
    monkeypatch.setattr(call, "SURELY_FREE", 0)
    sizes.clear()
    torch.testing.assert_close(clipped(1 << 20), whole)
    assert 1 < max(sizes) < 32  # about 35,000 bytes each


LAYERS = {
    "positions": (nn.Linear(12, 10), (40, 12), 120),
    "convolution": (nn.Conv2d(8, 6, 3), (8, 20, 20), 432),
    "three axes": (nn.Conv3d(2, 3, 2), (2, 9, 9, 9), 48),
    "transposed": (nn.ConvTranspose2d(4, 6, 3, stride=2), (4, 7, 7), 216),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_recorded_batch_keeps_no_more_than_memory_allows(name, monkeypatch):
    """The batch is there already; its gradients are formed for their norms, a few at a time."""
    layer, shape, numbers = LAYERS[name]
    model, x, formed = randomise(nn.Sequential(layer, nn.Tanh())), data(9, *shape), []
    module, function = (torch, "bmm") if name == "positions" else (conv_forms, "by_folding")
    original = getattr(module, function)

    def watch(*args, **options):
        out = original(*args, **options)
        weight = out[0] if options.get("has_bias") else out
        formed.append(weight.numel() // numbers)
        return out

    monkeypatch.setattr(module, function, watch)
    monkeypatch.setitem(conv_forms.FORMS, "folded", watch)
    with mock.patch.dict(base.FORCED, convolution="folded"):
        expected = recorded(model, x, loss=loss_fn).clipped_sum(max_grad_norm=0.5)
        assert max(formed) == 9
        formed.clear()
        monkeypatch.setattr(base, "SURELY_FREE", 4 * 4 * numbers)
        monkeypatch.setattr(base, "free_memory", lambda device: 0)
        found = recorded(model, x, loss=loss_fn).clipped_sum(max_grad_norm=0.5)
    assert formed == [4, 4, 1]
    torch.testing.assert_close(found, expected)


def test_free_memory_is_that_of_the_machine(monkeypatch):
    cpu = torch.device("cpu")
    assert 2**20 < call.free_memory(cpu) < 2**50

    def missing(*_):
        raise FileNotFoundError

    monkeypatch.setattr("builtins.open", missing)
    assert 2**20 < call.free_memory(cpu) < 2**50
