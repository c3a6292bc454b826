# SPDX-License-Identifier: Apache-2.0
"""Loader of a plan's logical batches, cut into masked chunks of one static shape."""

from __future__ import annotations

import copy
import hashlib
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import jax
import numpy as np

from dualdp._validate import AccountingError
from dualdp.plan.batches import HandedOut, end_of_pass, physical_batches, require_end
from dualdp.plan.plan import require_units
from dualdp.plan.samplers import num_batches
from dualdp.plan.units import UserRows, draw_rows
from dualdp_jax.parallel.mesh import DataMesh
from dualdp_jax.per_sample.call import refuse_unsplit_numbers, split_batch
from dualdp_jax.per_sample.open_loops import ChunkNeeds

Span = tuple[int, int | None]
_ARRAYS = (jax.Array, np.ndarray, np.generic)
_HANDED_ON = (bool, int, float, complex, str, bytes)  # leaves passed unchanged to every example


class Chunk(NamedTuple):
    """Part of a logical batch, padded to a static number of rows.

    Attributes:
        args: tuple, arguments of the loss after the parameters, every array leaf (rows, ...); with
            users and the plan's rows_per_unit=K there are K rows of each user, side by side.
        mask: (rows,) bool, False for padding; (users,) with users.
        indices: (rows,) index of each example in the data, or (users,) of each user; 0 for padding.
        row_weights: (users K,) float64 weight of each row, with users, for
            `clipped_grad_sum(..., rows_per_unit=K, row_weights=...)`; None without.
    """

    args: tuple[Any, ...]
    mask: Any
    indices: Any
    row_weights: Any = None


@dataclass(frozen=True, eq=False)
class LogicalBatch:
    """Batch that the sampler drew for one step; its arrays are read-only.

    Attributes:
        plan: `PrivacyPlan` that drew it.
        step: int, index of the step.
        chunks: tuple of at least one `Chunk`; an empty draw is one fully masked chunk.
    """

    plan: Any
    step: int
    chunks: tuple[Chunk, ...]

    def __iter__(self) -> Iterator[Any]:
        raise TypeError(
            "A batch of the loader can't be unpacked: it has as many chunks as its draw needs. "
            "Expected step(state, batch) with the batch as it is; a loop of your own takes the "
            "examples and the mask of each of batch.chunks."
        )


def _refuse_as_argument(*_: Any) -> Any:
    """Refuse a batch as an argument of a function of jax, which would need it as a pytree."""
    raise TypeError(
        "A batch of the loader was handed to jit, or to another function of jax. Call step(state, "
        "batch) from Python: it writes the ledger, and compiles what it computes. A loop of your "
        "own compiles functions of batch.chunks, and engine.record(num_steps=k) comes before."
    )


jax.tree_util.register_pytree_node(LogicalBatch, _refuse_as_argument, _refuse_as_argument)


class PlannedLoader:
    """Iterable over the logical batches of a plan, from the first step not yet released.

    One pass is an epoch, ceil(num_examples / expected_batch_size) steps or what is left of the
    plan; `remaining` is the rest of the plan. A pass that is left early and started again draws
    the unused batch once more.

    Args:
        data: tuple of arrays or pytrees of arrays, examples on axis 0.
        plan: `PrivacyPlan`; its physical_batch_size is that of one shard.
        span: callable () -> (next step, first step that must not be drawn or None).
        data_mesh: `DataMesh` of the rows on a mesh, with which a process reads only the rows of its
            devices; None for NumPy arrays.
        interrupted: int, step that ends the pass in which a checkpoint was saved; 0 for none.
        users: rows of each user, for a plan with unit="user"; None for single rows.

    Attributes:
        plan, users: as given.
        arrays: list of the arrays of the data.
        physical_batch_size: int, examples of a chunk over all shards, or users.
        handed_out: `HandedOut`, record of the batches drawn.

    Guarantees:
        Every drawn example is in exactly one chunk, unmasked.  [test_loader_cuts_no_draw]
        A batch that was changed after it was drawn is told apart.
            [test_a_changed_batch_is_refused]
        `len` is the number of batches of the coming pass.  [test_length_is_true]
    """

    def __init__(
        self,
        data: tuple[Any, ...],
        plan: Any,
        span: Callable[[], Span],
        data_mesh: DataMesh | None = None,
        interrupted: int = 0,
        users: UserRows | None = None,
    ) -> None:
        arrays, num_rows, self.rebuild = split_batch(data)
        refuse_unsplit_numbers(data, num_rows)
        require_units(plan, num_rows, users)
        _require_items(arrays, plan.rows_per_item)
        self.users = users
        self.arrays, self.plan, self._span, self._data_mesh = arrays, plan, span, data_mesh
        self.handed_out = HandedOut(pass_end=interrupted)
        self._interrupted, self._is_whole = interrupted, False
        shards = 1 if data_mesh is None else data_mesh.num_shards
        own = plan.physical_batch_size or -(-default_rows(plan) // shards)
        self.physical_batch_size = own * shards
        self._drawn: WeakKeyDictionary[LogicalBatch, tuple[list[Any], bytes]] = WeakKeyDictionary()

    def __len__(self) -> int:
        """Number of batches of a pass that begins now."""
        return len(self._steps())

    def __iter__(self) -> Iterator[LogicalBatch]:
        steps = self._steps()
        if not steps and not self._is_whole and self.plan.on_budget != "stop":
            raise AccountingError(
                f"All {steps.start} planned steps are taken. Plan more steps or epochs; each "
                "release spends privacy."
            )
        self.handed_out.pass_end = steps.stop
        for step in steps:
            yield self.batch(step)

    def _steps(self) -> range:
        """Steps of a pass that begins now."""
        start, end = self._span()
        if self._is_whole:
            return range(start, require_end(end))
        return range(start, end_of_pass(self.plan, start, end, self._interrupted))

    def remaining(self) -> PlannedLoader:
        """Return the same loader with passes that run to the end of the plan, empty after it.

        A pass of an open-ended run is refused.
        """
        other = copy.copy(self)
        other._is_whole = True
        return other

    def batch(self, step: int) -> LogicalBatch:
        """Return the logical batch of a step: a pure function of the plan's key and the step."""
        drawn = self.plan.batch_indices(step)
        drawn = drawn if self.users is None else self.users.having_rows(drawn)
        pieces = physical_batches(drawn, self.physical_batch_size)
        self.handed_out.note(step)
        return self.hand_out(step, (self._chunk(step, i, mask) for i, mask in pieces))

    def _chunk(self, step: int, indices: Any, mask: Any) -> Chunk:
        """Chunk of the examples, or users, at these indices."""
        if self.users is None:
            return Chunk(self._rows(indices), mask, indices)
        found = draw_rows(self.plan, step, indices, self.users, self.plan.rows_per_unit)
        return Chunk(self._rows(found.rows.ravel()), mask, indices, found.weights.ravel())

    def needs(self) -> ChunkNeeds:
        """Return what a clipped sum of the chunks needs."""
        plan, size = self.plan, self.physical_batch_size
        of_user = None if self.users is None else plan.rows_per_unit
        sizes = _constant_sizes(plan)
        return ChunkNeeds(
            num_rows=size * (of_user or 1),
            has_padding=of_user is not None or not sizes or any(n % size for n in sizes),
            rows_per_unit=of_user,
            max_grad_norm=plan.max_grad_norm_at(0) if plan.is_constant("max_grad_norm") else None,
        )

    def hand_out(self, step: int, chunks: Iterable[Chunk]) -> LogicalBatch:
        """Register these chunks as a drawn batch, which the engine accepts.

        For `dualdp_jax.testing`, which runs steps on chosen examples.
        """
        batch = LogicalBatch(self.plan, step, tuple(jax.tree.map(_frozen, c) for c in chunks))
        self._drawn[batch] = jax.tree.leaves(batch.chunks), _digest(batch.chunks)
        return batch

    def drew(self, batch: Any) -> bool:
        """True if this loader drew the batch and nothing in it was changed."""
        found = self._drawn.get(batch) if isinstance(batch, LogicalBatch) else None
        if found is None or batch.plan is not self.plan:
            return False
        leaves = jax.tree.leaves(batch.chunks)
        is_same = len(leaves) == len(found[0]) and all(map(operator.is_, leaves, found[0]))
        is_written = any(isinstance(x, np.ndarray) and x.flags.writeable for x in leaves)
        return is_same and not is_written and _digest(batch.chunks) == found[1]

    def _rows(self, indices: Any) -> tuple[Any, ...]:
        """Rows at these indices, as arguments of the loss."""
        if self._data_mesh is None:
            return self.rebuild([leaf[indices] for leaf in self.arrays])
        return self.rebuild([self._data_mesh.rows(leaf, at=indices) for leaf in self.arrays])


def _frozen(leaf: Any) -> Any:
    """Read-only leaf: a view of the batch's own copy for a NumPy array, else the leaf."""
    if not isinstance(leaf, np.ndarray):
        return leaf
    own = leaf if leaf.base is None and leaf.flags.owndata else leaf.copy()
    own.flags.writeable = False
    return own.view()  # a view can't be made writeable again


def _require_items(arrays: list[Any], rows_per_item: int | None) -> None:
    """Raise unless the items of the data hold K rows each; None for items that are one row."""
    wrong = [a.shape for a in arrays if rows_per_item and a.shape[1:2] != (rows_per_item,)]
    if wrong:
        raise ValueError(
            f"The data hold an array of shape {wrong[0]}. Expected (num_examples, {rows_per_item}) "
            f"in front with rows_per_unit={rows_per_item}, the rows of each item; what all rows of "
            "an item share is repeated for each of them. Rows of a person need unit='user' and "
            "users=."
        )


def _digest(chunks: Sequence[Chunk]) -> bytes:
    """SHA-256 of the masks, indices and weights of all chunks."""
    state = hashlib.sha256()
    for chunk in chunks:
        weights = () if chunk.row_weights is None else (chunk.row_weights,)
        for part in (chunk.mask, chunk.indices, *weights):
            state.update(repr((part.shape, part.dtype.str)).encode())
            state.update(np.ascontiguousarray(part).view(np.uint8).data)
    return state.digest()


def default_rows(plan: Any) -> int:
    """Return the number of rows of a chunk for a plan without physical_batch_size.

    Draws of constant size fill one chunk. For others a chunk holds the mean plus three standard
    deviations, so that one draw in a thousand takes a second chunk. On a CPU, whose time is
    proportional to the rows, that padding costs more than it saves: there a chunk is a quarter of
    the mean if the half chunk wasted on average is less than the three standard deviations.
    """
    steps = np.arange(max(plan.num_steps or 1, 1))
    expected = float(np.max(plan.expected_batch_size.at(steps)))
    spread = 3 * math.sqrt(expected * (1 - expected / plan.num_examples))
    if _constant_sizes(plan):
        spread = 0.0
    rows = expected + spread
    if jax.default_backend() == "cpu" and spread > expected / 8:
        rows = expected / 4
    most = min(plan.num_examples, plan.max_batch_size or plan.num_examples)
    return max(1, min(most, math.ceil(rows)))


def _constant_sizes(plan: Any) -> set[int]:
    """Sizes of the batches of a plan that draws no others; empty if they are random."""
    size = plan.expected_batch_size_at(0)
    if plan.sampler == "fixed_size":
        return {round(size)}
    if plan.sampler in ("shuffle", "fixed_order"):
        batches = num_batches(plan.num_examples, size)
        return {plan.num_examples // batches, -(-plan.num_examples // batches)}
    return set()


def _is_example(item: Any) -> bool:
    """True for a tuple of which a part is a number, such as (x, label)."""
    return isinstance(item, tuple) and any(
        isinstance(v, bool | int | float | np.generic) for v in item
    )


def examples_of(data: Any) -> tuple[Any, ...]:
    """Return the data as arguments of the loss: a tuple as it is, anything else as one argument."""
    for leaf in jax.tree.leaves(data, is_leaf=lambda node: isinstance(node, Iterator)):
        if not isinstance(leaf, _ARRAYS + _HANDED_ON):
            raise TypeError(
                f"data holds a {type(leaf).__module__}.{type(leaf).__name__}, which can't be drawn "
                "from by index as the sampler does. Expected NumPy or JAX arrays with the examples "
                "on axis 0, such as data=(np.asarray(x), np.asarray(y))."
            )
    if isinstance(data, list) and data and all(_is_example(item) for item in data):
        raise TypeError(
            f"data is a list of {len(data)} tuples with numbers, one for each example. Expected an "
            "array for each argument of loss_fn, such as data=(np.stack(x), np.asarray(y))."
        )
    return data if isinstance(data, tuple) and not hasattr(data, "_fields") else (data,)
