# SPDX-License-Identifier: Apache-2.0
"""Methods of the literature for per-sample gradients, norms and clipped sums, and their answers.

A method is three functions of a call and some of its rows; `answer` runs one over chunks of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from dualdp import _validate
from dualdp._validate import UnsupportedLayerError
from dualdp_jax import compat
from dualdp_jax.per_sample import norms
from dualdp_jax.per_sample.call import Answer, Call, PyTree, Row, traced
from dualdp_jax.per_sample.capture import analyzed
from dualdp_jax.per_sample.clip import Clip, checked_mask
from dualdp_jax.per_sample.jaxpr import CONVOLUTION
from dualdp_jax.per_sample.squared_norms import Accuracy, LeafNorms, accurate, reported, total
from dualdp_jax.rules import RULES
from dualdp_jax.rules.arrays import beside, weighted_sum, widen
from dualdp_jax.rules.estimate import of_gradients

Kept = TypeVar("Kept")
GRADS, NORMS, SUM = "gradients", "norms", "sum"  # kinds of request
#: Elements of all per-sample gradients up to which "auto" takes `vmap(grad)`, a program of few
#: operations: below it XLA's overhead per operation decides.
SMALL = 2**14
#: Elements of a model for which this holds for any number of examples, as in loops.
TINY = 2**8


class Method(NamedTuple):
    """Functions of one method of the literature."""

    #: callable (call, rows) -> (gradients, (n, *shape) per leaf; losses (n,); aux).
    grads: Callable[[Call, Row], tuple[list[jax.Array], jax.Array, PyTree]]
    #: callable (call, rows, accuracy) -> (squared norms, (n,) per leaf; losses; aux).
    sq_norms: Callable[[Call, Row, Accuracy], tuple[list[jax.Array], jax.Array, PyTree]]
    #: callable (call, rows, mask, clip, weights of a check or None) -> `Answer`.
    clipped: Callable[[Call, Row, jax.Array, Clip, jax.Array | None], Answer]
    footprint: Callable[[Call], int]  # callable (call) -> bytes that one example holds for privacy
    #: callable (captured use) -> True if its per-sample gradients are kept.
    keeps: norms.Keeps = norms.always


def _differentiated(mapped: Callable[[Call, Row], compat.Map]) -> Method:
    """Method that differentiates each example's loss; `mapped` extends this to all examples."""

    def grads(call: Call, rows: Row) -> tuple[list[jax.Array], jax.Array, PyTree]:
        def one(row: Row) -> tuple[list[jax.Array], jax.Array, PyTree]:
            differentiated = jax.value_and_grad(call.loss, has_aux=True)
            (value, aux), grads = differentiated(call.parameters.trained, row)
            return grads, value, aux

        return mapped(call, rows)(one)(rows)

    def sq_norms(
        call: Call, rows: Row, accuracy: Accuracy
    ) -> tuple[list[jax.Array], jax.Array, PyTree]:
        found, losses, aux = grads(call, rows)
        return accurate([LeafNorms(of_gradients(g)) for g in found], accuracy).sq_norms, losses, aux

    def clipped(
        call: Call, rows: Row, mask: jax.Array, clip: Clip, weights: jax.Array | None
    ) -> Answer:
        found, losses, aux = grads(call, rows)
        leaves = [LeafNorms(of_gradients(grad)) for grad in found]
        norms, factors = clip(accurate(leaves, clip.accuracy, mask), mask, weights)
        pairs = zip(clip.groups, found, strict=True)
        sums = [weighted_sum(factors[group], grad) for group, grad in pairs]
        return Answer(sums, norms, factors, losses, aux)

    return Method(grads, sq_norms, clipped, lambda call: norms.num_bytes(call.parameters.trained))


def _vmap(call: Call, rows: Row) -> compat.Map:
    """Map over the examples: `vmap`, unless XLA would miscompute per-example kernels."""
    return compat.mapping(lambda: _has_own_kernels(call), (rows, call.parameters.trained))


def _captured(keeps: norms.Keeps) -> Method:
    """Method that captures parameter uses, and keeps some of their per-sample gradients."""
    return Method(
        norms.grads,
        partial(norms.sq_norms, keeps),
        partial(norms.clipped, keeps),
        partial(norms.footprint, keeps),
        keeps,
    )


METHODS: dict[str, Method] = {
    "book_keeping": _captured(norms.never),
    "two_pass": _captured(norms.never)._replace(clipped=norms.reweighted),
    "materialize": _captured(norms.always),
    "vmap": _differentiated(_vmap),
    "loop": _differentiated(lambda call, rows: compat.one_by_one),
}
BY_COST = _captured(norms.by_cost)  # "auto" for all but small models


def check_method(name: str) -> None:
    """Refuse a name that is no method."""
    _validate.choice("method", name, [*METHODS, "auto"])


def choose(name: str, call: Call, n: int) -> Method:
    """Return the method of that name for n rows of a call; "auto" picks the cheapest."""
    if name == "auto" and is_small(call, n):
        name = "vmap"
    return METHODS.get(name, BY_COST)


def is_small(call: Call, n: int) -> bool:
    """True if "auto" differentiates the whole model by `vmap(grad)`.

    Never with convolutions: XLA's partitioner gives wrong numbers for their `vmap(grad)`.
    """
    numbers = sum(leaf.size for leaf in call.parameters.trained)
    if numbers > TINY and n * numbers > SMALL:
        return False
    return CONVOLUTION not in {e.primitive.name for e in compat.equations(call.program.jaxpr)}


def _has_own_kernels(call: Call, *, of_weights: bool = True) -> bool:
    """True if examples have convolution kernels, or (of weights) kernel gradients, of their own."""
    found = analyzed(call).analysis
    if of_weights and any(use.primitive == CONVOLUTION for use in found.uses):
        return True
    return bool(found.convolves)


def prepared(call: Call, method: str) -> Call:
    """Return a call with the analysis that the method needs; refused where XLA would get it wrong.

    Convolutions with a kernel, or a kernel gradient, per example become one with batch groups, of
    which XLA's partitioner loses most (found in jax 0.10.2; a test watches it).
    """
    arrays = (call.rows, call.parameters.trained)
    if compat.is_sharded_in_type(arrays):
        raise UnsupportedLayerError(
            "The arrays are spread over a mesh with explicit axes, for which every operation would "
            "have to name its sharding. Expected a mesh of automatic axes: jax.make_mesh(shape, "
            "names, axis_types=(jax.sharding.AxisType.Auto,) * len(names))."
        )
    if method == "loop" or call.num_examples == 0:
        return call
    call = traced(call) if method == "auto" else call
    spans_devices = compat.spans_devices(arrays)
    if spans_devices or (choose(method, call, call.num_examples) is not METHODS["vmap"]):
        call = analyzed(call)
    if spans_devices and _has_own_kernels(call, of_weights=method == "vmap"):
        raise UnsupportedLayerError(
            "XLA computes wrong gradients for convolutions with a kernel per example when arrays "
            f"are spread over several devices, and method={method!r} needs one here. Use "
            "method='auto' or 'book_keeping' for kernels that are parameters, else one device."
        )
    return call


@dataclass(frozen=True)
class Request:
    """Request for per-sample gradients, norms or a clipped sum."""

    kind: str  # `GRADS`, `NORMS` or `SUM`
    method: str  # a key of `METHODS`, or "auto"
    clip: Clip | None = None  # `Clip` for `SUM`, else None
    per_parameter: bool = False  # True for one norm per leaf

    @property
    def kind_key(self) -> Hashable:
        """Key of the requests that one check covers; bounds may differ."""
        clip = None if self.clip is None else (self.clip.clipping, tuple(self.clip.groups))
        return self.kind, self.method, self.per_parameter, clip, tuple(RULES.items())


def answer(
    request: Request,
    call: Call,
    mask: jax.Array | None,
    size: int,
    weights: jax.Array | None = None,
) -> Answer:
    """Answer a request in chunks of `size` rows; a masked example gives zeros, aux excepted.

    `weights` (n,) are those of `Clip`.
    """
    n, trained = call.num_examples, call.parameters.trained
    full_mask = checked_mask(mask, n)
    if n == 0:
        return _nothing(request, call)

    def kept(leaves: list[jax.Array], rows_mask: jax.Array) -> list[jax.Array]:
        if mask is None:
            return leaves
        return [jnp.where(beside(rows_mask, leaf), leaf, 0) for leaf in leaves]

    def work(rows: Row, mask: jax.Array, weights: jax.Array | None) -> tuple[list, Answer]:
        chosen = choose(request.method, call, rows[1].shape[0])
        if request.kind == GRADS:
            grads, _, aux = chosen.grads(call, rows)
            return [], Answer(kept(grads, mask), aux=aux)
        if request.kind == NORMS:
            groups = call.parameters.names if request.per_parameter else [""] * len(trained)
            squares, _, aux = chosen.sq_norms(call, rows, reported(trained, groups))
            return [], Answer(kept(squares, mask), aux=aux)
        assert request.clip is not None
        found = chosen.clipped(call, rows, mask, request.clip, weights)
        losses = jnp.where(mask, jax.lax.stop_gradient(widen(found.losses)), 0)
        return found.leaves, found._replace(leaves=[], losses=losses)

    sums, found = _in_chunks(work, (call.rows, full_mask, weights), size, mask is not None)
    if request.kind == SUM:
        return found._replace(leaves=sums)
    if request.kind == NORMS:
        zeros = jnp.zeros(n, call.parameters.dtype)
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
    work: Callable[..., tuple[list[jax.Array], Answer]],
    inputs: tuple[Row, jax.Array, jax.Array | None],
    size: int,
    may_skip: bool,
) -> tuple[list[jax.Array], Answer]:
    """Run `work` over ceil(n / size) chunks; add the sums, concatenate the values per example.

    `work` maps (rows, mask, weights) of a chunk to (sums, values per example). The last chunk is
    padded with masked copies of the last row; with `may_skip`, chunks that are all padding are
    skipped at run time.
    """
    num_rows = inputs[1].shape[0]
    if size >= num_rows:
        return work(*inputs)
    chunks = -(-num_rows // size)
    positions = jnp.arange(chunks * size)

    def cut(leaf: jax.Array) -> jax.Array:
        padded = leaf[jnp.minimum(positions, num_rows - 1)]
        return padded.reshape(chunks, size, *leaf.shape[1:])

    rows, mask, weights = jax.tree.map(cut, inputs)
    parts = rows, mask & (positions < num_rows).reshape(chunks, size), weights
    empty = jax.tree.map(
        lambda out: compat.varying_zeros(out.shape, out.dtype, compat.varying_axes(out)),
        jax.eval_shape(work, *jax.tree.map(lambda leaf: leaf[0], parts)),
    )

    def step(sums: list[jax.Array], chunk: tuple[Row, jax.Array, jax.Array | None]) -> tuple:
        if may_skip:
            added, values = jax.lax.cond(chunk[1].any(), work, lambda *_: empty, *chunk)
        else:
            added, values = work(*chunk)
        return jax.tree.map(jnp.add, sums, added), values

    def joined(leaf: jax.Array) -> jax.Array:
        return leaf.reshape(chunks * size, *leaf.shape[2:])[:num_rows]

    values: Answer
    sums, values = jax.lax.scan(step, empty[0], parts)
    return sums, jax.tree.map(joined, values)
