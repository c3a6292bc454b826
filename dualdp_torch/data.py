# SPDX-License-Identifier: Apache-2.0
"""Batches drawn as the plan says, whatever the loader drew before."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
)
from torch.utils.data.distributed import DistributedSampler

from dualdp import AccountingError, _validate
from dualdp.batches import num_physical_batches, physical_batches
from dualdp.randomness import counter

from .collate_check import CheckedCollate
from .normals import keyed_generator
from .rules.base import Tensor

_KEPT = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn"),
    *("multiprocessing_context", "prefetch_factor", "persistent_workers", "pin_memory_device"),
)


class Draw(NamedTuple):
    """Which rows of the plan's data one physical batch holds.

    Attributes:
        step: the logical batch it is part of.
        indices: row of the data set for each row of the batch.
        mask: (rows,) bool, False for padding.
        part: its number among the physical batches of the logical one.
        parts: how many those are.
    """

    step: int
    indices: list[int]
    mask: Tensor
    part: int = 0
    parts: int = 1

    @property
    def is_last(self) -> bool:
        """Whether it completes the logical batch."""
        return self.part == self.parts - 1


class Share(NamedTuple):
    """Which rows of every logical batch this process works on: rank, rank + size, and so on.

    Attributes:
        rank: of this process.
        size: number of processes.
    """

    rank: int = 0
    size: int = 1

    def num_batches(self, num_drawn: int, size: int | None) -> int:
        """Physical batches of one logical batch: those of rank 0, whose share is the largest."""
        return num_physical_batches(-(-num_drawn // self.size), size)


ALONE = Share()


def draws(
    plan: Any, start: int, stop: int, size: int | None, share: Share = ALONE
) -> Iterator[Draw]:
    """The physical batches of the steps start..stop-1; an empty one is one masked row.

    All processes get the same number of them, so that their loops stay in step.
    """
    for step in range(start, stop):
        drawn = plan.batch_indices(step)
        parts = list(physical_batches(drawn[share.rank :: share.size], size))
        missing = share.num_batches(len(drawn), size) - len(parts)
        parts += missing * list(physical_batches(drawn[:0], size))
        for k, (indices, mask) in enumerate(parts):
            rows = mask if mask.any() else np.arange(len(mask)) == 0  # no static shape is needed
            yield Draw(step, indices[rows].tolist(), torch.from_numpy(mask[rows]), k, len(parts))


class _Batches:
    """The row numbers of one pass, for a `DataLoader`; it may run ahead of the loop."""

    def __init__(self, draws_of: Callable[[int, int], Iterator[Draw]]) -> None:
        self._draws_of = draws_of
        self.begin(0, 0)

    def begin(self, start: int, stop: int) -> deque[Draw]:
        """The next iteration yields these steps; returns where their draws will stand."""
        self._span, self._handed_out = (start, stop), deque[Draw]()
        return self._handed_out

    def __iter__(self) -> Iterator[list[int]]:
        queue = self._handed_out
        for draw in self._draws_of(*self._span):
            queue.append(draw)
            yield draw.indices


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
        begin: called when a pass begins; returns its number.
        announce: called with each `Draw`, its batch and the number of its pass, before it is handed
            out.
        share: of this process.
        leave: called with the number of a pass that ends, or is given up.
        checks: share of the batches whose `collate_fn` is checked.

    Guarantees:
        `len` is the number of batches of the pass that runs, else of the coming one; of the last
            one when no further is left.  [test_length_is_true_and_batches_are_the_plans]
        A pass draws nothing from torch's global generator.
            [test_a_pass_leaves_the_users_random_numbers_alone]
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        plan: Any,
        span: Callable[[], tuple[int, int]],
        begin: Callable[[], int],
        announce: Callable[[Draw, Any, int], None],
        share: Share = ALONE,
        leave: Callable[[int], None] = lambda number: None,
        checks: float = 0.0,
    ) -> None:
        check_loader(loader)
        _check_share(loader, share)
        self.dataset = as_dataset(loader.dataset)
        if len(self.dataset) != plan.num_examples:  # type: ignore[arg-type]
            raise ValueError(
                f"The data has {len(self.dataset)} examples but the plan's "  # type: ignore[arg-type]
                f"num_examples is {plan.num_examples}. Both must agree, or epsilon is not true."
            )
        self._options = {name: getattr(loader, name) for name in _KEPT if hasattr(loader, name)}
        if not loader.pin_memory_device:
            self._options.pop("pin_memory_device", None)
        period = round(1 / checks) if checks else 0
        self._options["collate_fn"] = CheckedCollate(loader.collate_fn, period)
        self._plan, self._span, self._begin, self._announce = plan, span, begin, announce
        self._leave, self._share = leave, share
        self._use_size(plan.physical_batch_size)

    def _use_size(self, size: int | None) -> None:
        """Cut logical batches at so many rows from now on."""
        self._size = size
        self._running: tuple[int, int] | None = None
        self._last: tuple[int, int] | None = None
        self._batches = _Batches(
            lambda start, stop: draws(self._plan, start, stop, self._size, self._share)
        )
        self._loader: DataLoader[Any] | None = None

    def limited(self, max_physical_batch_size: int) -> PlannedLoader:
        """The same loader with physical batches of at most so many rows."""
        size = _validate.integer("max_physical_batch_size", max_physical_batch_size, minimum=1)
        other = copy.copy(self)
        other._use_size(size)
        return other

    def _length(self, start: int, stop: int) -> int:
        """Physical batches of some steps."""
        if self._size is None:
            return stop - start
        return sum(
            self._share.num_batches(len(self._plan.batch_indices(step)), self._size)
            for step in range(start, stop)
        )

    def __len__(self) -> int:
        span = self._running or self._span()
        if span[0] >= span[1] and self._last is not None:
            span = self._last
        return self._length(*span)

    def __iter__(self) -> Iterator[Any]:
        start, stop = self._span()
        if start >= stop:
            if self._plan.on_budget == "stop":
                return
            raise AccountingError(
                f"All {stop} planned steps are taken. Plan more steps or epochs; each release "
                "spends privacy."
            )
        number = self._begin()
        if self._loader is None:
            key = self._plan.step_key("dropout", start)
            if self._share.rank:  # what workers draw differs between processes
                key = counter.fold_in(key, self._share.rank)
            self._loader = DataLoader(
                self.dataset,
                batch_sampler=self._batches,  # type: ignore[arg-type]
                generator=keyed_generator(key, torch.device("cpu")),
                **self._options,
            )
        queue = self._batches.begin(start, stop)
        self._running = self._last = (start, stop)
        try:
            for batch in self._loader:
                self._announce(queue.popleft(), batch, number)
                yield batch
        finally:
            self._running = None
            self._leave(number)


class BatchMemoryManager:
    """Opacus' name for a loader of physical batches: `with BatchMemoryManager(...) as loader`.

    The loop stays as it is: `optimizer.step()` after each physical batch, of which only the last of
    a logical batch changes the parameters.

    Args:
        data_loader: what `make_private` returned.
        max_physical_batch_size: examples that are worked on at once.
        optimizer: what `make_private` returned.

    Raises:
        TypeError: a loader that is not private.
        ValueError: no positive integer.
    """

    def __init__(
        self, *, data_loader: Any, max_physical_batch_size: int, optimizer: torch.optim.Optimizer
    ) -> None:
        if not isinstance(data_loader, PlannedLoader):
            raise TypeError(
                f"data_loader is a {type(data_loader).__name__}. Expected the loader that "
                "make_private returned."
            )
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizer is a {type(optimizer).__name__}. Expected a torch one.")
        self._loader = data_loader.limited(max_physical_batch_size)

    def __enter__(self) -> PlannedLoader:
        return self._loader

    def __exit__(self, *_: object) -> None:
        """Nothing is left behind: an unfinished logical batch begins anew with the next pass."""


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
    batches = loader.batch_sampler
    sampler = batches.sampler if type(batches) is BatchSampler else (batches or loader.sampler)
    plain = type(sampler) is SequentialSampler or (
        type(sampler) is RandomSampler
        and not sampler.replacement
        and sampler.num_samples == len(loader.dataset)  # type: ignore[arg-type]
    )
    plain = plain or (type(sampler) is DistributedSampler and sampler.dataset is loader.dataset)
    if not plain or batches is None:
        raise ValueError(
            f"data_loader draws by {type(sampler).__name__}"
            f"{'' if batches else ' with batch_size=None'}, which the plan's sampler would "
            "replace. Expected a plain DataLoader(dataset, batch_size=..., shuffle=...); select "
            "examples in the data set instead."
        )


def _check_share(loader: DataLoader[Any], share: Share) -> None:
    """Refuse a `DistributedSampler` that was made for other processes than these.

    Raises:
        ValueError: its number of replicas or its rank are others.
    """
    sampler = loader.sampler
    if not isinstance(sampler, DistributedSampler):
        return
    if (sampler.rank, sampler.num_replicas) != share:
        raise ValueError(
            f"data_loader has a DistributedSampler of rank {sampler.rank} of "
            f"{sampler.num_replicas} in process {share.rank} of {share.size}. Expected that of the "
            "process group, or a plain DataLoader with the batch size of all processes together."
        )


def expected_batch_size(loader: DataLoader[Any]) -> int:
    """What a loader draws at once, on all processes together.

    The batch size of a loader with a `DistributedSampler` is that of one process, as torch has it.
    """
    size: int = loader.batch_sampler.batch_size  # type: ignore[union-attr]
    sampler = loader.sampler
    return size * sampler.num_replicas if isinstance(sampler, DistributedSampler) else size
