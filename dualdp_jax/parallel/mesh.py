# SPDX-License-Identifier: Apache-2.0
"""Sharding of a run's arrays on a mesh, and reduction of its sums.

Examples are split over the data axes of the mesh. Each shard works on its own rows under
`jax.shard_map`, where the program is that of one device: only the parameters that are split over
the same axes, and the sums, are communicated. A sum is reduced over the axes that split its
parameter as soon as it is formed (a reduce-scatter), and over the other data axes once per step (an
all-reduce).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from numpy.typing import NDArray

from dualdp_jax.compat import PyTree
from dualdp_jax.parallel.process_group import Group

Array = jax.Array | NDArray[Any]
Axes = tuple[str, ...]


@dataclass(frozen=True)
class DataMesh:
    """Mesh with the axes over which the examples are split."""

    mesh: Mesh  # `Mesh` with automatic axes
    axes: Axes  # the data axes, the slowest first
    group: Group | None  # `Group` of the processes that the mesh spans; None for one process

    @classmethod
    def of(cls, sharding: PyTree) -> DataMesh:
        """Return the data_mesh for the sharding of a batch."""
        spec = tuple(getattr(sharding, "spec", ()))
        axes = _names(spec[0]) if len(spec) else ()
        if not axes or any(entry is not None for entry in spec[1:]):
            raise ValueError(
                f"data_sharding is {sharding!r}. Expected one that splits axis 0, the examples, "
                'and nothing else, such as NamedSharding(mesh, PartitionSpec("data")).'
            )
        mesh: Any = sharding.mesh  # with automatic axes, which XLA's partitioner handles
        if any(kind is not AxisType.Auto for kind in mesh.axis_types):
            types = (AxisType.Auto,) * mesh.devices.ndim
            mesh = Mesh(mesh.devices, mesh.axis_names, axis_types=types)
        return cls(mesh, axes, Group.of(mesh.devices.flat))

    @property
    def num_shards(self) -> int:
        """Number of shards of the rows of a chunk."""
        return self._num_shards(self.axes)

    def _num_shards(self, axes: Axes) -> int:
        return math.prod(self.mesh.shape[name] for name in axes)

    def sharding(self, *spec: str | Axes | None) -> NamedSharding:
        """Return a sharding on the mesh."""
        return NamedSharding(self.mesh, P(*spec))

    def rows(self, array: Array, at: NDArray[np.int64] | None = None) -> jax.Array:
        """Return rows of an array, split over the data axes; a process reads only its own shards.

        `at` (rows,) holds the indices of the rows; None for all in order.
        """
        at = np.arange(len(array)) if at is None else at

        @cache  # once for all devices that hold a shard
        def read(start: int | None, stop: int | None) -> NDArray[Any]:
            return np.asarray(array[at[start:stop]])

        def shard(index: PyTree) -> NDArray[Any]:
            return read(index[0].start, index[0].stop)

        shape = (len(at), *array.shape[1:])
        return jax.make_array_from_callback(shape, self.sharding(self.axes), shard)

    def placed(self, name: str, leaf: PyTree) -> PyTree:
        """Return a model or optimizer array on the mesh, with the user's sharding or replicated."""
        if not isinstance(leaf, jax.Array | np.ndarray | np.generic | bool | int | float):
            return leaf
        given = getattr(leaf, "sharding", None)
        if given is None or len(given.device_set) == 1:
            return self._on_all(leaf)
        mesh = getattr(given, "mesh", None)  # whatever the types of its axes
        own = self.mesh
        places = [None if m is None else (m.axis_names, m.devices.tolist()) for m in (mesh, own)]
        if places[0] != places[1]:
            raise ValueError(
                f"{name} lies on {given}, and the batch on a mesh of {dict(own.shape)}. Expected "
                "both on one mesh: jax.device_put(params, NamedSharding(mesh, PartitionSpec()))."
            )
        return jax.device_put(leaf, given.update(mesh=own))

    def _on_all(self, leaf: PyTree) -> jax.Array:
        """Array or key of this process, replicated on all devices of the mesh."""
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            data = self._on_all(jax.random.key_data(leaf))
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
        array = np.asarray(leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf))
        return jax.make_array_from_callback(array.shape, self.sharding(), lambda _: array)

    def state(self, state: PyTree) -> PyTree:
        """Return the state with every array `placed`."""

        def placed(name: str, tree: PyTree) -> PyTree:
            paths, treedef = jax.tree_util.tree_flatten_with_path(tree)
            leaves = [self.placed(name + jax.tree_util.keystr(path), leaf) for path, leaf in paths]
            return jax.tree.unflatten(treedef, leaves)

        params, opt_state = placed("params", state.params), placed("opt_state", state.opt_state)
        return state._replace(params=params, opt_state=opt_state)

    def spread(self, function: Callable[..., PyTree], like: PyTree) -> Callable[..., PyTree]:
        """Extend a function of the rows of one shard to all rows.

        It maps (arrays of the model, rows, key, bound) to (sums, numbers, values per example): a
        sum for each leaf of `like`, with its sharding, and a pytree of scalars. Of global arrays,
        sums and numbers have a leading axis of unreduced shards.
        """
        splits = [self._split(leaf) for leaf in like]

        def one_shard(*arguments: PyTree) -> PyTree:
            sums, numbers, each = function(*arguments)
            sums = [_scattered(x, own) for x, (own, _) in zip(sums, splits, strict=True)]
            return *jax.tree.map(lambda x: x[None], (sums, numbers)), each

        sums = [P(rest or None, *own) for own, rest in splits]
        return self.each(one_shard, like, out_specs=(sums, P(self.axes), P(self.axes)))

    def each(
        self, function: Callable[..., PyTree], like: PyTree, out_specs: PyTree = None
    ) -> Callable[..., PyTree]:
        """Extend a function of the rows of one shard, its second argument, to all rows.

        `out_specs` are the specs of results that are not values per example.
        """

        def all_shards(*arguments: PyTree) -> PyTree:
            return jax.shard_map(
                function,
                mesh=self.mesh,
                in_specs=tuple(P(self.axes) if i == 1 else P() for i in range(len(arguments))),
                out_specs=P(self.axes) if out_specs is None else out_specs,
                axis_names=self._manual(like),
                check_vma=False,  # with it the loss would have to mark values that vary by shard
            )(*arguments)

        return all_shards

    def zeros(self, like: PyTree, numbers: PyTree) -> tuple[list[jax.Array], list[jax.Array]]:
        """Return zeros like the sums and numbers of `spread`."""
        sums = []
        for leaf in like:
            rest = self._split(leaf)[1]
            shape = (self._num_shards(rest), *leaf.shape)
            place = self.sharding(rest or None, *leaf.sharding.spec)
            sums.append(jnp.zeros(shape, jnp.result_type(jnp.float32, leaf.dtype), device=place))
        place = self.sharding(self.axes)
        return sums, [jnp.zeros(self.num_shards, x.dtype, device=place) for x in numbers]

    def _manual(self, like: PyTree) -> set[str]:
        """Axes of the `shard_map`: the data axes, and all axes that split no parameter.

        The fewer axes XLA's partitioner handles, the closer the program is to that of one device.
        """
        split = {name for leaf in like for entry in leaf.sharding.spec for name in _names(entry)}
        return set(self.axes) | (set(self.mesh.axis_names) - split)

    def _split(self, leaf: PyTree) -> tuple[list[Axes | None], Axes]:
        """Data axes that split each axis of a leaf, and the data axes that split none."""
        spec = [*leaf.sharding.spec, *[None] * (leaf.ndim - len(leaf.sharding.spec))]
        own = [tuple(a for a in _names(entry) if a in self.axes) or None for entry in spec]
        used = {name for entry in own for name in entry or ()}
        return own, tuple(name for name in self.axes if name not in used)


def data_mesh_of(
    data_sharding: jax.sharding.Sharding | None, parameters: PyTree = None
) -> DataMesh | None:
    """Return the data_mesh of a run, or None for one device."""
    if data_sharding is not None:
        return DataMesh.of(data_sharding)
    for leaf in [] if parameters is None else parameters.trained:
        if len(leaf.sharding.device_set) > 1:
            raise ValueError(
                f"params lie on {leaf.sharding}, and data_sharding is missing. Expected where the "
                'examples of a batch go, such as NamedSharding(mesh, PartitionSpec("data")).'
            )
    return None


def whole(array: PyTree) -> np.ndarray:
    """Return an array as NumPy on each process, also if sharded; all processes must call this."""
    if getattr(array, "is_fully_addressable", True) or array.is_fully_replicated:
        return np.asarray(array)
    return np.asarray(multihost_utils.process_allgather(array, tiled=True))


def shardings(tree: PyTree) -> PyTree:
    """Return the sharding of every leaf."""
    return jax.tree.map(lambda leaf: leaf.sharding, tree)


def _names(entry: str | Axes | None) -> Axes:
    """Mesh axes in one entry of a spec."""
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def _scattered(total: jax.Array, own: Sequence[Axes | None]) -> jax.Array:
    """Reduce-scatter a sum over the data axes that split its leaf."""
    for axis, names in enumerate(own):
        if names is not None:
            total = jax.lax.psum_scatter(total, names, scatter_dimension=axis, tiled=True)
    return total
