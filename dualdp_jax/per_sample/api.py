# SPDX-License-Identifier: Apache-2.0
"""Per-sample gradients, gradient norms and clipped gradient sums of a single-example loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from dualdp import _validate
from dualdp.exactness import CHECKS
from dualdp_jax import compat
from dualdp_jax.chunk import taking_chunks
from dualdp_jax.per_sample import clip
from dualdp_jax.per_sample.call import Answer, Call, Options, build, traced
from dualdp_jax.per_sample.checks import calls
from dualdp_jax.per_sample.methods import (
    GRADS,
    NORMS,
    SUM,
    Request,
    answer,
    check_method,
    chunk_size,
    prepared,
)


class ClippedGradSum(NamedTuple):
    """Clipped gradient sum with the norm and loss of each example, from `clipped_grad_sum`.

    Attributes:
        grads: pytree like the parameters, None at untrained leaves; float32 or wider.
        norms: (n,) L2 norm of each example's whole gradient before clipping; 0 for padding.
        losses: (n,) losses, 0 for padding.
        aux: pytree of (n, ...), auxiliary outputs of `loss_fn` stacked over the examples, or None.
    """

    grads: Any
    norms: Any
    losses: Any
    aux: Any


@taking_chunks
@compat.promoting
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
    keep_batch_dim: bool = False,
    rows_per_unit: int | None = None,
    row_weights: Any = None,
    check: str = "first",
) -> Any:
    """Return the gradient of each example's own loss.

    Args:
        loss_fn: callable (what, *example) -> scalar loss of ONE example (no batch axis), or
            -> (loss, aux) with `has_aux`; called with `key=` when a key is given.
        what: pytree of parameters, whose inexact leaves are trained, or an `nnx.Module`.
        *batch: pytrees whose array leaves have the examples on axis 0; other leaves are passed to
            `loss_fn` unchanged. Or one `Chunk` of a loader, which also has mask, bound, clipping
            and the rows of its units.
        method: str, one of `dualdp_jax.per_sample.methods.METHODS`, or "auto".
        physical_batch_size: int, examples processed at once; None for all.
        max_memory: int, bytes that a physical batch may hold for privacy (per-sample gradients, or
            the operands and output gradients of parameter uses); limits the physical batch size.
        has_aux: bool, True if `loss_fn` returns (loss, aux).
        key: random key; example k gets `fold_in(key, k)`.
        trainable: pytree of bools like `what`, or a prefix of it; False freezes.
        keep_batch_dim: bool, True for a `loss_fn` that is written for a batch: it gets batches of
            one example, arrays with an axis 0 of length 1, and returns their mean loss.
        rows_per_unit: int K; the batch has n * K rows, of which unit u owns u * K .. u * K + K - 1.
            `loss_fn` gets one row, and one key per row, by its position in the batch; the gradient
            of a unit is that of the mean of its rows' losses. A loss that couples the rows of a
            unit takes the unit as ONE example, an array with a leading axis of K, instead.
        row_weights: (n * K,) real numbers; the loss of a unit is the sum of its rows' losses times
            these, instead of the mean; 0 marks padding. They may depend on rows of the same unit
            and on public facts only: normalized over the batch they void the bound. None for means.
        check: str; "first" compares the result with plain autodiff at the first call for a loss,
            parameters and shapes (without n), "always" at every call, "off" never. A call inside
            `jit` is not compared: it warns once, unless one of its kind was; see `check`.

    Returns:
        Pytree like `what`, leaves (n, *shape), None at untrained leaves; with `has_aux` the pair
        (grads, aux), whose aux is (n, K, ...) for units. For an `nnx.Module`: like
        `nnx.state(what, nnx.Param)`.

    Raises:
        ExactnessError: the check failed.
    """
    options = Options(has_aux, key, trainable, keep_batch_dim, rows_per_unit, row_weights)
    call = build(loss_fn, what, batch, options)
    sizes = (physical_batch_size, max_memory)
    found = _answered(loss_fn, call, Request(GRADS, method), sizes, check, "per_sample_grads")
    result = call.parameters.like(found.leaves)
    return (result, found.aux) if has_aux else result


@taking_chunks
@compat.promoting
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
    keep_batch_dim: bool = False,
    rows_per_unit: int | None = None,
    row_weights: Any = None,
    check: str = "first",
) -> Any:
    """Return the L2 norm of each example's gradient.

    The arguments are those of `per_sample_grads`, where every n counts units, and
    `per_parameter`: bool, True for one norm per leaf instead of one for the whole gradient.

    Returns:
        (n,) norms, float32, or float64 if a parameter is; with `per_parameter` a pytree of (n,);
        with `has_aux` the pair (norms, aux).

    Raises:
        ExactnessError: the check failed.
    """
    options = Options(has_aux, key, trainable, keep_batch_dim, rows_per_unit, row_weights)
    call = build(loss_fn, what, batch, options)
    request = Request(NORMS, method, per_parameter=bool(per_parameter))
    sizes = (physical_batch_size, max_memory)
    found = _answered(loss_fn, call, request, sizes, check, "per_sample_norms")
    norms = call.parameters.like(found.leaves) if per_parameter else found.norms
    return (norms, found.aux) if has_aux else norms


@taking_chunks
@compat.promoting
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
    keep_batch_dim: bool = False,
    rows_per_unit: int | None = None,
    row_weights: Any = None,
    check: str = "first",
) -> ClippedGradSum:
    """Return the sum over the examples of their clipped gradients.

    The arguments are those of `per_sample_grads`, where every n counts units, and:

    - `max_grad_norm`: number or scalar array C > 0, gradient units (a new value does not
      recompile); for "per_layer" also a mapping from group to bound.
    - `clipping`: str, "flat", "per_layer" or "automatic".
    - `mask`: (n,) bool, False for padding; None without padding.

    The check compares norms of some examples, and sums over all, with plain autodiff.

    Returns:
        `ClippedGradSum`. With n = 0 it holds zeros and `loss_fn` is not called (aux is None).

    Raises:
        ExactnessError: the check failed.

    Guarantees:
        Each example contributes a vector of norm at most C, measured in float64 on what is summed.
            [test_contributions_are_bounded, test_no_contribution_is_beyond_the_bound]
        A masked example, or one whose norm is not finite, contributes exactly zero.
            [test_broken_and_masked_examples_contribute_zero]

    Source: Abadi et al. 2016, Algorithm 1, lines "clip gradient" and "add noise" (the sum).
    """
    options = Options(has_aux, key, trainable, keep_batch_dim, rows_per_unit, row_weights)
    call = build(loss_fn, what, batch, options)
    request = Request(SUM, method, clip.clipper(call.parameters, clipping, max_grad_norm))
    sizes = (physical_batch_size, max_memory)
    found = _answered(loss_fn, call, request, sizes, check, "clipped_grad_sum", mask)
    grads = call.parameters.like(found.leaves)
    return ClippedGradSum(grads, found.norms, found.losses, found.aux)


def _answered(
    loss_fn: Callable[..., Any],
    call: Call,
    request: Request,
    sizes: tuple[int | None, int | None],
    check: str,
    where: str,
    mask: Any = None,
) -> Answer:
    """Answer a request of the public function `where`, and check the answer if that is due.

    `sizes` is (physical_batch_size, max_memory).
    """
    _validate.choice("check", check, CHECKS)
    check_method(request.method)
    if call.live is not None:
        mask = call.live if mask is None else clip.checked_mask(mask, call.num_examples) & call.live
    call = prepared(call, request.method)
    size = chunk_size(call, request.method, *sizes)
    if check == "off" or call.num_examples == 0:
        return answer(request, call, mask, size)
    call = traced(call)
    kind = calls.kind_of(request, call, is_cut=size < call.num_examples)
    if compat.in_trace() or compat.is_traced(call.rows, call.parameters.trained, mask):
        calls.warn_of_traced(kind, where)
        return answer(request, call, mask, size)
    found = answer(request, call, mask, size)
    if check == "always" or not calls.was_compared(kind):
        calls.check(request, call, mask, size, found, kind)
    return found


@compat.promoting
def check(
    loss_fn: Callable[..., Any],
    what: Any,
    *batch: Any,
    max_grad_norm: Any = 1.0,
    clipping: str = "flat",
    mask: Any = None,
    method: str = "auto",
    physical_batch_size: int | None = None,
    max_memory: int | None = None,
    has_aux: bool = False,
    key: Any = None,
    trainable: Any = None,
    keep_batch_dim: bool = False,
    rows_per_unit: int | None = None,
    row_weights: Any = None,
) -> None:
    """Compare a clipped sum with plain autodiff, as an engine does on its first batch.

    The arguments are those of `clipped_grad_sum`, whose calls of this kind need not be compared
    again, also inside `jit`: same loss, parameters, shapes (without n), method and clipping.

    Raises:
        ExactnessError: it differs by more than rounding.
        TypeError: inside `jit`, where there are no numbers.
        ValueError: no example.
    """
    options = Options(has_aux, key, trainable, keep_batch_dim, rows_per_unit, row_weights)
    call = build(loss_fn, what, batch, options)
    if compat.in_trace() or compat.is_traced(call.rows, call.parameters.trained):
        raise TypeError("check was called inside jit, where there are no numbers. Call it outside.")
    if call.num_examples == 0:
        raise ValueError("The batch has no examples. Expected at least one to compare.")
    request = Request(SUM, method, clip.clipper(call.parameters, clipping, max_grad_norm))
    sizes = (physical_batch_size, max_memory)
    _answered(loss_fn, call, request, sizes, "always", "check", mask)
