# SPDX-License-Identifier: Apache-2.0
"""Expression graphs of values that depend on parameters alone, with a pull-back for gradients.

A weight seldom reaches its product unchanged: it is transposed, reshaped, cast, scaled, joined with
others. `Derived` records how, so that a gradient of the operand becomes one of the parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from dualdp_jax import compat

Array = jax.Array
Undo = Callable[[Array], Array]
CASTS = ("convert_element_type", "copy", "copy_p")
#: Primitives that permute the numbers, if the result has as many as the operand.
PERMUTATIONS = ("transpose", "rev", "reshape", "squeeze", "expand_dims", "broadcast_in_dim")


@dataclass(frozen=True, eq=False)
class Operation:
    """Function of derived values, with one or more results."""

    function: Callable[..., list[Array]]
    inputs: tuple[Derived, ...]


@dataclass(frozen=True, eq=False)
class Derived:
    """Value computed from parameters and constants."""

    value: Array  # , valid in the trace that made it
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


Memo = dict[Operation, list[Array]]


def constant(value: Array, index: int | None = None) -> Derived:
    """Return a value that depends on neither parameters nor data; `index` as in `Derived`."""
    return Derived(value, frozenset(), index=index)


def parameter(index: int, value: Array) -> Derived:
    """Return the parameter of a scope as a derived value."""
    order = tuple(range(jnp.ndim(value)))
    return Derived(value, frozenset([index]), None, lambda cotangent: cotangent, order, index)


def derive(eqn: compat.Equation, inputs: Sequence[Derived]) -> list[Derived]:
    """Evaluate an equation whose inputs are parameters and constants only."""
    operation = Operation(partial(compat.bind, eqn), tuple(inputs))
    results = operation.function(*(item.value for item in inputs))
    sources = frozenset().union(*(item.sources for item in inputs))
    undo, order = _rearranged(eqn, inputs)
    return [
        Derived(value, sources, (operation, position), undo, order)
        for position, value in enumerate(results)
    ]


def evaluate(item: Derived, values: Sequence[Array], memo: Memo) -> Array:
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


def pull_back(item: Derived, values: Sequence[Array], cotangent: Array) -> dict[int, Array]:
    """Return the gradients of the scope's parameters from a gradient of the item (same shape)."""
    if item.undo is not None:
        (index,) = item.sources
        return {index: item.undo(cotangent)}
    sources = sorted(item.sources)

    def function(*parts: Array) -> Array:
        replaced = list(values)
        for index, part in zip(sources, parts, strict=True):
            replaced[index] = part
        return evaluate(item, replaced, {})

    value, pull = jax.vjp(function, *(values[index] for index in sources))
    return dict(zip(sources, pull(cotangent.astype(value.dtype)), strict=True))


def _rearranged(eqn: Any, inputs: Sequence[Derived]) -> tuple[Undo | None, tuple[int, ...] | None]:
    """`undo` and `order` of the results of an equation, see `Derived`.

    Casts are not inverted: a float32 gradient is not rounded to the cast's bfloat16 on its way
    back. The inverse of a permutation is its transpose, which jax derives.
    """
    name = eqn.primitive.name
    if len(inputs) != 1 or name not in (*CASTS, *PERMUTATIONS):
        return None, None
    item, out = inputs[0], eqn.outvars[0].aval
    before, shape = item.undo, jnp.shape(item.value)
    is_cast = name in CASTS
    fits = jnp.issubdtype(out.dtype, jnp.floating) if is_cast else out.size == math.prod(shape)
    if before is None or not fits:
        return None, None

    def undo(cotangent: Array) -> Array:
        if is_cast:
            return before(cotangent)
        like = compat.varying_zeros(shape, cotangent.dtype, compat.varying_axes(cotangent))
        return before(jax.linear_transpose(lambda x: compat.bind(eqn, x)[0], like)(cotangent)[0])

    if item.order is None or not (is_cast or name == "transpose"):
        return undo, None
    axes = eqn.params.get("permutation", range(len(item.order)))
    return undo, tuple(item.order[axis] for axis in axes)
