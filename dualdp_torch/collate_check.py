# SPDX-License-Identifier: Apache-2.0
"""Checks that a `collate_fn` makes each row of a batch from that row alone.

Collating one row by itself must give the row that stands in the batch, up to padding: a constant
at one end of an axis. Functions that draw random numbers draw others for one row than for many;
there the other rows are replaced, under the same draws.
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
from torch.utils.data import default_collate

from .rules.base import Tensor

_ROWS = 4  # of a batch that are looked at
Collate = Callable[[list[Any]], Any]


class CheckedCollate:
    """A `collate_fn` that is checked on its first batch of two rows, and now and then later.

    Args:
        collate: the user's.
        period: one of so many batches is checked; 0 for none.
    """

    def __init__(self, collate: Collate, period: int) -> None:
        self._collate, self._period, self._count = collate, period, 0

    def __call__(self, rows: list[Any]) -> Any:
        """The batch of these rows.

        Raises:
            ValueError: a row of it depends on the other rows.
        """
        is_new = self._collate is not default_collate  # which takes each row by itself
        is_due = is_new and bool(self._period) and len(rows) > 1
        is_due = is_due and self._count % self._period == 0
        self._count += len(rows) > 1
        if not is_due:
            return self._collate(rows)
        kept, state = copy.deepcopy(rows), _Draws()
        batch = self._collate(rows)
        with state.kept():
            first, apart = self._count // self._period, max(1, len(rows) // _ROWS)
            for k in range(min(_ROWS, len(rows))):
                check(self._collate, kept, batch, state, (first + k * apart) % len(rows))
        return batch


class _Draws:
    """The states of the generators that a collate function draws from, as they were."""

    def __init__(self) -> None:
        self._torch, self._python = torch.get_rng_state(), random.getstate()
        self._numpy = np.random.get_state()  # noqa: NPY002

    def put(self) -> None:
        """Draw again what was drawn since."""
        torch.set_rng_state(self._torch)
        random.setstate(self._python)
        np.random.set_state(self._numpy)  # noqa: NPY002

    def kept(self) -> _Kept:
        """A context after which the generators stand where they stood at its beginning."""
        return _Kept()


class _Kept:
    """Whatever is drawn inside, the generators go on where they were."""

    def __enter__(self) -> None:
        self._now = _Draws()

    def __exit__(self, *_: object) -> None:
        self._now.put()


def check(collate: Collate, rows: list[Any], batch: Any, state: _Draws, row: int) -> None:
    """Refuse a batch of which one row depends on the others.

    Args:
        collate: the function.
        rows: what the batch was made of.
        batch: as it was made.
        state: of the generators, before.
        row: which one is looked at.

    Raises:
        ValueError: it depends on other rows.
    """

    def again(chosen: Sequence[int]) -> Any:
        state.put()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return collate([copy.deepcopy(rows[i]) for i in chosen])

    n, what = len(rows), "it can't be made of one row"
    with contextlib.suppress(Exception):
        found = differs(batch, again([row]), n, row, 1, 0)
        if found is None:
            return
        what = found
    compared = False
    for chosen in _others(n, row) if _is_random(collate, rows, batch, state) else ():
        other = again(chosen)
        if _shapes(other) != _shapes(batch):
            continue  # other draws
        found, compared = differs(batch, other, n, row, n, row), True
        if found is not None:
            what, compared = found, False
            break
    if not compared:
        raise ValueError(
            f"collate_fn makes a row of the batch from the other rows, too: {what}. One example "
            "would enter the gradients of others. Prepare each row by itself in the data set; only "
            "padding, a constant at one end of an axis, may depend on the batch."
        )


def _is_random(collate: Collate, rows: list[Any], batch: Any, state: _Draws) -> bool:
    """Whether the same rows make another batch under other draws."""
    state.put()
    torch.rand(1), random.random(), np.random.random()  # noqa: NPY002
    other, n = collate(copy.deepcopy(rows)), len(rows)
    return any(differs(batch, other, n, row, n, row) is not None for row in range(n))


def _others(n: int, row: int) -> Iterator[list[int]]:
    """Rows in whose place stand others, one row as it is."""
    for other in range(n):
        if other != row:
            yield [row if i == row else other for i in range(n)]
    for gone in range(n):
        if gone != row:
            left = next(i for i in (*range(gone + 1, n), *range(gone)) if i != row or n == 2)
            yield [left if i == gone else i for i in range(n)]


def differs(a: Any, b: Any, n: int, i: int, m: int, j: int, path: str = "batch") -> str | None:
    """How row i of a batch of n differs from row j of one of m, or None.

    Args:
        a: a batch of n rows.
        b: one of m rows.
        n: rows of the first.
        i: row of the first.
        m: rows of the second.
        j: row of the second.
        path: where this value stands, for the answer.
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
        return _first(differs(a[k], b[k], n, i, m, j, f"{path}[{k!r}]") for k in a)
    if isinstance(a, list | tuple):
        if len(a) == n and len(b) == m and not any(isinstance(v, Tensor) for v in a):
            return None if _equal(a[i], b[j]) else f"{path}[{i}] is another one"
        if len(a) != len(b):
            return f"{path} has {len(a)} entries for {n} rows and {len(b)} for {m}"
        pairs = zip(a, b, strict=True)
        return _first(differs(x, y, n, i, m, j, f"{path}[{k}]") for k, (x, y) in enumerate(pairs))
    if hasattr(a, "__dict__") and not callable(a):
        return differs(vars(a), vars(b), n, i, m, j, path)
    return None if _equal(a, b) else f"{path} is another value"


def _first(found: Iterator[str | None]) -> str | None:
    return next((text for text in found if text is not None), None)


def _tensors_differ(a: Tensor, b: Tensor, n: int, i: int, m: int, j: int, path: str) -> str | None:
    """As `differs`, of tensors with the rows on one axis, or on none."""
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
    """Whether one tensor holds another one there, and a constant everywhere else."""
    rest = torch.ones(x.shape, dtype=torch.bool)
    rest[inside] = False
    padding = x[rest]
    return _equal(x[inside], y) and _equal(padding, padding[:1].expand_as(padding))


def _equal(a: Any, b: Any) -> bool:
    """Whether two values are the same, up to rounding."""
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
    """The shapes of all tensors of a batch."""
    if isinstance(batch, Tensor | np.ndarray):
        return tuple(batch.shape)
    if isinstance(batch, Mapping):
        return {name: _shapes(value) for name, value in batch.items()}
    if isinstance(batch, list | tuple):
        return [_shapes(value) for value in batch]
    return _shapes(vars(batch)) if hasattr(batch, "__dict__") and not callable(batch) else None
