# SPDX-License-Identifier: Apache-2.0
"""Augmented views of an example, whose gradients are averaged before they are clipped.

Source: De et al. 2022, section 3.2 (augmentation multiplicity).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from dualdp import _validate


def check_views(views: Any, augment: Any, num_examples: int) -> int:
    """Return the validated number of views."""
    views = _validate.integer("views", views, minimum=1)
    if augment is None and views > 1:
        raise ValueError(
            f"views={views} came without augment, so that all views of an example would be equal. "
            "Expected augment=, a function (example, key) -> one view."
        )
    if augment is not None and not callable(augment):
        raise TypeError(
            f"augment is {_validate.kind(augment)}. Expected a function (example, key) -> one view."
        )
    if num_examples * views > 2**32:
        raise ValueError(
            f"views={views} of {num_examples} examples are more than the 2^32 keys of a step. "
            f"Expected at most {2**32 // num_examples}."
        )
    return views


def check_augment(augment: Callable[..., Any], example: tuple[Any, ...], key: Any) -> None:
    """Call `augment` on one example, while it is traced, to refuse an unsuitable one."""
    try:
        view = augment(example, key)
    except Exception as error:
        said = str(error).partition("\n")[0].rstrip(".")
        raise TypeError(
            f"augment failed for one example, a tuple of {len(example)}, without a batch axis: "
            f"{said}. Expected a function (example, key) -> one view, written with jax."
        ) from error
    if not isinstance(view, tuple) or len(view) != len(example):
        raise TypeError(
            f"augment returned {_validate.kind(view)} for an example that is a tuple of "
            f"{len(example)}. Expected such a tuple, the arguments of loss_fn after the parameters."
        )


def loss_of_view(
    loss_fn: Callable[..., Any], augment: Callable[..., Any], needs_key: bool, keep_batch_dim: bool
) -> Callable[..., Any]:
    """Return the loss of one view of an example: a function (params, *example, key) -> loss.

    The key is split into one for the view and one for `loss_fn`.
    """

    def lifted(leaf: Any) -> Any:
        return leaf[None] if isinstance(leaf, jax.Array | np.ndarray) else leaf

    def loss(params: Any, *example: Any, key: Any) -> Any:
        for_view, for_loss = jax.random.split(key)
        view = augment(example, for_view)
        view = jax.tree.map(lifted, view) if keep_batch_dim else view
        return loss_fn(params, *view, **({"key": for_loss} if needs_key else {}))

    return loss
