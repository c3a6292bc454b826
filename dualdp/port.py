# SPDX-License-Identifier: Apache-2.0
"""Conversion of models and checkpoints between PyTorch and JAX, through NumPy."""

from __future__ import annotations

import importlib
import os
from typing import Any

from dualdp import _validate
from dualdp import checkpoint as files
from dualdp.porting import matching, parameter_map
from dualdp.porting.parameter_map import ParameterMap

Mapped = matching.Mapped
Path_ = files.PathLike
STACKS = ("jax", "torch")


def _backends() -> tuple[Any, Any]:
    """Public modules of both backends, imported once one is needed."""
    import dualdp.jax as dpj
    import dualdp.torch as dpt

    return dpj, dpt


def match(model: Any, params: Any, mapping: Mapped | None = None) -> tuple[ParameterMap, ...]:
    """Match the parameters of a torch module with the leaves of a JAX model.

    Args:
        model: `nn.Module`.
        params: parameters of a Flax model (linen dict, nnx module or state, nested dict).
        mapping: mapping for names that differ, from a torch parameter or module to a JAX path
            joined by "/", or (path, layout) such as ("head/w", "o i -> i o").

    Returns:
        One `ParameterMap` per torch parameter, also for `noisy_mean(..., layout=)` of torch,
        so that both backends draw the same portable noise.

    Raises:
        ValueError: a parameter without partner, or partners whose shapes do not agree.
    """
    dpj, dpt = _backends()
    described, shapes = dpt.weights.description(model), dpj.weights.leaves(params)
    return matching.Matcher(**described, jax_shapes=shapes, mapping=mapping).parameter_maps()


def to_jax(model: Any, like: Any, mapping: Mapped | None = None) -> Any:
    """Return the weights of a torch module in the layout of a JAX model.

    Args:
        model: `nn.Module`.
        like: parameters of the JAX model, for structure, shapes and dtypes.
        mapping: mapping for names that differ, see `match`.

    Returns:
        Tree like `like`.

    Raises:
        ValueError: see `match`; or a bias that JAX has no place for.
    """
    dpj, dpt = _backends()
    arrays = parameter_map.to_jax(match(model, like, mapping), dpt.weights.to_numpy(model))
    return dpj.weights.from_named(like, arrays)


def to_torch(params: Any, like: Any, mapping: Mapped | None = None) -> dict[str, Any]:
    """Return the parameters of a JAX model as the `state_dict` of a torch module.

    JAX holds the sum of torch's two RNN biases; `bias_ih` gets the sum and `bias_hh` is zero.

    Args:
        params: parameters of the JAX model.
        like: `nn.Module`, for names, shapes, dtypes and buffers.
        mapping: mapping for names that differ, see `match`.

    Returns:
        `state_dict` of new tensors for `like.load_state_dict`.

    Raises:
        ValueError: see `match`.
    """
    dpj, dpt = _backends()
    arrays = parameter_map.to_torch(match(like, params, mapping), dpj.weights.to_numpy(params))
    state_dict: dict[str, Any] = dpt.weights.state_dict(like, arrays)
    return state_dict


def checkpoint(
    path: Path_, out: Path_, *, to: str, like: Any, mapping: Mapped | None = None
) -> None:
    """Convert a checkpoint of one backend to the other's format; loading does so automatically.

    The ledger file of the run is not copied.

    Args:
        path: path of the checkpoint.
        out: path of the new checkpoint.
        to: "torch" or "jax".
        like: (module, optimizer) for torch, a `dualdp.jax.TrainState` for JAX.
        mapping: mapping for names that differ, see `match`.

    Raises:
        ValueError: the checkpoint is one of that stack already, or does not fit.
    """
    _validate.choice("to", to, STACKS)
    arrays, document = files.read(path)
    if document["stack"] == to:
        raise ValueError(f"{os.fspath(path)} is a checkpoint of {to} already. Expected another.")
    backend = importlib.import_module(f"dualdp_{to}.checkpoint.single_file")
    converted, new_document = backend.converted(arrays, document, like, mapping)
    files.write(out, converted, files.relocated(new_document, path, out))
