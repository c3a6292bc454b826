# SPDX-License-Identifier: Apache-2.0
"""What is asked of a call, and its answer: per-sample gradients, norms, or the clipped sum."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dualdp import _validate
from dualdp_jax import compat
from dualdp_jax.bounds import Clip, Clipped, checked_mask
from dualdp_jax.call import Call, Row
from dualdp_jax.methods import choose
from dualdp_jax.norms import reported, total
from dualdp_jax.rules.product import widen

GRADS, NORMS, SUM = "gradients", "norms", "sum"  # what a request may ask for
Work = Callable[[Row, Any], tuple[Any, Any]]  # (rows, mask) to (sums, values per example)


@dataclass(frozen=True)
class Request:
    """One of the three questions.

    Attributes:
        kind: `GRADS`, `NORMS` or `SUM`.
        method: see `methods`.
        clip: how examples are clipped; None but for `SUM`.
        per_parameter: whether norms are those of each leaf.
    """

    kind: str
    method: str
    clip: Clip | None = None
    per_parameter: bool = False


class Answer(NamedTuple):
    """What a request gives.

    Attributes:
        leaves: of each trained leaf the per-sample gradients (n, *shape), their norms (n,), or the
            clipped sum.
        norms: (n,) of the whole gradients; None where gradients were asked for.
        factors: clipping group -> (n,); empty but for a sum.
        losses: (n,), 0 where the mask is False; None but for a sum.
        aux: stacked over the examples, or None.
    """

    leaves: list[Any]
    norms: Any = None
    factors: dict[str, Any] = {}
    losses: Any = None
    aux: Any = None


def answer(request: Request, call: Call, mask: Any, size: int) -> Answer:
    """Answer a request.

    Args:
        request: what is asked.
        call: the examples and their loss, `choices.prepared`.
        mask: (n,) bool, False marks padding; None when there is none.
        size: examples worked on at once.
    """
    if request.kind == SUM:
        return Answer(*_sum(request, call, mask, size))
    if request.kind == NORMS:
        return _norms(request, call, size)
    chosen = choose(request.method)

    def work(rows: Row, mask: Any) -> tuple[Any, Any]:
        grads, _, aux = chosen.grads(call, rows)
        return (), (grads, aux)

    if call.num_examples == 0:
        return Answer([jnp.zeros((0, *p.shape), p.dtype) for p in call.parameters.trained])
    _, (grads, aux) = _in_chunks(work, call.rows, checked_mask(None, call.num_examples), size)
    return Answer(grads, aux=aux)


def _norms(request: Request, call: Call, size: int) -> Answer:
    """Norms of the leaves, and of the whole gradients."""
    trained, names = call.parameters.trained, call.parameters.names
    chosen = choose(request.method)
    accuracy = reported(trained, names if request.per_parameter else [""] * len(trained))

    def work(rows: Row, mask: Any) -> tuple[Any, Any]:
        sq_norms, _, aux = chosen.sq_norms(call, rows, accuracy)
        return (), (sq_norms, aux)

    zeros = jnp.zeros(call.num_examples, call.parameters.dtype)
    if call.num_examples == 0:
        return Answer([zeros for _ in trained], zeros)
    mask = checked_mask(None, call.num_examples)
    _, (squares, aux) = _in_chunks(work, call.rows, mask, size)
    return Answer([jnp.sqrt(sq) for sq in squares], jnp.sqrt(total([zeros, *squares])), aux=aux)


def _sum(request: Request, call: Call, mask: Any, size: int) -> Clipped:
    """The clipped sum."""
    chosen, clip = choose(request.method), request.clip
    assert clip is not None
    full_mask = checked_mask(mask, call.num_examples)

    def work(rows: Row, rows_mask: Any) -> tuple[Any, Any]:
        found = chosen.clipped(call, rows, rows_mask, clip)
        losses = jnp.where(rows_mask, jax.lax.stop_gradient(widen(found.losses)), 0)
        return found.sums, (found.norms, found.factors, losses, found.aux)

    if call.num_examples == 0:
        sums = [jnp.zeros(p.shape, widen(p).dtype) for p in call.parameters.trained]
        nothing = jnp.zeros(0, call.parameters.dtype)
        return Clipped(sums, nothing, {}, nothing, None)
    sums, values = _in_chunks(work, call.rows, full_mask, size, may_skip=mask is not None)
    return Clipped(sums, *values)


def chunk_size(
    call: Call, method: str, physical_batch_size: int | None, max_memory: int | None
) -> int:
    """Examples worked on at once."""
    size = max(call.num_examples, 1)
    if physical_batch_size is not None:
        limit = _validate.integer("physical_batch_size", physical_batch_size, minimum=1)
        size = min(size, limit)
    if max_memory is not None:
        budget = _validate.integer("max_memory", max_memory, minimum=1)
        one = max(choose(method).footprint(call), 1) if call.num_examples else 1
        if budget < one:
            raise ValueError(
                f"max_memory={budget} bytes do not hold what one example needs ({one} bytes). "
                "Expected at least that."
            )
        size = min(size, budget // one)
    return size


def _in_chunks(
    work: Work, rows: Row, mask: Any, size: int, may_skip: bool = False
) -> tuple[Any, Any]:
    """Run `work` over ceil(n / size) chunks: sums are added, values per example joined.

    Args:
        work: (rows, mask) of one chunk to (sums, values per example).
        rows: pytree of (n, ...).
        mask: (n,) bool.
        size: rows of a chunk; the last one is padded by repeating the last row, masked.
        may_skip: leave out chunks that are all padding, when they run.
    """
    num_rows = mask.shape[0]
    if size >= num_rows:
        return work(rows, mask)
    chunks = -(-num_rows // size)
    index = jnp.minimum(jnp.arange(chunks * size), num_rows - 1)
    shape = lambda leaf: leaf[index].reshape((chunks, size) + leaf.shape[1:])  # noqa: E731
    padded = jax.tree.map(shape, rows)
    masks = shape(mask) & (jnp.arange(chunks * size) < num_rows).reshape(chunks, size)
    first = jax.tree.map(lambda leaf: leaf[0], padded)
    empty = jax.tree.map(
        lambda out: compat.vary(jnp.zeros(out.shape, out.dtype), compat.varying_axes(out)),
        jax.eval_shape(work, first, masks[0]),
    )

    def step(sums: Any, chunk: Any) -> tuple[Any, Any]:
        if may_skip:
            added, values = jax.lax.cond(chunk[1].any(), work, lambda *_: empty, *chunk)
        else:
            added, values = work(*chunk)
        return jax.tree.map(jnp.add, sums, added), values

    sums, values = jax.lax.scan(step, empty[0], (padded, masks))
    join = lambda leaf: leaf.reshape((chunks * size,) + leaf.shape[2:])[:num_rows]  # noqa: E731
    return sums, jax.tree.map(join, values)
