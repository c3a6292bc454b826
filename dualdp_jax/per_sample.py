# SPDX-License-Identifier: Apache-2.0
"""Per-sample gradients, norms and clipped sums of a loss of one example."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dualdp import _validate
from dualdp_jax import bounds, compat
from dualdp_jax.call import Call, Row, build
from dualdp_jax.choices import check_devices
from dualdp_jax.methods import Method, choose
from dualdp_jax.norms import reported, total
from dualdp_jax.rules.product import widen

Work = Callable[[Row, Any], tuple[Any, Any]]  # (rows, mask) to (sums, values per example)


class ClippedGradSum(NamedTuple):
    """What `clipped_grad_sum` returns.

    Attributes:
        grads: pytree like the parameters, None where nothing is trained; float32 or wider.
        norms: (n,) L2 norm of each example's whole gradient before clipping; 0 for padding.
        losses: (n,) losses, 0 for padding.
        aux: what `loss_fn` returned beside the loss, stacked over the examples, or None.
    """

    grads: Any
    norms: Any
    losses: Any
    aux: Any


def per_sample_grads(
    loss_fn: Callable[..., Any],
    what: Any,
    *batch: Any,
    method: str = "auto",
    physical_batch_size: int | None = None,
    max_memory: int | None = None,
    has_aux: bool = False,
    key: Any = None,
    trainable: Any = None,
) -> Any:
    """Gradient of each example's own loss.

    Args:
        loss_fn: (what, *example) to the scalar loss of ONE example (no batch axis), or to
            (loss, aux) with `has_aux`; called with `key=` when a key is given.
        what: pytree of parameters, whose inexact leaves are trained, or an `nnx.Module`.
        *batch: every array leaf has the examples on axis 0; other leaves are handed on unchanged.
        method: one of `dualdp_jax.methods.METHODS`, or "auto".
        physical_batch_size: examples worked on at once; None for all.
        max_memory: bytes that a physical batch may keep alive because of privacy (per-sample
            gradients, or the operands and gradients at the uses of weights); sets its size.
        has_aux: whether `loss_fn` returns (loss, aux).
        key: random key; example k gets `fold_in(key, k)`.
        trainable: pytree of bools like `what`, or a prefix of it; False freezes.

    Returns:
        Pytree like `what`, leaves (n, *shape), None where nothing is trained; with `has_aux` the
        pair (grads, aux). For an `nnx.Module`: like `nnx.state(what, nnx.Param)`.
    """
    call = build(loss_fn, what, batch, has_aux=has_aux, key=key, trainable=trainable)
    chosen = choose(method)
    check_devices(call, method)

    def work(rows: Row, mask: Any) -> tuple[Any, Any]:
        grads, _, aux = chosen.grads(call, rows)
        return (), (grads, aux)

    if call.num_examples == 0:
        grads, aux = [jnp.zeros((0, *p.shape), p.dtype) for p in call.parameters.trained], None
    else:
        mask = bounds.checked_mask(None, call.num_examples)
        size = _chunk_size(call, chosen, physical_batch_size, max_memory)
        _, (grads, aux) = _in_chunks(work, call.rows, mask, size)
    result = call.parameters.like(grads)
    return (result, aux) if has_aux else result


def per_sample_norms(
    loss_fn: Callable[..., Any],
    what: Any,
    *batch: Any,
    per_parameter: bool = False,
    method: str = "auto",
    physical_batch_size: int | None = None,
    max_memory: int | None = None,
    has_aux: bool = False,
    key: Any = None,
    trainable: Any = None,
) -> Any:
    """L2 norm of each example's gradient.

    Args:
        loss_fn: as for `per_sample_grads`.
        what: as for `per_sample_grads`.
        *batch: as for `per_sample_grads`.
        per_parameter: a norm for each leaf instead of one for the whole gradient.
        method: as for `per_sample_grads`.
        physical_batch_size: as for `per_sample_grads`.
        max_memory: as for `per_sample_grads`.
        has_aux: as for `per_sample_grads`.
        key: as for `per_sample_grads`.
        trainable: as for `per_sample_grads`.

    Returns:
        (n,) float32, or float64 where the parameters are; with `per_parameter` a pytree of such;
        with `has_aux` the pair (norms, aux).
    """
    call = build(loss_fn, what, batch, has_aux=has_aux, key=key, trainable=trainable)
    chosen = choose(method)
    check_devices(call, method)

    trained, names = call.parameters.trained, call.parameters.names
    groups = names if per_parameter else [""] * len(trained)

    def work(rows: Row, mask: Any) -> tuple[Any, Any]:
        sq_norms, _, aux = chosen.sq_norms(call, rows, reported(trained, groups))
        return (), (sq_norms, aux)

    zeros = jnp.zeros(call.num_examples, call.parameters.dtype)
    if call.num_examples == 0:
        parts, aux = [zeros for _ in trained], None
    else:
        mask = bounds.checked_mask(None, call.num_examples)
        size = _chunk_size(call, chosen, physical_batch_size, max_memory)
        _, (parts, aux) = _in_chunks(work, call.rows, mask, size)
    if per_parameter:
        norms = call.parameters.like([jnp.sqrt(part) for part in parts])
    else:
        norms = jnp.sqrt(total([zeros, *parts]))
    return (norms, aux) if has_aux else norms


def clipped_grad_sum(
    loss_fn: Callable[..., Any],
    what: Any,
    *batch: Any,
    max_grad_norm: Any,
    clipping: str = "flat",
    mask: Any = None,
    method: str = "auto",
    physical_batch_size: int | None = None,
    max_memory: int | None = None,
    has_aux: bool = False,
    key: Any = None,
    trainable: Any = None,
) -> ClippedGradSum:
    """Sum over the examples of their clipped gradients.

    Args:
        loss_fn: as for `per_sample_grads`.
        what: as for `per_sample_grads`.
        *batch: as for `per_sample_grads`.
        max_grad_norm: C > 0, gradient units; a number or a scalar array (no recompilation when
            it changes), or for "per_layer" a mapping from group to bound.
        clipping: "flat", "per_layer" or "automatic".
        mask: (n,) bool, False marks padding; None when there is none.
        method: as for `per_sample_grads`.
        physical_batch_size: as for `per_sample_grads`.
        max_memory: as for `per_sample_grads`.
        has_aux: as for `per_sample_grads`.
        key: as for `per_sample_grads`.
        trainable: as for `per_sample_grads`.

    Returns:
        `ClippedGradSum`. With n = 0 it holds zeros and `loss_fn` is not called (aux is None).

    Guarantees:
        Each example contributes a vector of norm at most C (1 + 1e-4), measured in float64 on what
            is summed.  [test_contributions_are_bounded]
        A masked example, or one whose norm is not finite, contributes exactly zero.
            [test_broken_examples_contribute_zero]

    Source: Abadi et al. 2016, Algorithm 1, lines "clip gradient" and "add noise" (the sum).
    """
    call = build(loss_fn, what, batch, has_aux=has_aux, key=key, trainable=trainable)
    return clipped_call(
        call,
        clip=bounds.clipper(call.parameters, clipping, max_grad_norm),
        mask=mask,
        method=method,
        physical_batch_size=physical_batch_size,
        max_memory=max_memory,
    )


def clipped_call(
    call: Call,
    *,
    clip: bounds.Clip,
    mask: Any = None,
    method: str = "auto",
    physical_batch_size: int | None = None,
    max_memory: int | None = None,
) -> ClippedGradSum:
    """`clipped_grad_sum` of a call in normal form."""
    chosen = choose(method)
    check_devices(call, method)
    size = _chunk_size(call, chosen, physical_batch_size, max_memory)
    full_mask = bounds.checked_mask(mask, call.num_examples)

    def work(rows: Row, rows_mask: Any) -> tuple[Any, Any]:
        sums, norms, losses, aux = chosen.clipped(call, rows, rows_mask, clip)
        losses = jnp.where(rows_mask, jax.lax.stop_gradient(widen(losses)), 0)
        return sums, (norms, losses, aux)

    if call.num_examples == 0:
        sums = [jnp.zeros(p.shape, widen(p).dtype) for p in call.parameters.trained]
        norms = losses = jnp.zeros(0, call.parameters.dtype)
        aux = None
    else:
        may_skip = mask is not None
        sums, (norms, losses, aux) = _in_chunks(work, call.rows, full_mask, size, may_skip)
    return ClippedGradSum(call.parameters.like(sums), norms, losses, aux)


def _chunk_size(
    call: Call, chosen: Method, physical_batch_size: int | None, max_memory: int | None
) -> int:
    """Examples worked on at once."""
    size = max(call.num_examples, 1)
    if physical_batch_size is not None:
        limit = _validate.integer("physical_batch_size", physical_batch_size, minimum=1)
        size = min(size, limit)
    if max_memory is not None:
        budget = _validate.integer("max_memory", max_memory, minimum=1)
        one = max(chosen.footprint(call), 1) if call.num_examples else 1
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
