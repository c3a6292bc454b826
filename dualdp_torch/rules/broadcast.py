# SPDX-License-Identifier: Apache-2.0
"""Parameters that are added, multiplied or expanded over the batch: positions, scales, tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from dualdp_torch.rules.base import Rule, Shapes, Tensor


def reduce_to(grads: Tensor, shape: torch.Size) -> Tensor:
    """(n, ...) -> (n, *shape): sum over the axes along which a parameter of `shape` broadcast."""
    rest = shape[1:] if len(shape) == grads.dim() else shape  # without the batch axis, of size 1
    extra = grads.dim() - 1 - len(rest)
    if extra:
        grads = grads.sum(tuple(range(1, 1 + extra)))
    spread = [axis for axis, size in enumerate(rest, 1) if size == 1 != grads.shape[axis]]
    if spread:
        grads = grads.sum(spread, keepdim=True)
    return grads.reshape(len(grads), *shape)


def _axes(shape: torch.Size, parameters: Shapes) -> Sequence[int]:
    """Axis 0 of the output, unless a parameter varies along it."""
    varies = any(len(p) == len(shape) and p[0] != 1 for p in parameters)
    return range(0) if varies or not shape else range(1)


def _added(_: None, grads_out: Tensor, *, shape: torch.Size, alpha: Any = 1, **__: Any) -> Tensor:
    """(n, ...) -> (n, *shape), scaled by `alpha`."""
    reduced = reduce_to(grads_out, shape)
    return reduced if alpha == 1 else reduced * alpha


def _first(_: None, grads_out: Tensor, *, shape: torch.Size, **__: Any) -> Tensor:
    """(n, ...) -> (n, *shape) for the operand that `alpha` does not scale."""
    return reduce_to(grads_out, shape)


def _multiplied(acts: Tensor, grads_out: Tensor, *, shape: torch.Size, **_: Any) -> Tensor:
    """(n, ...), (n, ...) -> (n, *shape)."""
    return reduce_to(acts * grads_out, shape)


def _is_one_parameter(call: Mapping[str, Any]) -> bool:
    """True if both operands are tensors with at least one axis."""
    tensors = [v for v in (call.get("input"), call.get("other")) if torch.is_tensor(v)]
    return len(tensors) == 2 and tensors[0].dim() > 0 and tensors[1].dim() > 0


def _elementwise(**grads: Callable[..., Tensor]) -> Rule:
    """Rule of an operation on two tensors that broadcast, whose gradients need no inputs."""
    return Rule(
        arguments=("input", "other"),
        grads=grads,
        acts=lambda held: "other" if "input" in held else "input",  # that is not a parameter
        light=frozenset({"input", "other"}),
        batch_axes=_axes,
        applies=_is_one_parameter,
    )


def _fills_a_tensor(call: Mapping[str, Any]) -> bool:
    """`_is_one_parameter` for an in-place call; False on a view, which hides its base's change."""
    return _is_one_parameter(call) and not call["input"]._is_view()


ADD = _elementwise(input=_first, other=_added)
SUB = _elementwise(input=_first, other=lambda acts, grads_out, **o: -_added(acts, grads_out, **o))
ADD_IN_PLACE, SUB_IN_PLACE = (
    replace(rule, grads={"other": rule.grads["other"]}, applies=_fills_a_tensor)
    for rule in (ADD, SUB)
)
MUL = replace(_elementwise(input=_multiplied, other=_multiplied), light=frozenset())
EXPAND = Rule(
    arguments=("input", "sizes"),
    grads={"input": _first},
    light=frozenset({"input"}),
    batch_axes=_axes,
    alone=True,
)


def _sizes(args: tuple[Any, ...]) -> Sequence[int]:
    """Sizes in `p.expand(*sizes)` or `p.expand(sizes)`."""
    return args[1] if len(args) == 2 and not isinstance(args[1], int) else args[1:]


def _spread_axis(shape: Sequence[int], sizes: Sequence[int]) -> int | None:
    """First axis that expands from size one; None if a new axis is added in front."""
    if len(shape) != len(sizes):
        return None
    grown = (axis for axis, size in enumerate(sizes) if shape[axis] == 1 and size not in (1, -1))
    return next(grown, None)


def expands_later(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if the first axis to expand is not axis 0: states (layers, 1, d) and the like."""
    return not kwargs and bool(_spread_axis(args[0].shape, _sizes(args)))


def expand_later(capture: Any, p: Tensor, *sizes: Any) -> Tensor:
    """`p.expand(sizes)` with the expanded axis moved to the front, where the rule expects it."""
    wanted = list(_sizes((p, *sizes)))
    axis = _spread_axis(p.shape, wanted) or 0
    wanted.insert(0, wanted.pop(axis))
    return p.movedim(axis, 0).expand(wanted).movedim(0, axis)


def repeats_ones(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if only axes of size one, or new ones, are repeated."""
    counts, shape = _sizes(args), args[0].shape
    old = counts[len(counts) - len(shape) :]
    return not kwargs and all(c == 1 or s == 1 for c, s in zip(old, shape, strict=True))


def repeat(capture: Any, p: Tensor, *counts: Any) -> Tensor:
    """`p.repeat(counts)` as an expansion and a copy, for calls that `repeats_ones` covers."""
    found = list(_sizes((p, *counts)))
    new = len(found) - p.dim()
    return p.expand(found[:new] + [c * s for c, s in zip(found[new:], p.shape, strict=True)]).clone(
        memory_format=torch.contiguous_format
    )


def chooses_smaller(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if a tensor that a `where` chooses from is smaller than what it returns."""
    if len(args) != 3 or kwargs:
        return False
    shape = _whole(args)
    return any(torch.is_tensor(value) and value.shape != shape for value in args[1:])


def where(capture: Any, condition: Tensor, *chosen: Any) -> Tensor:
    """`torch.where` of tensors that are expanded before, parameters by their rule."""
    shape = _whole((condition, *chosen))
    x, y = (
        value.expand(shape) if torch.is_tensor(value) and value.shape != shape else value
        for value in chosen
    )
    found: Tensor = torch.where(condition, x, y)
    return found


def _whole(values: Sequence[Any]) -> torch.Size:
    """Shape to which the tensors among the values broadcast."""
    return torch.broadcast_shapes(*[value.shape for value in values if torch.is_tensor(value)])


def fills_rows(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True for `x[mask] = value` with one value for all rows that the mask chooses."""
    x, mask, value = args
    if not torch.is_tensor(mask) or mask.dtype != torch.bool or not torch.is_tensor(value):
        return False
    if mask.device != x.device:  # `where` takes no mask of another device
        return False
    more = value.dim() - (x.dim() - mask.dim())  # axes for the chosen rows
    is_one = more <= 0 or (more == 1 and value.shape[0] == 1)
    return is_one and mask.shape == x.shape[: mask.dim()]


def fill_rows(capture: Any, x: Tensor, mask: Tensor, value: Tensor) -> None:
    """`x[mask] = value`, as a choice between the value and x."""
    spread = mask.reshape(*mask.shape, *[1] * (x.dim() - mask.dim()))
    one = value.squeeze(0) if value.dim() > x.dim() - mask.dim() else value
    x.copy_(torch.where(spread, one.to(x.dtype), x))


def spreads_later(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if an operand varies along axis 0 and is broadcast along a later axis."""
    return len(args) == 2 and (_later(*args) or _later(*args[::-1])) is not None


def _later(x: Any, y: Any) -> int | None:
    """Axis along which x is broadcast to y; None unless x varies along axis 0."""
    if not (torch.is_tensor(x) and torch.is_tensor(y)) or x.dim() != y.dim() or x.dim() == 0:
        return None
    return None if x.shape[0] == 1 else _spread_axis(x.shape, y.shape)


def spread_first(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Rewrite of a binary operation that expands the broadcast operand first, (t, 1, d) say."""

    def rewritten(capture: Any, x: Any, y: Any, **options: Any) -> Tensor:
        axis = _later(x, y)
        if axis is not None:
            return function(_spread(x, axis, y), y, **options)
        return function(x, _spread(y, _later(y, x), x), **options)

    return rewritten


def _spread(x: Tensor, axis: int | None, y: Tensor) -> Tensor:
    """Expand one axis of x to its size in y."""
    return x.expand([y.shape[a] if a == axis else -1 for a in range(x.dim())])
