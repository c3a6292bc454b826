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
from dualdp_jax.compat import leaf_paths
from dualdp_jax.training.adam_bc import adam_bc


def to_named(state: Any) -> dict[str, np.ndarray]:
    """Return a mapping from path, joined by "/", to array, for every leaf of an optax state."""
    return {path: np.asarray(leaf) for path, leaf in leaf_paths(state, "/")}


def from_named(like: Any, arrays: Mapping[str, Any]) -> Any:
    """Return a state like that of optax's `init` with the values of `to_named`, in its dtypes."""
    new = [jnp.asarray(arrays[path], leaf.dtype) for path, leaf in leaf_paths(like, "/")]
    return jax.tree.unflatten(jax.tree.structure(like), new)


def like_torch(kind: str, options: Mapping[str, Any]) -> optax.GradientTransformation:
    """Return the optax transformation with the updates of a torch optimizer.

    `kind` is its class, and `options` are its settings, as in a group of `param_groups`.
    """
    optimizer_state.check(optimizer_state.TorchState(kind, {}, {"the parameters": options}))
    return _OPTIMIZERS[kind](options)


def _sgd(o: Mapping[str, Any]) -> optax.GradientTransformation:
    """SGD; dampening scales the input of the trace (except at torch's first step)."""
    entering = 1 - o["dampening"]
    nesterov, momentum = o["nesterov"], o["momentum"]
    stages = [optax.add_decayed_weights(o["weight_decay"])] if o["weight_decay"] else []
    stages += [optax.scale(entering)] if momentum and entering != 1 else []
    stages += [optax.trace(momentum, nesterov)] if momentum else []
    return optax.chain(*stages, optax.scale_by_learning_rate(o["lr"]))


def _adam(o: Mapping[str, Any]) -> optax.GradientTransformation:
    """Adam; weight decay is added to the gradient, or for decoupled decay see `_adamw`."""
    adam = optax.adam(o["lr"], *o["betas"], eps=o["eps"])
    if not o["weight_decay"] or o.get("decoupled_weight_decay"):
        return adam if not o["weight_decay"] else _adamw(o)
    return optax.chain(optax.add_decayed_weights(o["weight_decay"]), adam)


def _adamw(o: Mapping[str, Any]) -> optax.GradientTransformation:
    """AdamW; torch and optax both multiply the decay by the learning rate."""
    return optax.adamw(o["lr"], *o["betas"], eps=o["eps"], weight_decay=o["weight_decay"])


def _adam_bc(o: Mapping[str, Any]) -> optax.GradientTransformation:
    """AdamBC, which is the same formula on both sides."""
    settings = {name: o[name] for name in ("floor", "eps", "weight_decay")}
    return adam_bc(o["lr"], *o["betas"], **settings)


_OPTIMIZERS: Mapping[str, Any] = {
    "SGD": _sgd,
    "Adam": _adam,
    "AdamW": _adamw,
    "AdamBC": _adam_bc,
}
