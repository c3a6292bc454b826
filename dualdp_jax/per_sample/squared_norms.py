# SPDX-License-Identifier: Apache-2.0
"""Norms as exact as clipping needs: estimates, or formed gradients where these fail.

The error of an estimate is compared with the number that the clip factor is computed from in the
parameter's clipping group: the norm, or the bound if that is larger. An estimate whose error is too
large, or that overflows or is nan, is replaced by the norm of that one example's gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dualdp.plan.clipping import margin_of
from dualdp_jax.rules.arrays import widen
from dualdp_jax.rules.estimate import Estimate, stable_norm

#: Norms that clip nothing are exact to half the margin times the larger of norm and this.
RESOLUTION = 1e-9
Formed = Callable[[Any], Any]  # arrays (1, ...) of one example to its gradient (1, *shape)


class Accuracy(NamedTuple):
    """Error that is allowed for the norms of a call."""

    groups: Sequence[str]  # per leaf the clipping group whose factor its norm enters
    #: scalars, per leaf the group norm below which the allowed error is constant.
    floors: Sequence[Any]
    margin: float  # twice the allowed relative error of a norm


class LeafNorms(NamedTuple):
    """Estimate of the norms of one leaf, and the means to compute them exactly."""

    estimate: Estimate  # `Estimate` of its norms
    arrays: Any = None  # pytree of (n, ...), inputs of `formed`
    #: callable from one example of `arrays` to its gradient; may be None if the estimate has no
    #: errors, or has `again`.
    formed: Formed | None = None


class AccurateNorms(NamedTuple):
    """Norms within the allowed error."""

    sq_norms: list[Any]  # (n,) per leaf
    rounding: list[Any]  # (n,) per leaf or None; see `Estimate`


def margin_for(trained: Sequence[Any]) -> float:
    """Return the margin of clipped sums of these leaves: that of the least precise one."""
    return max((margin_of(widen(leaf).dtype) for leaf in trained), default=0.0)


def reported(trained: Sequence[Any], groups: Sequence[str]) -> Accuracy:
    """Return the accuracy of norms that clip nothing."""
    return Accuracy(groups, [RESOLUTION] * len(trained), margin_for(trained))


def total(parts: Sequence[Any]) -> Any:
    """Return the sum of arrays, in the widest of their dtypes."""
    dtype = jnp.result_type(jnp.float32, *parts)
    found = [part.astype(dtype) for part in parts]
    return sum(found[1:], found[0])


def accurate(sources: Sequence[LeafNorms], accuracy: Accuracy, mask: Any = None) -> AccurateNorms:
    """Return the squared norms of the leaves within the allowed error.

    `mask` (n,) is False for examples whose norms need not be exact.
    """
    estimates = [source.estimate for source in sources]
    found = [estimate.sq_norms for estimate in estimates]
    fine = _fine(estimates, accuracy, mask)
    agains = {i: again for i in fine if (again := estimates[i].again) is not None}
    if agains:
        again = jax.lax.cond(
            jnp.stack([fine[i].all() for i in agains]).all(),
            lambda: [found[i] for i in agains],
            lambda: [function() for function in agains.values()],
        )
        for i, sq_norms in zip(agains, again, strict=True):
            found[i] = sq_norms
    formed = [i for i in fine if i not in agains]
    if formed:
        known = [(sources[i], found[i], fine[i]) for i in formed]
        for i, sq_norms in zip(formed, _by_forming(known), strict=True):
            found[i] = sq_norms
    return AccurateNorms(found, [estimate.rounding for estimate in estimates])


def _fine(estimates: Sequence[Estimate], accuracy: Accuracy, mask: Any) -> dict[int, Any]:
    """Mapping from leaf to (n,) bool, True if its estimate is within the allowed error.

    The errors of a group are allowed if they are within the margin together; otherwise those
    estimates fail whose error is more than an equal share.
    """
    known = {
        i: jnp.isfinite(e.sq_norms) & jnp.isfinite(e.errors)
        for i, e in enumerate(estimates)
        if e.errors is not None
    }
    fine = dict(known)
    for group in dict.fromkeys(accuracy.groups[i] for i in known):
        members = [i for i, own in enumerate(accuracy.groups) if own == group]
        some = [i for i in members if i in known]
        finite = lambda x: jnp.where(jnp.isfinite(x), x, 0)  # noqa: E731
        sq_norm = total([finite(estimates[i].sq_norms) for i in members])
        error = total([finite(estimates[i].errors) for i in some])
        floor = jnp.asarray(accuracy.floors[some[0]], sq_norm.dtype)
        allowed = jnp.maximum(accuracy.margin * sq_norm, jnp.square(accuracy.margin / 2 * floor))
        for i in some:
            small = estimates[i].errors * len(some) <= allowed
            fine[i] = known[i] & ((error <= allowed) | small)
    return fine if mask is None else {i: good | ~mask for i, good in fine.items()}


def _by_forming(known: Sequence[tuple[LeafNorms, Any, Any]]) -> list[Any]:
    """Squared norms (n,) of (source, estimate, is fine) of each leaf, from the formed gradients.

    Gradients are formed one example at a time, for those of which one estimate is not fine, and of
    all these leaves: few branches are quick to compile.
    """
    sources, estimates, fine = map(list, zip(*known, strict=True))
    is_fine = jnp.stack(fine).all(0)  # (n,)

    def form(arrays: list[Any]) -> list[Any]:
        lifted = jax.tree.map(lambda x: x[None], arrays)
        grads = [source.formed(part) for source, part in zip(sources, lifted, strict=True)]
        return [jnp.square(stable_norm(grad)[0]) for grad in grads]

    def one(example: Any) -> list[Any]:
        old, fine, arrays = example
        dtypes = [sq_norm.dtype for sq_norm in old]
        new = lambda: [sq.astype(d) for sq, d in zip(form(arrays), dtypes, strict=True)]  # noqa: E731
        return jax.lax.cond(fine, lambda: old, new)

    arrays = [source.arrays for source in sources]
    again = lambda: jax.lax.map(one, (estimates, is_fine, arrays))  # noqa: E731
    return list(jax.lax.cond(is_fine.all(), lambda: estimates, again))
