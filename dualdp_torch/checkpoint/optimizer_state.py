# SPDX-License-Identifier: Apache-2.0
"""Optimizer state by parameter name, as tensors and plain JSON data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from dualdp_torch.rules.base import Tensor

_PLAIN = (bool, int, float, str, type(None))


def _names(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[list[str]]:
    """Names of the parameters of each group, all of which must be the model's."""
    names = {id(p): name for name, p in model.named_parameters()}
    held = [[names.get(id(p), "") for p in group["params"]] for group in optimizer.param_groups]
    if any("" in group for group in held):
        raise ValueError(
            "The optimizer holds a parameter that is not the model's. Expected the optimizer of "
            "this model."
        )
    return held


def _kind(optimizer: torch.optim.Optimizer) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def named_state(
    optimizer: torch.optim.Optimizer, model: nn.Module
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return tensors named "<slot>/<parameter>", and everything else as plain data."""
    tensors: dict[str, Tensor] = {}
    plain: dict[str, dict[str, Any]] = {}
    groups = []
    for group, held in zip(optimizer.param_groups, _names(optimizer, model), strict=True):
        options = {name: value for name, value in group.items() if name != "params"}
        groups.append(
            {"parameters": held, "options": {n: _encoded(n, v) for n, v in options.items()}}
        )
        for name, p in zip(held, group["params"], strict=True):
            for slot, value in optimizer.state.get(p, {}).items():
                if torch.is_tensor(value):
                    tensors[f"{slot}/{name}"] = value
                else:
                    plain.setdefault(name, {})[slot] = _encoded(slot, value)
    return tensors, {"class": _kind(optimizer), "groups": groups, "plain": plain}


def _encoded(name: str, value: Any) -> Any:
    """Value as JSON data that keeps one-number tensors and tuples apart from numbers and lists."""
    if isinstance(value, _PLAIN):
        return value
    if torch.is_tensor(value) and value.numel() == 1:
        return {"tensor": value.item(), "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, tuple | list):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [_encoded(name, item) for item in value]}
    raise TypeError(
        f"The optimizer keeps {name!r}, a {type(value).__name__}, which can't be saved without "
        "code. Expected tensors, numbers, words, and tuples of them."
    )


def _decoded(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return torch.tensor(value["tensor"], dtype=getattr(torch, value["dtype"]))
    kind = tuple if "tuple" in value else list
    return kind(_decoded(item) for item in next(iter(value.values())))


def restorer(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    saved: Mapping[str, Any],
) -> Callable[[], None]:
    """Check that a saved state fits this optimizer; return a function that loads it.

    Parameters are found by name, so their order in the optimizer does not matter.
    """
    if saved["class"] != _kind(optimizer):
        raise ValueError(
            f"The checkpoint holds the state of {saved['class']}, but optimizer is a "
            f"{_kind(optimizer)}. Expected the same class."
        )
    held, theirs = _names(optimizer, model), saved["groups"]
    if len(held) != len(theirs):
        raise ValueError(
            f"The optimizer has {len(held)} parameter groups, but the checkpoint has "
            f"{len(theirs)}. Expected the same groups."
        )
    for k, (ours, other) in enumerate(zip(held, theirs, strict=True)):
        if sorted(ours) != sorted(other["parameters"]):
            raise ValueError(
                f"Parameter group {k} of the optimizer holds {sorted(ours)}, but that of the "
                f"checkpoint {sorted(other['parameters'])}. Expected the same groups."
            )
    index = {name: k for k, name in enumerate(name for group in held for name in group)}
    state: dict[int, dict[str, Any]] = {}
    for name, slots in saved["plain"].items():
        state.setdefault(index[name], {}).update({n: _decoded(v) for n, v in slots.items()})
    for path, tensor in tensors.items():
        slot, name = path.split("/", 1)
        state.setdefault(index[name], {})[slot] = tensor
    groups = [
        {
            **{name: _decoded(value) for name, value in other["options"].items()},
            "params": [index[name] for name in ours],
        }
        for ours, other in zip(held, theirs, strict=True)
    ]
    return lambda: optimizer.load_state_dict({"state": state, "param_groups": groups})
