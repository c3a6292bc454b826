# SPDX-License-Identifier: Apache-2.0
"""Checks that a `collate_fn` makes each row of a batch from that row alone.

Collating one row by itself must give the same row as in the batch, up to padding: a constant at one
end of an axis. A function that draws random numbers draws others for one row than for many; then
the other rows are replaced instead, with the same random numbers.
"""

from __future__ import annotations

import contextlib
import copy
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import default_collate

from dualdp_torch.per_sample.random_state import RandomState
from dualdp_torch.rules.base import Tensor

_ROWS = 4  # rows of a batch that are checked
Collate = Callable[[list[Any]], Any]


class CheckedCollate:
    """Wrapper of a `collate_fn` that is checked on its first batch of two rows, and periodically.

    One batch in `period` is checked; 0 for none.
    """

    def __init__(self, collate: Collate, period: int) -> None:
        self._collate, self._period, self._count = collate, period, 0

    def __call__(self, rows: list[Any]) -> Any:
        """Return the batch of these rows.

        Raises:
            ValueError: a row of it depends on the other rows.
        """
        count, self._count = self._count, self._count + (len(rows) > 1)
        is_checked = self._collate is not default_collate  # which takes each row by itself
        if not is_checked or not self._period or len(rows) < 2 or count % self._period:
            return self._collate(rows)
        model = nn.Module()  # without generators of its own
        kept, before = copy.deepcopy(rows), RandomState.of(model)
        batch, after = self._collate(rows), RandomState.of(model)
        try:
            first, apart = self._count // self._period, max(1, len(rows) // _ROWS)
            for k in range(min(_ROWS, len(rows))):
                _check(self._collate, kept, batch, before, (first + k * apart) % len(rows))
        finally:
            after.put()
        return batch


def _check(collate: Collate, rows: list[Any], batch: Any, state: RandomState, row: int) -> None:
    """Refuse a batch in which one row depends on the others.

    `rows` are those of the data set that the batch was made from, and `state` is that of the
    generators before it was made.
    """

    def again(chosen: Sequence[int]) -> Any:
        state.put()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return collate([copy.deepcopy(rows[i]) for i in chosen])

    n, what = len(rows), "it can't be made of one row"
    with contextlib.suppress(Exception):
        found = _difference(batch, again([row]), n, row, 1, 0)
        if found is None:
            return
        what = found
    compared = False
    for chosen in _others(n, row) if _is_random(collate, rows, batch, state) else ():
        other = again(chosen)
        if _shapes(other) != _shapes(batch):
            continue  # other draws
        found, compared = _difference(batch, other, n, row, n, row), True
        if found is not None:
            what, compared = found, False
            break
    if not compared:
        raise ValueError(
            f"collate_fn makes a row of the batch from the other rows, too: {what}. One example "
            "would enter the gradients of others. Prepare each row by itself in the data set; only "
            "padding, a constant at one end of an axis, may depend on the batch."
        )


def _is_random(collate: Collate, rows: list[Any], batch: Any, state: RandomState) -> bool:
    """True if the same rows give another batch with other random numbers."""
    state.put()
    torch.rand(1), random.random(), np.random.random()  # noqa: NPY002
    other, n = collate(copy.deepcopy(rows)), len(rows)
    return any(_difference(batch, other, n, row, n, row) is not None for row in range(n))


def _others(n: int, row: int) -> Iterator[list[int]]:
    """Yield row indices with some or all rows other than `row` replaced."""
    for other in range(n):
        if other != row:
            yield [row if i == row else other for i in range(n)]
    for gone in range(n):
        if gone != row:
            left = next(i for i in (*range(gone + 1, n), *range(gone)) if i != row or n == 2)
            yield [left if i == gone else i for i in range(n)]


def _difference(a: Any, b: Any, n: int, i: int, m: int, j: int, path: str = "batch") -> str | None:
    """Difference of row i in a batch a of n rows and row j in one b of m rows, or None.

    `path` is the position of the value in the batch, for the result.
    """
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and a.dtype != object:
        a, b = torch.from_numpy(a.copy()), torch.from_numpy(b.copy())
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return _tensors_differ(a, b, n, i, m, j, path)
    if type(a) is not type(b):
        return f"{path} is a {type(a).__name__} of many rows and a {type(b).__name__} of one"
    if isinstance(a, Mapping):
        if a.keys() != b.keys():
            return f"{path} has other keys"
        found = (_difference(a[k], b[k], n, i, m, j, f"{path}[{k!r}]") for k in a)
        return next(filter(None, found), None)
    if isinstance(a, list | tuple):
        if len(a) == n and len(b) == m and not any(isinstance(v, Tensor) for v in a):
            return None if _equal(a[i], b[j]) else f"{path}[{i}] is another one"
        if len(a) != len(b):
            return f"{path} has {len(a)} entries for {n} rows and {len(b)} for {m}"
        found = (_difference(a[k], b[k], n, i, m, j, f"{path}[{k}]") for k in range(len(a)))
        return next(filter(None, found), None)
    if hasattr(a, "__dict__") and not callable(a):
        return _difference(vars(a), vars(b), n, i, m, j, path)
    return None if _equal(a, b) else f"{path} is another value"


def _tensors_differ(a: Tensor, b: Tensor, n: int, i: int, m: int, j: int, path: str) -> str | None:
    """Like `differs`, for tensors with the rows on one axis, or on none."""
    if a.dim() != b.dim():
        return f"{path} has {a.dim()} axes for {n} rows and {b.dim()} for {m}"
    pairs = list(zip(a.shape, b.shape, strict=True))
    axis = next((k for k, sizes in enumerate(pairs) if sizes == (n, m)), None)
    x, y = (a, b) if axis is None else (a.select(axis, i), b.select(axis, j))
    if any(long < short for long, short in zip(x.shape, y.shape, strict=True)):
        return f"{path} is longer for {m} rows than for {n}"
    at_end = tuple(slice(size) for size in y.shape)
    at_start = tuple(
        slice(long - short, None) for long, short in zip(x.shape, y.shape, strict=True)
    )
    if any(_is_padded(x, y, inside) for inside in (at_end, at_start)):
        return None
    return f"{path} has other numbers"


def _is_padded(x: Tensor, y: Tensor, inside: tuple[slice, ...]) -> bool:
    """True if x holds y at `inside`, and a constant everywhere else."""
    rest = torch.ones(x.shape, dtype=torch.bool)
    rest[inside] = False
    padding = x[rest]
    return _equal(x[inside], y) and _equal(padding, padding[:1].expand_as(padding))


def _equal(a: Any, b: Any) -> bool:
    """True if two values are equal, up to rounding."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        if a.is_floating_point() or a.is_complex():
            return bool(torch.isclose(a, b, rtol=1e-5, atol=1e-7, equal_nan=True).all())
        return torch.equal(a, b)
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return bool(np.array_equal(np.asarray(a), np.asarray(b)))
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_equal, a, b))
    return bool(a == b)


def _shapes(batch: Any) -> Any:
    if isinstance(batch, Tensor | np.ndarray):
        return tuple(batch.shape)
    if isinstance(batch, Mapping):
        return {name: _shapes(value) for name, value in batch.items()}
    if isinstance(batch, list | tuple):
        return [_shapes(value) for value in batch]
    return _shapes(vars(batch)) if hasattr(batch, "__dict__") and not callable(batch) else None
