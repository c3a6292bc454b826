# SPDX-License-Identifier: Apache-2.0
"""This backend's half of porting weights: a model's leaves as NumPy, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dualdp_jax import compat
from dualdp_jax import optimizer_state as optimizer_state

Path = tuple[str, ...]


def leaves(params: Any) -> list[tuple[Path, tuple[int, ...]]]:
    """Path and shape of every parameter, in the order of `jax.tree.leaves`.

    Args:
        params: linen or nested dict, `nnx.Module` (its `nnx.Param`s, and `nnx.BatchStat`s where it
            has any) or `nnx.State`, any pytree.

    Raises:
        TypeError: a leaf is no array.
    """
    return [(path, leaf.shape) for path, leaf in _flat(params)]


def to_numpy(params: Any) -> list[np.ndarray]:
    """The parameters as NumPy arrays, in the order of `leaves`; bfloat16 comes as float32."""
    return [as_numpy(leaf) for _, leaf in _flat(params)]


def to_named(params: Any) -> dict[str, np.ndarray]:
    """Path joined by "/" -> array, as in `to_numpy`."""
    paths = ["/".join(path) for path, _ in leaves(params)]
    return dict(zip(paths, to_numpy(params), strict=True))


def from_named(like: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    """`from_numpy`, by path joined by "/"."""
    return from_numpy(like, [arrays["/".join(path)] for path, _ in leaves(like)])


def from_numpy(like: Any, arrays: Sequence[np.ndarray]) -> Any:
    """A tree like `like` that holds other numbers.

    Args:
        like: as for `leaves`; gives structure, shapes and dtypes. For an `nnx.Module` an
            `nnx.State` comes back, for `nnx.update(module, state)`.
        arrays: one for each leaf, in the order of `leaves`.

    Raises:
        ValueError: wrong number of arrays, or wrong shape of one.
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
    """A copy on the host; bfloat16, which torch does not take from NumPy, as float32."""
    return np.array(array, np.float32 if array.dtype == jnp.bfloat16 else None)


def from_foreign(array: Any, as_numpy: Callable[[], np.ndarray]) -> jax.Array:
    """An array of another library by DLPack, through NumPy where that fails."""
    try:
        return jnp.from_dlpack(array)
    except (BufferError, RuntimeError):
        return jnp.asarray(as_numpy())


def _tree(params: Any) -> Any:
    """The pytree that holds the parameters: the variables of a module, else itself."""
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
                f"The parameter {'/'.join(words)!r} is a {type(leaf).__name__}. Expected an array."
            )
        found.append((words, leaf))
    return found
