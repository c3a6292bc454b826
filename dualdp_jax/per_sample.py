# SPDX-License-Identifier: Apache-2.0
"""Per-sample gradients, norms and clipped sums of a loss of one example."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from dualdp import _validate
from dualdp.exactness import CHECKS
from dualdp_jax import bounds, checks, compat, first_calls, trials
from dualdp_jax.call import Call, build, traced
from dualdp_jax.choices import prepared
from dualdp_jax.methods import choose
from dualdp_jax.request import GRADS, NORMS, SUM, Answer, Request, answer, chunk_size
from dualdp_jax.rules.estimate import stable_norm
from dualdp_jax.sharding import whole

_draws = np.random.default_rng(0)  # of the examples that are checked outside of a plan


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
    check: str = "first",
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
        check: "first" compares two examples with plain `jax.grad` at the first call for a loss,
            parameters and shapes (without n); "always" at every call; "off" never. Inside `jit`
            stand-ins are compared while the program is traced; `explain` says what came of it.

    Returns:
        Pytree like `what`, leaves (n, *shape), None where nothing is trained; with `has_aux` the
        pair (grads, aux). For an `nnx.Module`: like `nnx.state(what, nnx.Param)`.

    Raises:
        ExactnessError: the check failed.
    """
    call = build(loss_fn, what, batch, has_aux=has_aux, key=key, trainable=trainable)
    sizes = (physical_batch_size, max_memory)
    found = _answered(loss_fn, call, Request(GRADS, method), sizes, check, "per_sample_grads")
    result = call.parameters.like(found.leaves)
    return (result, found.aux) if has_aux else result


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
    check: str = "first",
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
        check: as for `per_sample_grads`.

    Returns:
        (n,) float32, or float64 where the parameters are; with `per_parameter` a pytree of such;
        with `has_aux` the pair (norms, aux).

    Raises:
        ExactnessError: the check failed.
    """
    call = build(loss_fn, what, batch, has_aux=has_aux, key=key, trainable=trainable)
    request = Request(NORMS, method, per_parameter=bool(per_parameter))
    sizes = (physical_batch_size, max_memory)
    found = _answered(loss_fn, call, request, sizes, check, "per_sample_norms")
    norms = call.parameters.like(found.leaves) if per_parameter else found.norms
    return (norms, found.aux) if has_aux else norms


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
    check: str = "first",
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
        check: as for `per_sample_grads`; what two examples contribute to the sum is compared, and
            the sum of all with that of plain autodiff.

    Returns:
        `ClippedGradSum`. With n = 0 it holds zeros and `loss_fn` is not called (aux is None).

    Raises:
        ExactnessError: the check failed.

    Guarantees:
        Each example contributes a vector of norm at most C, measured in float64 on what is summed.
            [test_contributions_are_bounded, test_no_contribution_is_beyond_the_bound]
        A masked example, or one whose norm is not finite, contributes exactly zero.
            [test_broken_examples_contribute_zero]

    Source: Abadi et al. 2016, Algorithm 1, lines "clip gradient" and "add noise" (the sum).
    """
    call = build(loss_fn, what, batch, has_aux=has_aux, key=key, trainable=trainable)
    clip = bounds.clipper(call.parameters, clipping, max_grad_norm)
    sizes = (physical_batch_size, max_memory)
    request = Request(SUM, method, clip)
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
    """The answer to a request, checked where that is due.

    Args:
        loss_fn: the user's, to tell calls apart.
        call: the examples and their loss.
        request: what is asked.
        sizes: physical_batch_size and max_memory.
        check: see `per_sample_grads`.
        where: name of the public function.
        mask: (n,) bool, or None.
    """
    _validate.choice("check", check, CHECKS)
    choose(request.method)
    call = prepared(call, request.method)
    size = chunk_size(call, request.method, *sizes)
    if check == "off" or call.num_examples == 0:
        return answer(request, call, mask, size)
    if compat.in_trace() or compat.is_traced(call.rows, call.parameters.trained, mask):
        call = traced(call)
        trials.examine(request, call, size, where, again=check == "always")
        return answer(request, call, mask, size)
    found = answer(request, call, mask, size)
    kind = first_calls.kind_of(loss_fn, call, request, size)
    rows = _chosen_rows(found, call.num_examples, mask)
    if rows and (check == "always" or first_calls.is_new(kind)):
        asked = checks.Asked(request, traced(call), mask, size, found)
        checks.examine(asked, rows, where)
        first_calls.remember(kind)
    return found


def _chosen_rows(found: Answer, num_examples: int, mask: Any) -> Sequence[int]:
    """The rows that are compared: one that is drawn, and the one with the largest gradient."""
    counted = np.arange(num_examples)
    if mask is not None:
        counted = counted[np.asarray(whole(jnp.asarray(mask)))]
    if not len(counted):
        return ()
    norms = found.norms
    if norms is None:
        parts = [stable_norm(leaf) for leaf in found.leaves]
        norms = stable_norm(jnp.stack([part.astype(jnp.float32) for part in parts], 1))
    sizes = np.nan_to_num(np.asarray(whole(norms))[counted], nan=-1, posinf=-1)
    return sorted({int(_draws.choice(counted)), int(counted[np.argmax(sizes)])})
