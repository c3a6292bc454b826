# SPDX-License-Identifier: Apache-2.0
"""Batches drawn as the plan says, whatever the loader drew before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
)

from dualdp import AccountingError
from dualdp.batches import num_physical_batches, physical_batches

from .rules.base import Tensor

_KEPT = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn"),
    *("multiprocessing_context", "prefetch_factor", "pin_memory_device"),
)


class Draw(NamedTuple):
    """Which rows of the plan's data one physical batch holds.

    Attributes:
        step: the logical batch it is part of.
        indices: row of the data set for each row of the batch.
        mask: (rows,) bool, False for padding.
        is_first: it begins the logical batch.
        is_last: it completes the logical batch.
    """

    step: int
    indices: list[int]
    mask: Tensor
    is_first: bool
    is_last: bool


def draws(plan: Any, start: int, stop: int) -> Iterator[Draw]:
    """The physical batches of the steps start..stop-1; an empty draw is one masked row."""
    for step in range(start, stop):
        parts = list(physical_batches(plan.batch_indices(step), plan.physical_batch_size))
        for k, (indices, mask) in enumerate(parts, 1):
            yield Draw(step, indices.tolist(), torch.from_numpy(mask), k == 1, k == len(parts))


def as_dataset(data: Any) -> Dataset[Any]:
    """A map-style data set, also from a tensor or a tuple of tensors.

    Raises:
        TypeError: an iterable data set, or something without length and rows.
    """
    if torch.is_tensor(data):
        return TensorDataset(data)
    if isinstance(data, tuple | list) and data and all(torch.is_tensor(d) for d in data):
        return TensorDataset(*data)
    if isinstance(data, IterableDataset) or not hasattr(data, "__getitem__"):
        raise TypeError(
            f"The data is a {type(data).__name__}, which can't be drawn from by index. Expected a "
            "map-style Dataset or a tuple of tensors."
        )
    dataset: Dataset[Any] = data
    return dataset


class PlannedLoader:
    """The user's loader, with the plan's batches instead of its own.

    Args:
        loader: a `DataLoader` over a map-style data set; its workers, collate function and pinned
            memory are kept.
        plan: `PrivacyPlan`.
        span: () -> steps (start, stop) of the coming pass.
        begin: called when a pass begins.
        announce: called with each `Draw` before its batch is handed out.

    Guarantees:
        `len` is the number of batches of the coming pass.
            [test_length_is_true_and_batches_are_the_plans]
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        plan: Any,
        span: Callable[[], tuple[int, int]],
        begin: Callable[[], None],
        announce: Callable[[Draw], None],
    ) -> None:
        check_loader(loader)
        self.dataset = as_dataset(loader.dataset)
        if len(self.dataset) != plan.num_examples:  # type: ignore[arg-type]
            raise ValueError(
                f"The data has {len(self.dataset)} examples but the plan's "  # type: ignore[arg-type]
                f"num_examples is {plan.num_examples}. Both must agree, or epsilon is not true."
            )
        self._options = {name: getattr(loader, name) for name in _KEPT if hasattr(loader, name)}
        if not loader.pin_memory_device:
            self._options.pop("pin_memory_device", None)
        self._plan, self._span, self._begin, self._announce = plan, span, begin, announce

    def __len__(self) -> int:
        start, stop = self._span()
        size = self._plan.physical_batch_size
        if size is None:
            return stop - start
        return sum(
            num_physical_batches(len(self._plan.batch_indices(step)), size)
            for step in range(start, stop)
        )

    def __iter__(self) -> Iterator[Any]:
        start, stop = self._span()
        if start == stop:
            raise AccountingError(
                f"All {stop} planned steps are taken. Plan more steps or epochs; each release "
                "spends privacy."
            )
        self._begin()
        sampler = [draw.indices for draw in draws(self._plan, start, stop)]
        batches = DataLoader(self.dataset, batch_sampler=sampler, **self._options)
        for draw, batch in zip(draws(self._plan, start, stop), batches, strict=True):
            self._announce(draw)
            yield batch


def check_loader(loader: Any) -> None:
    """Refuse a loader whose own way of sampling would be silently replaced.

    Raises:
        TypeError: no `DataLoader`, or one over an iterable data set.
        ValueError: a sampler that is neither in order nor a plain shuffle of everything.
    """
    if not isinstance(loader, DataLoader):
        raise TypeError(
            f"data_loader is a {type(loader).__name__}. Expected a torch DataLoader over a "
            "map-style data set."
        )
    as_dataset(loader.dataset)
    sampler = loader.sampler
    plain = type(sampler) is SequentialSampler or (
        type(sampler) is RandomSampler
        and not sampler.replacement
        and sampler.num_samples == len(loader.dataset)  # type: ignore[arg-type]
    )
    if not plain or type(loader.batch_sampler).__name__ != "BatchSampler":
        raise ValueError(
            f"data_loader draws by {type(sampler).__name__}, which the plan's sampler would "
            "replace. Expected a plain DataLoader(dataset, batch_size=..., shuffle=...); select "
            "examples in the data set instead."
        )
