# SPDX-License-Identifier: Apache-2.0
"""Norms of a matrix that is used several times, without forming its gradients.

Each use's gradient is a sum over positions of outer products l r^T, and so is their sum: its
squared norm is that of all pairs of positions, (l . l') (r . r'), within and across the uses. In a
lookup l is one-hot, and its products are read off instead of computed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dualdp import costs
from dualdp_jax.interpret import Use
from dualdp_jax.rules.estimate import Estimate, of_gram
from dualdp_jax.rules.product import HIGHEST, widen

Part = tuple[Use, Any, Any]  # a use, its operands (n, ...), its cotangents (n, ...)


class Factors(NamedTuple):
    """One use of a matrix (rows, columns) by its outer products.

    Attributes:
        left: (n, t, rows), or (n, t) integers where it is one-hot; those above all rows: none.
        right: (n, t, columns).
    """

    left: Any
    right: Any

    @property
    def is_lookup(self) -> bool:
        """Whether `left` holds row numbers."""
        return bool(self.left.ndim == 2)


def factors_of(part: Part) -> Factors | None:
    """The outer products of a use, by the axes of the parameter; None where it has another form."""
    use, operands, cotangents = part
    if use.rule.factors is None or use.order is None or len(use.order) != 2 or use.spec.loops:
        return None
    found = use.rule.factors(use.spec, operands, cotangents)
    if found is None:
        return None
    factors = Factors(found[0], widen(found[1]))
    if use.order == (0, 1):
        return factors
    return None if factors.is_lookup else Factors(factors.right, factors.left)


def prefers_pairs(parts: list[Part]) -> bool:
    """Whether pairs of positions are cheaper than the gradients of all the uses, from shapes."""
    shapes = [jax.eval_shape(lambda o, c, u=use: factors_of((u, o, c)), *x) for use, *x in parts]
    if None in shapes:
        return False
    rows, columns = parts[0][0].spec.shape
    t = sum(shape.right.shape[1] for shape in shapes)
    return costs.prefers_gram(t=t, d_in=rows, d_out=columns)


def norms(parts: list[Part]) -> Estimate:
    """Norms of the summed gradients of the uses of one matrix, (n,)."""
    factors = [found for part in parts if (found := factors_of(part)) is not None]
    squares: Any = 0.0
    for i, one in enumerate(factors):
        squares = squares + _pairs(one, one) + sum(2 * _pairs(one, other) for other in factors[:i])
    left, right = (
        jnp.concatenate(rows, 1) for rows in zip(*map(_sq_lengths, factors), strict=True)
    )
    return of_gram(squares, left, right, (parts[0][0].spec.shape[0], parts[0][0].spec.shape[1]))


def _pairs(a: Factors, b: Factors) -> Any:
    """Sum over all pairs of positions of (l . l') (r . r'), (n,)."""
    if b.is_lookup and not a.is_lookup:
        a, b = b, a
    rights = jnp.einsum("nsc,ntc->nst", a.right, b.right, precision=HIGHEST)
    if not a.is_lookup:
        lefts = jnp.einsum("nsr,ntr->nst", widen(a.left), widen(b.left), precision=HIGHEST)
    elif b.is_lookup:
        lefts = (a.left[:, :, None] == b.left[:, None, :]).astype(rights.dtype)
    else:
        lefts = jnp.take_along_axis(widen(b.left), a.left[:, None], 2, mode="fill", fill_value=0)
        lefts = lefts.swapaxes(1, 2)
    return (lefts * rights).sum((1, 2))


def _sq_lengths(factors: Factors) -> tuple[Any, Any]:
    """Squared lengths of the factors, each (n, t)."""
    right = jnp.square(factors.right).sum(2)
    if factors.is_lookup:
        return jnp.ones_like(right), right
    return jnp.square(widen(factors.left)).sum(2), right
