# SPDX-License-Identifier: Apache-2.0
"""What a rule is: pure functions of arrays for one primitive.

Letters: n examples, l loop steps, b blocks (independent products), t positions, i in, o out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

_as_if: ContextVar[int | None] = ContextVar("num_examples", default=None)


def num_examples(array: Any) -> int:
    """The number of examples that a choice is made for: axis 0 of (n, ...), or that of `as_if`."""
    found = _as_if.get()
    return int(array.shape[0]) if found is None else found


@contextlib.contextmanager
def as_if(number: int) -> Iterator[None]:
    """Make the choices of so many examples for a batch of another size, in this thread."""
    token = _as_if.set(number)
    try:
        yield
    finally:
        _as_if.reset(token)


class Spec(NamedTuple):
    """One use of a primitive.

    Attributes:
        params: the parameters of its equation.
        position: which operand is the weight.
        shape: of the weight.
        dtype: of the weight.
        loops: of each loop around the use, outermost first: whether it has a weight of its own at
            every step (True), or the same weight at all steps (False).
        summed: axes of the equation's result that are summed away; its gradient lacks them.
    """

    params: Mapping[str, Any]
    position: int
    shape: tuple[int, ...]
    dtype: Any
    loops: tuple[bool, ...] = ()
    summed: tuple[int, ...] = ()


class Choice(NamedTuple):
    """What the cost model says about one use, from shapes alone.

    Attributes:
        form: how its norm is found, in a word.
        keeps: whether "auto" keeps the per-sample gradients.
        is_small: whether `vmap(grad)` is as good here; "auto" takes it for a model all of whose
            uses are small.
    """

    form: str = "gradients"
    keeps: bool = False
    is_small: bool = False


class Rule(NamedTuple):
    """How to find per-sample gradients at a primitive; all arrays lead with (n, *loops).

    Attributes:
        accepts: (params, position, shapes of all operands) to whether the rule holds here.
        grads: (spec, other operands, grads_out) to per-sample gradients, (n, *own, *shape) with
            an axis for each loop that has a weight of its own; summed over the other loops.
        norms: the same to their norms, an `Estimate` or (n,), without keeping them; an array is
            taken as exact where it is finite. None: from `grads`.
        weighted_sum: (spec, other operands, grads_out, factors (n,)) to the sum over the examples
            of factor times gradient, (*own, *shape), float32 or wider; an example of factor 0 is
            dropped, whatever its numbers are. None: from `grads`.
        choice: (spec, shapes of the other operands, shape of grads_out) to what the cost model
            says; None: the gradients are formed for their norm, and once more for the sum.
        factors: (spec, other operands, grads_out) to the outer products that a matrix's gradient
            is the sum of: (n, t, rows), or row numbers (n, t); and (n, t, columns), zero where
            there is no such row. None where the use has another form.
        takes_sums: whether the functions take a `spec` with `summed`.
    """

    accepts: Callable[[Mapping[str, Any], int, Sequence[Any]], bool]
    grads: Callable[..., Any]
    norms: Callable[..., Any] | None = None
    weighted_sum: Callable[..., Any] | None = None
    choice: Callable[..., Choice] | None = None
    factors: Callable[..., Any] | None = None
    takes_sums: bool = False
