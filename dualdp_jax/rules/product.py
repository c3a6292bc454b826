# SPDX-License-Identifier: Apache-2.0
"""Weights in products: the gradient is the sum over t of acts (n, b, t, i) x grads (n, b, t, o)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

HIGHEST = jax.lax.Precision.HIGHEST


def widen(array: Any) -> Any:
    """In float32, or float64 where it is already."""
    return array.astype(jnp.result_type(jnp.float32, array))


def beside(values: Any, array: Any) -> Any:
    """(n,) to (n, 1, ..., 1), to broadcast against (n, ...)."""
    return values.reshape(values.shape + (1,) * (array.ndim - 1))


def drop(factors: Any, *arrays: Any) -> list[Any]:
    """The arrays (n, ...) in wide precision, with the examples of factor 0 set to zero."""
    return [jnp.where(beside(factors != 0, array), widen(array), 0) for array in arrays]


def sq_norm(grads: Any) -> Any:
    """(n, *shape) to the squared norm of each example, (n,)."""
    return jnp.square(widen(grads)).sum(range(1, grads.ndim))


def weighted_sum(factors: Any, grads: Any) -> Any:
    """(n,), (n, *shape) to the sum of factor times gradient, wide; factor 0 drops nan and inf."""
    (kept,) = drop(factors, grads)
    return jnp.einsum("n,n...->...", factors.astype(kept.dtype), kept, precision=HIGHEST)


def scaled(factors: Any, grads: Any) -> Any:
    """(n,) times (n, ...), wide; an example of factor 0 gives zeros even if its numbers are nan."""
    (kept,) = drop(factors, grads)
    return beside(factors.astype(kept.dtype), kept) * kept


def outer(acts: Any, grads_out: Any) -> Any:
    """(n, b, t, i), (n, b, t, o) to per-sample gradients (n, b, i, o), wide."""
    return jnp.einsum("nbti,nbto->nbio", widen(acts), widen(grads_out), precision=HIGHEST)


def weighted_outer(acts: Any, grads_out: Any, factors: Any) -> Any:
    """Sum over the examples of factor times gradient, (b, i, o): one product."""
    (acts,) = drop(factors, acts)
    return jnp.einsum("nbti,nbto->bio", acts, scaled(factors, grads_out), precision=HIGHEST)
