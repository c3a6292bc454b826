# SPDX-License-Identifier: Apache-2.0
"""Operators of one whole private step: on a GPU, small models are bound by their number.

Counted on the host as another device would run them. Views and empty tensors start no kernel;
cuDNN's and ours are the same recurrent layers.
"""

import collections

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

import dualdp_torch as dpt
from benchmarks import workloads, workloads_torch
from dualdp_torch.rules import base

NO_KERNEL = {
    *("view", "_unsafe_view", "t", "transpose", "permute", "expand", "unsqueeze", "squeeze"),
    *("squeeze_", "select", "slice", "split", "split_with_sizes", "unbind", "diagonal", "detach"),
    *("as_strided", "alias", "unfold", "lift_fresh", "empty", "new_empty", "empty_like"),
}
READS = {"_local_scalar_dense", "nonzero", "item"}  # for which the host waits


class Count(TorchDispatchMode):
    """Operators by name."""

    def __init__(self):
        super().__init__()
        self.found = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.found[func._schema.name.split("::")[1]] += 1
        return func(*args, **(kwargs or {}))

    def total(self):
        return sum(count for name, count in self.found.items() if name not in NO_KERNEL)


# Row, examples, options, operators of the plain and of the private step.
SMALL = {"width": 16, "heads": 2, "length": 6, "vocabulary": 20}
ROWS = [
    ("mlp", 4, {}, 32, 55),
    ("mnist", 4, {}, 41, 69),
    ("gpt", 2, SMALL, 198, 336),
    ("embed", 4, {}, 22, 70),
    ("lstm", 2, {"length": 8}, 32, 104),
    pytest.param("cifar10", 2, {}, 65, 111, marks=pytest.mark.slow),
    pytest.param("resnet18_gn", 2, {"image": 16}, 211, 367, marks=pytest.mark.slow),
    pytest.param("vit_tiny", 2, {"image": 32, "layers": 6}, 287, 470, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("row", "n", "options", "plain", "private"), ROWS)
def test_a_private_step_starts_few_kernels(monkeypatch, row, n, options, plain, private):
    """Of the numbers reached, one operator is allowed more; the host waits once."""
    monkeypatch.setattr(base, "HOSTS", set())
    work = workloads.create(row, **options)
    data = tuple(map(torch.from_numpy, work.batch(n)))

    def steps(count, engine=None):
        """Operators of the last of `count` steps."""
        model = workloads_torch.model(work, 0)
        optimizer, batches = torch.optim.SGD(model.parameters(), 0.1), [data] * count
        if engine is not None:
            model, optimizer, loader = engine.make_private(
                module=model,
                optimizer=optimizer,
                data_loader=DataLoader(TensorDataset(*data), batch_size=n),
                noise_multiplier=1.0,
                max_grad_norm=1.0,
                poisson_sampling=False,
                checks=1e-9,
            )
            batches = (batch for _ in range(count) for batch in loader)
        for x, y in batches:
            with Count() as operators:
                optimizer.zero_grad()
                workloads_torch.losses(work, model(x), y).mean().backward()
                optimizer.step()
        return operators

    expected, engine = steps(1), dpt.PrivacyEngine()
    found = steps(3, engine)
    engine.detach()
    assert expected.total() == plain
    assert found.total() <= private + 1
    assert sum(found.found[name] for name in READS) <= 1
