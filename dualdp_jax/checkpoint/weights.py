# SPDX-License-Identifier: Apache-2.0
"""Model parameters as NumPy arrays, and back, for porting weights between backends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dualdp import _validate
from dualdp_jax import compat
from dualdp_jax.compat import PyTree


def leaves(params: PyTree) -> dict[str, tuple[int, ...]]:
    """Return a mapping from path, joined by "/", to shape, in the order of `jax.tree.leaves`.

    `params` is a linen or nested dict, `nnx.Module` (its `nnx.Param`s and `nnx.BatchStat`s),
    `nnx.State`, or any pytree.
    """
    return {path: leaf.shape for path, leaf in _flat(params)}


def to_numpy(params: PyTree) -> dict[str, np.ndarray]:
    """Return a mapping from path, joined by "/", to array, in the order of `leaves`.

    bfloat16, which torch does not take from NumPy, becomes float32.
    """
    return {
        path: np.array(leaf, np.float32 if leaf.dtype == jnp.bfloat16 else None)
        for path, leaf in _flat(params)
    }


def from_named(like: PyTree, arrays: Mapping[str, np.ndarray]) -> PyTree:
    """Return a tree like `like` with the values of arrays by path, joined by "/".

    For an `nnx.Module` it is an `nnx.State`, for `nnx.update(module, state)`.
    """
    new = []
    for path, leaf in _flat(like):
        array = arrays[path]
        if leaf.shape != np.shape(array):
            raise ValueError(
                f"The array for {path!r} has shape {np.shape(array)}. Expected {leaf.shape}."
            )
        new.append(jnp.asarray(array, leaf.dtype))
    return jax.tree.unflatten(jax.tree.structure(_tree(like)), new)


def _tree(params: PyTree) -> PyTree:
    """Pytree of the parameters: the variables of a module, else `params` itself."""
    nnx = compat.flax_module(params)
    return params if nnx is None else nnx.state(params, nnx.Any(nnx.Param, nnx.BatchStat))


def _flat(params: PyTree) -> list[tuple[str, Any]]:
    """(path joined by "/", array) of every leaf."""
    found = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(_tree(params))[0]:
        keys = compat.variable_path(path)
        name = jax.tree_util.keystr(keys, simple=True, separator="/")
        if not isinstance(leaf, jax.Array | np.ndarray):
            raise TypeError(f"The parameter {name!r} is {_validate.kind(leaf)}. Expected an array.")
        found.append((name, leaf))
    return found
