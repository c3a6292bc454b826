# SPDX-License-Identifier: Apache-2.0
"""How the two stacks store the same parameter, as data.

One line per kind of parameter: which names it has on either side, and the axes of torch's array in
the order in which JAX (Flax) stores them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

# (kind of the torch parameter, its last name in torch, its last name in Flax) -> axes, for an array
# of so many axes: "same" keeps them, "reversed" is (out, in, *kernel) -> (*kernel, in, out).
LAYOUTS: Mapping[tuple[str, str, str], str] = {
    ("linear", "weight", "kernel"): "reversed",
    ("linear", "bias", "bias"): "same",
    ("conv", "weight", "kernel"): "reversed",
    ("conv", "bias", "bias"): "same",
    ("embedding", "weight", "embedding"): "same",
    ("norm", "weight", "scale"): "same",
    ("norm", "bias", "bias"): "same",
}


def axes_for(layout: str, ndim: int) -> tuple[int, ...]:
    """Torch's axes in JAX's order: `jax_array = torch_array.transpose(axes)`."""
    if layout == "same":
        return tuple(range(ndim))
    return (*range(2, ndim), 1, 0)  # (o, i, *k) -> (*k, i, o)


@dataclass(frozen=True)
class Leaf:
    """One parameter as both stacks have it.

    Args:
        torch_name: in `named_parameters()`.
        jax_path: keys from the root of the parameter tree.
        jax_index: position in `jax.tree.leaves`, which numbers its noise key.
        torch_shape: of torch's array.
        axes: torch's axes in JAX's order.
    """

    torch_name: str
    jax_path: tuple[str, ...]
    jax_index: int
    torch_shape: tuple[int, ...]
    axes: tuple[int, ...]

    @property
    def jax_shape(self) -> tuple[int, ...]:
        """Shape of JAX's array."""
        return tuple(self.torch_shape[axis] for axis in self.axes)

    def to_jax(self, array: NDArray[Any], *, batch_axes: int = 0) -> NDArray[Any]:
        """Torch's array in JAX's layout; leading batch axes stay where they are."""
        return array.transpose(self._with_batch(self.axes, batch_axes))

    def to_torch(self, array: NDArray[Any], *, batch_axes: int = 0) -> NDArray[Any]:
        """JAX's array in torch's layout; leading batch axes stay where they are."""
        inverse = tuple(int(axis) for axis in np.argsort(self.axes))
        return array.transpose(self._with_batch(inverse, batch_axes))

    @staticmethod
    def _with_batch(axes: Sequence[int], batch_axes: int) -> tuple[int, ...]:
        """Axes behind `batch_axes` leading ones."""
        return (*range(batch_axes), *(batch_axes + axis for axis in axes))


def match(
    torch_shapes: Mapping[str, tuple[int, ...]],
    torch_kinds: Mapping[str, str],
    jax_leaves: Sequence[tuple[tuple[str, ...], tuple[int, ...]]],
    mapping: Mapping[str, str] | None = None,
) -> tuple[Leaf, ...]:
    """Pair every torch parameter with the JAX leaf of the same name; nothing is left over.

    Args:
        torch_shapes: name -> shape.
        torch_kinds: name -> kind, the first word of a line of `LAYOUTS`; "raw" keeps its layout.
        jax_leaves: (path, shape) in the order of `jax.tree.leaves`.
        mapping: torch name -> JAX path joined by "/", for names that differ.

    Returns:
        Leaves in torch's order.

    Raises:
        ValueError: a parameter without partner, or partners whose shapes do not agree.
    """
    mapping = dict(mapping or {})
    by_path = {"/".join(path): index for index, (path, _) in enumerate(jax_leaves)}
    unknown = sorted(set(mapping) - set(torch_shapes)) + sorted(
        set(mapping.values()) - set(by_path)
    )
    if unknown:
        raise ValueError(
            f"mapping names {unknown}, which neither model has. Expected torch names "
            f"{sorted(torch_shapes)} and JAX paths {sorted(by_path)}."
        )
    found = {
        name: mapping.get(name) or _partner(name, torch_kinds[name], by_path)
        for name in torch_shapes
    }
    lonely = [f"{name} {torch_shapes[name]}" for name, path in found.items() if path is None]
    spare = [
        f"{path} {jax_leaves[index][1]}"
        for path, index in by_path.items()
        if path not in found.values()
    ]
    if lonely or spare:
        raise ValueError(
            f"No partner for the torch parameters {lonely} and the JAX leaves {spare}. Expected "
            "the same names on both sides; pass mapping={torch name: 'jax/path'}."
        )
    if len(set(found.values())) < len(found):
        raise ValueError(
            f"Two torch parameters share a JAX leaf: {found}. Expected one partner each; pass "
            "mapping={torch name: 'jax/path'}."
        )
    return tuple(
        _leaf(name, torch_shapes[name], torch_kinds[name], jax_leaves, by_path[str(path)])
        for name, path in found.items()
    )


def _partner(name: str, kind: str, by_path: Mapping[str, int]) -> str | None:
    """The one JAX path whose names are the torch name's, Flax's word for the last; else None."""
    *modules, last = name.split(".")
    words = [flax for (k, torch_last, flax) in LAYOUTS if (k, torch_last) == (kind, last)] or [last]
    wanted = {("/".join([*root, *modules, word])) for word in words for root in ((), ("params",))}
    candidates = [path for path in by_path if path in wanted]
    return candidates[0] if len(candidates) == 1 else None


def _leaf(
    name: str,
    shape: tuple[int, ...],
    kind: str,
    jax_leaves: Sequence[tuple[tuple[str, ...], tuple[int, ...]]],
    index: int,
) -> Leaf:
    """The pair, once its shapes agree."""
    path, jax_shape = jax_leaves[index]
    layout = LAYOUTS.get((kind, name.split(".")[-1], path[-1]), "same")
    leaf = Leaf(name, path, index, shape, axes_for(layout, len(shape)))
    if leaf.jax_shape != jax_shape:
        raise ValueError(
            f"{name} {shape} in torch would be {leaf.jax_shape} in JAX, but {'/'.join(path)} is "
            f"{jax_shape}. Expected the same sizes on both sides."
        )
    return leaf
