# SPDX-License-Identifier: Apache-2.0
"""A step's numbers stay on their device: one look at them, and 32 bytes for a ledger in a file.

On the meta device there are no numbers to read, and tensors of two devices can't be mixed. The
analysis of a model reads numbers once for each kind of batch, so it is taken from the CPU.
"""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from dualdp_torch.noise import noise
from dualdp_torch.per_sample import analysis_cache
from tests.dualdp_torch.checks import data, ids
from tests.dualdp_torch.loop import plan, start

NUM = 60
MODELS = {
    "mlp": (lambda: [nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)], (6,)),
    "positions": (lambda: [nn.Linear(32, 32), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)], (2, 32)),
    "cnn": (
        lambda: [nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)],
        (1, 6, 6),
    ),
}


class Reads(TorchDispatchMode):
    """Mode that notes every number and copy that leaves the device, and answers in its place."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        if name not in ("_local_scalar_dense", "_to_copy") or args[0].device.type != "meta":
            return func(*args, **kwargs)
        if name == "_local_scalar_dense":
            self.found.append(name)
            return True
        if kwargs.get("device") in (None, torch.device("meta")):
            return func(*args, **kwargs)
        self.found.append(f"{args[0].nbytes} bytes")
        return torch.zeros(args[0].shape, dtype=args[0].dtype)


def train(make, shape, device, **options):
    """Reads of three steps, each of a logical batch in one or several physical batches."""
    inputs = torch.utils.data.TensorDataset(data(NUM, *shape), ids(3, NUM))
    model = nn.Sequential(*make()).to(device)
    parts = model, torch.optim.SGD(model.parameters(), lr=0.1), torch.utils.data.DataLoader(inputs)
    _, model, optimizer, loader = start(parts, checks=0, **options)
    reads = []
    for x, y in loader:
        x, y = x.to(device), y.to(device)
        with Reads() as mode:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        reads.append(mode.found)
    return reads


@pytest.mark.parametrize("physical", [None, 5], ids=["whole", "parts"])
@pytest.mark.parametrize("name", MODELS)
def test_a_step_looks_once_at_its_numbers(name, physical, tmp_path, monkeypatch):
    analyses, drawn, examine = [], noise.keyed_generator, analysis_cache.examine

    def kept(*args, **options):
        analyses.append(examine(*args, **options))
        return analyses[-1]

    chosen = plan(num_steps=3, physical_batch_size=physical)
    monkeypatch.setattr(analysis_cache, "examine", kept)
    assert not any(train(*MODELS[name], "cpu", plan=chosen))
    # The meta device passes for one with numbers.
    monkeypatch.setattr(analysis_cache, "examine", lambda *args, **options: analyses[0])
    monkeypatch.setattr(torch.Tensor, "is_meta", False)
    monkeypatch.setattr(
        noise,
        "keyed_generator",
        lambda key, device, block=0: None if device.type == "meta" else drawn(key, device, block),
    )
    look = ["_local_scalar_dense"]
    for path in (None, tmp_path / "ledger"):
        reads = train(*MODELS[name], "meta", plan=chosen, ledger=path)
        assert len(reads) == 3 if physical is None else len(reads) > 3
        assert all(found == look for found in reads)
