# SPDX-License-Identifier: Apache-2.0
"""What a rule is: pure functions of arrays for one primitive.

Letters: n examples, l loop steps, b blocks (independent products), t positions, i in, o out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple


class Spec(NamedTuple):
    """One use of a primitive.

    Attributes:
        params: the parameters of its equation.
        position: which operand is the weight.
        shape: of the weight.
        dtype: of the weight.
        loops: of each loop around the use, outermost first: whether it has a weight of its own at
            every step (True), or the same weight at all steps (False).
    """

    params: Mapping[str, Any]
    position: int
    shape: tuple[int, ...]
    dtype: Any
    loops: tuple[bool, ...] = ()


class Rule(NamedTuple):
    """How to find per-sample gradients at a primitive; all arrays lead with (n, *loops).

    Attributes:
        accepts: (params, position, shapes of all operands) to whether the rule holds here.
        grads: (spec, other operands, grads_out) to per-sample gradients, (n, *own, *shape) with
            an axis for each loop that has a weight of its own; summed over the other loops.
        sq_norms: the same to their squared norms, (n,), without keeping them; None: from `grads`.
        weighted_sum: (spec, other operands, grads_out, factors (n,)) to the sum over the examples
            of factor times gradient, (*own, *shape), float32 or wider; an example of factor 0 is
            dropped, whatever its numbers are. None: from `grads`.
        keeps: the same to whether "auto" keeps the per-sample gradients, by `dualdp.costs`; None:
            never.
    """

    accepts: Callable[[Mapping[str, Any], int, Sequence[Any]], bool]
    grads: Callable[..., Any]
    sq_norms: Callable[..., Any] | None = None
    weighted_sum: Callable[..., Any] | None = None
    keeps: Callable[..., bool] | None = None
