# SPDX-License-Identifier: Apache-2.0
"""Parameters as arrays and back."""

import numpy as np
import pytest
import torch
from torch import nn

from dualdp_torch.checkpoint import weights
from tests.dualdp_torch.checks import data, randomise


class Tied(nn.Module):
    """A tied head, a buffer, a parameter of no layer."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.norm = nn.LayerNorm(4)
        self.conv = nn.Conv1d(4, 4, 1)
        self.head = nn.Linear(4, 7)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("count", torch.arange(3))


def test_arrays_go_out_and_come_back():
    model, other = randomise(Tied(), 1), randomise(Tied(), 2)
    arrays = weights.to_numpy(model)
    assert list(arrays) == [name for name, _ in model.named_parameters()]
    state = weights.state_dict(other, arrays)
    assert set(state) == set(model.state_dict())
    before = other.scale.detach().clone()
    other.load_state_dict(state)
    assert not torch.equal(before, other.scale)
    for name, p in other.named_parameters():
        assert torch.equal(p, model.get_parameter(name))
    assert other.head.weight is other.embedding.weight
    arrays["scale"][:] = 5
    assert not bool((model.scale == 5).any())


def test_kinds_are_those_of_the_owning_module():
    assert weights.parameter_kinds(Tied()) == {
        "scale": "raw",
        "embedding.weight": "embedding",
        "norm.weight": "norm",
        "norm.bias": "norm",
        "conv.weight": "conv",
        "conv.bias": "conv",
        "head.bias": "linear",
        "head.weight": "linear",  # its other name
    }


def test_precision_and_device_are_the_modules():
    model = nn.Linear(3, 2).double()
    state = weights.state_dict(model, {"weight": np.ones((2, 3), np.float32), "bias": np.ones(2)})
    assert state["weight"].dtype == torch.float64


def test_other_names_and_shapes_are_refused():
    model = nn.Linear(3, 2)
    with pytest.raises(ValueError, match=r"lack \['bias'\] and name \['other'\]"):
        weights.state_dict(model, {"weight": data(2, 3).numpy(), "other": np.ones(2)})
    with pytest.raises(ValueError, match=r"'weight' has shape \(3, 2\). Expected \(2, 3\)"):
        weights.state_dict(model, {"weight": np.ones((3, 2)), "bias": np.ones(2)})
