# SPDX-License-Identifier: Apache-2.0
"""Which data set this is, in words that two processes can compare.

Row i must be the same example on every process. Where it is not, one example may lie in the shares
of two processes at one step, and count twice.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterator
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree
from torch.utils.data import ConcatDataset, Subset, TensorDataset

_ROWS = 16  # that are fetched, where all would take too long
_MOST = 1 << 28  # bytes of a table that is read for this
_PLAIN = (str, bytes, int, float, bool, type(None), PurePath)


def described(dataset: Any) -> dict[str, Any]:
    """Digests of a data set that differ where its rows lie in another order.

    Tensors, indices and tables are seen whole. Of other data sets a few rows are fetched twice, and
    count where both times give the same bits; rows that are drawn anew each time tell nothing, so
    there only the tables that the data set holds do (names of files, say).

    Args:
        dataset: map-style.
    """
    about = {"class": type(dataset).__qualname__, "examples": len(dataset)}
    if isinstance(dataset, TensorDataset):
        return about | {"rows": [_digest(_of_rows(tensor)) for tensor in dataset.tensors]}
    if isinstance(dataset, Subset):
        indices = np.asarray(dataset.indices, np.int64)
        return about | {"indices": _digest(indices), "of": described(dataset.dataset)}
    if isinstance(dataset, ConcatDataset):
        return about | {"parts": [described(part) for part in dataset.datasets]}
    held = sorted(getattr(dataset, "__dict__", {}).items())
    tables = {name: _digest(value) for name, value in held if _is_table(value, len(dataset))}
    return about | {"tables": tables, "rows": _fetched(dataset)}


def _is_table(value: Any, num: int) -> bool:
    """Whether something holds one plain entry for each example."""
    if isinstance(value, np.ndarray | torch.Tensor):
        is_plain = torch.is_tensor(value) or value.dtype != object
        return is_plain and value.ndim > 0 and len(value) == num and value.nbytes <= _MOST
    if not isinstance(value, list | tuple) or len(value) != num:
        return False
    return all(isinstance(leaf, _PLAIN) for leaf in pytree.tree_leaves(list(value)))


def _of_rows(tensor: torch.Tensor) -> torch.Tensor:
    """(n,) for each row the sum of its bytes' words, so that little is copied."""
    flat = tensor.detach().reshape(len(tensor), -1).contiguous()
    flat = torch.view_as_real(flat).reshape(len(tensor), -1) if flat.is_complex() else flat
    words = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return flat.view(words[flat.element_size()]).sum(1, dtype=torch.int64)


def _fetched(dataset: Any) -> list[str | None]:
    """A digest of some rows; None for one that is not the same twice, or can't be had here."""
    rows = sorted({*np.linspace(0, len(dataset) - 1, _ROWS).astype(int)}) if len(dataset) else []
    with _leaving_generators():
        return [_twice(dataset, int(row)) for row in rows]


def _twice(dataset: Any, row: int) -> str | None:
    try:
        first, second = (_digest(dataset[row]) for _ in range(2))
    except Exception:  # noqa: BLE001 - a data set may open its files in workers only
        return None
    return first if first == second else None


@contextlib.contextmanager
def _leaving_generators() -> Iterator[None]:
    """What is drawn inside is not missing afterwards."""
    python, legacy = random.getstate(), np.random.get_state()  # noqa: NPY002
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(legacy)  # noqa: NPY002


def _digest(value: Any) -> str:
    """SHA-256 of plain data, arrays and tensors in nested containers."""
    leaves, spec = pytree.tree_flatten(value)
    state = hashlib.sha256(repr(spec).encode())
    for leaf in leaves:
        if torch.is_tensor(leaf):
            state.update(repr((leaf.shape, leaf.dtype)).encode())
            leaf = leaf.detach().cpu().contiguous()
            leaf = torch.view_as_real(leaf) if leaf.is_complex() else leaf
            leaf = leaf.reshape(-1).view(torch.uint8).numpy()
        if isinstance(leaf, str | PurePath):  # a file may lie in another folder elsewhere
            state.update(repr(PurePath(leaf).parts[-2:]).encode())
        elif isinstance(leaf, _PLAIN):
            state.update(repr(leaf).encode())
        elif hasattr(leaf, "tobytes"):  # an array, a number of NumPy's, an image
            state.update(repr(getattr(leaf, "shape", None)).encode() + leaf.tobytes())
        else:
            state.update(type(leaf).__qualname__.encode())
    return state.hexdigest()
