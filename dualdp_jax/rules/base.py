# SPDX-License-Identifier: Apache-2.0
"""Types of a per-sample gradient rule: pure functions of arrays for one primitive.

Letters: n examples, l loop steps, b blocks (independent products), t positions, i in, o out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import numpy as np

_forced: ContextVar[frozenset[str]] = ContextVar("forced", default=frozenset())


@contextlib.contextmanager
def forced(*forms: str) -> Iterator[None]:
    """Context that takes these forms wherever they are possible, to test and to compare them.

    Forms of norms: "gram" or "gradients", of one position also "lengths"; "pairs" or "formed" for
    weights with several uses; "patches" or "offsets" of convolutions.
    "kept" or "dropped" says whether "auto" keeps per-sample gradients. It must be active while a
    call is traced.
    """
    token = _forced.set(frozenset(forms))
    try:
        yield
    finally:
        _forced.reset(token)


def form_of(usual: str, *possible: str) -> str:
    """Return the forced one of the forms that are possible, or else the usual one."""
    return next((form for form in possible if form in _forced.get()), usual)


class Spec(NamedTuple):
    """Description of one parameter use.

    Attributes:
        params: mapping, parameters of the equation.
        position: int, index of the weight among the operands.
        shape: shape of the weight.
        dtype: dtype of the weight.
        loops: int, number of loops around the use, whose steps have the weight in common.
        summed: axes of the equation's result that are summed away; its gradient lacks them.
    """

    params: Mapping[str, Any]
    position: int
    shape: tuple[int, ...]
    dtype: np.dtype
    loops: int = 0
    summed: tuple[int, ...] = ()


class Choice(NamedTuple):
    """Cost model's choice for one parameter use, from shapes alone.

    Attributes:
        form: str, short name of the formula for its norm.
        keeps: bool, True if "auto" keeps the per-sample gradients.
    """

    form: str = "gradients"
    keeps: bool = False


class Rule(NamedTuple):
    """Per-sample gradient rule of a primitive; all arrays lead with (n, *loops).

    Where the steps of a loop have weights of their own, the functions are mapped over these steps.

    Attributes:
        accepts: callable (params, position, shapes of all operands) -> True if the rule applies.
        grads: callable (spec, other operands, grads_out) -> per-sample gradients (n, *shape),
            summed over the loops.
        norms: callable with the same arguments -> their norms, an `Estimate` or (n,), without
            keeping them; an array counts as exact where finite. None: from `grads`.
        weighted_sum: callable (spec, other operands, grads_out, factors (n,)) -> sum over the
            examples of factor times gradient, (*shape), float32 or wider; an example of factor
            0 is dropped, even if nan or inf. None: from `grads`.
        choice: callable (spec, shapes of the other operands, shape of grads_out) -> `Choice`;
            None: the gradients are formed for their norm, and once more for the sum.
        factors: callable (spec, other operands, grads_out) -> outer products whose sum is a
            matrix's gradient: (n, t, rows), or row numbers (n, t); and (n, t, columns), zero where
            there is no such row. None, also as its result: the use has another form.
        takes_sums: bool, True if the functions take a `spec` with `summed`.
    """

    accepts: Callable[[Mapping[str, Any], int, Sequence[Any]], bool]
    grads: Callable[..., Any]
    norms: Callable[..., Any] | None = None
    weighted_sum: Callable[..., Any] | None = None
    choice: Callable[..., Choice] | None = None
    factors: Callable[..., Any] | None = None
    takes_sums: bool = False
