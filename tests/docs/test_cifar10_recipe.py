# SPDX-License-Identifier: Apache-2.0
"""The recipe for CIFAR-10, on files made in the format of its data set."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import cifar10_recipe  # noqa: E402

sys.path.pop(0)


def test_cifar10_is_read(tmp_path):
    rows = np.random.default_rng(0).integers(256, size=(4, 3073), dtype=np.uint8)
    rows[:, 0] = range(4)
    rows.tofile(tmp_path / "test_batch.bin")
    images, labels = cifar10_recipe.read(tmp_path, ["test_batch.bin"] * 2)
    assert labels.tolist() == [*range(4)] * 2
    found = images[5, 1, 0, 3] * 127.5 + 127.5
    torch.testing.assert_close(found, torch.tensor(rows[1, 1 + 1027]).float())


def test_the_recipe_for_cifar10_says_which_files_it_needs(tmp_path, monkeypatch):
    for arguments in ([], [str(tmp_path)]):
        monkeypatch.setattr(sys, "argv", ["cifar10_recipe.py", *arguments])
        with pytest.raises(SystemExit, match="data_batch_1.bin is missing. Expected PATH/cifar-10"):
            cifar10_recipe.cifar10()


def test_the_network_of_the_recipe_has_the_size_of_wrn_16_4():
    model = cifar10_recipe.wide_resnet()
    sizes = [m.kernel_size[0] for m in model.modules() if isinstance(m, torch.nn.Conv2d)]
    assert (sizes.count(3), sizes.count(1)) == (13, 3)
    assert round(sum(p.numel() for p in model.parameters()) / 1e6, 2) == 2.75
    assert model(torch.zeros(1, 3, 32, 32)).shape == (1, 10)


def test_convolutions_of_the_recipe_forget_scale_and_mean_of_their_weights():
    torch.manual_seed(0)
    layer, x = cifar10_recipe.StandardisedConv2d(3, 4, 3).double(), torch.randn(2, 3, 5, 5).double()
    before = layer(x)
    with torch.no_grad():
        layer.weight.mul_(3).add_(0.5)
    torch.testing.assert_close(layer(x), before, rtol=1e-3, atol=1e-3)
    assert (before - layer.bias.view(1, -1, 1, 1)).abs().max() > 0.1
