# SPDX-License-Identifier: Apache-2.0
"""Expression graphs of values that depend on parameters alone, with a pull-back for gradients.

A weight seldom reaches its product unchanged: it is transposed, reshaped, cast, scaled, joined with
others. `Derived` records how, so that a gradient of the operand becomes one of the parameters.
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
#: Primitives that permute the numbers, if the result has as many as the operand.
PERMUTATIONS = ("transpose", "rev", "reshape", "squeeze", "expand_dims", "broadcast_in_dim")


@dataclass(frozen=True, eq=False)
class Operation:
    """Function of derived values, with one or more results."""

    function: Callable[..., list[Any]]
    inputs: tuple[Derived, ...]


@dataclass(frozen=True, eq=False)
class Derived:
    """Value computed from parameters and constants."""

    value: Any  # array, valid in the trace that made it
    sources: frozenset[int]  # indices of the scope's parameters it depends on; empty: constant
    #: (operation, index of its result), or None for a parameter or a given constant.
    origin: tuple[Operation, int] | None = None
    #: callable from a gradient of the value to one of the parameter, linear and keeping the
    #: norm, if the value rearranges ONE parameter; else None.
    undo: Undo | None = None
    #: per axis the axis of the parameter it is, if only axes of a parameter were exchanged
    #: (and dtypes cast); else None.
    order: tuple[int, ...] | None = None
    #: int, index among the scope's values of a parameter or a given constant; else None.
    index: int | None = None


def constant(value: Any, index: int | None = None) -> Derived:
    """Return a value that depends on neither parameters nor data; `index` as in `Derived`."""
    return Derived(value, frozenset(), index=index)


def parameter(index: int, value: Any) -> Derived:
    """Return the parameter of a scope as a derived value."""
    order = tuple(range(jnp.ndim(value)))
    return Derived(value, frozenset([index]), None, lambda cotangent: cotangent, order, index)


def derive(eqn: Any, inputs: Sequence[Derived]) -> list[Derived]:
    """Evaluate an equation whose inputs are parameters and constants only."""
    operation = Operation(lambda *values: compat.bind(eqn, *values), tuple(inputs))
    results = operation.function(*(item.value for item in inputs))
    sources = frozenset().union(*(item.sources for item in inputs))
    undo, order = _undo(eqn, inputs), _order(eqn, inputs)
    return [
        Derived(value, sources, (operation, position), undo, order)
        for position, value in enumerate(results)
    ]


def evaluate(item: Derived, values: Sequence[Any], memo: dict[Operation, list[Any]]) -> Any:
    """Evaluate `item` for other values of the scope.

    Constants are computed anew as well: their `value` may belong to a trace that has ended.
    """
    if item.origin is None:
        return item.value if item.index is None else values[item.index]
    operation, position = item.origin
    if operation not in memo:
        inputs = [evaluate(part, values, memo) for part in operation.inputs]
        memo[operation] = operation.function(*inputs)
    return memo[operation][position]


def pull_back(item: Derived, values: Sequence[Any], cotangent: Any) -> dict[int, Any]:
    """Return the gradients of the scope's parameters from a gradient of the item (same shape)."""
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
    """Inverse of a rearrangement applied to a rearranged parameter, else None."""
    before = inputs[0].undo if len(inputs) == 1 else None
    inverse = None if before is None else _inverse(eqn, jnp.shape(inputs[0].value))
    if before is None or inverse is None:
        return None
    return lambda cotangent: before(inverse(cotangent))


def _order(eqn: Any, inputs: Sequence[Derived]) -> tuple[int, ...] | None:
    """Axis of the parameter for each axis of the result, if nothing else changed, else None."""
    before = inputs[0].order if len(inputs) == 1 else None
    if before is None or eqn.primitive.name not in ("transpose", *CASTS):
        return None
    axes = eqn.params.get("permutation", range(len(before)))
    return tuple(before[axis] for axis in axes)


def _inverse(eqn: Any, shape: tuple[int, ...]) -> Undo | None:
    """Inverse of one equation that only permutes numbers, else None; casts are not inverted.

    A float32 gradient is not rounded to the cast's bfloat16 on its way back. The inverse of a
    permutation is its transpose, which jax derives.
    """
    name, out = eqn.primitive.name, eqn.outvars[0].aval
    if name in CASTS and jnp.issubdtype(out.dtype, jnp.floating):
        return lambda cotangent: cotangent
    if name not in PERMUTATIONS or out.size != math.prod(shape):
        return None

    def undo(cotangent: Any) -> Any:
        like = compat.varying_zeros(shape, cotangent.dtype, compat.varying_axes(cotangent))
        return jax.linear_transpose(lambda x: compat.bind(eqn, x)[0], like)(cotangent)[0]

    return undo
