# SPDX-License-Identifier: Apache-2.0
"""Frozen bases of low precision under trained adapters: exact, or refused by name."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dualdp.torch as dpt
from dualdp import UnsupportedLayerError
from tests.dualdp_torch.checks import data, ids
from tests.dualdp_torch.finetuning.models import gradients_of
from tests.dualdp_torch.loop import plan, start


class Int8(nn.Module):
    """Linear map with weights of 8 bits and a scale for each output, computed in float."""

    def __init__(self, inside, outside):
        super().__init__()
        weight = torch.randn(outside, inside)
        scale = weight.abs().amax(1, keepdim=True) / 127
        self.register_buffer("weight", (weight / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype) * self.scale.to(x.dtype))


class Narrow(nn.Module):
    """Frozen linear map in bfloat16."""

    def __init__(self, inside, outside):
        super().__init__()
        self.inner = nn.Linear(inside, outside).bfloat16().requires_grad_(False)

    def forward(self, x):
        return self.inner(x.bfloat16()).to(x.dtype)


class Adapted(nn.Module):
    """A frozen base plus a trained product of two thin matrices (LoRA)."""

    def __init__(self, base, inside, outside):
        super().__init__()
        self.base, self.up = base(inside, outside), nn.Parameter(torch.randn(outside, 2))
        self.down = nn.Parameter(torch.randn(2, inside))

    def forward(self, x):
        return self.base(x) + x @ self.down.T @ self.up.T


def model_of(base):
    torch.manual_seed(2)
    return nn.Sequential(Adapted(base, 6, 8), nn.Tanh(), Adapted(base, 8, 3))


def losses(model, x, y):
    return F.cross_entropy(model(x), y, reduction="none")


@pytest.mark.parametrize("base", [Int8, Narrow])
def test_gradients_of_the_adapters_are_plain_autograd(base):
    model, x, y = model_of(base), data(7, 6), ids(3, 7)
    expected = gradients_of(model, [losses(model, x[[k]], y[[k]]).sum() for k in range(7)])
    found = dpt.per_sample_grads(losses, model, x, y, check="always")
    assert found.keys() == expected.keys()
    for name, grads in expected.items():
        torch.testing.assert_close(found[name], grads, rtol=2e-5, atol=2e-5, msg=name)


@pytest.mark.parametrize("base", [Int8, Narrow])
def test_steps_over_a_frozen_base_pass_every_check(base):
    model = model_of(base)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    rows = torch.utils.data.TensorDataset(data(60, 6), ids(3, 60))
    optimizer = torch.optim.SGD(trained.values(), lr=0.1)
    loader = torch.utils.data.DataLoader(rows, batch_size=12)
    engine, model, optimizer, loader = start(
        (model, optimizer, loader), plan=plan(num_steps=3), checks=1.0
    )
    for x, y in loader:
        optimizer.zero_grad()
        losses(model, x, y).mean().backward()
        optimizer.step()
    assert engine.ledger.last_check == 2
    engine.detach()
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]) == (name not in trained), name


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_dynamic_quantisation_is_refused_by_name():
    dynamic = pytest.importorskip("torch.ao.nn.quantized.dynamic")

    def rounded(inside, outside):
        made = dynamic.Linear(inside, outside)  # whose weights are whatever memory held
        weight = torch.quantize_per_tensor(torch.randn(outside, inside), 0.03, 0, torch.qint8)
        made.set_weight_bias(weight, torch.zeros(outside))
        return made

    model, x, y = model_of(rounded), data(7, 6), ids(3, 7)
    with torch.no_grad():
        apart = model(torch.cat([x, 50 * x[:1]]))[:1] - model(x[:1])
    assert float(apart.abs().max()) > 1e-3  # another example moves this one
    match = "DynamicQuantizedLinear .*'0.base'.*: it rounds activations to a scale that is made of"
    with pytest.raises(UnsupportedLayerError, match=match):
        dpt.per_sample_grads(losses, model, x, y, check="off")
    assert "made of the whole batch" in str(dpt.validate(model)[0])
