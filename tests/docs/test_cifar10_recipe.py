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
