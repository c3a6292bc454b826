# SPDX-License-Identifier: Apache-2.0
"""What a rule is: how the parameters of one function get their per-sample gradients."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch

Tensor = torch.Tensor
RuleFunction = Callable[..., Tensor]
#: (n,) squared norms, and (n,) a bound on their error or None.
Norms = tuple[Tensor, Tensor | None]
Shapes = Sequence[torch.Size]


def first_axis(shape: torch.Size, parameters: Shapes) -> Sequence[int]:
    """The batch may only be axis 0 of the output."""
    return range(min(len(shape), 1))


def all_but_last(shape: torch.Size, parameters: Shapes) -> Sequence[int]:
    """The batch may be any axis of the output but the last, which holds features."""
    return range(len(shape) - 1)


def is_transposed(grads: Tensor) -> bool:
    """Whether these are n matrices that lie in memory by columns."""
    return grads.dim() == 3 and not grads.is_contiguous() and grads.mT.is_contiguous()


_Function = TypeVar("_Function", bound=Callable[..., Any])


def without_autocast(function: _Function) -> _Function:
    """A function of our own arithmetic, which keeps its precision where the caller's is lowered."""

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        if not (torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")):
            return function(*args, **kwargs)
        with contextlib.ExitStack() as stack:
            for device in filter(torch.is_autocast_enabled, ("cpu", "cuda")):
                stack.enter_context(torch.autocast(device, enabled=False))
            return function(*args, **kwargs)

    return cast("_Function", called)


_BLOCK = 1024  # numbers that float32 adds up without losing digits


def sq_norms(grads: Tensor) -> Tensor:
    """(n, ...) -> (n,), by norms of blocks: `square().sum()` would write everything out again."""
    if is_transposed(grads):
        grads = grads.mT
    flat = grads if grads.dim() == 2 else grads.reshape(len(grads), math.prod(grads.shape[1:]))
    whole = flat.shape[1] // _BLOCK * _BLOCK
    rest: Tensor = torch.linalg.vector_norm(flat[:, whole:] if whole else flat, dim=1).square_()
    if not whole:
        return rest
    blocks = flat[:, :whole].view(len(flat), -1, _BLOCK)
    rest += torch.linalg.vector_norm(blocks, dim=2).square_().sum(1)
    return rest


def exact_sq_norms(grads: Tensor) -> Tensor:
    """(n, ...) -> (n,) float64, where squares of float32 numbers neither overflow nor vanish."""
    flat = grads.reshape(len(grads), math.prod(grads.shape[1:]))
    return torch.linalg.vector_norm(flat, dim=1, dtype=torch.float64).square_()


@without_autocast
def weighted_sum(factors: Tensor, grads: Tensor) -> Tensor:
    """(n,), (n, *shape) -> shape."""
    factors = factors.to(grads.dtype)
    if grads.dim() <= 2:
        return factors @ grads
    if is_transposed(grads):
        return weighted_sum(factors, grads.mT).T.contiguous()
    return (factors @ grads.flatten(1)).view(grads.shape[1:])


@dataclass(frozen=True)
class Rule:
    """Per-sample gradients of one function from what went in and the gradient of what came out.

    Every function below is called as `f(acts, grads_out, *, shape, **options)`: `acts` are the
    saved inputs and `grads_out` the output's gradient, both with the n examples on axis 0; `shape`
    is the parameter's; `options` are the call's other arguments by name. Letters: n examples, t
    positions, i in, o out, c channels, k kernel points, g groups, v vocabulary, d features.

    Attributes:
        arguments: names of the function's arguments, in order.
        grads: parameter argument -> (n, *shape) per-sample gradients.
        sq_norms: parameter argument -> (n,) squared norms, where cheaper than forming the gradient,
            and a bound on their error, (n,), or None where nothing cancels.
        sums: parameter argument -> (*shape) sum over the examples, `grads_out` scaled already.
        acts: argument (or arguments) that the functions need besides `grads_out`; or a function of
            the parameter arguments that names it.
        light: parameter arguments whose functions need no `acts` (they get None).
        batch_axes: shapes of output and parameters -> axes of the output that may be the batch.
        rows_are_free: any number of position axes may follow the batch axis.
        keeps: as the functions above -> True where keeping per-sample gradients is cheapest.
        join: several (acts, grads_out) of one parameter -> one, its positions those of all.
        refuse: arguments -> why this call has no per-sample gradient, or None.
        alone: covers calls without any tensor but parameters.
        applies: arguments -> whether the rule covers this call; else it goes through `vmap`.
    """

    arguments: tuple[str, ...]
    grads: Mapping[str, RuleFunction]
    sq_norms: Mapping[str, Callable[..., Norms]] = field(default_factory=dict)
    sums: Mapping[str, RuleFunction] = field(default_factory=dict)
    acts: str | tuple[str, ...] | Callable[[Mapping[str, str]], str] = "input"
    light: frozenset[str] = frozenset({"bias"})
    batch_axes: Callable[[torch.Size, Shapes], Sequence[int]] = first_axis
    rows_are_free: bool = False
    alone: bool = False
    keeps: Callable[..., bool] | None = None
    join: Callable[[Sequence[tuple[Any, Tensor]]], tuple[Any, Tensor]] | None = None
    refuse: Callable[[Mapping[str, Any]], str | None] | None = None
    applies: Callable[[Mapping[str, Any]], bool] | None = None
