# SPDX-License-Identifier: Apache-2.0
"""Per-sample gradients of some rows: formed, or captured uses that give their norms and sums."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dualdp_jax import compat
from dualdp_jax.per_sample import tied
from dualdp_jax.per_sample.call import Array, Call, PyTree, Row
from dualdp_jax.per_sample.clip import Clip
from dualdp_jax.per_sample.program import CapturedUse
from dualdp_jax.per_sample.squared_norms import Accuracy, accurate
from dualdp_jax.rules.arrays import weighted_sum, widen
from dualdp_jax.rules.base import form_of
from dualdp_jax.rules.estimate import Estimate, of_gradients


def keeps(method: str, use: CapturedUse) -> bool:
    """Return True if a method keeps the per-sample gradients of a use; "auto" goes by cost."""
    if method != "auto":
        return method == "materialize"
    return form_of("kept" if use.choice.keeps else "dropped", "kept", "dropped") == "kept"


class Gradients(NamedTuple):
    """Per-sample gradients of some rows.

    Attributes:
        trained: trained leaves.
        losses: (n,) losses.
        aux: pytree of (n, ...), stacked over the examples, or None.
        kept: mapping from leaf index to per-sample gradients (n, *shape).
        uses: mapping from leaf index to its uses, if its gradients are not formed.
        captured: all uses.
    """

    trained: list[Array]
    losses: Array
    aux: PyTree
    kept: dict[int, Array]
    uses: dict[int, list[CapturedUse]] = {}
    captured: Sequence[CapturedUse] = ()

    def formed(self) -> list[Array]:
        """Return the per-sample gradients in the dtypes of the parameters, all of them kept."""
        return [
            self.kept[i].astype(p.dtype)
            if i in self.kept
            else jnp.zeros((len(self.losses), *p.shape), p.dtype)
            for i, p in enumerate(self.trained)
        ]

    def norms(self, accuracy: Accuracy, mask: Array | None = None) -> list[Estimate]:
        """Return the norms of each leaf, as exact as they have to be."""
        dtype = jnp.result_type(jnp.float32, *self.trained)
        found = [Estimate(jnp.zeros(self.losses.shape, dtype)) for _ in self.trained]
        for index, grads in self.kept.items():
            found[index] = of_gradients(grads)
        for index, uses in self.uses.items():
            estimate = tied.norms(uses) if len(uses) > 1 else uses[0].estimate()
            found[index] = estimate._replace(
                arrays=[use[1:] for use in uses], formed=partial(self._gradient, index)
            )
        return accurate(found, accuracy, mask)

    def _gradient(self, index: int, arrays: Sequence[PyTree]) -> Array:
        """Gradient of a leaf from such arrays of its uses."""
        uses = [
            CapturedUse(use.use, *own) for use, own in zip(self.uses[index], arrays, strict=True)
        ]
        return _gradients(self.trained, uses, {})[index]

    def weighted_sum(self, index: int, factors: Array) -> Array:
        """Return the sum (*shape) of a leaf's gradients, each times its factor (n,)."""
        if index in self.kept:
            return weighted_sum(factors, self.kept[index])
        total = jnp.zeros(self.trained[index].shape, widen(self.trained[index]).dtype)
        for use in self.uses.get(index, ()):
            total = total + use.use.pull(self.trained, use.weighted_sum(factors))[index]
        return total


def differentiated(each: compat.Map, call: Call, rows: Row) -> Gradients:
    """Differentiate each example's loss; `each` extends this to all examples."""

    def one(row: Row) -> tuple[list[Array], Array, PyTree]:
        plain = jax.value_and_grad(call.loss, has_aux=True)
        (value, aux), grads = plain(call.parameters.trained, row)
        return grads, value, aux

    grads, losses, aux = each(one)(rows)
    return Gradients(call.parameters.trained, losses, aux, dict(enumerate(grads)))


def captured(method: str, call: Call, rows: Row) -> Gradients:
    """Capture the uses of a batch, and form the per-sample gradients that have to be formed.

    These belong to parameters with several uses (their gradients add up before the norm is taken)
    unless pairs of positions are cheaper, to weights computed from parameters by more than a
    rearrangement, and to uses that the method keeps.
    """
    losses, aux, every, kept = call.program.capture(call.parameters.trained, call.shared, rows)
    users: dict[int, list[CapturedUse]] = {}
    for use in every:
        for index in use.use.sources:
            users.setdefault(index, []).append(use)
    uses = {i: own for i, own in users.items() if i not in kept and _are_spared(method, own)}
    spared = {id(use) for own in uses.values() for use in own}
    formed = [use for use in every if id(use) not in spared]
    total = _gradients(call.parameters.trained, formed, kept)
    return Gradients(call.parameters.trained, losses, aux, total, uses, every)


def _are_spared(method: str, uses: Sequence[CapturedUse]) -> bool:
    """True if the norm and the sum of a parameter with these uses need no formed gradient."""
    is_plain = all(use.use.is_rearrangement for use in uses)
    is_plain = is_plain and not any(keeps(method, use) for use in uses)
    return is_plain and (len(uses) == 1 or tied.prefers_pairs(uses))


def _gradients(
    trained: list[Array], uses: Sequence[CapturedUse], others: dict[int, Array]
) -> dict[int, Array]:
    """Wide per-sample gradients (n, *shape) by parameter index, of the uses and the others."""
    total = {index: widen(grads) for index, grads in others.items()}
    for use in uses:
        for index, part in jax.vmap(partial(use.use.pull, trained))(use.grads()).items():
            total[index] = total[index] + widen(part) if index in total else widen(part)
    return total


def second_pass(call: Call, rows: Row, clip: Clip, factors: dict[str, Array]) -> list[Array]:
    """Return clipped sums from a backward pass of the factor-weighted losses, one for each group.

    Rows with factor 0 are replaced by a row with a nonzero factor, so that their values, perhaps
    nan, do not enter the second pass.

    Source: Lee & Kifer 2021, algorithm 2; Li et al. 2022, section 4.
    """
    each = call.program.mapping((rows, call.parameters.trained))
    sums: dict[int, Array] = {}
    for group, factor in factors.items():
        members = [i for i, own in enumerate(clip.groups) if own == group]
        sums |= zip(members, reweighted(call, rows, factor, members, each), strict=True)
    return [sums[i] for i in range(len(sums))]


def check_second_pass(call: Call, rows: Row) -> None:
    """Refuse a loss whose gradient need not scale with the loss.

    In low precision the scaled loss rounds differently; a custom backward need not be linear.
    """
    trained, shapes = call.parameters.trained, jax.tree.map(compat.type_of_row, rows)
    advice, forward = "Use method='book_keeping'.", call.program.jaxpr
    if any(map(compat.has_own_backward, forward.eqns)):
        raise ValueError(
            "method='two_pass' multiplies the loss by the clip factor, and a custom_vjp in it may "
            f"not hand that factor on, so that contributions would exceed the bound. {advice}"
        )
    backward, _ = compat.trace(jax.grad(call.loss, has_aux=True), trained, shapes)
    low = compat.low_precision_dtypes(compat.open_jaxpr(backward)[0])
    low |= compat.low_precision_dtypes(forward)
    if low:
        raise ValueError(
            f"method='two_pass' would sum gradients in {', '.join(sorted(low))}, "
            f"which the loss computes in, and exceed the bound by its rounding. {advice}"
        )


def reweighted(
    call: Call, rows: Row, factor: Array, members: list[int], each: compat.Map
) -> list[Array]:
    """Gradient of the sum of factor (n,) times loss, for the parameters in `members`."""
    counts = factor != 0
    index = jnp.where(counts, jnp.arange(factor.shape[0]), jnp.argmax(counts))
    rows = jax.tree.map(lambda leaf: leaf[index], rows)
    trained = call.parameters.trained

    def total(parts: list[Array]) -> Array:
        values = list(trained)
        for member, part in zip(members, parts, strict=True):
            values[member] = part
        losses = each(lambda row: call.loss(values, row)[0])(rows)
        return jnp.sum(widen(losses) * factor.astype(widen(losses).dtype))

    grads = jax.grad(total)([trained[member] for member in members])
    any_counts = counts.any()
    return [jnp.where(any_counts, widen(grad), 0) for grad in grads]
