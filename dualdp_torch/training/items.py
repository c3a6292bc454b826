# SPDX-License-Identifier: Apache-2.0
"""Items of a data set that hold several rows of the model, such as the two of a pair."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree
from torch.utils.data import default_collate

from dualdp import _validate
from dualdp_torch.per_sample.random_state import untouched_generators


class ItemCollate:
    """`collate_fn` that returns the rows of all items of a batch, an item's rows side by side.

    It is made of one whose tensors are (items, K, ...).
    """

    def __init__(self, collate: Callable[[list[Any]], Any], rows_per_item: int) -> None:
        self._collate, self._rows = collate, rows_per_item
        self._has_items_in_front = collate is default_collate

    def __call__(self, items: list[Any]) -> Any:
        """Return the batch, whose tensors are (items K, ...)."""
        if len(items) == self._rows and not self._has_items_in_front:
            self._try_another_number(items)
        rows = self._rows_of(self._collate(items), len(items))
        self._has_items_in_front |= len(items) != self._rows
        return rows

    def _try_another_number(self, items: list[Any]) -> None:
        """Refuse a `collate_fn` whose tensors are (K, items, ...), which K items do not tell."""
        with untouched_generators():
            batch = self._collate(copy.deepcopy([*items, items[0]]))
        self._rows_of(batch, len(items) + 1)
        self._has_items_in_front = True

    def _rows_of(self, batch: Any, num_items: int) -> Any:
        """Batch with the rows of each item side by side, refused where they are not there."""
        lead, leaves = (num_items, self._rows), pytree.tree_leaves(batch)
        rows = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor | np.ndarray)]
        if not rows:
            raise ValueError(
                f"The batch is {_validate.kind(batch)}, in which no tensor was found. Expected "
                f"tensors, or dicts, lists and tuples of them, for rows_per_unit={self._rows}: "
                "dict(...) of a mapping of another type."
            )
        for leaf in rows:
            if tuple(leaf.shape[:2]) != lead:
                raise ValueError(
                    f"The batch of {num_items} items holds a tensor of shape {tuple(leaf.shape)}. "
                    f"Expected {lead} in front with rows_per_unit={self._rows}, the rows of each "
                    "item; what all rows of an item share is repeated for each of them. Rows of a "
                    "person need unit='user' and users=."
                )
        return pytree.tree_map_only(
            (torch.Tensor, np.ndarray),
            lambda leaf: leaf.reshape(num_items * self._rows, *leaf.shape[2:]),
            batch,
        )


def refuse_views_of_items(plan: Any) -> None:
    """Refuse views of items of several rows: a loss could not tell which rows it joins."""
    if plan.rows_per_item is not None:
        raise ValueError(
            f"views= or augment= came with rows_per_unit={plan.rows_per_item}, whose items hold "
            "several rows already. Expected one of the two; the data set may augment its items."
        )
