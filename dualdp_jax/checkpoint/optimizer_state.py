# SPDX-License-Identifier: Apache-2.0
"""Optax state as NumPy arrays by path, and back, for porting optimizers between backends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dualdp.porting import optimizer_state
from dualdp_jax.compat import PyTree, leaf_paths
from dualdp_jax.training.adam_bc import adam_bc


def to_named(state: PyTree) -> dict[str, np.ndarray]:
    """Return a mapping from path, joined by "/", to array, for every leaf of an optax state."""
    return {path: np.asarray(leaf) for path, leaf in leaf_paths(state, "/")}


def from_named(like: PyTree, arrays: Mapping[str, np.ndarray]) -> PyTree:
    """Return a state like that of optax's `init` with the values of `to_named`, in its dtypes."""
    new = [jnp.asarray(arrays[path], leaf.dtype) for path, leaf in leaf_paths(like, "/")]
    return jax.tree.unflatten(jax.tree.structure(like), new)


def like_torch(kind: str, options: Mapping[str, Any]) -> optax.GradientTransformation:
    """Return the optax transformation with the updates of a torch optimizer.

    `kind` is its class, and `options` are its settings, as in a group of `param_groups`.
    """
    optimizer_state.check(optimizer_state.TorchState(kind, {}, {"the parameters": options}))
    lr, decay = options["lr"], options["weight_decay"]
    if kind == "SGD":  # dampening scales the input of the trace (except at torch's first step)
        entering, momentum = 1 - options["dampening"], options["momentum"]
        stages = [optax.add_decayed_weights(decay)] if decay else []
        stages += [optax.scale(entering)] if momentum and entering != 1 else []
        stages += [optax.trace(momentum, options["nesterov"])] if momentum else []
        return optax.chain(*stages, optax.scale_by_learning_rate(lr))
    betas, eps = options["betas"], options["eps"]
    if kind == "AdamBC":
        return adam_bc(lr, *betas, floor=options["floor"], eps=eps, weight_decay=decay)
    if kind == "AdamW" or (decay and options.get("decoupled_weight_decay")):
        return optax.adamw(lr, *betas, eps=eps, weight_decay=decay)
    adam = optax.adam(lr, *betas, eps=eps)
    return optax.chain(optax.add_decayed_weights(decay), adam) if decay else adam
