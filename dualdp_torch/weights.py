# SPDX-License-Identifier: Apache-2.0
"""A module's parameters as NumPy arrays and back: torch's side of porting."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

_KINDS: dict[str, tuple[type[nn.Module], ...]] = {
    "linear": (nn.Linear,),
    "conv": (_ConvNd,),
    "embedding": (nn.Embedding,),
    "norm": (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, _NormBase),
}


def to_numpy(model: nn.Module) -> dict[str, NDArray[Any]]:
    """Name -> array of every parameter, frozen ones too; a tied weight under its first name."""
    return {name: p.detach().cpu().numpy().copy() for name, p in model.named_parameters()}


def parameter_kinds(model: nn.Module) -> dict[str, str]:
    """Name -> "linear", "conv", "embedding", "norm", or "raw" for a parameter of another module."""
    return {name: _kind(_owner(model, name)) for name, _ in model.named_parameters()}


def _owner(model: nn.Module, name: str) -> nn.Module:
    """The module that holds a parameter."""
    return model.get_submodule(name.rpartition(".")[0])


def _kind(module: nn.Module) -> str:
    """The kind of one module."""
    return next((kind for kind, classes in _KINDS.items() if isinstance(module, classes)), "raw")


def state_dict(model: nn.Module, arrays: Mapping[str, NDArray[Any]]) -> dict[str, torch.Tensor]:
    """The module's `state_dict` with these parameters, in new tensors.

    Args:
        model: the module, which is left as it was.
        arrays: name -> array, for every name of `named_parameters()`.

    Returns:
        What `load_state_dict` takes: tied names and buffers included.

    Raises:
        ValueError: a name or shape that the module does not have, or a name missing.
    """
    parameters = dict(model.named_parameters())
    missing, unknown = sorted(parameters.keys() - arrays.keys()), sorted(arrays.keys() - parameters)
    if missing or unknown:
        raise ValueError(
            f"The arrays lack {missing} and name {unknown}. Expected one array for each parameter "
            f"of the module: {sorted(parameters)}."
        )
    first_names = {id(p): name for name, p in parameters.items()}
    found = {}
    for name, value in model.state_dict(keep_vars=True).items():
        array = arrays.get(first_names.get(id(value), ""))
        if array is None:
            found[name] = value.detach().clone()
            continue
        if np.shape(array) != tuple(value.shape):
            raise ValueError(
                f"The array of {name!r} has shape {np.shape(array)}. Expected {tuple(value.shape)}."
            )
        tensor = torch.from_numpy(np.array(array))
        found[name] = tensor.to(dtype=value.dtype, device=value.device)
    return found
