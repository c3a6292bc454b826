# SPDX-License-Identifier: Apache-2.0
"""Sums over positions t of outer products of acts (n, b, t, i) and grads_out (n, b, t, o)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

Array = jax.Array
HIGHEST = jax.lax.Precision.HIGHEST


def widen(array: Array) -> Array:
    """Convert to float32, or keep float64."""
    return array.astype(jnp.result_type(jnp.float32, array))


def beside(values: Array, array: Array) -> Array:
    """Reshape (n,) to (n, 1, ..., 1), to broadcast against (n, ...)."""
    return values.reshape(values.shape + (1,) * (array.ndim - 1))


def drop(factors: Array, *arrays: Array) -> list[Array]:
    """Return the arrays (n, ...) in wide precision, with the examples of factor 0 set to zero."""
    return [jnp.where(beside(factors != 0, array), widen(array), 0) for array in arrays]


def sq_norm(grads: Array) -> Array:
    """Return the squared norm of each example, (n,), from (n, *shape)."""
    return jnp.square(widen(grads)).sum(range(1, grads.ndim))


def weighted_sum(factors: Array, grads: Array) -> Array:
    """Return the sum of factor (n,) times gradient (n, *shape), wide; factor 0 drops nan, inf."""
    (kept,) = drop(factors, grads)
    return jnp.einsum("n,n...->...", factors.astype(kept.dtype), kept, precision=HIGHEST)


def scaled(factors: Array, grads: Array) -> Array:
    """Return (n,) times (n, ...), wide; an example of factor 0 gives zeros even if it holds nan."""
    (kept,) = drop(factors, grads)
    return beside(factors.astype(kept.dtype), kept) * kept


def outer(acts: Array, grads_out: Array) -> Array:
    """Return per-sample gradients (n, b, i, o) from (n, b, t, i) and (n, b, t, o), wide."""
    return jnp.einsum("nbti,nbto->nbio", widen(acts), widen(grads_out), precision=HIGHEST)


def weighted_outer(acts: Array, grads_out: Array, factors: Array) -> Array:
    """Return the sum over the examples of factor times gradient, (b, i, o), by one product."""
    (acts,) = drop(factors, acts)
    # One axis of all rows (b, n t, .): XLA copies what two axes are contracted over.
    n, b, t, _ = acts.shape
    left, right = (
        jnp.moveaxis(array, 1, 0).reshape(b, n * t, array.shape[3])
        for array in (acts, scaled(factors, grads_out))
    )
    return jnp.einsum("bri,bro->bio", left, right, precision=HIGHEST)
