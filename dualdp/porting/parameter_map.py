# SPDX-License-Identifier: Apache-2.0
"""Map of a torch parameter to the JAX leaves that hold its rows, and its inverse."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True)
class Axes:
    """Layout such as "(h d) i -> i h d", for arrays of one shape."""

    shape: tuple[int, ...]  # torch's
    apart: tuple[int, ...]  # the same with a size for each letter
    order: tuple[int, ...]  # JAX's axes, by their number in `apart`

    @classmethod
    def of(cls, layout: str, shape: Sequence[int], known: Mapping[str, int]) -> Axes | None:
        """Return the axes of a layout for torch's shape, or None if the layout does not fit."""
        if layout.count("->") != 1:
            raise ValueError(
                f"layout={layout!r} has no '->'. Expected torch's axes and JAX's: 'o i -> i o'."
            )
        left, right = layout.split("->")
        spread = len(shape) - len(_groups(left)) + 1
        torch, jax = (_groups(side, spread) for side in (left, right))
        if len(torch) != len(shape):
            return None
        letters, apart = list[str](), list[int]()
        for group, size in zip(torch, shape, strict=True):
            outer = [known.get(letter, 0) for letter in group[:-1]]
            inner = math.prod(outer)
            if inner == 0 or size % inner:
                return None
            letters += group
            apart += [*outer, size // inner]
        order = tuple(letters.index(letter) for (letter,) in jax)
        return cls(tuple(shape), tuple(apart), order)

    @property
    def jax_shape(self) -> tuple[int, ...]:
        """Shape of JAX's array."""
        return tuple(self.apart[axis] for axis in self.order)

    def to_jax(self, array: Array) -> Array:
        """Return torch's array in JAX's layout."""
        return array.reshape(self.apart).transpose(self.order)

    def to_torch(self, array: Array, batch_axes: int = 0) -> Array:
        """Return JAX's array in torch's layout; leading batch axes are unchanged."""
        order = [batch_axes + self.order.index(axis) for axis in range(len(self.order))]
        back = array.transpose(*range(batch_axes), *order)
        return back.reshape(*array.shape[:batch_axes], *self.shape)


def _groups(side: str, spread: int = 1) -> list[tuple[str, ...]]:
    """Axes of "(h d) i" as [("h", "d"), ("i",)]; "..." becomes `spread` axes."""
    found: list[tuple[str, ...]] = []
    for axis in re.findall(r"\([^)]*\)|\S+", side):
        if axis == "...":
            found += [(f"...{number}",) for number in range(spread)]
        else:
            found.append(tuple(axis.strip("()").split()))
    return found


@dataclass(frozen=True)
class LeafSlice:
    """Rows of a torch parameter that one JAX leaf holds.

    `is_added` if the leaf holds a sum of which another parameter is the first term. In the
    conversion to torch the first term gets the leaf, and these rows get zeros.
    """

    path: str  # joined by "/"
    noise_index: int  # among the trained leaves: number of the noise key
    rows: tuple[int, int] | None  # first and last + 1, on torch's axis 0; None for a scalar
    axes: Axes  # of the rows
    is_added: bool = False
    zero: tuple[int, int] | None = None  # rows that JAX does not have and that must be zero


@dataclass(frozen=True)
class ParameterMap:
    """One torch parameter and the JAX leaves that hold it."""

    torch_name: str  # in `named_parameters()`, or of a buffer
    torch_shape: tuple[int, ...]
    slices: tuple[LeafSlice, ...]  # in the order of the rows
    noise_stream: int  # number of a noise key that no JAX leaf has

    @property
    def jax_path(self) -> str:
        """Paths of its JAX leaves, joined by ", "."""
        return ", ".join(s.path for s in self.slices)

    def to_torch(self, arrays: Mapping[str, Array], batch_axes: int = 0) -> Array:
        """Return torch's array, of JAX's by path; leading batch axes are unchanged."""
        rows = [s.axes.to_torch(arrays[s.path], batch_axes) for s in self.slices]
        return rows[0] if len(rows) == 1 else np.concatenate(rows, batch_axes)

    def normals(self, draw: Callable[[int, tuple[int, ...]], Array]) -> Array:
        """Return portable normals: those of the JAX leaves, or separate ones for added rows.

        `draw` is a function (number of the noise key, shape) -> normals.

        Guarantees:
            No normal serves two parameters, where two biases fold into one too.
                [test_folded_biases_have_noise_of_their_own]
        """
        if any(s.is_added for s in self.slices):
            return draw(self.noise_stream, self.torch_shape)
        return self.to_torch({s.path: draw(s.noise_index, s.axes.jax_shape) for s in self.slices})


def to_jax(maps: Sequence[ParameterMap], arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Return torch's arrays, by name, as JAX's, by path; rows without a leaf must be zero."""
    found: dict[str, Array] = {}
    pairs = [(s, parameter) for parameter in maps for s in parameter.slices]
    for s, parameter in sorted(pairs, key=lambda pair: pair[0].is_added):
        array = arrays[parameter.torch_name]
        if s.zero and np.any(array[slice(*s.zero)]):
            raise ValueError(
                f"{parameter.torch_name} {parameter.torch_shape} is not zero in the rows {s.zero}, "
                f"for which {s.path} {s.axes.jax_shape} has no place. Expected zeros there, or a "
                "cell that has that bias (flax.linen.GRUCell)."
            )
        term = s.axes.to_jax(array if s.rows is None else array[slice(*s.rows)])
        found[s.path] = found[s.path] + term if s.is_added else term
    return found


def to_torch(maps: Sequence[ParameterMap], arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Return JAX's arrays, by path, as torch's, by name.

    Of two biases that JAX holds as their sum, the first gets the sum and the second is zero.
    """
    found = {}
    for parameter in maps:
        held = {s.path: arrays[s.path] for s in parameter.slices}
        held |= {s.path: np.zeros_like(arrays[s.path]) for s in parameter.slices if s.is_added}
        found[parameter.torch_name] = parameter.to_torch(held)
    return found


def to_json(maps: Sequence[ParameterMap]) -> list[dict[str, Any]]:
    """Return parameter maps as plain data, for a checkpoint."""
    return [asdict(leaf) for leaf in maps]


def from_json(data: Sequence[Mapping[str, Any]]) -> tuple[ParameterMap, ...]:
    """Return the parameter maps that `to_json` serialized."""
    maps = []
    for leaf in _tuples(data):
        slices = [LeafSlice(**{**held, "axes": Axes(**held["axes"])}) for held in leaf["slices"]]
        maps.append(ParameterMap(**{**leaf, "slices": tuple(slices)}))
    return tuple(maps)


def _tuples(value: Any) -> Any:
    """Plain data with every list as a tuple."""
    if isinstance(value, Mapping):
        return {name: _tuples(inner) for name, inner in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value
