# SPDX-License-Identifier: Apache-2.0
"""Data sets in which a row is another example are told apart, whatever kind they are."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from dualdp_torch.training.dataset_digest import described

ORDER = torch.arange(40)
#: The first and last rows as they are, the middle in another order.
MIDDLE = torch.cat([ORDER[:5], ORDER[5:35].flip(0), ORDER[35:]])


def tensors(order, dtype=torch.float32):
    table = torch.arange(120).reshape(40, 3).to(dtype)
    return TensorDataset(table[order], torch.arange(40)[order])


class Fetched(Dataset):
    """Rows that only fetching shows, as dictionaries with words and arrays."""

    def __init__(self, order):
        self._row = {k: int(row) for k, row in enumerate(order)}.get

    def __len__(self):
        return 40

    def __getitem__(self, index):
        row = self._row(index)
        return {"x": np.full(2, row), "name": f"row {row}", "y": torch.tensor(row), "z": (None, 1)}


class Augmented(Dataset):
    """Rows that are drawn anew whenever they are fetched, from files in a list."""

    def __init__(self, order, folder="/data", table=list):
        self.files = table(f"{folder}/class/{int(row)}.png" for row in order)

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        return torch.rand(3) + np.random.rand() + random.random()  # noqa: NPY002


class Closed(Fetched):
    """Rows that can be fetched by workers only."""

    def __getitem__(self, index):
        raise RuntimeError("not open")


class Held(Augmented):
    """The same from arrays."""

    def __init__(self, order):
        self.files = np.arange(40.0)[order]
        self.others = torch.arange(40).bfloat16()[order]
        self.labels = {"unknown": object()}


KINDS = {
    "tensors": tensors,
    "bfloat16": lambda order: tensors(order, torch.bfloat16),
    "complex": lambda order: tensors(order, torch.complex64),
    "subset": lambda order: Subset(Augmented(ORDER), order.tolist()),
    "concat": lambda order: ConcatDataset([tensors(ORDER), tensors(order)]),
    "fetched": Fetched,
    "augmented": Augmented,
    "tuple": lambda order: Augmented(order, table=tuple),
    "held": Held,
}


@pytest.mark.parametrize(
    "order", [ORDER.flip(0), ORDER.roll(1), MIDDLE], ids=["flip", "roll", "middle"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_another_order_is_told_apart(kind, order):
    build = KINDS[kind]
    assert described(build(ORDER)) == described(build(ORDER))
    assert described(build(ORDER)) != described(build(order))


def test_files_may_lie_elsewhere():
    assert described(Augmented(ORDER)) == described(Augmented(ORDER, folder="/scratch/copy"))


def test_rows_that_can_not_be_fetched_tell_nothing():
    assert described(Closed(ORDER))["rows"] == [None] * 16
    assert described(Augmented(ORDER))["rows"] == [None] * 16


def test_empty_data_is_described():
    assert described(Augmented([]))["rows"] == []


def legacy():
    """The state of NumPy's global generator."""
    return str(np.random.get_state(legacy=False))  # noqa: NPY002


def test_looking_leaves_the_users_random_numbers_alone():
    before, numpy_before, python_before = torch.get_rng_state(), legacy(), random.getstate()
    described(Augmented(ORDER))
    assert torch.equal(torch.get_rng_state(), before)
    assert legacy() == numpy_before
    assert random.getstate() == python_before
