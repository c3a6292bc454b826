# SPDX-License-Identifier: Apache-2.0
"""Norms of per-sample gradients by short formulas, each with a bound of its error.

A formula squares numbers and multiplies the squares. Squares below the smallest normal number are
flushed to zero, squares above the largest overflow, and sums of products cancel. Each formula here
bounds what that can cost from numbers that it has anyway, so that its caller can tell the examples
for which it holds from those whose gradients have to be formed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dualdp_jax.rules.product import sq_norm, widen


class Estimate(NamedTuple):
    """Squared norms, and how far they may be off.

    Attributes:
        sq_norms: (n,) of the gradients, float32 or wider.
        errors: (n,) bound of |squared norm - true one|, nan or inf where nothing is known; None
            where they are sums of the squares of the gradients.
        again: () -> (n,) squared norms that are right whatever the size of the factors; None where
            only the gradients themselves give them.
        rounding: (n,) estimate of the length by which rounding moves a gradient that is added up
            from its positions in one order, as the clipped sum does it, from the same in another
            order, as the norm does it. None where both are made of the same numbers.
    """

    sq_norms: Any
    errors: Any = None
    again: Callable[[], Any] | None = None
    rounding: Any = None


def stable_norm(array: Any, start: int = 1) -> Any:
    """(n, ...) to norms over the axes from `start` on; no square overflows or is flushed."""
    array, axes = widen(array), tuple(range(start, array.ndim))
    if not math.prod(array.shape[start:]):
        return jnp.zeros(array.shape[:start], array.dtype)
    largest = jnp.abs(array).max(axes, keepdims=True)
    # Scaled to at most 16: the inverse of the largest float32 would be flushed itself.
    scale = 16 / jnp.maximum(largest, 1e8 * jnp.finfo(array.dtype).tiny)
    scale = jnp.where(jnp.isfinite(largest), scale, 1)
    # Else XLA may square the two factors apart, and overflow, where it knows their numbers.
    scaled = jax.lax.optimization_barrier(array * scale)
    return jnp.sqrt(jnp.square(scaled).sum(axes)) / scale.reshape(array.shape[:start])


def of_gradients(grads: Any, lengths: Any = None) -> Estimate:
    """Norms of gradients (n, *shape).

    Args:
        grads: (n, *shape).
        lengths: (n, ..., t) of the vectors that the clipped sum adds up instead of them.
    """
    return Estimate(sq_norm(grads), rounding=None if lengths is None else rounding(lengths))


def of_lengths(left: Any, right: Any) -> Estimate:
    """Norms of outer products of rows, (n, b, i) and (n, b, o), side by side over b."""
    squares = [jnp.square(rows).sum(2) for rows in (left, right)]
    flushed = [rows.shape[2] * jnp.finfo(rows.dtype).tiny for rows in (left, right)]
    errors = squares[0] * flushed[1] + squares[1] * flushed[0] + flushed[0] * flushed[1]

    def again() -> Any:
        return jnp.square(stable_norm(left, 2) * stable_norm(right, 2)).sum(1)

    return Estimate((squares[0] * squares[1]).sum(1), errors.sum(1), again)


def of_gram(squares: Any, left: Any, right: Any, sizes: tuple[int, int]) -> Estimate:
    """Norms by a Gram form, whose terms cancel where positions do.

    It adds t * t products of inner products, together at most (sum over t of |l| |r|) ** 2.

    Args:
        squares: (n,) squared norms that the form gave; rounding may have made them negative.
        left: (n, ..., t) squared lengths of the left factors.
        right: (n, ..., t) squared lengths of the right ones.
        sizes: numbers in one left factor, and in one right factor.
    """
    kind, t = jnp.finfo(squares.dtype), left.shape[-1]
    pairs = zip((left, right), sizes, strict=True)
    longest = [jnp.sqrt(part + size * kind.tiny) for part, size in pairs]
    both, *alone = (jnp.square(x.sum(-1)) for x in (longest[0] * longest[1], *longest))
    flushed = alone[0] * sizes[1] + alone[1] * sizes[0] + t * t
    errors = (4 * kind.eps * both + kind.tiny * flushed).sum(tuple(range(1, left.ndim - 1)))
    return Estimate(jnp.maximum(squares, 0), errors, rounding=rounding(longest[0] * longest[1]))


def rounding(lengths: Any) -> Any:
    """Rounding in sums of vectors, (n,), from the vectors' lengths (n, ..., t)."""
    size = lengths.reshape(lengths.shape[0], -1).sum(1)
    found = jnp.finfo(size.dtype).eps / 4 * (1 + math.sqrt(lengths.shape[-1])) * size
    return jnp.where(jnp.isfinite(found), found, 0)


def beside(parts: Estimate) -> Estimate:
    """Estimates of parts side by side, (p, n), as one of the whole."""
    added = lambda part: None if part is None else part.sum(0)  # noqa: E731
    return Estimate(added(parts.sq_norms), added(parts.errors), rounding=added(parts.rounding))
