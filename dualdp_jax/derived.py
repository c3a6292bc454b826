# SPDX-License-Identifier: Apache-2.0
"""Values that depend on parameters alone, as small graphs with a way back for gradients.

A weight seldom reaches its product as it is: it is transposed, reshaped, cast, scaled, joined with
others. `Derived` remembers how, so that a gradient of the operand becomes one of the parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from dualdp_jax import compat

Undo = Callable[[Any], Any]
CASTS = ("convert_element_type", "copy", "copy_p")
#: Primitives that hand each number on once, where the result has as many as the operand.
PERMUTATIONS = ("transpose", "rev", "reshape", "squeeze", "expand_dims", "broadcast_in_dim")


@dataclass(frozen=True, eq=False)
class Operation:
    """A function of derived values, with one or more results."""

    function: Callable[..., list[Any]]
    inputs: tuple[Derived, ...]


@dataclass(frozen=True, eq=False)
class Derived:
    """A value computed from parameters and constants.

    Attributes:
        value: the value itself, valid in the trace that made it.
        sources: indices of the parameters (of the scope) that it depends on; none: a constant.
        origin: (operation, which of its results), or None for a parameter or a given constant.
        undo: for a rearrangement of ONE parameter, the way from a gradient of the value to one of
            the parameter, a linear map that keeps the norm; else None.
        order: for a parameter of which only axes were exchanged (and dtypes cast), which axis of
            the parameter each axis is; else None.
        place: of a parameter, or of a constant that the scope is given: where it is among the
            scope's values.
    """

    value: Any
    sources: frozenset[int]
    origin: tuple[Operation, int] | None = None
    undo: Undo | None = None
    order: tuple[int, ...] | None = None
    place: int | None = None


def constant(value: Any, place: int | None = None) -> Derived:
    """A value that depends on neither parameters nor data; `place` as in `Derived`."""
    return Derived(value, frozenset(), place=place)


def parameter(index: int, value: Any) -> Derived:
    """The parameter of a scope itself."""
    order = tuple(range(jnp.ndim(value)))
    return Derived(value, frozenset([index]), None, lambda cotangent: cotangent, order, index)


def derive(eqn: Any, inputs: Sequence[Derived]) -> list[Derived]:
    """The results of an equation whose inputs are parameters and constants only."""
    operation = Operation(lambda *values: compat.bind(eqn, *values), tuple(inputs))
    results = operation.function(*(item.value for item in inputs))
    sources = frozenset().union(*(item.sources for item in inputs))
    undo, order = _undo(eqn, inputs), _order(eqn, inputs)
    return [
        Derived(value, sources, (operation, position), undo, order)
        for position, value in enumerate(results)
    ]


def evaluate(item: Derived, values: Sequence[Any], memo: dict[Operation, list[Any]]) -> Any:
    """The value that `item` has for other values of the scope.

    Constants are computed anew as well: their `value` may belong to a trace that has ended.
    """
    if item.origin is None:
        return item.value if item.place is None else values[item.place]
    operation, position = item.origin
    if operation not in memo:
        inputs = [evaluate(part, values, memo) for part in operation.inputs]
        memo[operation] = operation.function(*inputs)
    return memo[operation][position]


def pull_back(item: Derived, values: Sequence[Any], cotangent: Any) -> dict[int, Any]:
    """Gradients of the scope's parameters, from a gradient of the item (same shape, any float)."""
    if item.undo is not None:
        (index,) = item.sources
        return {index: item.undo(cotangent)}
    sources = sorted(item.sources)

    def function(*parts: Any) -> Any:
        replaced = list(values)
        for index, part in zip(sources, parts, strict=True):
            replaced[index] = part
        return evaluate(item, replaced, {})

    value, pull = jax.vjp(function, *(values[index] for index in sources))
    return dict(zip(sources, pull(cotangent.astype(value.dtype)), strict=True))


def _undo(eqn: Any, inputs: Sequence[Derived]) -> Undo | None:
    """The inverse of a rearrangement applied to a rearranged parameter, else None."""
    before = inputs[0].undo if len(inputs) == 1 else None
    inverse = None if before is None else _inverse(eqn, jnp.shape(inputs[0].value))
    if before is None or inverse is None:
        return None
    return lambda cotangent: before(inverse(cotangent))


def _order(eqn: Any, inputs: Sequence[Derived]) -> tuple[int, ...] | None:
    """Which axis of the parameter each axis of the result is, where it is nothing else."""
    before = inputs[0].order if len(inputs) == 1 else None
    if before is None or eqn.primitive.name not in ("transpose", *CASTS):
        return None
    axes = eqn.params.get("permutation", range(len(before)))
    return tuple(before[axis] for axis in axes)


def _inverse(eqn: Any, shape: tuple[int, ...]) -> Undo | None:
    """The inverse of one equation that only moves numbers about; casts are left out on purpose.

    A gradient in float32 is not rounded to the cast's bfloat16 on its way back. The inverse of a
    permutation is its transpose, which jax derives, whatever order the equation reads in.
    """
    name, out = eqn.primitive.name, eqn.outvars[0].aval
    if name in CASTS and jnp.issubdtype(out.dtype, jnp.floating):
        return lambda cotangent: cotangent
    if name not in PERMUTATIONS or out.size != math.prod(shape):
        return None

    def undo(cotangent: Any) -> Any:
        like = compat.vary(jnp.zeros(shape, cotangent.dtype), compat.varying_axes(cotangent))
        return jax.linear_transpose(lambda x: compat.bind(eqn, x)[0], like)(cotangent)[0]

    return undo
