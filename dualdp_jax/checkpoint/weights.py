# SPDX-License-Identifier: Apache-2.0
"""Model parameters as NumPy arrays, and back, for porting weights between backends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dualdp import _validate
from dualdp_jax import compat
from dualdp_jax.checkpoint import optimizer_state as optimizer_state

Path = tuple[str, ...]


def leaves(params: Any) -> list[tuple[Path, tuple[int, ...]]]:
    """Return the path and shape of every parameter, in the order of `jax.tree.leaves`.

    `params` is a linen or nested dict, `nnx.Module` (its `nnx.Param`s and `nnx.BatchStat`s),
    `nnx.State`, or any pytree.
    """
    return [(path, leaf.shape) for path, leaf in _flat(params)]


def to_numpy(params: Any) -> list[np.ndarray]:
    """Return the parameters as NumPy arrays, in the order of `leaves`; bfloat16 as float32."""
    return [as_numpy(leaf) for _, leaf in _flat(params)]


def to_named(params: Any) -> dict[str, np.ndarray]:
    """Return a mapping from path, joined by "/", to array as in `to_numpy`."""
    paths = ["/".join(path) for path, _ in leaves(params)]
    return dict(zip(paths, to_numpy(params), strict=True))


def from_named(like: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    """Call `from_numpy` with arrays by path, joined by "/"."""
    return from_numpy(like, [arrays["/".join(path)] for path, _ in leaves(like)])


def from_numpy(like: Any, arrays: Sequence[np.ndarray]) -> Any:
    """Return a tree like `like` with the values of `arrays`, which are in the order of `leaves`.

    For an `nnx.Module` it is an `nnx.State`, for `nnx.update(module, state)`.
    """
    flat = _flat(like)
    if len(arrays) != len(flat):
        raise ValueError(
            f"{len(arrays)} arrays came for {len(flat)} parameters. Expected one for each of "
            f"{['/'.join(path) for path, _ in flat]}."
        )
    for (path, leaf), array in zip(flat, arrays, strict=True):
        if leaf.shape != np.shape(array):
            raise ValueError(
                f"The array for {'/'.join(path)!r} has shape {np.shape(array)}. Expected "
                f"{leaf.shape}."
            )
    new = [jnp.asarray(array, leaf.dtype) for (_, leaf), array in zip(flat, arrays, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(_tree(like)), new)


def as_numpy(array: Any) -> np.ndarray:
    """Return a copy on the host; bfloat16, which torch does not take from NumPy, as float32."""
    return np.array(array, np.float32 if array.dtype == jnp.bfloat16 else None)


def _tree(params: Any) -> Any:
    """Pytree of the parameters: the variables of a module, else `params` itself."""
    nnx = compat.flax_module(params)
    return params if nnx is None else nnx.state(params, nnx.Any(nnx.Param, nnx.BatchStat))


def _flat(params: Any) -> list[tuple[Path, Any]]:
    """(path, array) of every leaf."""
    found = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(_tree(params))[0]:
        keys = compat.variable_path(path) if compat.is_flax_state(_tree(params)) else path
        words = tuple(jax.tree_util.keystr((key,), simple=True) for key in keys)
        if not isinstance(leaf, jax.Array | np.ndarray):
            raise TypeError(
                f"The parameter {'/'.join(words)!r} is {_validate.kind(leaf)}. Expected an array."
            )
        found.append((words, leaf))
    return found
