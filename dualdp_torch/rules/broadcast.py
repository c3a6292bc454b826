# SPDX-License-Identifier: Apache-2.0
"""Parameters that are added, multiplied or expanded over the batch: positions, scales, tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from .base import Rule, Shapes, Tensor


def reduce_to(grads: Tensor, shape: torch.Size) -> Tensor:
    """(n, ...) -> (n, *shape): undo the broadcast of a parameter of that shape."""
    rest = shape[1:] if len(shape) == grads.dim() else shape  # without the batch axis, of size 1
    extra = grads.dim() - 1 - len(rest)
    if extra:
        grads = grads.sum(tuple(range(1, 1 + extra)))
    spread = [axis for axis, size in enumerate(rest, 1) if size == 1 != grads.shape[axis]]
    if spread:
        grads = grads.sum(spread, keepdim=True)
    return grads.reshape(len(grads), *shape)


def _axes(shape: torch.Size, parameters: Shapes) -> Sequence[int]:
    """Axis 0, if the parameters are the same for all that lies along it."""
    varies = any(len(p) == len(shape) and p[0] != 1 for p in parameters)
    return range(0) if varies or not shape else range(1)


def _added(_: None, grads_out: Tensor, *, shape: torch.Size, alpha: Any = 1, **__: Any) -> Tensor:
    """(n, ...) -> (n, *shape)."""
    reduced = reduce_to(grads_out, shape)
    return reduced if alpha == 1 else reduced * alpha


def _first(_: None, grads_out: Tensor, *, shape: torch.Size, **__: Any) -> Tensor:
    """(n, ...) -> (n, *shape): the operand that `alpha` does not scale."""
    return reduce_to(grads_out, shape)


def _subtracted(acts: None, grads_out: Tensor, **options: Any) -> Tensor:
    """(n, ...) -> (n, *shape)."""
    return -_added(acts, grads_out, **options)


def _multiplied(acts: Tensor, grads_out: Tensor, *, shape: torch.Size, **_: Any) -> Tensor:
    """(n, ...), (n, ...) -> (n, *shape)."""
    return reduce_to(acts * grads_out, shape)


def _other_operand(held: Mapping[str, str]) -> str:
    """The operand that is data."""
    return "other" if "input" in held else "input"


def _is_one_parameter(call: Mapping[str, Any]) -> bool:
    """Whether the other operand is a tensor with as many axes as the result."""
    tensors = [v for v in (call.get("input"), call.get("other")) if torch.is_tensor(v)]
    return len(tensors) == 2 and tensors[0].dim() > 0 and tensors[1].dim() > 0


def _elementwise(
    grads: dict[str, Callable[..., Tensor]], light: frozenset[str] = frozenset({"input", "other"})
) -> Rule:
    """A rule of an operation on two tensors that broadcast."""
    return Rule(
        arguments=("input", "other"),
        grads=grads,
        acts=_other_operand,
        light=light,
        batch_axes=_axes,
        applies=_is_one_parameter,
    )


def _fills_a_tensor(call: Mapping[str, Any]) -> bool:
    """As `_is_one_parameter`, in place: a view would hide the change of its base."""
    return _is_one_parameter(call) and not call["input"]._is_view()


ADD = _elementwise({"input": _first, "other": _added})
SUB = _elementwise({"input": _first, "other": _subtracted})
ADD_IN_PLACE, SUB_IN_PLACE = (
    replace(rule, grads={"other": rule.grads["other"]}, applies=_fills_a_tensor)
    for rule in (ADD, SUB)
)
MUL = _elementwise({"input": _multiplied, "other": _multiplied}, light=frozenset())
EXPAND = Rule(
    arguments=("input", "sizes"),
    grads={"input": _first},
    light=frozenset({"input"}),
    batch_axes=_axes,
    alone=True,
)
