# SPDX-License-Identifier: Apache-2.0
"""Digest of a data set, by which processes find out that their rows differ.

Row i must be the same example on every process. Otherwise two processes may draw the same example
in one step, and it counts twice.
"""

from __future__ import annotations

import hashlib
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from dualdp_torch.parallel.process_group import as_integers
from dualdp_torch.per_sample.random_state import untouched_generators

_ROWS = 16  # rows of a data set that are fetched
_MOST = 1 << 28  # bytes of the largest table that is read
_PLAIN = (str, bytes, int, float, bool, type(None), PurePath)


def described(dataset: Any) -> dict[str, Any]:
    """Return digests of a data set that differ if its rows are in another order.

    Tensors, indices and tables are read whole. Of other data sets a few rows are fetched twice and
    used if both fetches give the same bits. Rows that are augmented at random never do; there only
    the tables that the data set holds (names of files, say) count.
    """
    about = {"class": type(dataset).__qualname__, "examples": len(dataset)}
    if isinstance(dataset, TensorDataset | torch.Tensor):
        tensors = dataset.tensors if isinstance(dataset, TensorDataset) else (dataset,)
        return about | {"rows": [_digest(_of_rows(tensor)) for tensor in tensors]}
    if isinstance(dataset, Subset):
        indices = np.asarray(dataset.indices, np.int64)
        return about | {"indices": _digest(indices), "of": described(dataset.dataset)}
    if isinstance(dataset, ConcatDataset):
        return about | {"parts": [described(part) for part in dataset.datasets]}
    held = sorted(getattr(dataset, "__dict__", {}).items())
    tables = {name: _digest(value) for name, value in held if _is_table(value, len(dataset))}
    return about | {"tables": tables, "rows": _fetched(dataset)}


def _is_table(value: Any, num: int) -> bool:
    """True if a value holds one plain entry for each of `num` examples."""
    if isinstance(value, np.ndarray | torch.Tensor):
        is_plain = torch.is_tensor(value) or value.dtype != object
        return is_plain and value.ndim > 0 and len(value) == num and value.nbytes <= _MOST
    if not isinstance(value, list | tuple) or len(value) != num:
        return False
    return all(isinstance(leaf, _PLAIN) for leaf in pytree.tree_leaves(list(value)))


def _of_rows(tensor: torch.Tensor) -> torch.Tensor:
    """(n,) sum of each row's bits as integers, so that little is copied to the CPU."""
    rows = tensor.detach().reshape(len(tensor), -1).contiguous()
    return as_integers(rows).sum(1, dtype=torch.int64)


def _fetched(dataset: Any) -> list[str | None]:
    """Digests of some rows; None for a row that differs between two fetches or fails here."""
    rows = sorted({*np.linspace(0, len(dataset) - 1, _ROWS).astype(int)}) if len(dataset) else []
    with untouched_generators():
        return [_twice(dataset, int(row)) for row in rows]


def _twice(dataset: Any, row: int) -> str | None:
    try:
        first, second = (_digest(dataset[row]) for _ in range(2))
    except Exception:  # noqa: BLE001 - a data set may open its files in workers only
        return None
    return first if first == second else None


def _digest(value: Any) -> str:
    """SHA-256 of plain data, arrays and tensors in nested containers."""
    leaves, spec = pytree.tree_flatten(value)
    state = hashlib.sha256(repr(spec).encode())
    for leaf in leaves:
        if torch.is_tensor(leaf):
            state.update(repr((leaf.shape, leaf.dtype)).encode())
            leaf = as_integers(leaf.detach().cpu().reshape(-1)).numpy()
        if isinstance(leaf, str | PurePath):  # a file's folder may differ between machines
            state.update(repr(PurePath(leaf).parts[-2:]).encode())
        elif isinstance(leaf, _PLAIN):
            state.update(repr(leaf).encode())
        elif hasattr(leaf, "tobytes"):  # an array, a NumPy scalar, an image
            state.update(repr(getattr(leaf, "shape", None)).encode() + leaf.tobytes())
        else:
            state.update(type(leaf).__qualname__.encode())
    return state.hexdigest()
