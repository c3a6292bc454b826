# SPDX-License-Identifier: Apache-2.0
"""Loader of the plan's batches, which replace those of the user's `DataLoader`."""

from __future__ import annotations

import copy
import os
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
)
from torch.utils.data.distributed import DistributedSampler

from dualdp import _validate
from dualdp._validate import AccountingError
from dualdp.plan.batches import (
    drawn_indices,
    drawn_rows,
    num_physical_batches,
    physical_batches,
)
from dualdp.plan.plan import PrivacyPlan, require_units
from dualdp.plan.units import UserRows
from dualdp.randomness import SegmentBits, fold_in
from dualdp_torch.noise.generators import keyed_generator
from dualdp_torch.rules.base import Tensor
from dualdp_torch.training.items import ItemCollate, refuse_views_of_items
from dualdp_torch.training.opacus_names import missing_in
from dualdp_torch.training.views import DrawnViews, Views, flat_collate

_KEPT = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn"),
    *("multiprocessing_context", "prefetch_factor", "persistent_workers", "pin_memory_device"),
)


_WRAPPED = (  # by accelerate, Fabric and others
    "of a package that wraps loaders, the DataLoader before it was wrapped: make_private first, "
    "then accelerator.prepare(model, optimizer) or fabric.setup(model, optimizer)"
)


class Draw(NamedTuple):
    """Examples of the data set in one physical batch, which may hold several rows of each."""

    step: int  # index of the logical batch
    indices: list[int]  # the data set's index of each example
    mask: Tensor  # (examples,) bool, False for padding
    chunk: int = 0  # index among the physical batches of the logical batch
    num_chunks: int = 1  # number of physical batches in the logical batch
    rows: list[int] | None = None  # K rows of the data set for each example, which is a user
    row_weights: Tensor | None = None  # (rows,) float64, 1 / (the user's rows), 0 for padding

    @property
    def is_last(self) -> bool:
        """True for the last physical batch of a logical batch."""
        return self.chunk == self.num_chunks - 1

    def row_factors(self) -> Tensor | None:
        """Return (rows,) float64 weights of rows times K; None if all are 1, as in a plain mean."""
        if self.row_weights is None:
            return None
        counts = (self.row_weights.view(len(self.mask), -1) > 0).double()
        factors = counts * (counts.shape[1] / counts.sum(1, keepdim=True).clamp(min=1))
        return None if bool((factors == 1).all()) else factors.flatten()


class Share(NamedTuple):
    """Rows of every logical batch that one process works on: rank, rank + size, and so on."""

    rank: int = 0
    size: int = 1

    def num_batches(self, num_drawn: int, size: int | None) -> int:
        """Physical batches of one logical batch on every process: as many as rank 0 needs."""
        return num_physical_batches(-(-num_drawn // self.size), size)


SINGLE_PROCESS = Share()


def draws(
    plan: PrivacyPlan,
    bits: SegmentBits,
    start: int,
    stop: int,
    size: int | None,
    share: Share = SINGLE_PROCESS,
    users: UserRows | None = None,
) -> Iterator[Draw]:
    """Yield the physical batches of the steps start..stop-1; an empty one is one masked example.

    All processes get the same number of them, so that their loops take the same steps.
    """
    for step in range(start, stop):
        drawn = drawn_indices(plan, bits, step)
        own = drawn[share.rank :: share.size]
        chunks = list(physical_batches(own if users is None else users.having_rows(own), size))
        missing = share.num_batches(len(drawn), size) - len(chunks)
        chunks += missing * list(physical_batches(drawn[:0], size))
        for k, (indices, mask) in enumerate(chunks):
            kept = mask if mask.any() else np.arange(len(mask)) == 0  # no static shape is needed
            draw = Draw(step, indices[kept].tolist(), torch.from_numpy(mask[kept]), k, len(chunks))
            if users is not None:
                found = drawn_rows(plan, bits, step, indices[kept], users, plan.rows_per_unit or 1)
                weights = torch.from_numpy(found.weights).flatten()
                draw = draw._replace(rows=found.rows.flatten().tolist(), row_weights=weights)
            yield draw


def check_dataset(data: Any) -> None:
    """Refuse data that aren't map-style: without length or rows, or a collection of columns."""
    is_mapped = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    if isinstance(data, Mapping):
        is_table = not all(isinstance(key, int) for key in data)
    else:  # a list holds examples
        is_table = isinstance(data, tuple) and all(hasattr(item, "__array__") for item in data)
    if is_table and len(data):
        reason = "whose items are columns, not examples"
    elif isinstance(data, IterableDataset) or not is_mapped:
        reason = "which can't be drawn from by index, as the sampler does"
    else:
        return
    raise TypeError(
        f"The data set is {_validate.kind(data)}, {reason}. Expected a map-style one (with "
        "__getitem__ and __len__), such as TensorDataset(x, y)."
    )


class _BatchSampler:
    """Batch sampler of a `DataLoader` for one pass, which may prefetch ahead of the loop."""

    def __init__(self, items: Callable[[Draw], list[Any]]) -> None:
        self.draws: Callable[[], Iterator[Draw]] = lambda: iter(())
        self.queue, self.items = deque[Draw](), items  # draws asked for and not yet returned

    def __iter__(self) -> Iterator[list[Any]]:
        queue = self.queue
        for draw in self.draws():
            queue.append(draw)
            yield self.items(draw)


class Passes(NamedTuple):
    """Passes over the loader of a run.

    The attached `PrivateStep` numbers them (`begin`), and gets each batch before it is yielded
    (`announce`) and the end of each pass (`leave`).
    """

    span: Callable[[bool], tuple[int, int]]  # steps of the coming pass; with True, of the rest
    step: Callable[[], Any]  # returns the attached `PrivateStep`


class OneByOne:
    """Data set whose items are fetched one at a time: a fetch of all of a batch may mix them."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitem__(self, index: Any) -> Any:
        return self._dataset[index]

    def __len__(self) -> int:
        return len(self._dataset)

    def __getattr__(self, name: str) -> Any:  # for a worker's `get_worker_info().dataset`
        if name in ("_dataset", "__getitems__") or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._dataset, name)


def one_by_one(dataset: Any) -> Any:
    """Return a data set without `__getitems__`, which torch prefers to `__getitem__`."""
    inner = dataset
    while type(inner) is Subset:
        inner = inner.dataset
    return OneByOne(dataset) if hasattr(inner, "__getitems__") else dataset


class PlannedLoader:
    """Copy of the user's loader that yields the plan's batches.

    One pass is an epoch, or what is left of the plan; `remaining` is the rest of the plan. Workers,
    collate function and pinned memory are kept. Batches are drawn by `bits`: anew in every run,
    after a resume and in a fork. Without `passes` only `of_steps` can be called.

    Attributes:
        source: `DataLoader` that it was made of, which a further `make_private` takes.

    Guarantees:
        `len` is the number of batches of the pass that runs, else of the coming one; of the last
            one when no further is left.  [test_length_is_true_and_batches_are_the_plans]
        A pass draws nothing from torch's global generator.
            [test_a_pass_leaves_the_users_random_numbers_alone]
    """

    if not TYPE_CHECKING:  # a type checker refuses unknown names by itself
        __getattr__ = missing_in("PlannedLoader", "DPDataLoader")

    def __init__(
        self,
        loader: DataLoader[Any],
        plan: PrivacyPlan,
        bits: SegmentBits,
        passes: Passes | None,
        share: Share = SINGLE_PROCESS,
        views: Views | None = None,
        users: UserRows | None = None,
    ) -> None:
        check_loader(loader)
        _check_share(loader, share)
        self.source, self.dataset = loader, loader.dataset
        require_units(plan, len(self.dataset), users)  # type: ignore[arg-type]
        self._options = {name: getattr(loader, name) for name in _KEPT if hasattr(loader, name)}
        if not loader.pin_memory_device:
            self._options.pop("pin_memory_device", None)
        collate = loader.collate_fn
        self._drawn: Any = one_by_one(self.dataset)
        self._views: Views | None = None
        if plan.rows_per_item is not None:
            self._options["collate_fn"] = ItemCollate(collate, plan.rows_per_item)
        if views is not None and views.augment is not None:
            refuse_views_of_items(plan)
            self._views, self._drawn = views, DrawnViews(self.dataset, views.augment)
            self._options["collate_fn"] = partial(flat_collate, collate)
        self._plan, self._bits, self._share, self._users = plan, bits, share, users
        self._passes: Any = passes
        self._is_whole = False  # True if a pass is the rest of the plan
        self._use_size(plan.physical_batch_size)

    def _use_size(self, size: int | None) -> None:
        """Split logical batches into physical ones of at most `size` rows, None for no limit."""
        self._size, self._sampler = size, _BatchSampler(self._items)
        self._loader: DataLoader[Any] | None = None
        self._running: tuple[int, int] | None = None
        self._last: tuple[int, int] | None = None

    def _items(self, draw: Draw) -> list[Any]:
        """Arguments of the data set for each example, or each row of it, of a draw."""
        if self._views is None:
            return draw.indices if draw.rows is None else draw.rows
        return self._views.keys(self._bits, draw.step, draw.indices)

    def limited(self, max_physical_batch_size: int) -> PlannedLoader:
        """Return the same loader with at most `max_physical_batch_size` rows per physical batch."""
        size = _validate.integer("max_physical_batch_size", max_physical_batch_size, minimum=1)
        other = copy.copy(self)
        other._use_size(size)
        return other

    def remaining(self) -> PlannedLoader:
        """Return the same loader with passes that run to the end of the plan.

        Once the plan is done its passes are empty.

        Raises:
            AccountingError: in a pass, the run is open-ended.
        """
        other = copy.copy(self)
        other._use_size(self._size)
        other._is_whole = True
        return other

    def num_batches(self, start: int, stop: int) -> int:
        """Return the number of physical batches of the steps start..stop-1."""
        if self._size is None:
            return stop - start
        return sum(
            self._share.num_batches(len(drawn_indices(self._plan, self._bits, step)), self._size)
            for step in range(start, stop)
        )

    def __len__(self) -> int:
        span = self._running or self._passes.span(self._is_whole)
        if span[0] >= span[1] and self._last is not None:
            span = self._last
        return self.num_batches(*span)

    def __iter__(self) -> Iterator[Any]:
        return (batch for _, batch in self.with_draws())

    def with_draws(self) -> Generator[tuple[Draw, Any]]:
        """Yield each physical batch of a pass with its draw."""
        passes, span = self._passes, self._passes.span(self._is_whole)
        is_done = span[0] >= span[1]
        batches = iter(()) if is_done and self._is_whole else self.of_steps(*span)
        if is_done:
            return
        step = passes.step()
        number = step.begin(span[1])
        self._running = self._last = span
        try:
            for draw, batch in batches:
                passes.step().announce(draw, batch, number)
                yield draw, batch
        finally:
            self._running = None
            step.leave(number)

    def of_steps(self, start: int, stop: int) -> Iterator[tuple[Draw, Any]]:
        """Return an iterator over the physical batches of the steps start..stop-1, with draws.

        Raises:
            AccountingError: there is no such step, and the plan does not stop the loader silently.
        """
        if start < stop:
            return self._load(start, stop)
        if self._plan.on_budget != "stop":
            raise AccountingError(
                f"All {stop} planned steps are taken. Plan more steps or epochs; each release "
                "spends privacy."
            )
        return iter(())

    def draws_of_steps(self, start: int, stop: int) -> Iterator[Draw]:
        """Return an iterator over the draws of the steps start..stop-1, without their data."""
        arguments = self._plan, self._bits, start, stop, self._size, self._share, self._users
        return draws(*arguments)

    def _load(self, start: int, stop: int) -> Iterator[tuple[Draw, Any]]:
        if self._loader is None:
            key = self._bits.key("dropout", start)
            if self._share.rank:  # workers of different processes draw different numbers
                key = fold_in(key, self._share.rank)
            self._loader = DataLoader(
                self._drawn,
                batch_sampler=self._sampler,  # type: ignore[arg-type]
                generator=keyed_generator(key, torch.device("cpu")),
                **self._options,
            )
        queue = self._sampler.queue = deque()
        self._sampler.draws, pid = partial(self.draws_of_steps, start, stop), os.getpid()
        for batch in self._loader:
            if os.getpid() != pid:
                raise RuntimeError(
                    "This pass over the loader began before the process was forked, and its "
                    "batches are those of the parent. Expected a new pass, whose batches are "
                    "drawn anew."
                )
            yield queue.popleft(), batch


class BatchMemoryManager:
    """Opacus' name for a loader of physical batches: `with BatchMemoryManager(...) as loader`.

    The loop calls `optimizer.step()` after each physical batch; only the last one of a logical
    batch changes the parameters.

    Args:
        data_loader: loader that `make_private` returned.
        max_physical_batch_size: examples that are processed at once.
        optimizer: optimizer that `make_private` returned.

    Raises:
        TypeError: a loader that is not private.
        ValueError: no positive integer.
    """

    def __init__(
        self, *, data_loader: Any, max_physical_batch_size: int, optimizer: torch.optim.Optimizer
    ) -> None:
        if not isinstance(data_loader, PlannedLoader):
            raise TypeError(
                f"data_loader is {_validate.kind(data_loader)}. Expected the loader that "
                "make_private returned."
            )
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"optimizer is {_validate.kind(optimizer)}. Expected the optimizer that "
                "make_private returned."
            )
        self._loader = data_loader.limited(max_physical_batch_size)

    def __enter__(self) -> PlannedLoader:
        return self._loader

    def __exit__(self, *_: object) -> None:
        """Do nothing: an unfinished logical batch begins again with the next pass."""


def draws_all(sampler: RandomSampler, n: int) -> bool:
    """True for a shuffle that draws each of n examples once."""
    return not sampler.replacement and sampler.num_samples == n


def check_loader(loader: Any) -> None:
    """Refuse a loader with a sampler or an `__iter__` of its own, which would not be used.

    Raises:
        TypeError: no `DataLoader`, or one over an iterable data set.
        ValueError: a sampler that is neither in order nor a plain shuffle of everything, or a class
            with an `__iter__` of its own.
    """
    if not isinstance(loader, DataLoader):
        raise TypeError(
            f"data_loader is {_validate.kind(loader)}. Expected a torch DataLoader over a "
            f"map-style data set; {_WRAPPED}."
        )
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise ValueError(
            f"data_loader is a {type(loader).__name__} with an __iter__ of its own, which the "
            "plan's batches would not pass. Expected a plain DataLoader: prepare examples in the "
            f"data set or in collate_fn, or batches in the loop; {_WRAPPED}."
        )
    check_dataset(loader.dataset)
    batches = loader.batch_sampler
    sampler = batches.sampler if type(batches) is BatchSampler else (batches or loader.sampler)
    plain = type(sampler) is SequentialSampler or (
        type(sampler) is RandomSampler and draws_all(sampler, len(loader.dataset))  # type: ignore[arg-type]
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
    """Refuse a `DistributedSampler` made for another rank or number of processes."""
    sampler = loader.sampler
    if isinstance(sampler, DistributedSampler) and (sampler.rank, sampler.num_replicas) != share:
        raise ValueError(
            f"data_loader has a DistributedSampler of rank {sampler.rank} of "
            f"{sampler.num_replicas} in process {share.rank} of {share.size}. Expected that of the "
            "process group, or a plain DataLoader with the batch size of all processes together."
        )


def most_steps(loader: DataLoader[Any], users: UserRows | None = None) -> int | None:
    """Return the batches of a loader that drops its incomplete last one; None for others.

    With users they are batches of users.
    """
    if not loader.drop_last or users is None:
        return len(loader) if loader.drop_last else None
    return users.num_users // expected_batch_size(loader)


def expected_batch_size(loader: DataLoader[Any]) -> int:
    """Return the batch size of a loader, over all processes together.

    With a `DistributedSampler` the loader's own batch size is that of one process.
    """
    size: int = loader.batch_sampler.batch_size  # type: ignore[union-attr]
    sampler = loader.sampler
    return size * sampler.num_replicas if isinstance(sampler, DistributedSampler) else size
