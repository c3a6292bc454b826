# SPDX-License-Identifier: Apache-2.0
"""Carry an experiment from one stack to the other, through NumPy and the table of `layouts`."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import numpy as np

from dualdp import _validate, leaves, matching, optimizers
from dualdp import checkpoint as files
from dualdp.randomness import RootKey

Mapped = matching.Mapped
Path_ = str | os.PathLike[str]
STACKS = ("jax", "torch")


def match(model: Any, params: Any, mapping: Mapped | None = None) -> tuple[leaves.Leaf, ...]:
    """Which parameter of a torch module is which leaf of a JAX model.

    Args:
        model: an `nn.Module`.
        params: a Flax model's parameters (linen dict, nnx module or state, nested dict).
        mapping: for names that differ: torch name of a parameter or of a module -> JAX path joined
            by "/", or (path, layout) such as ("head/w", "o i -> i o").

    Returns:
        One `leaves.Leaf` per torch parameter; `noisy_mean(..., layout=)` of torch takes it, so
        that both stacks draw the same portable noise.

    Raises:
        ValueError: a parameter without partner, or partners whose shapes do not agree.
    """
    import dualdp.jax as dpj
    import dualdp.torch as dpt

    return matching.match(
        **dpt.weights.description(model), jax_leaves=dpj.weights.leaves(params), mapping=mapping
    )


def suggest(model: Any, params: Any) -> dict[str, str]:
    """A `mapping` by structure for modules that no name pairs: read it, correct it, pass it.

    Nothing is paired in this way unless you pass it: two layers of the same sizes in another order
    would be swapped.

    Args:
        model: an `nn.Module`.
        params: as in `match`.

    Returns:
        Torch module -> JAX path; a module that fits nowhere is not in it.
    """
    import dualdp.jax as dpj
    import dualdp.torch as dpt

    return matching.suggest(**dpt.weights.description(model), jax_leaves=dpj.weights.leaves(params))


def to_jax(model: Any, like: Any, mapping: Mapped | None = None) -> Any:
    """Weights of a torch module in the layout of a JAX model.

    Args:
        model: an `nn.Module`.
        like: parameters of the JAX model, for structure, shapes and dtypes.
        mapping: as in `match`.

    Returns:
        A tree like `like`.

    Raises:
        ValueError: see `match`; or a bias that JAX has no place for.
    """
    import dualdp.jax as dpj
    import dualdp.torch as dpt

    arrays = leaves.to_jax(match(model, like, mapping), dpt.weights.to_numpy(model))
    return dpj.weights.from_named(like, arrays)


def to_torch(params: Any, like: Any, mapping: Mapped | None = None) -> dict[str, Any]:
    """Parameters of a JAX model as the `state_dict` of a torch module.

    Of torch's two biases of an RNN, which JAX holds as their sum, `bias_ih` gets it and `bias_hh`
    is zero.

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

    arrays = leaves.to_torch(match(like, params, mapping), dpj.weights.to_named(params))
    return dpt.weights.state_dict(like, arrays)


# ---------------------------------------------------------------------- optimizers


def to_optax(optimizer: Any) -> Any:
    """The optax transformation with the updates of a torch optimizer: its settings, not its state.

    Args:
        optimizer: SGD, Adam, AdamW or RMSprop of torch.optim, with one group of parameters.

    Raises:
        ValueError: another optimizer, several groups, or settings that optax does not have.
    """
    import dualdp.jax as dpj

    if len(optimizer.param_groups) != 1:
        raise ValueError(
            f"The optimizer has {len(optimizer.param_groups)} groups of parameters. Expected one; "
            "write optax.multi_transform for several."
        )
    return dpj.weights.optimizer_state.like_torch(
        type(optimizer).__name__, optimizer.param_groups[0]
    )


def optimizer_to_jax(
    optimizer: Any,
    model: Any,
    *,
    like: Any,
    params: Any,
    mapping: Mapped | None = None,
    steps: int | None = None,
) -> Any:
    """State of a torch optimizer as that of an optax transformation.

    Args:
        optimizer: of torch.optim.
        model: whose parameters it holds.
        like: state of optax's `init`, for structure, shapes and dtypes.
        params: of the JAX model.
        mapping: as in `match`.
        steps: updates done, where optax counts them and torch does not (a schedule beside SGD).

    Returns:
        A state like `like`.

    Raises:
        ValueError: the two optimizers do not keep the same numbers.
    """
    import dualdp.jax as dpj

    state = _torch_state(optimizer, model)
    wanted = dpj.weights.optimizer_state.to_named(like)
    arrays = optimizers.to_jax(
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
    steps: int | None = None,
) -> None:
    """Load the state of an optax transformation into a torch optimizer.

    Args:
        state: of optax.
        params: of the JAX model.
        optimizer: of torch.optim; its state is overwritten, its settings stay.
        model: whose parameters it holds.
        mapping: as in `match`.
        steps: updates done, where torch counts them and optax does not (RMSprop).

    Raises:
        ValueError: the two optimizers do not keep the same numbers.
    """
    import dualdp.jax as dpj
    import dualdp.torch as dpt

    arrays = optimizers.to_torch(
        dpj.weights.optimizer_state.to_named(state),
        match(model, params, mapping),
        _torch_state(optimizer, model),
        steps,
    )
    dpt.weights.load_optimizer(optimizer, model, arrays)


def _torch_state(optimizer: Any, model: Any) -> optimizers.TorchState:
    """State and settings of a torch optimizer, of the parameters that are trained."""
    import dualdp.torch as dpt

    return optimizers.TorchState.of(*dpt.weights.optimizer_state(optimizer, model))


# ---------------------------------------------------------------------- checkpoints


def checkpoint(
    path: Path_, out: Path_, *, to: str, like: Any, mapping: Mapped | None = None
) -> None:
    """Write a checkpoint of one stack as one of the other; either stack loads both anyway.

    The key is copied to `<out>.key` (mode 0600) where it lies beside the first; the run's ledger
    stays the one file that it is.

    Args:
        path: of the checkpoint.
        out: of the new one.
        to: "torch" or "jax".
        like: for torch a module and its optimizer, for JAX a `dualdp.jax.TrainState`.
        mapping: as in `match`.

    Raises:
        ValueError: the checkpoint is one of that stack already, or does not fit.
    """
    _validate.choice("to", to, STACKS)
    arrays, document = files.read(path)
    if document["stack"] == to:
        raise ValueError(f"{os.fspath(path)} is a checkpoint of {to} already. Expected another.")
    backend = importlib.import_module(f"dualdp_{to}.checkpoint")
    moved, said = backend.crossed(arrays, document, like, mapping)
    ledger = Path(path).resolve().parent / document["ledger_file"]
    said["ledger_file"] = os.path.relpath(ledger.resolve(), Path(out).resolve().parent)
    if files.key_path(path).exists() and not files.key_path(out).exists():
        RootKey.load(files.key_path(path)).save(files.key_path(out))
    files.write(out, moved, said)


# ---------------------------------------------------------------------- arrays


def array_to_jax(tensor: Any) -> Any:
    """A torch tensor as a JAX array, by DLPack without a copy where both stacks share the device.

    What shares memory changes with it: do not write into the tensor while the array is in use.
    JAX copies what it can't share: strides that are no permutation of a whole array, memory that
    is not aligned, and 64-bit numbers unless `jax_enable_x64` is set.

    Args:
        tensor: of any device; without its graph.
    """
    import dualdp.jax as dpj
    import dualdp.torch as dpt

    return dpj.weights.from_foreign(tensor.detach(), lambda: dpt.weights.as_numpy(tensor))


def array_to_torch(array: Any) -> Any:
    """A JAX array as a torch tensor, by DLPack without a copy where both stacks share the device.

    JAX's arrays never change, so do not write into the tensor: clone it first.

    Args:
        array: concrete, on one device.
    """
    import dualdp.jax as dpj
    import dualdp.torch as dpt

    return dpt.weights.from_foreign(array, lambda: dpj.weights.as_numpy(array))
