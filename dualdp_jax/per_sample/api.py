# SPDX-License-Identifier: Apache-2.0
"""Per-sample gradients, gradient norms and clipped gradient sums of a single-example loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from dualdp_jax import compat
from dualdp_jax.chunk import Chunk, taking_chunks
from dualdp_jax.per_sample import clip
from dualdp_jax.per_sample.call import Array, Options, PyTree, build
from dualdp_jax.per_sample.checks import calls
from dualdp_jax.per_sample.methods import GRADS, LEAF_NORMS, NORMS, SUM, Request

LossFn = Callable[..., Any]


class ClippedGradSum(NamedTuple):
    """Clipped gradient sum with the norm and loss of each example, from `clipped_grad_sum`.

    Attributes:
        grads: pytree like the parameters, None at untrained leaves; float32 or wider.
        norms: (n,) L2 norm of each example's whole gradient before clipping; 0 for padding.
        losses: (n,) losses, 0 for padding.
        aux: pytree of (n, ...), auxiliary outputs of `loss_fn` stacked over the examples, or None.
    """

    grads: PyTree
    norms: Array
    losses: Array
    aux: PyTree


@taking_chunks
@compat.promoting
def per_sample_grads(loss_fn: LossFn, what: PyTree, *batch: PyTree, **options: Any) -> Any:
    """Return the gradient of each example's own loss.

    Args:
        loss_fn: callable (what, *example) -> scalar loss of ONE example (no batch axis), or
            -> (loss, aux) with `has_aux`; called with `key=` when a key is given.
        what: pytree of parameters, whose inexact leaves are trained, or an `nnx.Module`.
        *batch: pytrees whose array leaves have the examples on axis 0; other leaves are passed to
            `loss_fn` unchanged. Or one `Chunk` of a loader, which also has mask, bound, clipping
            and the rows of its units.
        **options: keywords of `Options`.

    Returns:
        Pytree like `what`, leaves (n, *shape), None at untrained leaves; with `has_aux` the pair
        (grads, aux), whose aux is (n, K, ...) for units. For an `nnx.Module`: like
        `nnx.state(what, nnx.Param)`.

    Raises:
        ExactnessError: the check failed.
    """
    call = build(loss_fn, what, batch, Options(**options))
    found = calls.answered(Request(GRADS), call, None, "per_sample_grads")
    grads = call.parameters.like(found.leaves)
    return (grads, found.aux) if call.options.has_aux else grads


@taking_chunks
@compat.promoting
def per_sample_norms(
    loss_fn: LossFn, what: PyTree, *batch: PyTree, per_parameter: bool = False, **options: Any
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
    call = build(loss_fn, what, batch, Options(**options))
    request = Request(LEAF_NORMS if per_parameter else NORMS)
    found = calls.answered(request, call, None, "per_sample_norms")
    norms = call.parameters.like(found.leaves) if per_parameter else found.norms
    return (norms, found.aux) if call.options.has_aux else norms


@taking_chunks
@compat.promoting
def clipped_grad_sum(
    loss_fn: LossFn,
    what: PyTree,
    *batch: PyTree,
    max_grad_norm: float | Array | Mapping[str, float],
    clipping: str = "flat",
    mask: Array | None = None,
    **options: Any,
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
            [test_contributions_are_bounded, test_every_contribution_is_bounded]
        A masked example, or one whose norm is not finite, contributes exactly zero.
            [test_broken_and_masked_examples_contribute_zero]

    Source: Abadi et al. 2016, Algorithm 1, lines "clip gradient" and "add noise" (the sum).
    """
    call = build(loss_fn, what, batch, Options(**options))
    request = Request(SUM, clip.clipper(call.parameters, clipping, max_grad_norm))
    found = calls.answered(request, call, mask, "clipped_grad_sum")
    grads = call.parameters.like(found.leaves)
    return ClippedGradSum(grads, found.norms, found.losses, found.aux)


def check(loss_fn: LossFn, what: PyTree, *batch: PyTree, **options: Any) -> None:
    """Compare a clipped sum with plain autodiff, as an engine does on its first batch.

    The arguments are those of `clipped_grad_sum`, whose calls of this kind need not be compared
    again, also inside `jit`: same loss, parameters, shapes (without n), method and clipping, and
    for "auto" also the way that it takes for n.
    Without `max_grad_norm` the bound is 1, or that of the chunk.

    Raises:
        ExactnessError: it differs by more than rounding.
        TypeError: inside `jit`, where there are no numbers.
        ValueError: no example.
    """
    if not compat.is_eager():
        raise TypeError("check was called inside jit, where there are no numbers. Call it outside.")
    if not isinstance(batch[0] if batch else None, Chunk):
        options = {"max_grad_norm": 1.0, **options}
    if not len(clipped_grad_sum(loss_fn, what, *batch, check="always", **options).norms):
        raise ValueError("The batch has no examples. Expected at least one to compare.")
