# SPDX-License-Identifier: Apache-2.0
"""Norms and clipped sums from a capture: book-keeping, two passes, materialized gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dualdp_jax import compat
from dualdp_jax.per_sample import tied
from dualdp_jax.per_sample.call import Answer, Call, Row
from dualdp_jax.per_sample.capture import Capture, CapturedUse, capture
from dualdp_jax.per_sample.clip import Clip
from dualdp_jax.per_sample.squared_norms import Accuracy, AccurateNorms, LeafNorms, accurate
from dualdp_jax.rules.arrays import weighted_sum, widen
from dualdp_jax.rules.base import form_of
from dualdp_jax.rules.estimate import Estimate, of_gradients

Keeps = Callable[[CapturedUse], bool]  # True if the per-sample gradients of a use are kept


def by_cost(use: CapturedUse) -> bool:
    """Return the cost model's decision whether to keep the gradients of a use."""
    return form_of("kept" if use.choice.keeps else "dropped", "kept", "dropped") == "kept"


def never(_: CapturedUse) -> bool:
    """False: form only the per-sample gradients that cannot be avoided."""
    return False


def always(_: CapturedUse) -> bool:
    """True: form and keep every per-sample gradient."""
    return True


class FormedCapture(NamedTuple):
    """Capture with those per-sample gradients that have to be formed."""

    capture: Capture  # `Capture` of the batch
    #: mapping from parameter index to its uses, if its gradients are not formed.
    unformed: dict[int, list[CapturedUse]]
    kept: dict[int, Any]  # mapping from parameter index to per-sample gradients (n, *shape)


def form(call: Call, rows: Row, keeps: Keeps) -> FormedCapture:
    """Capture a batch, and form the per-sample gradients that have to be formed.

    These belong to parameters with several uses (their gradients add up before the norm is taken)
    unless pairs of positions are cheaper, to weights computed from parameters by more than a
    rearrangement, and to uses for which `keeps` is True.
    """
    taken = capture(call, rows)
    unformed, spared = {}, set()
    for index, numbers in unformed_uses(taken.uses, taken.kept).items():
        uses = [taken.uses[number] for number in numbers]
        if not any(map(keeps, uses)):
            unformed[index] = uses
            spared.update(numbers)
    kept = {index: widen(grads) for index, grads in taken.kept.items()}
    formed = [use for number, use in enumerate(taken.uses) if number not in spared]
    for index, part in _gradients(call, formed).items():
        kept[index] = kept[index] + part if index in kept else part
    return FormedCapture(taken, unformed, kept)


def unformed_uses(uses: Sequence[CapturedUse], kept: Iterable[int]) -> dict[int, list[int]]:
    """Return the use numbers of each parameter whose norm and sum need no formed gradient."""
    numbers: dict[int, list[int]] = {}
    for number, (use, *_) in enumerate(uses):
        for index in use.sources:
            numbers.setdefault(index, []).append(number)
    return {
        index: found
        for index, found in numbers.items()
        if index not in kept
        and all(uses[number].use.is_rearrangement for number in found)
        and (len(found) == 1 or tied.prefers_pairs([uses[number] for number in found]))
    }


def _gradients(call: Call, uses: Sequence[CapturedUse]) -> dict[int, Any]:
    """Per-sample gradients (n, *shape) by parameter index, summed over the uses, wide."""
    total: dict[int, Any] = {}
    for use in uses:
        pull = jax.vmap(partial(use.use.pull, call.parameters.trained))
        for index, part in pull(use.grads()).items():
            total[index] = total[index] + widen(part) if index in total else widen(part)
    return total


def _norms_of(
    call: Call, found: FormedCapture, accuracy: Accuracy, mask: Any = None
) -> AccurateNorms:
    """Norms of each leaf, as exact as they have to be."""
    zeros = jnp.zeros(found.capture.losses.shape, call.parameters.dtype)

    def of(index: int) -> LeafNorms:
        if index in found.kept:
            return LeafNorms(of_gradients(found.kept[index]))
        if index not in found.unformed:
            return LeafNorms(Estimate(zeros))
        uses = found.unformed[index]

        def gradient(arrays: Any) -> Any:
            again = map(CapturedUse, [use.use for use in uses], *zip(*arrays, strict=True))
            return _gradients(call, list(again))[index]

        estimate = tied.norms(uses) if len(uses) > 1 else uses[0].estimate()
        return LeafNorms(estimate, [use[1:] for use in uses], gradient)

    return accurate([of(i) for i in range(len(call.parameters.trained))], accuracy, mask)


def _sum_of(call: Call, found: FormedCapture, index: int, factors: Any) -> Any:
    """Weighted sum (*shape) of the per-sample gradients of one leaf."""
    trained = call.parameters.trained
    if index in found.kept:
        return weighted_sum(factors, found.kept[index])
    if index not in found.unformed:
        return jnp.zeros(trained[index].shape, widen(trained[index]).dtype)
    total: Any = 0.0
    for use in found.unformed[index]:
        total = total + use.use.pull(trained, use.weighted_sum(factors))[index]
    return total


def grads(call: Call, rows: Row) -> Any:
    """Per-sample gradients, losses and aux, with every gradient formed."""
    taken, _, kept = form(call, rows, always)
    zeros = lambda p: jnp.zeros((taken.losses.shape[0], *p.shape), p.dtype)  # noqa: E731
    trained = enumerate(call.parameters.trained)
    out = [kept[i].astype(p.dtype) if i in kept else zeros(p) for i, p in trained]
    return out, taken.losses, taken.aux


def sq_norms(keeps: Keeps, call: Call, rows: Row, accuracy: Accuracy) -> Any:
    """Squared norms (n,) per leaf, losses and aux."""
    found = form(call, rows, keeps)
    return _norms_of(call, found, accuracy).sq_norms, found.capture.losses, found.capture.aux


def clipped(
    keeps: Keeps, call: Call, rows: Row, mask: Any, clip: Clip, weights: Any = None
) -> Answer:
    """Clipped sums from one forward pass, one backward pass, and one product per parameter use."""
    found = form(call, rows, keeps)
    norms, factors = clip(_norms_of(call, found, clip.accuracy, mask), mask, weights)
    sums = [_sum_of(call, found, i, factors[group]) for i, group in enumerate(clip.groups)]
    return Answer(sums, norms, factors, found.capture.losses, found.capture.aux)


def reweighted(call: Call, rows: Row, mask: Any, clip: Clip, weights: Any = None) -> Answer:
    """Clipped sums in two passes: norms, then one backward pass of the factor-weighted losses.

    Rows with factor 0 are replaced by a row with a nonzero factor, so that their values, perhaps
    nan, do not enter the second pass. Each clipping group takes its own backward pass.

    Source: Lee & Kifer 2021, algorithm 2; Li et al. 2022, section 4.
    """
    _check_second_pass(call, rows)
    found = form(call, rows, never)
    norms, factors = clip(_norms_of(call, found, clip.accuracy, mask), mask, weights)
    each = compat.mapping(lambda: found.capture.convolves, (rows, call.parameters.trained))
    sums: list[Any] = [None] * len(clip.groups)
    for group, factor in factors.items():
        members = [i for i, own in enumerate(clip.groups) if own == group]
        for i, total in zip(members, _second_pass(call, rows, factor, members, each), strict=True):
            sums[i] = total
    return Answer(sums, norms, factors, found.capture.losses, found.capture.aux)


def _check_second_pass(call: Call, rows: Row) -> None:
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
    backward, _ = compat.trace(jax.grad(call.traced_loss), trained, shapes)
    low = compat.low_precision_dtypes(compat.open_jaxpr(backward)[0])
    low |= compat.low_precision_dtypes(forward)
    if low:
        raise ValueError(
            f"method='two_pass' would sum gradients in {', '.join(sorted(low))}, "
            f"which the loss computes in, and exceed the bound by its rounding. {advice}"
        )


def _second_pass(
    call: Call, rows: Row, factor: Any, members: list[int], each: Callable[..., Any]
) -> list[Any]:
    """Gradient of the sum of factor (n,) times loss, for the parameters in `members`."""
    counts = factor != 0
    index = jnp.where(counts, jnp.arange(factor.shape[0]), jnp.argmax(counts))
    rows = jax.tree.map(lambda leaf: leaf[index], rows)
    trained = call.parameters.trained

    def total(parts: list[Any]) -> Any:
        values = list(trained)
        for member, part in zip(members, parts, strict=True):
            values[member] = part
        losses = each(lambda row: call.traced_loss(values, row))(rows)
        return jnp.sum(widen(losses) * factor.astype(widen(losses).dtype))

    grads = jax.grad(total)([trained[member] for member in members])
    any_counts = counts.any()
    return [jnp.where(any_counts, widen(grad), 0) for grad in grads]


def footprint(keeps: Keeps, call: Call) -> int:
    """Bytes of operands, cotangents and kept gradients of one example."""
    row = jax.eval_shape(lambda rows: jax.tree.map(lambda leaf: leaf[:1], rows), call.rows)

    def held(row: Row) -> Any:
        taken, _, kept = form(call, row, keeps)
        return [use[1:] for use in taken.uses], kept

    return num_bytes(jax.eval_shape(held, row))


def num_bytes(tree: Any) -> int:
    """Return the size in bytes of all arrays of a pytree."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
