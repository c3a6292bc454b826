# SPDX-License-Identifier: Apache-2.0
"""Requests for per-sample gradients, norms or the clipped sum of a call, and their answers."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from dualdp import _validate
from dualdp_jax import compat
from dualdp_jax.per_sample.call import Answer, Call, Row
from dualdp_jax.per_sample.capture import analyzed
from dualdp_jax.per_sample.clip import Clip, checked_mask
from dualdp_jax.per_sample.methods import BY_COST, METHODS, choose
from dualdp_jax.per_sample.squared_norms import reported, total
from dualdp_jax.rules import RULES
from dualdp_jax.rules.arrays import beside, widen
from dualdp_jax.rules.base import num_examples

GRADS, NORMS, SUM = "gradients", "norms", "sum"  # kinds of request


@dataclass(frozen=True)
class Request:
    """Request for per-sample gradients, norms or a clipped sum."""

    kind: str  # `GRADS`, `NORMS` or `SUM`
    method: str  # see `methods`
    clip: Clip | None = None  # `Clip` for `SUM`, else None
    per_parameter: bool = False  # True for one norm per leaf

    @property
    def kind_key(self) -> Hashable:
        """Key of the requests that one check covers; bounds may differ."""
        clip = None if self.clip is None else (self.clip.clipping, tuple(self.clip.groups))
        return self.kind, self.method, self.per_parameter, clip, tuple(RULES.items())


def answer(request: Request, call: Call, mask: Any, size: int) -> Answer:
    """Answer a request; an example where the mask (n,) is False gives zeros, aux excepted."""
    n, trained = call.num_examples, call.parameters.trained
    zeros = jnp.zeros(n, call.parameters.dtype) if request.kind == NORMS else None
    full_mask = checked_mask(mask, n)
    if n == 0:
        return _nothing(request, call)
    if request.method not in ("vmap", "loop"):
        call = analyzed(call)

    def kept(leaves: list[Any], rows_mask: Any) -> list[Any]:
        if mask is None:
            return leaves
        return [jnp.where(beside(rows_mask, leaf), leaf, 0) for leaf in leaves]

    def work(rows: Row, rows_mask: Any) -> tuple[Any, Any]:
        chosen = choose(request.method, call, num_examples(rows[1]))
        if request.kind == GRADS:
            grads, _, aux = chosen.grads(call, rows)
            return (), Answer(kept(grads, rows_mask), aux=aux)
        if request.kind == NORMS:
            groups = call.parameters.names if request.per_parameter else [""] * len(trained)
            squares, _, aux = chosen.sq_norms(call, rows, reported(trained, groups))
            return (), Answer(kept(squares, rows_mask), aux=aux)
        assert request.clip is not None
        found = chosen.clipped(call, rows, rows_mask, request.clip)
        losses = jnp.where(rows_mask, jax.lax.stop_gradient(widen(found.losses)), 0)
        return found.leaves, found._replace(leaves=[], losses=losses)

    sums, found = _in_chunks(work, call.rows, full_mask, size, may_skip=mask is not None)
    if request.kind == SUM:
        return found._replace(leaves=sums)
    if request.kind == NORMS:
        norms = [jnp.sqrt(sq) for sq in found.leaves]
        return found._replace(leaves=norms, norms=jnp.sqrt(total([zeros, *found.leaves])))
    return found


def _nothing(request: Request, call: Call) -> Answer:
    """Answer for a call without examples."""
    trained, empty = call.parameters.trained, jnp.zeros(0, call.parameters.dtype)
    if request.kind == GRADS:
        return Answer([jnp.zeros((0, *p.shape), p.dtype) for p in trained])
    if request.kind == NORMS:
        return Answer([empty for _ in trained], empty)
    return Answer([jnp.zeros(p.shape, widen(p).dtype) for p in trained], empty, losses=empty)


def chunk_size(
    call: Call, method: str, physical_batch_size: int | None, max_memory: int | None
) -> int:
    """Number of examples processed at once."""
    size = max(call.num_examples, 1)
    if physical_batch_size is not None:
        limit = _validate.integer("physical_batch_size", physical_batch_size, minimum=1)
        size = min(size, limit)
    if max_memory is not None:
        budget = _validate.integer("max_memory", max_memory, minimum=1)
        footprint = METHODS.get(method, BY_COST).footprint
        one = max(footprint(call), 1) if call.num_examples else 1
        if budget < one:
            raise ValueError(
                f"max_memory={budget} bytes do not hold what one example needs ({one} bytes). "
                "Expected at least that."
            )
        size = min(size, budget // one)
    return size


def _in_chunks(
    work: Callable[[Row, Any], tuple[Any, Any]],
    rows: Row,
    mask: Any,
    size: int,
    may_skip: bool = False,
) -> tuple[Any, Any]:
    """Run `work` over ceil(n / size) chunks; add the sums, concatenate the values per example.

    `work` maps (rows, mask) of a chunk to (sums, values per example). The last chunk is padded with
    masked copies of the last row; with `may_skip`, chunks that are all padding are skipped at run
    time.
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
        lambda out: compat.varying_zeros(out.shape, out.dtype, compat.varying_axes(out)),
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
