# SPDX-License-Identifier: Apache-2.0
"""Norms and clipped sums from what the capture holds: book-keeping, two passes, materialising."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dualdp_jax import compat, tied
from dualdp_jax.bounds import Clip, Clipped
from dualdp_jax.call import Call, Row
from dualdp_jax.capture import Capture, capture, mapping
from dualdp_jax.interpret import Use
from dualdp_jax.norms import Accuracy, Settled, Source, settled
from dualdp_jax.rules import Choice
from dualdp_jax.rules.estimate import Estimate, of_gradients
from dualdp_jax.rules.product import weighted_sum, widen

Keeps = Callable[[Use, Any, Any], bool]


class Found(NamedTuple):
    """A capture, sorted.

    Attributes:
        capture: what the pass left behind.
        ghosts: parameter index to the numbers of its uses, whose gradients are never formed.
        kept: parameter index to per-sample gradients, (n, *shape).
    """

    capture: Capture
    ghosts: dict[int, list[int]]
    kept: dict[int, Any]


def find(call: Call, rows: Row, keeps: Keeps) -> Found:
    """Capture a batch, and form the per-sample gradients that have to be formed.

    These are: of parameters with several uses (their gradients add up before the norm is taken),
    unless pairs of positions are cheaper; of weights that are computed from parameters by more than
    a rearrangement, and of uses that `keeps` names.
    """
    taken = capture(call, rows)
    ghosts = {
        index: numbers
        for index, numbers in users(taken).items()
        if not any(keeps(*part) for part in _parts(taken, numbers))
    }
    spared = {number for numbers in ghosts.values() for number in numbers}
    formed = [number for number in range(len(taken.uses)) if number not in spared]
    kept = {index: widen(grads) for index, grads in taken.kept.items()}
    for index, part in _formed(call, _parts(taken, formed)).items():
        kept[index] = kept[index] + part if index in kept else part
    return Found(taken, ghosts, kept)


def users(taken: Capture) -> dict[int, list[int]]:
    """Parameter index to its uses, where its gradient need not be formed for a norm and a sum."""
    numbers: dict[int, list[int]] = {}
    for number, use in enumerate(taken.uses):
        for index in use.sources:
            numbers.setdefault(index, []).append(number)
    return {
        index: found
        for index, found in numbers.items()
        if index not in taken.kept
        and all(taken.uses[number].is_rearrangement for number in found)
        and (len(found) == 1 or tied.prefers_pairs(_parts(taken, found)))
    }


def _parts(taken: Capture, numbers: list[int]) -> list[tied.Part]:
    """Some uses, with their operands and cotangents."""
    return [(taken.uses[i], taken.operands[i], taken.cotangents[i]) for i in numbers]


def _formed(call: Call, parts: list[tied.Part]) -> dict[int, Any]:
    """Per-sample gradients of the parameters behind some uses, summed over the uses, wide."""
    total: dict[int, Any] = {}
    for use, operands, cotangents in parts:
        grads = use.rule.grads(use.spec, operands, cotangents)
        for index, part in jax.vmap(partial(use.pull, call.parameters.trained))(grads).items():
            total[index] = total[index] + widen(part) if index in total else widen(part)
    return total


def _norms_of(call: Call, found: Found, accuracy: Accuracy, mask: Any = None) -> Settled:
    """Norms per trained leaf."""
    zeros = jnp.zeros(found.capture.losses.shape, call.parameters.dtype)

    def one(index: int) -> Source:
        if index in found.kept:
            return Source(of_gradients(found.kept[index]))
        if index not in found.ghosts:
            return Source(Estimate(zeros))
        parts = _parts(found.capture, found.ghosts[index])
        uses, arrays = [use for use, *_ in parts], [part[1:] for part in parts]
        form = lambda arrays: _formed(  # noqa: E731
            call, [(use, *a) for use, a in zip(uses, arrays, strict=True)]
        )[index]
        estimate = tied.norms(parts) if len(parts) > 1 else _estimate(*parts[0])
        return Source(estimate, arrays, form)

    return settled([one(i) for i in range(len(call.parameters.trained))], accuracy, mask)


def _estimate(use: Use, operands: Any, cotangents: Any) -> Estimate:
    """Norms of the gradients of one use."""
    if use.rule.norms is None:
        return of_gradients(use.rule.grads(use.spec, operands, cotangents))
    found = use.rule.norms(use.spec, operands, cotangents)
    return found if isinstance(found, Estimate) else Estimate(jnp.square(found))


def _sum_of(call: Call, found: Found, index: int, factors: Any) -> Any:
    """Weighted sum of the per-sample gradients of one leaf."""
    like = call.parameters.trained[index]
    if index in found.kept:
        return weighted_sum(factors, found.kept[index])
    total: Any = 0.0
    for use, operands, cotangents in _parts(found.capture, found.ghosts.get(index, [])):
        if use.rule.weighted_sum is None:
            part = weighted_sum(factors, use.rule.grads(use.spec, operands, cotangents))
        else:
            part = use.rule.weighted_sum(use.spec, operands, cotangents, factors)
        total = total + use.pull(call.parameters.trained, part)[index]
    return total if index in found.ghosts else jnp.zeros(like.shape, widen(like).dtype)


def grads(call: Call, rows: Row) -> Any:
    """Per-sample gradients, losses, aux."""
    found = find(call, rows, lambda *_: True)
    zeros = lambda p: jnp.zeros((found.capture.losses.shape[0], *p.shape), p.dtype)  # noqa: E731
    trained = enumerate(call.parameters.trained)
    out = [found.kept[i].astype(p.dtype) if i in found.kept else zeros(p) for i, p in trained]
    return out, found.capture.losses, found.capture.aux


def sq_norms(keeps: Keeps, call: Call, rows: Row, accuracy: Accuracy) -> Any:
    """Squared norms per leaf, losses, aux."""
    found = find(call, rows, keeps)
    return _norms_of(call, found, accuracy).sq_norms, found.capture.losses, found.capture.aux


def clipped(keeps: Keeps, call: Call, rows: Row, mask: Any, clip: Clip) -> Clipped:
    """Clipped sums by one forward, one backward, and one product per use."""
    found = find(call, rows, keeps)
    norms, factors = clip(_norms_of(call, found, clip.accuracy, mask), mask)
    sums = [_sum_of(call, found, i, factors[group]) for i, group in enumerate(clip.groups)]
    return Clipped(sums, norms, factors, found.capture.losses, found.capture.aux)


def reweighted(call: Call, rows: Row, mask: Any, clip: Clip) -> Clipped:
    """The same in two passes: norms, then one backward of the losses times their factors.

    Rows that are dropped are replaced by one that counts, so that their numbers, perhaps nan, do
    not enter the second pass. Groups with factors of their own take a backward each.

    Raises:
        ValueError: the second pass would not give what the norms were taken of.

    Source: Lee & Kifer 2021, algorithm 2; Li et al. 2022, section 4.
    """
    _check_second_pass(call, rows)
    found = find(call, rows, never)
    norms, factors = clip(_norms_of(call, found, clip.accuracy, mask), mask)
    each = mapping(lambda: found.capture.convolves, (rows, call.parameters.trained))
    sums: dict[int, Any] = {}
    for group, factor in factors.items():
        members = [i for i, own in enumerate(clip.groups) if own == group]
        sums |= _second_pass(call, rows, factor, members, each)
    in_order = [sums[index] for index in range(len(sums))]
    return Clipped(in_order, norms, factors, found.capture.losses, found.capture.aux)


def _check_second_pass(call: Call, rows: Row) -> None:
    """Refuse a loss whose gradients are not multiplied by a factor when the loss is.

    In low precision they round otherwise; a custom backward may do with a cotangent what it likes.
    """
    trained, shapes = call.parameters.trained, jax.tree.map(compat.type_of_row, rows)
    advice, forward = "Use method='book_keeping'.", call.program.jaxpr
    if any(map(compat.has_own_backward, forward.eqns)):
        raise ValueError(
            "method='two_pass' multiplies the loss by the clip factor, and a custom_vjp in it may "
            f"not hand that factor on, so that contributions would exceed the bound. {advice}"
        )
    backward, _ = compat.trace(jax.grad(lambda *args: call.loss(*args)[0]), trained, shapes)
    low = compat.low_precision_dtypes(compat.open_jaxpr(backward)[0])
    low |= compat.low_precision_dtypes(forward)
    if low:
        raise ValueError(
            f"method='two_pass' would sum gradients in {', '.join(sorted(low))}, "
            f"which the loss computes in, and exceed the bound by its rounding. {advice}"
        )


def _second_pass(
    call: Call, rows: Row, factor: Any, members: list[int], each: Callable[..., Any]
) -> dict[int, Any]:
    """Gradient of the sum of factor times loss, for some of the parameters."""
    counts = factor != 0
    index = jnp.where(counts, jnp.arange(factor.shape[0]), jnp.argmax(counts))
    rows = jax.tree.map(lambda leaf: leaf[index], rows)
    trained = call.parameters.trained

    def total(parts: list[Any]) -> Any:
        values = list(trained)
        for member, part in zip(members, parts, strict=True):
            values[member] = part
        losses = each(lambda row: call.loss(values, row)[0])(rows)
        return jnp.sum(widen(losses) * factor.astype(widen(losses).dtype))

    grads = jax.grad(total)([trained[member] for member in members])
    any_counts = counts.any()
    return {
        member: jnp.where(any_counts, widen(grad), 0)
        for member, grad in zip(members, grads, strict=True)
    }


def footprint(keeps: Keeps, call: Call) -> int:
    """Bytes of operands, cotangents and kept gradients of one example."""
    row = jax.eval_shape(lambda rows: jax.tree.map(lambda leaf: leaf[:1], rows), call.rows)

    def held(row: Row) -> Any:
        found = find(call, row, keeps)
        return found.capture.operands, found.capture.cotangents, found.kept

    return num_bytes(jax.eval_shape(held, row))


def num_bytes(tree: Any) -> int:
    """Size of all arrays of a pytree."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def keeps_by_cost(use: Use, operands: Any, cotangents: Any) -> bool:
    """Whether to keep the per-sample gradients of a use, by the cost model."""
    return choice(use, operands, cotangents).keeps


def choice(use: Use, operands: Any, cotangents: Any) -> Choice:
    """What the cost model says about a use."""
    if use.rule.choice is None:
        return Choice()
    return use.rule.choice(use.spec, operands, cotangents)


def never(use: Use, operands: Any, cotangents: Any) -> bool:
    """Keep no per-sample gradient that can be avoided."""
    return False


def always(use: Use, operands: Any, cotangents: Any) -> bool:
    """Form and keep every per-sample gradient."""
    return True
