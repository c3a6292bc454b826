# SPDX-License-Identifier: Apache-2.0
"""Loader of the plan's batches, which replace those of the user's `DataLoader`.

An item of the data may become several rows of the model: a pair, or views of an example.

Source: De et al. 2022, section 3.2 (augmentation multiplicity), for views.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils import _pytree as pytree
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)
from torch.utils.data.distributed import DistributedSampler

from dualdp import _validate
from dualdp._validate import AccountingError
from dualdp.plan.batches import HandedOut, drawn_indices, drawn_rows, num_physical_batches
from dualdp.plan.plan import PrivacyPlan, require_units
from dualdp.plan.units import UserRows, user_rows
from dualdp.randomness import SegmentBits, fold_in, threefry
from dualdp_torch.noise.noise import keyed_generator
from dualdp_torch.parallel.process_group import Group
from dualdp_torch.per_sample.random_state import untouched_generators
from dualdp_torch.per_sample.units import Mark, mark
from dualdp_torch.rules.base import Tensor
from dualdp_torch.training.opacus_names import missing_in

_KEPT = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn"),
    *("multiprocessing_context", "prefetch_factor", "persistent_workers"),
)
_WRAPPED = (  # by accelerate, Fabric and others
    "of a package that wraps loaders, the DataLoader before it was wrapped: make_private first, "
    "then accelerator.prepare(model, optimizer) or fabric.setup(model, optimizer)"
)
Augment = Callable[[Any, torch.Generator], Any]
#: Function of True, for all that is left, or False -> (start, stop) steps of the coming pass.
Span = Callable[[bool], tuple[int, int]]


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
        weights = self.row_weights
        if weights is None or bool((weights > 0).all()):
            return None
        return weights * (len(weights) / len(self.mask))


class ItemCollate:
    """`collate_fn` that returns the rows of all items of a batch, an item's rows side by side.

    It is made of one whose tensors are (items, K, ...).
    """

    def __init__(self, collate: Callable[[list[Any]], Any], rows_per_item: int) -> None:
        self._collate, self._rows = collate, rows_per_item

    def __call__(self, items: list[Any]) -> Any:
        """Return the batch, whose tensors are (items K, ...)."""
        if len(items) == self._rows:  # tensors might be (K, items, ...): another number tells
            with untouched_generators():
                more = self._collate(copy.deepcopy([*items, items[0]]))
            self._rows_of(more, len(items) + 1)
        return self._rows_of(self._collate(items), len(items))

    def _rows_of(self, batch: Any, num_items: int) -> Any:
        """Batch with the rows of each item side by side, refused where they are not there."""
        lead, leaves = (num_items, self._rows), pytree.tree_leaves(batch)
        rows = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor | np.ndarray)]
        wrong = [tuple(leaf.shape) for leaf in rows if tuple(leaf.shape[:2]) != lead]
        if wrong or not rows:
            came = f"a tensor of shape {wrong[0]}" if wrong else "no tensor"
            raise ValueError(
                f"The batch of {num_items} items, {_validate.kind(batch)}, holds {came}. Expected "
                f"{lead} in front with rows_per_unit={self._rows}, the rows of each item; what all "
                "rows of an item share is repeated for each of them. Rows of a person need "
                "unit='user' and users=. Tensors may lie in dicts, lists and tuples."
            )
        return pytree.tree_map_only(
            (torch.Tensor, np.ndarray),
            lambda leaf: leaf.reshape(num_items * self._rows, *leaf.shape[2:]),
            batch,
        )


class Views:
    """Views of the examples of a map-style data set, each drawn from a key of its own.

    Args:
        views: int K >= 1, number of views of each example.
        augment: callable, `augment(example, generator)` -> one view of it; None only for K = 1, the
            example itself.
    """

    def __init__(self, views: Any, augment: Any) -> None:
        self.count = _validate.integer("views", views, minimum=1)
        if augment is None and self.count > 1:
            raise ValueError(
                f"views={views} came without augment, and equal views would cost {views} times as "
                "much for nothing. Expected augment=, a function (example, generator) -> view."
            )
        if augment is not None:
            _validate.takes("augment", augment, "(example, generator)", None, None)
        self.augment: Augment | None = augment

    def keys(self, bits: SegmentBits, step: int, examples: list[int]) -> list[Any]:
        """Return what `DrawnViews` takes for each example: its index and K keys of its views."""
        shape = len(examples), self.count
        low = np.broadcast_to(np.arange(self.count, dtype=np.uint32), shape)
        high = np.broadcast_to(np.array(examples, np.uint32)[:, None], shape)
        key = bits.key("views", step)
        words = threefry.threefry2x32(key, high.flatten(), low.flatten())
        keys = np.stack(words, 1).reshape(*shape, 2).tolist()
        return list(zip(examples, keys, strict=True))


class DrawnViews:
    """Data set whose items are lists of views, for an index and the key of each view.

    Torch's global generator starts from the same key, for functions that draw from it, such as
    torchvision's.
    """

    def __init__(self, dataset: Any, augment: Augment) -> None:
        self._dataset, self._augment = dataset, augment

    def __getitem__(self, drawn: tuple[int, list[Any]]) -> list[Any]:
        index, keys = drawn
        example, found = self._dataset[index], []
        for key in keys:
            generator = keyed_generator(key, torch.device("cpu"))
            with torch.random.fork_rng(devices=[]):
                torch.set_rng_state(generator.get_state())
                found.append(self._augment(pytree.tree_map(_copied, example), generator))
        return found


def _copied(leaf: Any) -> Any:
    """Copy an array or tensor: a function that writes into it would change the data of others."""
    if torch.is_tensor(leaf):
        return leaf.clone()
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf


def flat_collate(collate: Callable[[list[Any]], Any], examples: list[list[Any]]) -> Any:
    """Return the batch of the views of all examples, an example's views side by side."""
    return collate([view for views in examples for view in views])


class Data(NamedTuple):
    """Checked data of a run: the user's loader, views of each example, and rows of each user."""

    loader: DataLoader[Any]
    views: Views
    users: UserRows | None

    @classmethod
    def of(cls, loader: DataLoader[Any], views: int, augment: Augment | None, users: Any) -> Data:
        """Return the data of the arguments of `make_private`; `users` is None for examples."""
        if isinstance(loader, PlannedLoader):  # a cell that names it `loader` was run again
            loader = loader.source
        check_loader(loader)
        seen = Views(views, augment)
        if users is not None and augment is not None:
            raise ValueError(
                "users and views= or augment= came together, and a unit is the rows of a user or "
                "the views of a row. Expected one of the two; the data set may augment its rows."
            )
        num_rows = len(loader.dataset)  # type: ignore[arg-type]
        rows = None if users is None else user_rows(users, num_rows=num_rows)
        return cls(loader, seen, rows)

    @property
    def num_units(self) -> int:
        """Number of examples, or of users."""
        return len(self.loader.dataset) if self.users is None else self.users.num_users  # type: ignore[arg-type]

    @property
    def batch_size(self) -> int:
        """Batch size of all processes; that of a `DistributedSampler`'s loader is one's."""
        size: int = self.loader.batch_sampler.batch_size  # type: ignore[union-attr]
        sampler = self.loader.sampler
        return size * sampler.num_replicas if isinstance(sampler, DistributedSampler) else size

    @property
    def most_steps(self) -> int | None:
        """Batches of a loader that drops its incomplete last one; None for others."""
        if not self.loader.drop_last:
            return None
        return len(self.loader) if self.users is None else self.num_units // self.batch_size


class _BatchSampler:
    """Batch sampler of a `DataLoader` for one pass, which may prefetch ahead of the loop."""

    def __init__(self, items: Callable[[Draw], list[Any]]) -> None:
        self.draws: Iterable[Draw] = ()
        self.queue, self.items = deque[Draw](), items  # draws asked for and not yet returned

    def __iter__(self) -> Iterator[list[Any]]:
        queue = self.queue
        for draw in self.draws:
            queue.append(draw)
            yield self.items(draw)


class PlannedLoader:
    """Copy of the user's loader that yields the plan's batches.

    One pass is an epoch, or what is left of the plan; `remaining` is the rest of the plan. Workers,
    collate function and pinned memory are kept. Batches are drawn by `bits`: anew in every run,
    after a resume and in a fork. The attached `PrivateStep`, which `step` returns, takes note of
    each batch before it is yielded.

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
        data: Data,
        plan: PrivacyPlan,
        bits: SegmentBits,
        span: Span,
        group: Group,
        step: Callable[[], Any] | None = None,
    ) -> None:
        self.source, self._views, self._users = data
        _check_share(self.source, group)
        self.dataset = self.source.dataset
        self._drawn: Any = self.dataset
        require_units(plan, len(self.dataset), self._users)  # type: ignore[arg-type]
        self._options = {name: getattr(self.source, name) for name in _KEPT}
        collate, augment = self._options["collate_fn"], self._views.augment
        if plan.rows_per_item is not None:
            self._options["collate_fn"] = ItemCollate(collate, plan.rows_per_item)
        if augment is not None:
            if plan.rows_per_item is not None:
                raise ValueError(
                    f"views= or augment= came with rows_per_unit={plan.rows_per_item}, whose items "
                    "hold several rows already. Expected one of the two; the data set may augment "
                    "its items."
                )
            self._drawn = DrawnViews(self.dataset, augment)
            self._options["collate_fn"] = partial(flat_collate, collate)
        self._plan, self._bits, self._group = plan, bits, group
        self._span: Span = span
        self._step: Any = step
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
        if self._views.augment is None:
            return draw.indices if draw.rows is None else draw.rows
        return self._views.keys(self._bits, draw.step, draw.indices)

    def limited(self, max_physical_batch_size: int) -> Self:
        """Return the same loader with at most `max_physical_batch_size` rows per physical batch."""
        size = _validate.integer("max_physical_batch_size", max_physical_batch_size, minimum=1)
        other = copy.copy(self)
        other._use_size(size)
        return other

    def remaining(self) -> Self:
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
            self._num_chunks(drawn_indices(self._plan, self._bits, step))
            for step in range(start, stop)
        )

    def __len__(self) -> int:
        span = self._running or self._span(self._is_whole)
        if span[0] >= span[1] and self._last is not None:
            span = self._last
        return self.num_batches(*span)

    def __iter__(self) -> Iterator[Any]:
        return (batch for _, batch in self.with_draws())

    def with_draws(self) -> Generator[tuple[Draw, Any]]:
        """Yield each physical batch of a pass with its draw."""
        span = self.coming()
        if span[0] >= span[1]:
            return
        step = self._step()
        self._running = self._last = span
        try:
            yield from step.batches(self.of_steps(*span), span[1])
        finally:
            self._running = None

    def coming(self) -> tuple[int, int]:
        """Return the steps (start, stop) of the coming pass.

        Raises:
            AccountingError: none is left, and the plan does not stop the loader silently.
        """
        start, stop = self._span(self._is_whole)
        if start >= stop and not self._is_whole and self._plan.on_budget != "stop":
            raise AccountingError(
                f"All {stop} planned steps are taken. Plan more steps or epochs; each release "
                "spends privacy."
            )
        return start, stop

    def draws(self, start: int, stop: int) -> Iterator[Draw]:
        """Yield the draws of the steps start..stop-1, without data; an empty one is a masked row.

        All processes get the same number of them, so that their loops take the same steps.
        """
        plan, bits, users = self._plan, self._bits, self._users
        group, size = self._group, self._size
        for step in range(start, stop):
            drawn = drawn_indices(plan, bits, step)
            own = drawn[group.rank :: group.size]
            own = own if users is None else users.having_rows(own)
            length, num_chunks = size or max(len(own), 1), self._num_chunks(drawn)
            for k in range(num_chunks):
                units = own[k * length : (k + 1) * length]
                mask = torch.full((max(len(units), 1),), len(units) > 0)
                units = units if len(units) else np.zeros(1, np.int64)
                draw = Draw(step, units.tolist(), mask, k, num_chunks)
                if users is not None:
                    found = drawn_rows(plan, bits, step, units, users, plan.rows_per_unit or 1)
                    weights = torch.from_numpy(found.weights).flatten()
                    draw = draw._replace(rows=found.rows.flatten().tolist(), row_weights=weights)
                yield draw

    def _num_chunks(self, drawn: NDArray[np.int64]) -> int:
        """Physical batches of a logical batch on every process: as many as rank 0 needs."""
        return num_physical_batches(-(-len(drawn) // self._group.size), self._size)

    def of_steps(self, start: int, stop: int) -> Iterator[tuple[Draw, Any]]:
        """Yield the physical batches of the steps start..stop-1, with their draws."""
        if self._loader is None:
            key = self._bits.key("dropout", start)
            if self._group.rank:  # workers of different processes draw different numbers
                key = fold_in(key, self._group.rank)
            self._loader = DataLoader(
                self._drawn,
                batch_sampler=self._sampler,  # type: ignore[arg-type]
                generator=keyed_generator(key, torch.device("cpu")),
                **self._options,
            )
        queue = self._sampler.queue = deque()
        self._sampler.draws, pid = self.draws(start, stop), os.getpid()
        for batch in self._loader:
            if os.getpid() != pid:
                raise RuntimeError(
                    "This pass over the loader began before the process was forked, and its "
                    "batches are the parent's. Begin a new pass, whose batches are drawn anew."
                )
            yield queue.popleft(), batch


class Chunk(NamedTuple):
    """Part of a logical batch.

    Attributes:
        args: tuple of the loader's batch, the arguments of the loss after the model; with views=K,
            or users and the plan's rows_per_unit=K, it holds K rows of each example, for
            `clipped_grad_sum(..., rows_per_unit=K)`.
        mask: (examples,) bool, False for padding: an empty draw is one masked example.
        indices: (examples,) row of each example in the data, or user.
        row_weights: (examples K,) float64 weight of each row, with users, for
            `clipped_grad_sum(..., rows_per_unit=K, row_weights=...)`; None without.
    """

    args: tuple[Any, ...]
    mask: Tensor
    indices: list[int]
    row_weights: Tensor | None = None


@dataclass(frozen=True)
class LogicalBatch:
    """Examples that the sampler drew for one step.

    Attributes:
        plan: `PrivacyPlan` that drew them.
        step: index of the step.
        chunks: tuple of at least one `Chunk`, together the whole draw; the logical batch's sum is
            that of `clipped_grad_sum` over all chunks, each with its mask.
    """

    plan: PrivacyPlan
    step: int
    chunks: tuple[Chunk, ...]


class OwnLoopLoader(PlannedLoader):
    """Iterable over the logical batches of a plan, from the first step not yet on record.

    One pass is an epoch, or what is left of the plan; `remaining` is the rest of the plan.

    Attributes:
        handed_out: record of the batches that were yielded.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.handed_out = HandedOut()

    def __len__(self) -> int:
        """Logical batches of a pass that would begin now."""
        start, stop = self._span(self._is_whole)
        return max(stop - start, 0)

    def indices(self) -> Iterator[tuple[NDArray[np.int64], NDArray[np.bool_]]]:
        """Yield the draws of a pass for readers of your own: (indices, mask) of each step.

        Both are (examples,), of rows of the data or of users; the one padded example of an empty
        draw has index 0 and mask False.
        """
        parts = list[Draw]()
        for draw in self.draws(*self.coming()):
            parts.append(draw)
            if draw.is_last:
                self.handed_out.note(draw.step)
                indices = [np.array(part.indices, np.int64) for part in parts]
                masks = [part.mask.numpy() for part in parts]
                yield np.concatenate(indices), np.concatenate(masks)
                parts = []

    def __iter__(self) -> Iterator[LogicalBatch]:
        plan, span, chunks = self._plan, self.coming(), list[Chunk]()
        if span[0] >= span[1]:
            return
        rows_per_unit = self._views.count * (plan.rows_per_unit or 1)
        bound = plan.max_grad_norm_at(0) if plan.is_constant("max_grad_norm") else None
        for draw, batch in self.of_steps(*span):
            args = tuple(batch) if isinstance(batch, list | tuple) else (batch,)
            mask = None if bool(draw.mask.all()) else draw.mask
            mark(args, Mark(rows_per_unit, draw.row_weights is not None, mask, bound))
            chunks.append(Chunk(args, draw.mask, draw.indices, draw.row_weights))
            if draw.is_last:
                self.handed_out.note(draw.step)
                yield LogicalBatch(plan, draw.step, tuple(chunks))
                chunks = []


class BatchMemoryManager(contextlib.nullcontext[PlannedLoader]):
    """Opacus' name for a loader of physical batches: `with BatchMemoryManager(...) as loader`.

    The loop calls `optimizer.step()` after each physical batch; only the last one of a logical
    batch changes the parameters. A logical batch that is left unfinished begins again with the next
    pass.

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
        super().__init__(data_loader.limited(max_physical_batch_size))


def check_loader(loader: Any) -> None:
    """Refuse a loader with a sampler or an `__iter__` of its own, which would not be used.

    Raises:
        TypeError: no `DataLoader`, or data that aren't map-style: without length or rows, or a
            collection of columns.
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
    data: Any = loader.dataset
    if isinstance(data, Mapping):
        is_table = not all(isinstance(key, int) for key in data)
    else:  # a list holds examples
        is_table = isinstance(data, tuple) and all(hasattr(item, "__array__") for item in data)
    is_mapped = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    if isinstance(data, IterableDataset) or not is_mapped or (is_table and len(data)):
        what = "whose items are columns, not examples"
        what = what if is_table else "which can't be drawn from by index"
        raise TypeError(
            f"The data set is {_validate.kind(data)}, {what}. Expected a map-style one (with "
            "__getitem__ and __len__), such as TensorDataset(x, y)."
        )
    batches = loader.batch_sampler
    sampler = batches.sampler if type(batches) is BatchSampler else (batches or loader.sampler)
    plain = type(sampler) is SequentialSampler
    if type(sampler) is RandomSampler:  # a shuffle that draws each example once
        plain = not sampler.replacement and sampler.num_samples == len(data)
    if type(sampler) is DistributedSampler:
        plain = sampler.dataset is data
    if not plain or batches is None:
        raise ValueError(
            f"data_loader draws by {type(sampler).__name__}"
            f"{'' if batches else ' with batch_size=None'}, which the plan's sampler would "
            "replace. Expected a plain DataLoader(dataset, batch_size=..., shuffle=...); select "
            "examples in the data set instead."
        )


def _check_share(loader: DataLoader[Any], group: Group) -> None:
    """Refuse a `DistributedSampler` made for another rank or number of processes."""
    sampler, own = loader.sampler, (group.rank, group.size)
    if isinstance(sampler, DistributedSampler) and (sampler.rank, sampler.num_replicas) != own:
        raise ValueError(
            f"data_loader has a DistributedSampler of rank {sampler.rank} of "
            f"{sampler.num_replicas} in process {group.rank} of {group.size}. Expected that of the "
            "process group, or a plain DataLoader with the batch size of all processes together."
        )
