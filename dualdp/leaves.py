# SPDX-License-Identifier: Apache-2.0
"""One torch parameter as the JAX leaves that hold its numbers: where each row goes, and back."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True)
class Axes:
    """A layout such as "(h d) i -> i h d", for arrays of one shape.

    Args:
        torch: torch's axes, each a tuple of letters whose sizes multiply.
        jax: letters in JAX's order.
        sizes: of every letter.
    """

    torch: tuple[tuple[str, ...], ...]
    jax: tuple[str, ...]
    sizes: Mapping[str, int] = field(hash=False)

    @classmethod
    def of(cls, layout: str, shape: Sequence[int], known: Mapping[str, int]) -> Axes | None:
        """The axes of a layout for torch's shape, or None where it does not fit.

        Args:
            layout: torch's axes, "->", JAX's axes; "..." stands for the remaining ones.
            shape: torch's.
            known: sizes of letters, needed where torch merges axes that JAX keeps apart.
        """
        left, right = layout.split("->")
        spread = len(shape) - len(_groups(left)) + 1
        torch, jax = (_groups(side, spread) for side in (left, right))
        if len(torch) != len(shape):
            return None
        sizes: dict[str, int] = {}
        for group, size in zip(torch, shape, strict=True):
            *first, last = group
            inner = math.prod(known.get(letter, 0) for letter in first)
            if inner == 0 or size % inner:
                return None
            sizes |= {letter: known[letter] for letter in first} | {last: size // inner}
        return cls(tuple(torch), tuple(letter for (letter,) in jax), sizes)

    @property
    def jax_shape(self) -> tuple[int, ...]:
        """Shape of JAX's array."""
        return tuple(self.sizes[letter] for letter in self.jax)

    def to_jax(self, array: Array, batch_axes: int = 0) -> Array:
        """Torch's array in JAX's layout; leading batch axes stay where they are."""
        letters = [letter for group in self.torch for letter in group]
        batch = array.shape[:batch_axes]
        apart = array.reshape(*batch, *(self.sizes[letter] for letter in letters))
        return apart.transpose(_behind(batch_axes, [letters.index(letter) for letter in self.jax]))

    def to_torch(self, array: Array, batch_axes: int = 0) -> Array:
        """JAX's array in torch's layout; leading batch axes stay where they are."""
        letters = [letter for group in self.torch for letter in group]
        back = array.transpose(_behind(batch_axes, [self.jax.index(letter) for letter in letters]))
        merged = [math.prod(self.sizes[letter] for letter in group) for group in self.torch]
        return back.reshape(*array.shape[:batch_axes], *merged)


def _groups(side: str, spread: int = 1) -> list[tuple[str, ...]]:
    """The axes of "(h d) i" as [("h", "d"), ("i",)]; "..." becomes so many axes."""
    found: list[tuple[str, ...]] = []
    for word in re.findall(r"\([^)]*\)|\S+", side):
        if word == "...":
            found += [(f"...{number}",) for number in range(spread)]
        else:
            found.append(tuple(word.strip("()").split()))
    return found


def _behind(batch_axes: int, axes: Sequence[int]) -> tuple[int, ...]:
    """Axes behind `batch_axes` leading ones."""
    return (*range(batch_axes), *(batch_axes + axis for axis in axes))


@dataclass(frozen=True)
class Place:
    """Where some rows of a torch parameter are on JAX's side.

    Args:
        path: of the leaf, joined by "/".
        index: of the leaf in `jax.tree.leaves`.
        noise_index: of the leaf among those that are trained, which numbers its noise key.
        rows: first and last + 1, on torch's axis 0; None for all of a scalar.
        axes: how the rows are laid out there.
        is_added: the leaf holds a sum, of which another parameter is the first term. On the way
            back the first term gets the leaf, and these rows get zeros.
        zero: rows that have no place on JAX's side and must be zero.
    """

    path: str
    index: int
    noise_index: int
    rows: tuple[int, int] | None
    axes: Axes
    is_added: bool = False
    zero: tuple[int, int] | None = None

    def cut(self, array: Array, batch_axes: int = 0) -> Array:
        """These rows of torch's array."""
        if self.rows is None:
            return array
        return array[(slice(None),) * batch_axes + (slice(*self.rows),)]


@dataclass(frozen=True)
class Leaf:
    """One torch parameter and the JAX leaves that hold it.

    Args:
        torch_name: in `named_parameters()`, or of a buffer.
        torch_shape: of its array.
        places: in the order of its rows.
        noise_stream: number of a noise key that no JAX leaf has.
    """

    torch_name: str
    torch_shape: tuple[int, ...]
    places: tuple[Place, ...]
    noise_stream: int

    @property
    def jax_path(self) -> str:
        """The paths of its leaves."""
        return ", ".join(place.path for place in self.places)

    @property
    def jax_index(self) -> int:
        """Position of its leaf in `jax.tree.leaves`."""
        return self._only().index

    @property
    def jax_shape(self) -> tuple[int, ...]:
        """Shape of its leaf."""
        return self._only().axes.jax_shape

    def _only(self) -> Place:
        """The one place of a parameter that is one leaf."""
        if len(self.places) != 1:
            raise ValueError(
                f"{self.torch_name} is held by {len(self.places)} JAX leaves ({self.jax_path}). "
                "Expected one; use leaves.to_torch and leaves.to_jax."
            )
        return self.places[0]

    def to_jax(self, array: Array, *, batch_axes: int = 0) -> Array:
        """Torch's array in JAX's layout, of a parameter that is one leaf."""
        return self._only().axes.to_jax(array, batch_axes)

    def to_torch(self, array: Array, *, batch_axes: int = 0) -> Array:
        """JAX's array in torch's layout, of a parameter that is one leaf."""
        return self._only().axes.to_torch(array, batch_axes)

    def from_leaves(self, part: Callable[[Place], Array], *, batch: tuple[int, ...] = ()) -> Array:
        """Torch's array, put together from what `part` gives for each place."""
        parts = [place.axes.to_torch(part(place), len(batch)) for place in self.places]
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts, axis=len(batch))

    def normals(self, draw: Callable[[int, tuple[int, ...]], Array]) -> Array:
        """Portable normals: each JAX leaf's own, in its shape; rows that are added have their own.

        Args:
            draw: (number of the noise key, shape) to normals.

        Returns:
            Normals in torch's layout, of which no two are one draw.

        Guarantees:
            No normal serves two parameters, where two biases fold into one too.
                [test_folded_biases_have_noise_of_their_own]
        """
        if any(place.is_added for place in self.places):
            return draw(self.noise_stream, self.torch_shape)
        return self.from_leaves(lambda place: draw(place.noise_index, place.axes.jax_shape))


def to_jax(
    leaves: Sequence[Leaf], arrays: Mapping[str, Array], *, batch_axes: int = 0
) -> dict[str, Array]:
    """Torch's arrays in JAX's layout.

    Args:
        leaves: from `dualdp.matching.match`.
        arrays: torch name -> array.
        batch_axes: leading axes that stay where they are.

    Returns:
        JAX path -> array.

    Raises:
        ValueError: rows that JAX has no place for are not zero.
    """
    found: dict[str, Array] = {}
    for place, leaf in sorted(_places(leaves), key=lambda pair: pair[0].is_added):
        array = arrays[leaf.torch_name]
        if place.zero and np.any(array[(slice(None),) * batch_axes + (slice(*place.zero),)]):
            raise ValueError(
                f"{leaf.torch_name} {leaf.torch_shape} is not zero in the rows {place.zero}, for "
                f"which {place.path} {place.axes.jax_shape} has no place. Expected zeros there, or "
                "a cell that has that bias (flax.linen.GRUCell)."
            )
        part = place.axes.to_jax(place.cut(array, batch_axes), batch_axes)
        found[place.path] = found[place.path] + part if place.is_added else part
    return found


def to_torch(
    leaves: Sequence[Leaf], arrays: Mapping[str, Array], *, batch_axes: int = 0
) -> dict[str, Array]:
    """JAX's arrays in torch's layout.

    Args:
        leaves: from `dualdp.matching.match`.
        arrays: JAX path -> array.
        batch_axes: leading axes that stay where they are.

    Returns:
        Torch name -> array. Of two biases that JAX holds as their sum, the first gets it and the
        second is zero.
    """

    def part(place: Place) -> Array:
        array = arrays[place.path]
        return np.zeros_like(array) if place.is_added else array

    batches = {name: array.shape[:batch_axes] for name, array in arrays.items()}
    return {
        leaf.torch_name: leaf.from_leaves(part, batch=batches[leaf.places[0].path])
        for leaf in leaves
    }


def _places(leaves: Sequence[Leaf]) -> list[tuple[Place, Leaf]]:
    """Every place, with its parameter."""
    return [(place, leaf) for leaf in leaves for place in leaf.places]


def to_json(leaves: Sequence[Leaf]) -> list[dict[str, Any]]:
    """Leaves as plain data, for a checkpoint."""
    return [asdict(leaf) for leaf in leaves]


def from_json(data: Sequence[Mapping[str, Any]]) -> tuple[Leaf, ...]:
    """What `to_json` was given."""

    def place(said: Mapping[str, Any]) -> Place:
        axes = said["axes"]
        torch = tuple(tuple(group) for group in axes["torch"])
        pairs = {key: tuple(said[key]) if said[key] else None for key in ("rows", "zero")}
        return Place(**{**said, **pairs, "axes": Axes(torch, tuple(axes["jax"]), axes["sizes"])})

    return tuple(
        Leaf(
            leaf["torch_name"],
            tuple(leaf["torch_shape"]),
            tuple(map(place, leaf["places"])),
            leaf["noise_stream"],
        )
        for leaf in data
    )
