# SPDX-License-Identifier: Apache-2.0
"""Norms for a matrix with several uses, without forming its gradients.

The gradient of each use is a sum over positions of outer products l r^T, and so is their sum: its
squared norm is the sum of (l . l') (r . r') over all pairs of positions, within and across the
uses. In a lookup l is one-hot, and its products are read off instead of computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dualdp import costs
from dualdp_jax.per_sample.program import CapturedUse
from dualdp_jax.rules.arrays import HIGHEST, widen
from dualdp_jax.rules.base import form_of
from dualdp_jax.rules.estimate import Estimate, of_gram


class OuterProducts(NamedTuple):
    """Outer products whose sum is the gradient of one use of a matrix (rows, columns)."""

    left: Any  # (n, t, rows), or (n, t) integers if one-hot; an integer >= rows is a zero row
    right: Any  # (n, t, columns)

    @property
    def is_lookup(self) -> bool:
        """True if `left` holds row numbers."""
        return bool(self.left.ndim == 2)


def outer_products(captured: CapturedUse) -> OuterProducts | None:
    """Return the outer products of a use, in the parameter's axes; None if it has no such form."""
    use, operands, cotangents = captured
    if use.rule.factors is None or use.order is None or len(use.order) != 2 or use.loops:
        return None
    found = use.rule.factors(use.spec, operands, cotangents)
    if found is None:
        return None
    products = OuterProducts(found[0], widen(found[1]))
    if use.order == (0, 1):
        return products
    return None if products.is_lookup else OuterProducts(products.right, products.left)


def prefers_pairs(uses: Sequence[CapturedUse]) -> bool:
    """True if pairs of positions are cheaper than the gradients of all uses, or forced."""
    shapes = [
        jax.eval_shape(lambda *arrays, use=use: outer_products(CapturedUse(use, *arrays)), *arrays)
        for use, *arrays in uses
    ]
    if None in shapes:
        return False
    rows, columns = uses[0].use.spec.shape
    t = sum(shape.right.shape[1] for shape in shapes)
    is_cheap = costs.prefers_gram(t=t, d_in=rows, d_out=columns)
    return form_of("pairs" if is_cheap else "formed", "pairs", "formed") == "pairs"


def norms(uses: Sequence[CapturedUse]) -> Estimate:
    """Return the estimated norms (n,) of the summed gradients of the uses of one matrix."""
    products = [found for use in uses if (found := outer_products(use)) is not None]
    squares: Any = 0.0
    for i, one in enumerate(products):
        squares = squares + pairs(one, one) + sum(2 * pairs(one, two) for two in products[:i])
    left, right = (
        jnp.concatenate(lengths, 1) for lengths in zip(*map(_sq_lengths, products), strict=True)
    )
    rows, columns = uses[0].use.spec.shape
    return of_gram(squares, left, right, (rows, columns))


def pairs(a: OuterProducts, b: OuterProducts) -> Any:
    """Sum of (l . l') (r . r') over all pairs of positions, (n,)."""
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


def _sq_lengths(products: OuterProducts) -> tuple[Any, Any]:
    """Squared lengths of the left and right vectors, each (n, t)."""
    right = jnp.square(products.right).sum(2)
    if products.is_lookup:
        return jnp.ones_like(right), right
    return jnp.square(widen(products.left)).sum(2), right
