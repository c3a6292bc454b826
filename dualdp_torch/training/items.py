# SPDX-License-Identifier: Apache-2.0
"""Items of a data set that become several rows of the model: pairs, and views of an example.

Source: De et al. 2022, section 3.2 (augmentation multiplicity), for views.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from dualdp import _validate
from dualdp.randomness import SegmentBits, threefry
from dualdp_torch.noise.noise import keyed_generator
from dualdp_torch.per_sample.random_state import untouched_generators

Augment = Callable[[Any, torch.Generator], Any]


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
