# SPDX-License-Identifier: Apache-2.0
"""Where the arrays of a run lie on a mesh, and how its sums are formed there.

Examples are split over the data axes of the mesh. Each shard works on its own rows under
`jax.shard_map`, where the program is that of one device: nothing is exchanged but the parameters
that are split over the same axes, and the sums. A sum is reduced over the axes that split its
parameter as soon as it is formed (a reduce-scatter), and over the other data axes once per step (an
all-reduce).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dualdp_jax.distributed import Group
from dualdp_jax.parameters import Parameters

Axes = tuple[str, ...]


@dataclass(frozen=True)
class Layout:
    """A mesh, and which of its axes the examples are split over.

    Attributes:
        mesh: of automatic axes.
        axes: data axes, the slowest first.
        group: of the processes that the mesh spans; None for one.
    """

    mesh: Mesh
    axes: Axes
    group: Group | None

    @classmethod
    def of(cls, sharding: Any) -> Layout:
        """The layout that the sharding of a batch describes.

        Raises:
            TypeError: it is no `NamedSharding`.
            ValueError: it splits more than the examples.
        """
        if not isinstance(sharding, NamedSharding):
            raise TypeError(
                f"data_sharding is a {type(sharding).__name__}. Expected where the examples of a "
                'batch go, such as NamedSharding(mesh, PartitionSpec("data")).'
            )
        if any(entry is not None for entry in sharding.spec[1:]):
            raise ValueError(
                f"data_sharding has the spec {sharding.spec}. Expected one that splits axis 0, the "
                'examples, and nothing else, such as PartitionSpec("data").'
            )
        axes = _names(sharding.spec[0]) if len(sharding.spec) else ()
        if not axes:
            raise ValueError(
                f"data_sharding has the spec {sharding.spec}, which splits no examples. Expected "
                'one with a data axis, such as PartitionSpec("data"); the axis may have size 1.'
            )
        mesh = automatic(sharding.mesh)
        return cls(mesh, axes, Group.of(mesh.devices.flat))

    @property
    def num_shards(self) -> int:
        """Into how many parts the rows of a chunk are cut."""
        return _product(self.mesh, self.axes)

    def sharding(self, *spec: Any) -> NamedSharding:
        """A sharding on the mesh."""
        return NamedSharding(self.mesh, P(*spec))

    # ------------------------------------------------------------------ placing

    def rows(self, array: Any, at: Any = None) -> jax.Array:
        """Rows of an array, split over the data axes; each process reads only those of its devices.

        Args:
            array: (num_examples, ...).
            at: (rows,) which of them; None for all in order.
        """
        at = np.arange(len(array)) if at is None else at
        read: dict[tuple[Any, ...], Any] = {}

        def shard(index: Any) -> Any:
            part = index[0].start, index[0].stop
            if part not in read:
                read[part] = np.asarray(array[at[index[0]]])
            return read[part]

        shape = (len(at), *array.shape[1:])
        return jax.make_array_from_callback(shape, self.sharding(self.axes), shard)

    def placed(self, name: str, leaf: Any) -> Any:
        """An array of the model or its optimizer: where the user put it on the mesh, else on all.

        Raises:
            ValueError: it lies on several devices in another way.
        """
        if not isinstance(leaf, jax.Array | np.ndarray | np.generic | bool | int | float):
            return leaf
        given = getattr(leaf, "sharding", None)
        if given is None or len(given.device_set) == 1:
            return self._on_all(leaf)
        if not isinstance(given, NamedSharding) or not _are_alike(given.mesh, self.mesh):
            raise ValueError(
                f"{name} lies on {given}, and the batch on a mesh of {dict(self.mesh.shape)}. "
                "Expected both on one mesh, such as jax.device_put(params, NamedSharding(mesh, "
                "PartitionSpec()))."
            )
        return jax.device_put(leaf, given.update(mesh=self.mesh))

    def _on_all(self, leaf: Any) -> jax.Array:
        """An array or a key of this process, on all devices of the mesh."""
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            words = self._on_all(jax.random.key_data(leaf))
            return jax.random.wrap_key_data(words, impl=jax.random.key_impl(leaf))
        array = np.asarray(leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf))
        return jax.make_array_from_callback(array.shape, self.sharding(), lambda _: array)

    def state(self, state: Any) -> Any:
        """Every array of a state, `placed`."""
        place = lambda path, leaf: self.placed(jax.tree_util.keystr(path), leaf)  # noqa: E731
        return state._replace(
            params=jax.tree_util.tree_map_with_path(place, state.params),
            opt_state=jax.tree_util.tree_map_with_path(place, state.opt_state),
        )

    def model(self, parameters: Parameters) -> Parameters:
        """A model whose arrays lie on the mesh."""
        named = zip(parameters.names, parameters.trained, strict=True)

        def others(arrays: Sequence[Any]) -> list[Any]:
            return [self.placed("params", leaf) for leaf in arrays]

        def arrays(tree: Any) -> tuple[list[Any], list[Any]]:
            trained, rest = parameters.arrays(tree)
            return trained, others(rest)

        return replace(
            parameters,
            trained=[self.placed(f"params[{name!r}]", leaf) for name, leaf in named],
            others=others(parameters.others),
            arrays=arrays,
        )

    # ------------------------------------------------------------------ sums

    def spread(self, function: Callable[..., Any], like: Sequence[Any]) -> Callable[..., Any]:
        """A function of the rows of one shard, as one of all rows.

        Args:
            function: (trained, others, rows, key, bound) to (sums, numbers, values per example),
                with a sum for each leaf of `like`, and any number of numbers.
            like: arrays, placed as the sums will be.

        Returns:
            The same of global arrays; sums and numbers have an axis of parts in front.
        """
        splits = [self._split(leaf) for leaf in like]

        def one_shard(*arguments: Any) -> Any:
            sums, numbers, each = function(*arguments)
            sums = [_scattered(x, own) for x, (own, _) in zip(sums, splits, strict=True)]
            return *jax.tree.map(lambda x: x[None], (sums, numbers)), each

        sums = [P(rest or None, *own) for own, rest in splits]
        return self.each(one_shard, like, out_specs=(sums, P(self.axes), P(self.axes)))

    def each(
        self, function: Callable[..., Any], like: Sequence[Any], out_specs: Any = None
    ) -> Callable[..., Any]:
        """A function of the rows of one shard, its third argument, as one of all rows.

        Args:
            function: with values per example as its results.
            like: the parameters, as they are placed.
            out_specs: of other results.
        """

        def all_shards(*arguments: Any) -> Any:
            in_specs = [P(self.axes) if i == 2 else P() for i in range(len(arguments))]
            return jax.shard_map(
                function,
                mesh=self.mesh,
                in_specs=tuple(in_specs),
                out_specs=P(self.axes) if out_specs is None else out_specs,
                axis_names=self._manual(like),
                check_vma=False,  # else the loss would have to say what differs between shards
            )(*arguments)

        return all_shards

    def parts(self, like: Sequence[Any]) -> tuple[list[NamedSharding], NamedSharding]:
        """Where the sums and the numbers of `spread` lie."""
        rests = [self._split(leaf)[1] or None for leaf in like]
        sums = [self.sharding(r, *x.sharding.spec) for r, x in zip(rests, like, strict=True)]
        return sums, self.sharding(self.axes)

    def zeros(self, like: Sequence[Any], numbers: Any) -> tuple[list[Any], Any]:
        """What the sums and numbers of `spread` are added to.

        Args:
            like: arrays, placed as the sums will be.
            numbers: arrays without axes.
        """
        counts = [_product(self.mesh, self._split(leaf)[1]) for leaf in like]
        shapes = [
            ((n, *x.shape), jnp.result_type(jnp.float32, x.dtype))
            for n, x in zip(counts, like, strict=True)
        ]

        def made() -> Any:
            sums = [jnp.zeros(*shape) for shape in shapes]
            return sums, jax.tree.map(lambda x: jnp.zeros(self.num_shards, x.dtype), numbers)

        found: tuple[list[Any], Any] = jax.jit(made, out_shardings=self.parts(like))()
        return found

    def _manual(self, like: Sequence[Any]) -> set[str]:
        """Axes that XLA's partitioner has no say about: the data's, and all that split nothing.

        The less it decides, the closer the program is to that of one device.
        """
        split = {name for leaf in like for entry in leaf.sharding.spec for name in _names(entry)}
        return set(self.axes) | (set(self.mesh.axis_names) - split)

    def _split(self, leaf: Any) -> tuple[list[Axes | None], Axes]:
        """Data axes that split each axis of a leaf, and those that split none."""
        spec = [*leaf.sharding.spec, *[None] * (leaf.ndim - len(leaf.sharding.spec))]
        own = [tuple(a for a in _names(entry) if a in self.axes) or None for entry in spec]
        used = {name for entry in own for name in entry or ()}
        return own, tuple(name for name in self.axes if name not in used)


def layout_of(data_sharding: Any, parameters: Parameters | None = None) -> Layout | None:
    """The layout of a run, or None for one device.

    Raises:
        ValueError: the parameters lie on several devices, and nobody said where the batch goes.
    """
    if data_sharding is not None:
        return Layout.of(data_sharding)
    for leaf in [] if parameters is None else parameters.trained:
        if len(leaf.sharding.device_set) > 1:
            raise ValueError(
                f"params lie on {leaf.sharding}, and data_sharding is missing. Expected where the "
                'examples of a batch go, such as NamedSharding(mesh, PartitionSpec("data")).'
            )
    return None


def automatic(mesh: Any) -> Mesh:
    """The mesh with axes that XLA's partitioner decides about, as the parameters' need."""
    if all(kind is AxisType.Auto for kind in mesh.axis_types):
        return mesh
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * mesh.devices.ndim)


def whole(array: Any) -> np.ndarray:
    """An array that may lie on several processes, as NumPy on each; all must ask."""
    if getattr(array, "is_fully_addressable", True) or array.is_fully_replicated:
        return np.asarray(array)
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(array, tiled=True))


def shardings(tree: Any) -> Any:
    """Of every leaf."""
    return jax.tree.map(lambda leaf: leaf.sharding, tree)


def pieces(array: Any) -> list[np.ndarray]:
    """The distinct parts of an array that this process holds, in the order of their place."""
    if not isinstance(array, jax.Array):
        return [np.asarray(array)]
    found = {_place(shard.index, array.shape): shard for shard in array.addressable_shards}
    return [np.asarray(found[place].data) for place in sorted(found)]


def fingerprint(arrays: Sequence[Any]) -> str:
    """A word for the bits that this process holds of arrays on a mesh; a sum, against mistakes."""
    words = _summed(arrays[0].sharding.mesh, tuple(array.sharding.spec for array in arrays))
    sums = sorted(int(np.asarray(s.data)[0]) for s in words(*arrays).addressable_shards)
    return hashlib.sha256(repr(sums).encode()).hexdigest()


@cache
def _summed(mesh: Mesh, specs: tuple[P, ...]) -> Callable[..., Any]:
    """Arrays to a sum of their bits on each device, (devices,) uint32."""

    def one(*leaves: Any) -> Any:
        total = jnp.uint32(0)
        for leaf in leaves:
            kind = jnp.dtype(f"uint{8 * leaf.dtype.itemsize}")
            bits = jax.lax.bitcast_convert_type(leaf, kind)
            bits = bits ^ bits >> 32 if leaf.dtype.itemsize == 8 else bits
            total = total * jnp.uint32(31) + bits.astype(jnp.uint32).sum(dtype=jnp.uint32)
        return total[None]

    out = P(mesh.axis_names)
    return jax.jit(jax.shard_map(one, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False))


def held(arrays: Sequence[Any]) -> str:
    """Which parts of arrays this process holds, in a word that others can compare with theirs."""
    places = [
        sorted({_place(shard.index, array.shape) for shard in array.addressable_shards})
        for array in arrays
    ]
    return hashlib.sha256(repr(places).encode()).hexdigest()


def _place(index: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Where a shard begins and ends on each axis."""
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def _names(entry: Any) -> Axes:
    """The mesh axes in one entry of a spec."""
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def _product(mesh: Mesh, axes: Axes) -> int:
    return int(np.prod([mesh.shape[name] for name in axes], dtype=np.int64))


def _are_alike(one: Any, two: Mesh) -> bool:
    """Whether two meshes have the same devices in the same places, whatever their axes' types."""
    return one.axis_names == two.axis_names and np.array_equal(one.devices, two.devices)


def _scattered(total: Any, own: Sequence[Axes | None]) -> Any:
    """A sum over shards, each with the part that the leaf's own data axes leave it."""
    for axis, names in enumerate(own):
        if names is not None:
            total = jax.lax.psum_scatter(total, names, scatter_dimension=axis, tiled=True)
    return total
