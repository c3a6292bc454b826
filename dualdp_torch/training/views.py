# SPDX-License-Identifier: Apache-2.0
"""Random views of each example, whose gradients are averaged before the clip.

Source: De et al. 2022, section 3.2 (augmentation multiplicity).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from dualdp import _validate
from dualdp.randomness import SegmentBits, threefry
from dualdp_torch.noise.noise import keyed_generator

Augment = Callable[[Any, torch.Generator], Any]
_CPU = torch.device("cpu")


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
        leaves = pytree.tree_leaves(example)

        def state() -> list[Any]:
            versions = [leaf._version for leaf in leaves if torch.is_tensor(leaf)]
            return versions + [leaf.tobytes() for leaf in leaves if isinstance(leaf, np.ndarray)]

        before = state()
        for key in keys:
            generator = keyed_generator(key, _CPU)
            with torch.random.fork_rng(devices=[]):
                torch.set_rng_state(generator.get_state())
                found.append(self._augment(example, generator))
        if state() != before:
            raise ValueError(
                "augment changed the example in place, so that its next view would begin from this "
                "one. Expected a new tensor: x + noise, not x.add_(noise)."
            )
        return found


def flat_collate(collate: Callable[[list[Any]], Any], examples: list[list[Any]]) -> Any:
    """Return the batch of the views of all examples, an example's views side by side."""
    return collate([view for views in examples for view in views])
