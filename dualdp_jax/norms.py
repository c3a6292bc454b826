# SPDX-License-Identifier: Apache-2.0
"""Norms right to within what clipping allows: estimates, and the gradients where they fail.

An estimate's error is compared with the number that the clip factor is made of, of the parameter's
own clipping group: its norm, or the bound where that is larger. What exceeds it, overflows, or is
no number is computed again from the gradients of that one example.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dualdp.clipping import margin_of
from dualdp_jax.rules.estimate import Estimate, stable_norm
from dualdp_jax.rules.product import widen

#: Norms that nobody clips by are right to within half the margin of themselves, or of this.
RESOLUTION = 1e-9
Formed = Callable[[Any], Any]  # arrays (1, ...) of one example to its gradient (1, *shape)


class Accuracy(NamedTuple):
    """What an error of a norm is measured by.

    Attributes:
        groups: of each leaf, the clipping group whose factor its norm enters.
        floors: of each leaf, below which its group's norm moves the factor by nothing; scalars.
        margin: relative error of a norm that a contribution can bear, twice over.
    """

    groups: Sequence[str]
    floors: Sequence[Any]
    margin: float


class Source(NamedTuple):
    """Where the norm of one leaf comes from.

    Attributes:
        estimate: of its norms.
        arrays: pytree of (n, ...), and
        formed: the function from one example of them to its gradient; None for an estimate that
            needs no other way.
    """

    estimate: Estimate
    arrays: Any = None
    formed: Formed | None = None


class Settled(NamedTuple):
    """Norms that will do.

    Attributes:
        sq_norms: (n,) of each leaf.
        rounding: (n,) of each leaf, or None; see `Estimate`.
    """

    sq_norms: list[Any]
    rounding: list[Any]


def margin_for(trained: Sequence[Any]) -> float:
    """The margin of clipped sums of these leaves: that of the least precise one."""
    return max((margin_of(widen(leaf).dtype) for leaf in trained), default=0.0)


def reported(trained: Sequence[Any], groups: Sequence[str]) -> Accuracy:
    """The accuracy of norms that clip nothing."""
    return Accuracy(groups, [RESOLUTION] * len(trained), margin_for(trained))


def total(parts: Sequence[Any]) -> Any:
    """Sum of arrays, in the widest of their dtypes."""
    dtype = jnp.result_type(jnp.float32, *parts)
    found = [part.astype(dtype) for part in parts]
    return sum(found[1:], found[0])


def settled(sources: Sequence[Source], accuracy: Accuracy, mask: Any = None) -> Settled:
    """Squared norms of the leaves within a margin of what the factors are made of.

    Args:
        sources: of each leaf.
        accuracy: of each leaf.
        mask: (n,) examples that count; of the others nothing is computed again.
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
    for i in fine.keys() - agains.keys():
        found[i] = _by_forming(sources[i], found[i], fine[i])
    return Settled(found, [estimate.rounding for estimate in estimates])


def _fine(estimates: Sequence[Estimate], accuracy: Accuracy, mask: Any) -> dict[int, Any]:
    """Leaf -> (n,): whether its estimate will do, of those that have errors.

    A group's estimates will do if their errors together are within the margin; where they are not,
    those whose error is more than an equal share are computed again.
    """
    known = {
        i: jnp.isfinite(e.sq_norms) & jnp.isfinite(e.errors)
        for i, e in enumerate(estimates)
        if e.errors is not None
    }
    fine = dict(known)
    for group in {accuracy.groups[i] for i in known}:
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


def _by_forming(source: Source, sq_norms: Any, fine: Any) -> Any:
    """The norms, of some examples from their gradients: one after the other, in little memory."""
    formed = source.formed
    assert formed is not None

    def form(row: Any) -> Any:
        return jnp.square(stable_norm(formed(row))[0])

    def one(example: Any) -> Any:
        known, is_fine, row = example
        lifted = jax.tree.map(lambda x: x[None], row)
        return jax.lax.cond(is_fine, lambda: known, lambda: form(lifted).astype(known.dtype))

    again = lambda: jax.lax.map(one, (sq_norms, fine, source.arrays))  # noqa: E731
    return jax.lax.cond(fine.all(), lambda: sq_norms, again)
