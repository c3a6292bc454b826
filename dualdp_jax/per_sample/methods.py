# SPDX-License-Identifier: Apache-2.0
"""Methods of the literature for per-sample gradients, and the answers of a call by one of them."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dualdp import _validate
from dualdp_jax import compat
from dualdp_jax.per_sample.call import Array, Call, PyTree, Row
from dualdp_jax.per_sample.clip import Clip, checked_mask
from dualdp_jax.per_sample.gradients import (
    Gradients,
    captured,
    check_second_pass,
    differentiated,
    second_pass,
)
from dualdp_jax.per_sample.jaxpr import CONVOLUTION
from dualdp_jax.per_sample.squared_norms import reported, total
from dualdp_jax.rules import RULES
from dualdp_jax.rules.arrays import beside, widen

#: Elements of all per-sample gradients up to which "auto" takes `vmap(grad)`, a program of few
#: operations: below it XLA's overhead per operation decides.
SMALL = 2**14
#: Elements of a model for which this holds for any number of examples, as in loops.
TINY = 2**8


METHODS = ("book_keeping", "two_pass", "materialize", "vmap", "loop")
#: Those that capture uses.
RULED = ("auto", "book_keeping", "two_pass", "materialize")
#: Ways of "auto", one after the other: where one is not supported, or its first numbers differ.
WAYS = ("auto", "vmap", "loop")
#: Kinds of request.
GRADS, NORMS, LEAF_NORMS, SUM = "gradients", "norms", "norms of leaves", "clipped sum"


def check_method(name: str) -> None:
    """Refuse a name that is no method."""
    _validate.choice("method", name, [*METHODS, "auto"])


def way_of(call: Call, n: int) -> str:
    """Return the method by which n rows of a call go: "auto" differentiates small models whole.

    Never with convolutions: XLA's partitioner gives wrong numbers for their `vmap(grad)`.
    """
    numbers = sum(leaf.size for leaf in call.parameters.trained)
    if call.options.method != "auto" or (numbers > TINY and n * numbers > SMALL):
        return call.options.method
    primitives = {e.primitive.name for e in compat.equations(call.program.jaxpr)}
    return "auto" if CONVOLUTION in primitives else "vmap"


def gradients_of(call: Call, rows: Row, *, formed: bool = False) -> Gradients:
    """Return the per-sample gradients of rows by the method of the call, or all of them formed."""
    way = way_of(call, len(rows[1]))
    if way in RULED:
        return captured("materialize" if formed else way, call, rows)
    if way == "loop":
        return differentiated(compat.one_by_one, call, rows)
    arrays = rows, call.parameters.trained
    return differentiated(call.program.mapping(arrays, of_kernels=True), call, rows)


class Answer(NamedTuple):
    """Result of a call, or of some of its rows.

    Attributes:
        leaves: per trained leaf its per-sample gradients (n, *shape), their norms (n,), or its
            clipped sum.
        norms: (n,) norms of the whole gradients; None for a request of gradients.
        factors: mapping from clipping group to factors (n,); empty unless a sum was requested.
        losses: (n,), 0 where the mask is False; None unless a sum was requested.
        aux: pytree of (n, ...), stacked over the examples, or None.
    """

    leaves: list[Array]
    norms: Any = None
    factors: dict[str, Array] = {}
    losses: Any = None
    aux: PyTree = None


class Request(NamedTuple):
    """Request for per-sample gradients, norms or a clipped sum.

    Attributes:
        kind: `GRADS`, `NORMS`, `LEAF_NORMS` or `SUM`.
        clip: `Clip` of a sum.
    """

    kind: str
    clip: Clip | None = None

    @property
    def key(self) -> Hashable:
        """Key of the requests that one check covers; bounds may differ."""
        clip = None if self.clip is None else (self.clip.clipping, tuple(self.clip.groups))
        return self.kind, clip, tuple(RULES.items())


def answer(
    request: Request, call: Call, mask: Array | None = None, weights: Array | None = None
) -> Answer:
    """Answer a request in chunks of rows; a masked example gives zeros, aux excepted.

    `weights` (n,) are those of `Clip`.
    """
    n, trained = call.num_examples, call.parameters.trained
    full_mask = checked_mask(mask, n)
    call = call if n else call.by("vmap")

    def work(rows: Row, rows_mask: Array, weights: Array | None) -> tuple[list[Array], Answer]:
        if request.clip is not None:
            return _clipped(call, request.clip, rows, rows_mask, weights)
        found = gradients_of(call, rows, formed=request.kind == GRADS)
        if request.kind == GRADS:
            leaves = found.formed()
        else:
            groups = call.parameters.names if request.kind == LEAF_NORMS else [""] * len(trained)
            leaves = [norm.sq_norms for norm in found.norms(reported(trained, groups))]
        if mask is not None:
            leaves = [jnp.where(beside(rows_mask, leaf), leaf, 0) for leaf in leaves]
        return [], Answer(leaves, aux=found.aux)

    sums, found = _in_chunks(work, (call.rows, full_mask, weights), chunk_size(call))
    if request.kind == SUM:
        return found._replace(leaves=sums)
    if request.kind == GRADS:
        return found
    whole = total([jnp.zeros(n, call.parameters.dtype), *found.leaves])
    return found._replace(leaves=list(map(jnp.sqrt, found.leaves)), norms=jnp.sqrt(whole))


def _clipped(
    call: Call, clip: Clip, rows: Row, mask: Array, weights: Array | None
) -> tuple[list[Array], Answer]:
    """Clipped sums of some rows, and what there is of each row."""
    is_second = call.options.method == "two_pass"
    if is_second:
        check_second_pass(call, rows)
    found = gradients_of(call, rows)
    norms, factors = clip(found.norms(clip.accuracy, mask), mask, weights)
    if is_second:
        sums = second_pass(call, rows, clip, factors)
    else:
        sums = [found.weighted_sum(i, factors[own]) for i, own in enumerate(clip.groups)]
    losses = jnp.where(mask, jax.lax.stop_gradient(widen(found.losses)), 0)
    return sums, Answer([], norms, factors, losses, found.aux)


def footprint(call: Call) -> int:
    """Return the bytes that one example holds for privacy: operands, cotangents, gradients."""

    def held(rows: Row) -> PyTree:
        method = call.options.method
        found = captured(method, call, rows) if method in RULED else gradients_of(call, rows)
        return [use[1:] for use in found.captured], found.kept

    row = jax.eval_shape(lambda rows: jax.tree.map(lambda leaf: leaf[:1], rows), call.rows)
    arrays = jax.tree.leaves(jax.eval_shape(held, row))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in arrays)


def chunk_size(call: Call) -> int:
    """Return the number of examples processed at once."""
    options, size = call.options, max(call.num_examples, 1)
    if options.physical_batch_size is not None:
        limit = _validate.integer("physical_batch_size", options.physical_batch_size, minimum=1)
        size = min(size, limit)
    if options.max_memory is not None:
        budget = _validate.integer("max_memory", options.max_memory, minimum=1)
        one = max(footprint(call), 1) if call.num_examples else 1
        if budget < one:
            raise ValueError(
                f"max_memory={budget} bytes do not hold what one example needs ({one} bytes). "
                "Expected at least that."
            )
        size = min(size, budget // one)
    return size


def _in_chunks(
    work: Callable[..., tuple[list[Array], Answer]],
    inputs: tuple[Row, Array, Array | None],
    size: int,
) -> tuple[list[Array], Answer]:
    """Run `work` over ceil(n / size) chunks; add the sums, concatenate the values per example.

    `work` maps (rows, mask, weights) of a chunk to (sums, values per example). The last chunk is
    padded with masked copies of the last row.
    """
    num_rows = inputs[1].shape[0]
    if size >= num_rows:
        return work(*inputs)
    chunks = -(-num_rows // size)
    positions = jnp.arange(chunks * size)

    def cut(leaf: Array) -> Array:
        padded = leaf[jnp.minimum(positions, num_rows - 1)]
        return padded.reshape(chunks, size, *leaf.shape[1:])

    def step(sums: list[Array], chunk: tuple[Row, Array, Array | None]) -> tuple:
        added, values = work(*chunk)
        return jax.tree.map(jnp.add, sums, added), values

    rows, mask, weights = jax.tree.map(cut, inputs)
    parts = rows, mask & (positions < num_rows).reshape(chunks, size), weights
    types, _ = jax.eval_shape(work, *jax.tree.map(lambda leaf: leaf[0], parts))
    empty = [compat.varying_zeros(t.shape, t.dtype, compat.varying_axes(t)) for t in types]
    values: Answer
    sums, values = jax.lax.scan(step, empty, parts)
    return sums, jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:])[:num_rows], values)
