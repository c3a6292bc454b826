# SPDX-License-Identifier: Apache-2.0
"""Conversion of models, optimizers and checkpoints between PyTorch and JAX, through NumPy."""

from __future__ import annotations

import importlib
import os
from typing import Any

import numpy as np

from dualdp import _validate
from dualdp import checkpoint as files
from dualdp.porting import matching, optimizer_state, parameter_map
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
    described, leaves = dpt.weights.description(model), dpj.weights.leaves(params)
    return matching.Matcher(**described, jax_leaves=leaves, mapping=mapping).parameter_maps()


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
    arrays = parameter_map.to_torch(match(like, params, mapping), dpj.weights.to_named(params))
    state_dict: dict[str, Any] = dpt.weights.state_dict(like, arrays)
    return state_dict


def to_optax(optimizer: Any) -> Any:
    """Return the optax transformation with the settings, not the state, of a torch optimizer.

    Args:
        optimizer: SGD, Adam or AdamW of torch.optim, or AdamBC, with one parameter group.

    Raises:
        ValueError: another optimizer, several groups, or settings that optax does not have.
    """
    if isinstance(optimizer, type) or not hasattr(optimizer, "param_groups"):
        raise TypeError(
            f"optimizer is {_validate.kind(optimizer)}. Expected an optimizer of torch.optim."
        )
    groups = optimizer.param_groups
    if len(groups) != 1:
        raise ValueError(
            f"The optimizer has {len(groups)} groups of parameters. Expected one; write "
            "optax.multi_transform for several."
        )
    path = f"{type(optimizer).__module__}.{type(optimizer).__name__}"
    kind = optimizer_state.kind_of(path)
    if kind == path:
        raise ValueError(
            f"The optimizer is {path}. Expected one of torch.optim; write another one's updates "
            "with optax."
        )
    dpj, _ = _backends()
    numbers = {k: v.item() if hasattr(v, "item") else v for k, v in groups[0].items()}
    return dpj.weights.optimizer_state.like_torch(kind, numbers)


def optimizer_to_jax(
    optimizer: Any,
    model: Any,
    *,
    like: Any,
    params: Any,
    mapping: Mapped | None = None,
    steps: int | None = None,
) -> Any:
    """Return the state of a torch optimizer as the state of an optax transformation.

    Args:
        optimizer: optimizer of torch.optim.
        model: `nn.Module` with the optimizer's parameters.
        like: state of optax's `init`, for structure, shapes and dtypes.
        params: parameters of the JAX model.
        mapping: mapping for names that differ, see `match`.
        steps: number of updates, if optax counts them and torch does not (a schedule with SGD).

    Returns:
        State like `like`.

    Raises:
        ValueError: the two optimizers do not keep the same numbers.
    """
    dpj, _ = _backends()
    state = _torch_state(optimizer, model)
    wanted = dpj.weights.optimizer_state.to_named(like)
    arrays = optimizer_state.to_jax(
        state,
        match(model, params, mapping),
        {path: np.shape(array) for path, array in wanted.items()},
        state.steps if steps is None else steps,
    )
    return dpj.weights.optimizer_state.from_named(like, arrays)


def optimizer_to_torch(
    state: Any,
    params: Any,
    *,
    optimizer: Any,
    model: Any,
    mapping: Mapped | None = None,
) -> None:
    """Load the state of an optax transformation into a torch optimizer.

    Args:
        state: optax state.
        params: parameters of the JAX model.
        optimizer: optimizer of torch.optim; its state is overwritten, its settings are kept.
        model: `nn.Module` with the optimizer's parameters.
        mapping: mapping for names that differ, see `match`.

    Raises:
        ValueError: the two optimizers do not keep the same numbers.
    """
    dpj, dpt = _backends()
    arrays = optimizer_state.to_torch(
        dpj.weights.optimizer_state.to_named(state),
        match(model, params, mapping),
        _torch_state(optimizer, model),
    )
    dpt.weights.load_optimizer(optimizer, model, arrays)


def _torch_state(optimizer: Any, model: Any) -> optimizer_state.TorchState:
    """State and settings of a torch optimizer, for the trained parameters."""
    _, dpt = _backends()
    return optimizer_state.TorchState.of(*dpt.weights.optimizer_state(optimizer, model))


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
