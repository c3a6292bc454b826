# SPDX-License-Identifier: Apache-2.0
"""Estimates of per-sample gradient norms by short formulas, each with an error bound.

A formula squares numbers and multiplies the squares. Squares below the smallest normal number are
flushed to zero, squares above the largest overflow, and sums of products cancel. Each formula here
bounds these errors from numbers that it has anyway, so that its caller can find the examples whose
gradients have to be formed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dualdp_jax.rules.arrays import sq_norm, widen

Array = jax.Array


class Estimate(NamedTuple):
    """Squared norms with error bounds, and the means to compute them exactly.

    Attributes:
        sq_norms: (n,) squared norms of the gradients, float32 or wider.
        errors: (n,) bound of |squared norm - true one|, nan or inf where unknown; None if the
            squares of the gradients themselves were summed.
        rounding: (n,) estimated norm of the difference between a gradient summed over its positions
            in the order of the clipped sum and in that of the norm; None if both use the same
            numbers.
        arrays: pytree of (n, ...), inputs of `formed`.
        formed: callable, arrays (1, ...) of one example -> its gradient (1, *shape); not needed
            without errors.
    """

    sq_norms: Array
    errors: Array | None = None
    rounding: Array | None = None
    arrays: Any = None
    formed: Callable[[Any], Array] | None = None


def stable_norm(array: Array, start: int = 1) -> Array:
    """Return the norms of (n, ...) over the axes from `start` on, without over- or underflow."""
    array, axes = widen(array), tuple(range(start, array.ndim))
    if not math.prod(array.shape[start:]):
        return jnp.zeros(array.shape[:start], array.dtype)
    largest = jnp.abs(array).max(axes, keepdims=True)
    # Scaled to at most 16: the inverse of the largest float32 would itself be flushed.
    scale = 16 / jnp.maximum(largest, 1e8 * jnp.finfo(array.dtype).tiny)
    scale = jnp.where(jnp.isfinite(largest), scale, 1)
    # Without the barrier XLA may square known factors separately, which overflows.
    scaled = jax.lax.optimization_barrier(array * scale)
    return jnp.sqrt(jnp.square(scaled).sum(axes)) / scale.reshape(array.shape[:start])


def of_gradients(grads: Array, lengths: Array | None = None) -> Estimate:
    """Return the norms of gradients (n, *shape).

    `lengths` (n, ..., t) are the norms of the vectors that the clipped sum adds up instead.
    """
    return Estimate(sq_norm(grads), rounding=None if lengths is None else rounding(lengths))


def of_lengths(left: Array, right: Array) -> Estimate:
    """Return the norms of outer products of rows (n, b, i) and (n, b, o), joined over b.

    One of the two may be so short that its squares are flushed, and the other one long.
    """
    return Estimate(jnp.square(stable_norm(left, 2) * stable_norm(right, 2)).sum(1))


def of_gram(squares: Array, left: Array, right: Array, sizes: tuple[int, int]) -> Estimate:
    """Return norms computed by a Gram form, whose terms cancel where positions do.

    `left` and `right` (n, ..., t) are the squared norms of the two vectors of each outer product,
    and `sizes` their numbers of elements; `squares` (n,) may be negative by rounding. The form adds
    t * t products of inner products, together at most (sum over t of |l| |r|) ** 2.
    """
    kind, t = jnp.finfo(squares.dtype), left.shape[-1]
    pairs = zip((left, right), sizes, strict=True)
    longest = [jnp.sqrt(part + size * kind.tiny) for part, size in pairs]
    both, *alone = (jnp.square(x.sum(-1)) for x in (longest[0] * longest[1], *longest))
    flushed = alone[0] * sizes[1] + alone[1] * sizes[0] + t * t
    errors = (4 * kind.eps * both + kind.tiny * flushed).sum(tuple(range(1, left.ndim - 1)))
    return Estimate(jnp.maximum(squares, 0), errors, rounding=rounding(longest[0] * longest[1]))


def rounding(lengths: Array) -> Array:
    """Return the rounding (n,) in sums of vectors, from the vectors' norms (n, ..., t)."""
    size = lengths.reshape(lengths.shape[0], -1).sum(1)
    found = jnp.finfo(size.dtype).eps / 4 * (1 + math.sqrt(lengths.shape[-1])) * size
    return jnp.where(jnp.isfinite(found), found, 0)
