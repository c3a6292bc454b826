# SPDX-License-Identifier: Apache-2.0
"""Weights in products: the gradient is the sum over t of acts (n, b, t, i) x grads (n, b, t, o).

Dot products and (through their patches) convolutions share this form and the choice between its
two exact norms.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from dualdp import costs

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


def sq_norms(acts: Any, grads_out: Any) -> Any:
    """Squared norms of the gradients, (n,), by the cheapest exact way.

    The Gram form cancels where positions do; its rounding error is bounded, and a batch in which
    the bound is too large for one example is done by the gradients themselves.

    Source: Li et al. 2022, eq. 3; for t = 1 Goodfellow 2015.
    """
    acts, grads_out = widen(acts), widen(grads_out)
    t, d_in, d_out = acts.shape[2], acts.shape[3], grads_out.shape[3]
    if t == 1:
        tiny = jnp.finfo(acts.dtype).tiny
        rows = [jnp.square(x).sum((2, 3)) + x.shape[3] * tiny for x in (acts, grads_out)]
        return (rows[0] * rows[1]).sum(1)
    if not costs.prefers_gram(t=t, d_in=d_in, d_out=d_out):
        return _formed(acts, grads_out)
    norms, is_safe = _gram(acts, grads_out)
    return jax.lax.cond(
        is_safe.all(), lambda *_: norms, lambda *args: _formed(*args), acts, grads_out
    )


def _formed(acts: Any, grads_out: Any) -> Any:
    """Squared norms through the gradients, (n,)."""
    return jnp.square(outer(acts, grads_out)).sum((1, 2, 3))


def _gram(acts: Any, grads_out: Any) -> tuple[Any, Any]:
    """Squared norms by the Gram form, and whether its rounding error is negligible, (n,)."""
    gram = lambda x: jnp.einsum("nbti,nbsi->nbts", x, x, precision=HIGHEST)  # noqa: E731
    norms = (gram(acts) * gram(grads_out)).sum((1, 2, 3))
    lengths = [jnp.sqrt(jnp.square(x).sum(3)) for x in (acts, grads_out)]
    size = (lengths[0] * lengths[1]).sum(2)
    return norms, gram_is_safe(norms, size)


def gram_is_safe(norms: Any, size: Any) -> Any:
    """Whether the rounding error of a Gram form is negligible, (n,).

    The form adds t * t products of inner products, of size at most (sum of |act| |grad|) ** 2.

    Args:
        norms: (n,) squared norms that it gave.
        size: (n, b) sum over t of |act| |grad|.
    """
    bound = 4 * jnp.finfo(norms.dtype).eps * jnp.square(size).sum(1)
    return (bound <= 1e-4 * norms) | ~jnp.isfinite(bound)
