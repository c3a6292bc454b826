# SPDX-License-Identifier: Apache-2.0
"""Programs of the literature, on files made in the formats of their data sets."""

import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import dualdp

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import cifar10_recipe  # noqa: E402
import literature  # noqa: E402

sys.path.pop(0)


def test_cifar10_is_read(tmp_path):
    folder, rng = tmp_path / "cifar-10-batches-py", np.random.default_rng(0)
    folder.mkdir()
    images = rng.integers(256, size=(6, 4, 3072), dtype=np.uint8)
    names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    for name, data in zip(names, images, strict=True):
        content = {"data": data, "labels": list(range(4))}
        (folder / name).write_bytes(pickle.dumps(content))
    (train, labels), (test, _) = literature.cifar10(tmp_path)
    assert labels.tolist() == list(range(4)) * 5
    torch.testing.assert_close(
        train[5, 1, 0, 3] * 127.5 + 127.5, torch.tensor(images[1, 1, 1027]).float()
    )
    assert literature.model_for("cifar10")(test).shape == (4, 10)
    (folder / "test_batch").write_bytes(pickle.dumps({"data": tmp_path}))
    with pytest.raises(ValueError, match="in a file of CIFAR-10. Expected arrays only"):
        list(literature.cifar10(tmp_path))


def test_the_recipe_for_cifar10_says_which_files_it_needs(tmp_path, monkeypatch):
    for arguments in ([], [str(tmp_path)]):
        monkeypatch.setattr(sys, "argv", ["cifar10_recipe.py", *arguments])
        with pytest.raises(SystemExit, match="has no cifar-10-batches-py/test_batch. Expected one"):
            cifar10_recipe.data_folder()


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


def test_imdb_is_read(tmp_path):
    for part in ("train", "test"):
        for kind, text in (("pos", "The movie, was GREAT"), ("neg", "was the")):
            folder = tmp_path / "aclImdb" / part / kind
            folder.mkdir(parents=True)
            (folder / "1_9.txt").write_text(text)
    (tmp_path / "aclImdb" / "imdb.vocab").write_text("the\nmovie\nwas\n")
    (ids, labels), _ = literature.imdb(tmp_path)
    assert ids[:, :5].tolist() == [[4, 2, 0, 0, 0], [2, 3, 4, 1, 0]]
    assert labels.tolist() == [0, 1]
    assert literature.model_for("imdb")(ids).shape == (2, 2)


def test_the_epsilons_of_the_docstring():
    sizes = {"mnist": 60_000, "cifar10": 50_000, "imdb": 25_000}
    for task, said in (("mnist", "2.38"), ("cifar10", "2.40"), ("imdb", "19.5")):
        noise, _, size, _, epochs, _ = literature.SETTINGS[task]
        epsilon = dualdp.get_epsilon(
            noise_multiplier=noise,
            sample_rate=size / sizes[task],
            num_steps=epochs * -(-sizes[task] // size),
            delta=literature.DELTA,
        )
        assert said in literature.__doc__
        assert 0 <= float(said) - epsilon < 0.05
