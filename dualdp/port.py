# SPDX-License-Identifier: Apache-2.0
"""Carry parameters from one stack to the other, through NumPy and the table of `layouts`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dualdp import layouts

Mapped = Mapping[str, str]


def match(model: Any, params: Any, mapping: Mapped | None = None) -> tuple[layouts.Leaf, ...]:
    """Which parameter of a torch module is which leaf of a JAX model.

    Args:
        model: an `nn.Module`.
        params: a Flax model's parameters (linen dict, nnx module or state, nested dict).
        mapping: torch name -> JAX path joined by "/", for names that differ.

    Returns:
        One `layouts.Leaf` per torch parameter; `noisy_mean(..., layout=)` of torch takes it, so
        that both stacks draw the same portable noise.

    Raises:
        ValueError: a parameter without partner, or partners whose shapes do not agree.
    """
    import dualdp.jax as dpj
    import dualdp.torch as dpt

    arrays = dpt.weights.to_numpy(model)
    return layouts.match(
        {name: array.shape for name, array in arrays.items()},
        dpt.weights.parameter_kinds(model),
        dpj.weights.leaves(params),
        mapping,
    )


def to_jax(model: Any, like: Any, mapping: Mapped | None = None) -> Any:
    """Weights of a torch module in the layout of a JAX model.

    Args:
        model: an `nn.Module`.
        like: parameters of the JAX model, for structure, shapes and dtypes.
        mapping: as in `match`.

    Returns:
        A tree like `like`.

    Raises:
        ValueError: see `match`.
    """
    import dualdp.jax as dpj
    import dualdp.torch as dpt

    arrays = dpt.weights.to_numpy(model)
    pairs = sorted(match(model, like, mapping), key=lambda leaf: leaf.jax_index)
    return dpj.weights.from_numpy(like, [leaf.to_jax(arrays[leaf.torch_name]) for leaf in pairs])


def to_torch(params: Any, like: Any, mapping: Mapped | None = None) -> dict[str, Any]:
    """Parameters of a JAX model as the `state_dict` of a torch module.

    Args:
        params: parameters of the JAX model.
        like: the `nn.Module`, for names, shapes, dtypes and buffers.
        mapping: as in `match`.

    Returns:
        A `state_dict` of new tensors that `like.load_state_dict` takes.

    Raises:
        ValueError: see `match`.
    """
    import dualdp.jax as dpj
    import dualdp.torch as dpt

    arrays = dpj.weights.to_numpy(params)
    pairs = match(like, params, mapping)
    return dpt.weights.state_dict(
        like, {leaf.torch_name: leaf.to_torch(arrays[leaf.jax_index]) for leaf in pairs}
    )
