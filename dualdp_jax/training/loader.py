# SPDX-License-Identifier: Apache-2.0
"""Loader of a plan's logical batches, cut into masked chunks of one static shape."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from weakref import WeakSet

import jax
import numpy as np
from numpy.typing import NDArray

from dualdp._validate import AccountingError
from dualdp.ledger.ledger import Ledger
from dualdp.plan.accounting import stretches
from dualdp.plan.batches import (
    HandedOut,
    drawn_indices,
    drawn_rows,
    end_of_pass,
    physical_batches,
    require_end,
)
from dualdp.plan.plan import PrivacyPlan, require_units
from dualdp.plan.units import UserRows
from dualdp.randomness import SegmentBits
from dualdp_jax.chunk import Chunk, Origin, Rows
from dualdp_jax.compat import PyTree
from dualdp_jax.noise.noise import Array
from dualdp_jax.parallel.mesh import DataMesh
from dualdp_jax.per_sample.call import refuse_unsplit_numbers, split_batch

_ARRAYS = (jax.Array, np.ndarray, np.generic)
_HANDED_ON = (bool, int, float, complex, str, bytes)  # leaves passed unchanged to every example


class PlannedLoader:
    """Iterable over the logical batches of a plan, from the first step not yet released.

    One pass is an epoch, ceil(num_examples / expected_batch_size) steps or what is left of the
    plan; `remaining` is the rest of the plan. A pass that is left early and started again draws
    the unused batch once more.

    Args:
        data: tuple of arrays or pytrees of arrays, examples on axis 0.
        plan: `PrivacyPlan`; its physical_batch_size is that of one shard.
        bits: `SegmentBits` of the batches.
        ledger: callable () -> `Ledger` of the run; it raises once the run has ended.
        data_mesh: `DataMesh` of the rows on a mesh, with which a process reads only the rows of its
            devices; None for NumPy arrays.
        interrupted: int, step that ends the pass in which a checkpoint was saved; 0 for none.
        users: rows of each user, for a plan with unit="user"; None for single rows.

    Attributes:
        plan, bits, users, data_mesh: as given.
        arrays: list of the arrays of the data.
        physical_batch_size: int, examples of a chunk over all shards, or users.
        handed_out: `HandedOut`, record of the batches drawn.
        origin: `Origin` of its chunks.
        drawn: batches that it drew and that are still in use, by identity.

    Guarantees:
        Every drawn example is in exactly one chunk, unmasked.  [test_loader_cuts_no_draw]
        A batch that was changed after it was drawn is told apart.
            [test_a_changed_batch_is_refused]
        `len` is the number of batches of the coming pass.  [test_length_is_true]
    """

    def __init__(
        self,
        data: tuple[PyTree, ...],
        plan: PrivacyPlan,
        bits: SegmentBits,
        ledger: Callable[[], Ledger],
        data_mesh: DataMesh | None = None,
        interrupted: int = 0,
        users: UserRows | None = None,
    ) -> None:
        self.arrays, num_rows, _ = split_batch(data)
        refuse_unsplit_numbers(data, num_rows)
        require_units(plan, num_rows, users)
        _require_items(self.arrays, plan.rows_per_item)
        self.plan, self.bits, self.users, self.data_mesh = plan, bits, users, data_mesh
        self._ledger, self.origin = ledger, Origin(plan, data)
        self.handed_out = HandedOut(pass_end=interrupted)
        self._interrupted, self._is_whole = interrupted, False
        shards = 1 if data_mesh is None else data_mesh.num_shards
        own = plan.physical_batch_size or -(-default_rows(plan) // shards)
        self.physical_batch_size = own * shards
        self.drawn: WeakSet[Chunk] = WeakSet()

    def __len__(self) -> int:
        """Number of batches of a pass that begins now."""
        return len(self._steps())

    def __iter__(self) -> Iterator[Chunk]:
        for step in self._pass():
            yield self.batch(step)

    def indices(self) -> Iterator[tuple[NDArray[np.int64], NDArray[np.bool_]]]:
        """Yield the draws of a pass for readers of your own: (indices, mask) of each step.

        Both are (examples,), of rows of the data or of users: a whole number of physical batches,
        in which padding has index 0 and mask False.
        """
        for step in self._pass():
            indices, masks = zip(*self._draw(step), strict=True)
            yield np.concatenate(indices), np.concatenate(masks)

    def remaining(self) -> PlannedLoader:
        """Return the same loader with passes that run to the end of the plan, empty after it.

        A pass of an open-ended run is refused.
        """
        other = copy.copy(self)
        other._is_whole = True
        return other

    def batch(self, step: int) -> Chunk:
        """Draw the logical batch of a step, the same one until it is released."""
        return self.hand_out(step, [self._rows(step, *piece) for piece in self._draw(step)])

    def hand_out(self, step: int, parts: Iterable[Rows]) -> Chunk:
        """Register these rows as a drawn batch, which the engine accepts.

        For `dualdp_jax.testing`, which runs steps on chosen examples.
        """
        parts, plan = [jax.tree.map(_frozen, part) for part in parts], self.plan
        bound = self._ledger().max_grad_norm if plan.is_adaptive else plan.max_grad_norm_at(step)
        chunk = Chunk(tuple(parts), np.asarray(bound), np.asarray(step), self.origin)
        self.drawn.add(chunk)
        return chunk

    def _pass(self) -> Iterator[int]:
        """Steps of a pass."""
        steps = self._steps()
        if not steps and not self._is_whole and self.plan.on_budget != "stop":
            raise AccountingError(
                f"All {steps.start} planned steps are taken. Plan more steps or epochs; each "
                "release spends privacy."
            )
        self.handed_out.pass_end = steps.stop
        yield from steps

    def _steps(self) -> range:
        """Steps of a pass that begins now."""
        ledger, plan = self._ledger(), self.plan
        start, end = ledger.position, ledger.end if plan.on_budget == "stop" else plan.num_steps
        if self._is_whole:
            return range(start, require_end(end))
        return range(start, end_of_pass(plan, start, end, self._interrupted))

    def _draw(self, step: int) -> list[tuple[NDArray[np.int64], NDArray[np.bool_]]]:
        """Indices and mask of each physical batch of a step."""
        drawn = drawn_indices(self.plan, self.bits, step)
        drawn = drawn if self.users is None else self.users.having_rows(drawn)
        self.handed_out.note(step)
        return list(physical_batches(drawn, self.physical_batch_size))

    def _rows(self, step: int, indices: NDArray[np.int64], mask: NDArray[np.bool_]) -> Rows:
        """Rows of the examples, or users, at these indices."""
        if self.users is None:
            return Rows(self._at(indices), mask, indices)
        most = self.plan.rows_per_unit or 1
        found = drawn_rows(self.plan, self.bits, step, indices, self.users, most)
        return Rows(self._at(found.rows.ravel()), mask, indices, found.weights.ravel())

    def _at(self, rows: NDArray[np.int64]) -> list[Array]:
        """Arrays of the data at these rows."""
        if self.data_mesh is None:
            return [leaf[rows] for leaf in self.arrays]
        return [self.data_mesh.rows(leaf, at=rows) for leaf in self.arrays]


def _frozen(array: Array | None) -> Array | None:
    """Copy of a NumPy array that nobody can write to, and anything else itself."""
    if not isinstance(array, np.ndarray):
        return array
    own = array.copy()
    own.flags.writeable = False
    return own.view()  # a view can't be made writeable again


def _require_items(arrays: Sequence[Array], rows_per_item: int | None) -> None:
    """Raise unless the items of the data hold K rows each; None for items that are one row."""
    wrong = [a.shape for a in arrays if rows_per_item and a.shape[1:2] != (rows_per_item,)]
    if wrong:
        raise ValueError(
            f"The data hold an array of shape {wrong[0]}. Expected (num_examples, {rows_per_item}) "
            f"in front with rows_per_unit={rows_per_item}, the rows of each item; what all rows of "
            "an item share is repeated for each of them. Rows of a person need unit='user' and "
            "users=."
        )


def default_rows(plan: PrivacyPlan) -> int:
    """Return the number of rows of a chunk for a plan without physical_batch_size.

    Draws of constant size fill one chunk. For others a chunk holds the mean plus three standard
    deviations, so that one draw in a thousand takes a second chunk. On a CPU, whose time is
    proportional to the rows, that padding costs more than it saves: there a chunk is a quarter of
    the mean if the half chunk wasted on average is less than the three standard deviations.
    """
    expected = max(size for _, size, _ in stretches(plan, 0, max(plan.num_steps or 1, 1)))
    spread = 3 * math.sqrt(expected * (1 - expected / plan.num_examples))
    if plan.sampler in ("fixed_size", "shuffle", "fixed_order"):
        spread = 0.0
    rows = expected + spread
    if jax.default_backend() == "cpu" and spread > expected / 8:
        rows = expected / 4
    most = min(plan.num_examples, plan.max_batch_size or plan.num_examples)
    return max(1, min(most, math.ceil(rows)))


def examples_of(data: PyTree) -> tuple[PyTree, ...]:
    """Return the data as arguments of the loss: tuple or list as such, anything else as one."""
    for leaf in jax.tree.leaves(data, is_leaf=lambda node: isinstance(node, Iterator)):
        if not isinstance(leaf, _ARRAYS + _HANDED_ON):
            raise TypeError(
                f"data holds a {type(leaf).__module__}.{type(leaf).__name__}, which can't be drawn "
                "from by index as the sampler does. Expected NumPy or JAX arrays with the examples "
                "on axis 0, such as data=(np.asarray(x), np.asarray(y))."
            )
    if isinstance(data, list) and any(isinstance(item, tuple) for item in data):
        raise TypeError(
            "data is a list of tuples. Expected an array for each argument of loss_fn, such as "
            "data=(np.stack(x), np.asarray(y))."
        )
    is_several = isinstance(data, tuple | list) and not hasattr(data, "_fields")
    return tuple(data) if is_several else (data,)
