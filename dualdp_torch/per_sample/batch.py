# SPDX-License-Identifier: Apache-2.0
"""Batch arguments of a call: tensors with the examples on axis 0, and any other objects."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from dualdp import _validate
from dualdp_torch.rules.base import Tensor


def _refuse_array(leaf: Any) -> None:
    """Refuse what may hold examples and is no tensor."""
    is_array = hasattr(leaf, "__array__") and not isinstance(leaf, np.generic)
    if is_array or isinstance(leaf, Iterator):
        shape = f" of shape {leaf.shape}" if hasattr(leaf, "shape") else ""
        raise TypeError(
            f"The batch holds {_validate.kind(leaf)}{shape}. Expected torch tensors; use "
            "torch.as_tensor."
        )


class Batch:
    """Flattened arguments of a loss function after the model: nested dicts, lists and tuples.

    With `shares`, a tensor with 1 on axis 0 beside n > 1 elsewhere is one that all examples share,
    such as position ids, and is handed on whole.

    Attributes:
        n: number of examples, each of which is a unit of `rows_per_unit` consecutive rows.
    """

    def __init__(
        self, arguments: tuple[Any, ...], *, shares: bool = False, rows_per_unit: int = 1
    ) -> None:
        self._arguments, self._shares, self.rows_per_unit = arguments, shares, rows_per_unit
        self.leaves, self.spec = pytree.tree_flatten(arguments)
        sizes: set[int] = set()
        for leaf in self.leaves:
            if not torch.is_tensor(leaf):
                _refuse_array(leaf)
                continue
            if leaf.is_nested or leaf.layout is not torch.strided:
                kind = "nested" if leaf.is_nested else "sparse"
                dense = (
                    "torch.nested.to_padded_tensor(x, 0.0)" if leaf.is_nested else "x.to_dense()"
                )
                raise TypeError(
                    f"The batch holds a {kind} tensor, of which single examples can't be picked. "
                    f"Expected a dense one: {dense}, in collate_fn or before the model's call."
                )
            if leaf.is_meta:
                raise ValueError(
                    "The batch holds a tensor on the meta device, which has no numbers. Expected "
                    "the examples themselves."
                )
            if leaf.dim() == 0:
                raise ValueError(
                    "The batch holds a tensor without axes. Expected the examples on axis 0 of "
                    "every tensor; pass numbers as Python floats."
                )
            sizes.add(leaf.shape[0])
        if shares and len(sizes) == 2:
            sizes.discard(1)
        if len(sizes) != 1:
            came = f"{sorted(sizes)} examples" if sizes else "no tensor"
            mapping = next((x for x in self.leaves if isinstance(x, Mapping)), None)
            if mapping is not None:
                came += f", but {_validate.kind(mapping)}, of which dict(...) would show them"
            way_out = ", or 1 if all examples share it (unsqueeze(0))" if shares else ""
            if len(sizes) > 1:
                way_out += (
                    ". Rows of unequal lengths, also joined ones with offsets, are padded to one "
                    "length and masked (pad_sequence(rows, batch_first=True))"
                )
            raise ValueError(
                f"The batch arguments hold {came}. Expected the same number of examples on axis 0 "
                f"of every tensor{way_out}."
            )
        self.num_rows = sizes.pop()
        self.n, rest = divmod(self.num_rows, rows_per_unit)
        if rest:
            raise ValueError(
                f"The batch holds {self.num_rows} rows, which split a unit of {rows_per_unit}. "
                f"Expected a multiple of {rows_per_unit} rows: whole units, in their order."
            )

    def _has_rows(self, leaf: Any) -> bool:
        return torch.is_tensor(leaf) and leaf.shape[0] == self.num_rows

    def _map(self, change: Any) -> Any:
        leaves = [change(leaf) if self._has_rows(leaf) else leaf for leaf in self.leaves]
        return pytree.tree_unflatten(leaves, self.spec)

    def arguments(self) -> Any:
        """Return the arguments, detached; dicts and lists are new unless nothing was detached."""
        if all(torch.is_tensor(a) and not a.requires_grad for a in self._arguments):
            return self._arguments
        return pytree.tree_map_only(
            Tensor, lambda t: t.detach() if t.requires_grad else t, self._arguments
        )

    def rows(self, which: slice | Tensor) -> Batch:
        """Return the batch of the selected examples, each with all rows of its unit."""
        k = self.rows_per_unit
        if k > 1:
            if isinstance(which, slice):
                which = slice(which.start * k, which.stop * k)
            else:
                which = (which[:, None] * k + torch.arange(k, device=which.device)).flatten()

        def pick(leaf: Tensor) -> Tensor:
            return leaf[which if isinstance(which, slice) else which.to(leaf.device)]

        return self._with(self._map(pick))

    def _with(self, arguments: Any) -> Batch:
        return Batch(arguments, shares=self._shares, rows_per_unit=self.rows_per_unit)

    def chunks(self, size: int | None) -> Iterator[tuple[slice, Batch]]:
        """Yield (rows, batch) for consecutive chunks of at most `size` examples; none if n = 0."""
        if self.n and (size is None or size >= self.n):
            yield slice(0, self.n), self
            return
        for start in range(0, self.n, size or 1):
            which = slice(start, min(start + (size or 1), self.n))
            yield which, self.rows(which)

    def tensors(self) -> list[Tensor]:
        """Return the tensors with examples, in flattened order."""
        return [leaf for leaf in self.leaves if self._has_rows(leaf)]

    def with_tensors(self, tensors: list[Tensor]) -> Any:
        """Return the arguments with their tensors replaced by `tensors`, in order."""
        queue = iter(tensors)
        return self._map(lambda _: next(queue))

    def on(self, tensors: list[Tensor]) -> Batch:
        """Return the batch with its tensors replaced by `tensors`, in order."""
        return self._with(self.with_tensors(tensors))

    def signature(self) -> tuple[Any, ...]:
        """Return structure, shapes without n, dtypes, devices, types, which have rows, unit."""
        kinds = tuple(
            (leaf.shape[1:], leaf.dtype, leaf.device) if torch.is_tensor(leaf) else type(leaf)
            for leaf in self.leaves
        )
        return self.spec, kinds, tuple(map(self._has_rows, self.leaves)), self.rows_per_unit


def split_aux(returned: Any, has_aux: bool) -> tuple[Any, Any]:
    """Return (losses, aux) of what a loss function returned."""
    if not has_aux:
        return returned, None
    if not isinstance(returned, tuple | list) or len(returned) != 2:
        raise TypeError(
            f"has_aux=True, but loss_fn returned {_validate.kind(returned)}. Expected "
            "(losses, aux)."
        )
    return returned[0], returned[1]


def check_losses(losses: Any, n: int) -> Tensor:
    """Return the losses, checked to be one per example."""
    if not torch.is_tensor(losses) or not losses.is_floating_point():
        what = losses.dtype if torch.is_tensor(losses) else _validate.kind(losses)
        raise TypeError(
            f"loss_fn returned {what}. Expected a floating-point tensor of shape ({n},): one loss "
            "per example; has_aux=True allows (losses, aux)."
        )
    if losses.shape != (n,):
        k = n // len(losses) if losses.dim() == 1 and len(losses) and n % len(losses) == 0 else 1
        units = f" If {k} rows are one unit, such as a pair, give rows_per_unit={k}."
        raise ValueError(
            f"loss_fn returned a loss of shape {tuple(losses.shape)}. Expected ({n},): one loss "
            'per example, for instance with reduction="none" and a mean over the other axes.'
            f"{units if 1 < k < n else ''}"
        )
    return losses


def join_aux(auxes: list[tuple[Any, int]], rows_per_unit: int = 1) -> Any:
    """Join the auxiliary outputs of consecutive chunks, each with the size of its chunk."""
    if len(auxes) < 2:
        return auxes[0][0] if auxes else None
    flat = [pytree.tree_flatten(aux) for aux, _ in auxes]
    leaves = []
    for values in zip(*(leaves for leaves, _ in flat), strict=True):
        first = values[0]
        if not torch.is_tensor(first):
            if any(value is not first and value != first for value in values):
                raise ValueError(
                    f"aux holds a {type(first).__name__} that differs between the chunks of "
                    "the batch. Expected tensors with the examples on axis 0, which can be joined."
                )
            leaves.append(first)
            continue
        for value, (_, size) in zip(values, auxes, strict=True):
            if value.dim() == 0 or len(value) not in (size, size * rows_per_unit):
                raise ValueError(
                    f"aux holds a tensor of shape {tuple(value.shape)} for {size} examples. "
                    "Expected the examples on axis 0, so that pieces of a batch can be joined."
                )
        leaves.append(torch.cat(values))
    return pytree.tree_unflatten(leaves, flat[0][1])
