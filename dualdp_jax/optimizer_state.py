# SPDX-License-Identifier: Apache-2.0
"""An optax state as NumPy arrays by path, and back: this backend's half of porting optimizers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dualdp import optimizers
from dualdp_jax import compat


def _flat(state: Any) -> list[tuple[str, Any]]:
    """(path joined by "/", leaf) of every leaf."""
    flat = jax.tree_util.tree_flatten_with_path(state)[0]
    paths = [(compat.variable_path(path), leaf) for path, leaf in flat]
    return [(jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in paths]


def to_named(state: Any) -> dict[str, np.ndarray]:
    """Path joined by "/" -> array of every leaf of an optax state."""
    return {path: np.asarray(leaf) for path, leaf in _flat(state)}


def from_named(like: Any, arrays: Mapping[str, Any]) -> Any:
    """A state like `like`, with these numbers in its dtypes.

    Args:
        like: of optax's `init`.
        arrays: path joined by "/" -> array, for every leaf.
    """
    new = [jnp.asarray(arrays[path], leaf.dtype) for path, leaf in _flat(like)]
    return jax.tree.unflatten(jax.tree.structure(like), new)


def like_torch(kind: str, options: Mapping[str, Any]) -> optax.GradientTransformation:
    """The optax transformation with the updates of a torch optimizer.

    Args:
        kind: class of torch.optim, one of `dualdp.optimizers.SLOTS`.
        options: its settings, as in a group of `param_groups`.

    Raises:
        ValueError: settings that optax does not have.
    """
    optimizers.check(optimizers.TorchState(kind, {}, {"the parameters": options}))
    return _TWINS[kind](options)


def _sgd(o: Mapping[str, Any]) -> optax.GradientTransformation:
    """Dampening scales what enters the trace (torch's very first step excepted)."""
    entering = 1 - o["dampening"]
    nesterov, momentum = o["nesterov"], o["momentum"]
    stages = [optax.add_decayed_weights(o["weight_decay"])] if o["weight_decay"] else []
    stages += [optax.scale(entering)] if momentum and entering != 1 else []
    stages += [optax.trace(momentum, nesterov)] if momentum else []
    return optax.chain(*stages, optax.scale_by_learning_rate(o["lr"]))


def _adam(o: Mapping[str, Any]) -> optax.GradientTransformation:
    """L2 regularisation enters the moments; `_adamw` decays beside them."""
    adam = optax.adam(o["lr"], *o["betas"], eps=o["eps"])
    if not o["weight_decay"] or o.get("decoupled_weight_decay"):
        return adam if not o["weight_decay"] else _adamw(o)
    return optax.chain(optax.add_decayed_weights(o["weight_decay"]), adam)


def _adamw(o: Mapping[str, Any]) -> optax.GradientTransformation:
    """Both multiply the decay by the learning rate."""
    return optax.adamw(o["lr"], *o["betas"], eps=o["eps"], weight_decay=o["weight_decay"])


def _rmsprop(o: Mapping[str, Any]) -> optax.GradientTransformation:
    """Epsilon outside of the root, as in torch."""
    rmsprop = optax.rmsprop(
        o["lr"],
        decay=o["alpha"],
        eps=o["eps"],
        eps_in_sqrt=False,
        centered=o["centered"],
        momentum=o["momentum"] or None,
    )
    if not o["weight_decay"]:
        return rmsprop
    return optax.chain(optax.add_decayed_weights(o["weight_decay"]), rmsprop)


_TWINS: Mapping[str, Any] = {
    "SGD": _sgd,
    "Adam": _adam,
    "AdamW": _adamw,
    "RMSprop": _rmsprop,
}
