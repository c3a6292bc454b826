# SPDX-License-Identifier: Apache-2.0
"""Conversion of a module's parameters to NumPy arrays and back, for porting."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from dualdp_torch.parallel.fsdp import is_sharded
from dualdp_torch.per_sample.model_checks import require_module

_KINDS: dict[str, tuple[type[nn.Module], ...]] = {
    "linear": (nn.Linear,),
    "transposed conv": (_ConvTransposeNd,),
    "conv": (_ConvNd,),
    "embedding": (nn.Embedding, nn.EmbeddingBag),
    "norm": (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, _NormBase),
    "lstm": (nn.LSTM, nn.LSTMCell),
    "gru": (nn.GRU, nn.GRUCell),
    "rnn": (nn.RNN, nn.RNNCell),
}


def to_numpy(model: nn.Module) -> dict[str, NDArray[Any]]:
    """Return all parameters, including frozen ones, and running statistics as arrays by name.

    A tied weight has its first name; bfloat16, which NumPy lacks, becomes float32.
    """
    return {name: as_numpy(value) for name, value in _values(model)}


def _values(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, then running statistics."""
    yield from model.named_parameters()
    yield from _statistics(model)


def _statistics(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Running statistics, the buffers that JAX has, too."""
    for name, buffer in model.named_buffers():
        if name.rpartition(".")[2] in ("running_mean", "running_var"):
            yield name, buffer


def description(model: nn.Module) -> dict[str, Any]:
    """Return, as plain data, what `dualdp.porting.matching.Matcher` is told of a torch module."""
    require_module("The torch model", model)
    values, names = dict(_values(model)), dict[int, list[str]]()
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(p), []).append(name)
    return {
        "torch_shapes": {name: list(value.shape) for name, value in values.items()},
        "torch_kinds": parameter_kinds(model),
        "tied": {aliases[0]: aliases for aliases in names.values() if len(aliases) > 1},
        "frozen": [name for name, value in values.items() if not value.requires_grad],
    }


def parameter_kinds(model: nn.Module) -> dict[str, str]:
    """Return kinds (of `dualdp.porting.layouts`, or "raw") by name of a parameter, tied or not."""
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    names += [name for name, _ in _statistics(model)]
    return {name: _kind(model, name.rpartition(".")[0]) for name in names}


def _kind(model: nn.Module, path: str) -> str:
    """Kind of one module; attention's output projection has the kind of the attention."""
    module, parent = (model.get_submodule(p) for p in (path, path.rpartition(".")[0]))
    for owner in (module, parent):
        if isinstance(owner, nn.MultiheadAttention):
            return f"attention h={owner.num_heads}"
    if type(module).__name__ == "Conv1D" and type(module).__module__.startswith("transformers."):
        return "conv1d of transformers"
    return next((kind for kind, classes in _KINDS.items() if isinstance(module, classes)), "raw")


def state_dict(model: nn.Module, arrays: Mapping[str, NDArray[Any]]) -> dict[str, torch.Tensor]:
    """Return the module's `state_dict` with the given parameters, in new tensors.

    It has tied names and buffers, too. `arrays` maps every name of `to_numpy(model)` to an array.

    Raises:
        ValueError: a name or shape that the module does not have, or a name missing.
    """
    values = dict(_values(model))
    missing, unknown = sorted(values.keys() - arrays.keys()), sorted(arrays.keys() - values)
    if missing or unknown:
        raise ValueError(
            f"The arrays lack {missing} and name {unknown}. Expected one array for each parameter "
            f"of the module: {sorted(values)}."
        )
    first_names = {id(value): name for name, value in values.items()}
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
        tensor = _dense(array)
        found[name] = tensor.to(dtype=value.dtype, device=value.device)
    return found


def _dense(array: Any) -> torch.Tensor:
    """Return a copy in rows: fused optimizers read memory, and ignore the order of its axes."""
    return torch.from_numpy(np.array(array, order="C"))


def as_numpy(tensor: torch.Tensor) -> NDArray[Any]:
    """Return a copy on the host; bfloat16, which NumPy lacks, becomes float32.

    A sharded tensor is gathered, so all of its processes must call this.
    """
    whole: Any = tensor.detach()
    tensor = (whole.full_tensor() if is_sharded(whole) else whole).cpu()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy().copy()


def fold_biases(model: nn.Module) -> nn.Module:
    """Fold both biases of every LSTM and RNN into one, as in JAX; the other is zero and frozen.

    Torch adds two biases with the same gradient, so their sum moves twice as fast as JAX's one
    bias and counts twice in an example's norm. After this call both backends train alike. A GRU
    keeps its hidden bias, which JAX has only in part: its outputs port, its training differs.

    Args:
        model: module, changed in place; its outputs are the same up to rounding.

    Returns:
        the module.
    """
    for module in model.modules():
        if not isinstance(module, (*_KINDS["lstm"], *_KINDS["rnn"])):
            continue
        for name, second in module.named_parameters(recurse=False):
            if name.startswith("bias_hh"):
                with torch.no_grad():
                    getattr(module, name.replace("_hh", "_ih")).add_(second)
                    second.zero_()
                second.requires_grad_(False)
    return model
