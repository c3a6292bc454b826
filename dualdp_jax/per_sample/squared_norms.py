# SPDX-License-Identifier: Apache-2.0
"""Norms as exact as clipping needs: estimates, or formed gradients where these fail.

The error of an estimate is compared with the number that the clip factor is computed from in the
parameter's clipping group: the norm, or the bound if that is larger. An estimate whose error is too
large, or that overflows or is nan, is replaced by the norm of that one example's gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dualdp.plan.clipping import margin_of
from dualdp_jax.rules.arrays import widen
from dualdp_jax.rules.estimate import Estimate, stable_norm

PyTree = Any
Array = jax.Array
#: Norms that clip nothing are exact to half the margin times the larger of norm and this.
RESOLUTION = 1e-9


class Accuracy(NamedTuple):
    """Error that is allowed for the norms of a call."""

    groups: Sequence[str]  # per leaf the clipping group whose factor its norm enters
    #: scalars, per leaf the group norm below which the allowed error is constant.
    floors: Sequence[float | Array]
    margin: float  # twice the allowed relative error of a norm


def margin_for(trained: Sequence[Array]) -> float:
    """Return the margin of clipped sums of these leaves: that of the least precise one."""
    return max((margin_of(widen(leaf).dtype) for leaf in trained), default=0.0)


def reported(trained: Sequence[Array], groups: Sequence[str]) -> Accuracy:
    """Return the accuracy of norms that clip nothing."""
    return Accuracy(groups, [RESOLUTION] * len(trained), margin_for(trained))


def total(parts: Sequence[Array]) -> Array:
    """Return the sum of arrays, in the widest of their dtypes."""
    dtype = jnp.result_type(jnp.float32, *parts)
    found = [part.astype(dtype) for part in parts]
    return sum(found[1:], found[0])


def accurate(
    estimates: Sequence[Estimate], accuracy: Accuracy, mask: Array | None = None
) -> list[Estimate]:
    """Return the norms of the leaves within the allowed error.

    `mask` (n,) is False for examples whose norms need not be exact.
    """
    found, fine = list(estimates), within_error(estimates, accuracy, mask)
    known = [(estimates[i], is_fine) for i, is_fine in fine.items()]
    for i, sq_norms in zip(fine, _by_forming(known) if fine else (), strict=True):
        found[i] = estimates[i]._replace(sq_norms=sq_norms)
    return found


def within_error(
    estimates: Sequence[Estimate], accuracy: Accuracy, mask: Array | None
) -> dict[int, Array]:
    """Mapping from leaf to (n,) bool, True if its estimate is within the allowed error.

    The errors of a group are allowed if they are within the margin together; otherwise those
    estimates fail whose error is more than an equal share.
    """
    errors = {i: e.errors for i, e in enumerate(estimates) if e.errors is not None}
    fine = {}
    for group in dict.fromkeys(accuracy.groups[i] for i in errors):
        members = [i for i, own in enumerate(accuracy.groups) if own == group]
        some = [i for i in members if i in errors]
        sq_norm = total([_finite(estimates[i].sq_norms) for i in members])
        error = total([_finite(errors[i]) for i in some])
        floor = jnp.asarray(accuracy.floors[some[0]], sq_norm.dtype)
        allowed = jnp.maximum(accuracy.margin * sq_norm, jnp.square(accuracy.margin / 2 * floor))
        for i in some:
            known = jnp.isfinite(estimates[i].sq_norms) & jnp.isfinite(errors[i])
            fine[i] = known & ((error <= allowed) | (errors[i] * len(some) <= allowed))
    return fine if mask is None else {i: good | ~mask for i, good in fine.items()}


def _finite(values: Array) -> Array:
    """Values with 0 in the place of nan and inf."""
    return jnp.where(jnp.isfinite(values), values, 0)


def _by_forming(known: Sequence[tuple[Estimate, Array]]) -> list[Array]:
    """Squared norms (n,) of (estimate, is fine) of each leaf, from the formed gradients.

    Gradients are formed one example at a time, for those of which one estimate is not fine, and of
    all these leaves: few branches are quick to compile.
    """
    sources, fine = zip(*known, strict=True)
    estimates = [source.sq_norms for source in sources]
    is_fine = jnp.stack(fine).all(0)  # (n,)

    def form(source: Estimate, sq_norm: Array, arrays: PyTree) -> Array:
        assert source.formed is not None
        grads = source.formed(jax.tree.map(lambda x: x[None], arrays))
        return jnp.square(stable_norm(grads)[0]).astype(sq_norm.dtype)

    def one(example: tuple[list[Array], Array, list[PyTree]]) -> list[Array]:
        old, fine, arrays = example
        return jax.lax.cond(fine, lambda: old, lambda: list(map(form, sources, old, arrays)))

    examples = estimates, is_fine, [source.arrays for source in sources]
    return list(jax.lax.cond(is_fine.all(), lambda: estimates, lambda: jax.lax.map(one, examples)))
