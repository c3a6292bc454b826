# SPDX-License-Identifier: Apache-2.0
"""Public functions: per-sample gradients of a model, their norms, and their clipped sum."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Unpack

import torch
from torch import nn

from dualdp.exactness import ExactnessError
from dualdp_torch.per_sample.batch import Batch, check_losses, join_aux, split_aux
from dualdp_torch.per_sample.call import Call, Options
from dualdp_torch.per_sample.checks import identity
from dualdp_torch.per_sample.checks.identity import Numbers, Reference
from dualdp_torch.per_sample.clip import (
    Factors,
    SecondPass,
    Terms,
    clipping_bounds,
    refuse_two_pass,
)
from dualdp_torch.per_sample.gradients import Captured, Formed, Limits, added_up, one_group
from dualdp_torch.per_sample.numbers import numbers_of
from dualdp_torch.per_sample.parameter_use import never_compiled
from dualdp_torch.per_sample.units import mark_of, require_bound
from dualdp_torch.per_sample.vmap_and_loop import reweighted
from dualdp_torch.rules.base import Tensor, is_narrow, wide

LossFn = Callable[..., Any]
#: Number of parameters whose gradient sums are compared between the passes of "two_pass".
WITNESSES = 3


class ClippedGradSum(NamedTuple):
    """Result of `clipped_grad_sum`.

    Attributes:
        grads: mapping from parameter name to the sum over examples of clipped gradients.
        norms: (n,) norms before clipping; 0 for padding.
        losses: (n,) losses; 0 for padding.
        aux: auxiliary output of the loss function, or None.
    """

    grads: dict[str, Tensor]
    norms: Tensor
    losses: Tensor
    aux: Any


@never_compiled
def per_sample_grads(
    loss_fn: LossFn,
    model: nn.Module,
    *batch: Any,
    **options: Unpack[Options],
) -> Any:
    """Return the gradient of every example's own loss.

    Args:
        loss_fn: callable, `loss_fn(model, *batch)` -> (n,) losses, one per example.
        model: module; its trainable parameters are differentiated.
        *batch: tensors with the examples on axis 0, nested dicts and tuples of them, or any other
            object, which is passed on unchanged.
        **options: keywords of `Options`.

    Returns:
        Mapping from parameter name to (n, *shape); with `has_aux` a pair of that mapping and aux.

    Raises:
        ExactnessError: a spot check failed.
        RuntimeError: the call is inside `torch.inference_mode()`.
        UnsupportedLayerError: the losses depend on other examples.
        TypeError, ValueError: a wrong argument or loss.
    """
    call = Call.checked(loss_fn, model, batch, ("per_sample_grads",), **options)
    found: list[Mapping[str, Tensor]] = []
    auxes: list[tuple[Any, int]] = []
    for _, numbers in _of_chunks(call, _grads, auxes):
        found.append(numbers.gradients.grads() if numbers.gradients else {})
    grads = {
        name: torch.cat([grads[name] for grads in found]).to(p.dtype)
        if found
        else p.new_zeros((0, *p.shape)).detach()
        for name, p in call.parameters.items()
    }
    return (grads, join_aux(auxes, call.batch.rows_per_unit)) if call.has_aux else grads


@never_compiled
def per_sample_norms(
    loss_fn: LossFn,
    model: nn.Module,
    *batch: Any,
    per_parameter: bool = False,
    **options: Unpack[Options],
) -> Any:
    """Return the L2 norm of every example's gradient.

    Args:
        loss_fn: callable, see `per_sample_grads`.
        model: module, see `per_sample_grads`.
        *batch: tensors and other objects, see `per_sample_grads`.
        per_parameter: bool, one norm per parameter instead of the norm of the whole gradient.
        **options: keywords of `Options`.

    Returns:
        (n,), or a mapping from parameter name to (n,), float32 or wider; with `has_aux` a pair of
        that and aux.

    Raises:
        ExactnessError: a spot check failed.
        RuntimeError: the call is inside `torch.inference_mode()`.
        UnsupportedLayerError: the losses depend on other examples.
        TypeError, ValueError: a wrong argument or loss.
    """
    purpose = "per_sample_norms", "each" if per_parameter else "whole"
    call = Call.checked(loss_fn, model, batch, purpose, **options)
    limits = Limits() if per_parameter else Limits(one_group)
    auxes: list[tuple[Any, int]] = []
    found = [numbers for _, numbers in _of_chunks(call, partial(_norms, limits), auxes)]
    norms: Any = torch.cat([numbers.norms for numbers in found]) if found else _no_norms(call)
    if per_parameter:
        norms = {
            name: torch.cat([numbers.lengths[name] for numbers in found])
            if found
            else torch.zeros(0, dtype=wide(p.dtype), device=p.device)
            for name, p in call.parameters.items()
        }
    return (norms, join_aux(auxes, call.batch.rows_per_unit)) if call.has_aux else norms


@never_compiled
def clipped_grad_sum(
    loss_fn: LossFn,
    model: nn.Module,
    *batch: Any,
    max_grad_norm: float | Tensor | Mapping[str, float],
    clipping: str = "flat",
    mask: Tensor | None = None,
    **options: Unpack[Options],
) -> ClippedGradSum:
    """Return the sum over examples of gradients scaled to norm at most C.

    Args:
        loss_fn: callable, see `per_sample_grads`.
        model: module, see `per_sample_grads`.
        *batch: tensors and other objects, see `per_sample_grads`.
        max_grad_norm: C > 0, a number or scalar tensor; with clipping="per_layer" also a mapping
            from module path to bound.
        clipping: str: "flat"; "per_layer", each module's parameters to C / sqrt(modules);
            "automatic", factors C / (norm + 0.01).
        mask: (n,) bool, False for padding; that of the chunk for a chunk of `make_loader`.
        **options: keywords of `Options`; "check" looks at the sum over the batch, too.

    Returns:
        `(grads, norms, losses, aux)`; grads float32, or float64 where the parameters are.

    Raises:
        ExactnessError: a spot check failed.
        RuntimeError: the call is inside `torch.inference_mode()`.
        UnsupportedLayerError: the losses depend on other examples.
        TypeError, ValueError: a wrong argument or loss.

    Guarantees:
        Every example's contribution has norm <= C.  [test_every_contribution_is_bounded]
        A masked example, or one whose norm is not finite, contributes exactly zero.
            [test_masked_and_nan_examples_contribute_nothing]

    Source: Abadi et al. 2016, Algorithm 1; Bu et al. 2023 (book-keeping).
    """
    found = mark_of(batch)
    if found is not None and mask is None:
        mask = found.mask
    purpose = "clipped_grad_sum", clipping
    call = Call.checked(loss_fn, model, batch, purpose, mask=mask, **options)
    bounds = clipping_bounds(call.parameters, clipping, max_grad_norm)
    require_bound(found, max_grad_norm)
    refuse_two_pass(call.method, clipping)
    grads: dict[str, Tensor] = {}
    auxes: list[tuple[Any, int]] = []
    norms, losses = [], []
    clipped = partial(clipped_numbers, bounds=bounds, clipping=clipping)
    for chunk, numbers in _of_chunks(call, clipped, auxes):
        for name, total in dict(numbers.sums or {}).items():
            grads[name] = grads[name].add_(total) if name in grads else total
        norms.append(numbers.norms)
        each = numbers.losses
        losses.append(each if chunk.mask is None else each.where(chunk.mask.to(each.device), 0))
    if not norms:
        grads = {n: torch.zeros_like(p, dtype=wide(p.dtype)) for n, p in call.parameters.items()}
        norms = losses = [_no_norms(call)]
    aux = join_aux(auxes, call.batch.rows_per_unit) if call.has_aux else None
    return ClippedGradSum(grads, torch.cat(norms), torch.cat(losses), aux)


#: Function of a chunk that returns its numbers, and aux.
Compute = Callable[[Call], tuple[Numbers, Any]]


def _of_chunks(
    call: Call, compute: Compute, auxes: list[tuple[Any, int]]
) -> Iterator[tuple[Call, Numbers]]:
    """Yield (chunk, checked numbers) of every chunk; (aux, size) joins `auxes`."""
    for chunk in call.chunks():
        while True:
            numbers, aux = compute(chunk)
            try:
                check_numbers(chunk, numbers, compute)
                break
            except ExactnessError as error:
                if not chunk.falls_back(error):
                    raise
        auxes.append((aux, chunk.batch.n))
        yield chunk, numbers


def _no_norms(call: Call) -> Tensor:
    """Return (0,) norms, for a batch without examples, in the precision of the parameters."""
    empty = {n: torch.zeros(0, dtype=wide(p.dtype)) for n, p in call.parameters.items()}
    return added_up(empty, str, 0).whole


def _grads(call: Call) -> tuple[Numbers, Any]:
    """Return the formed gradients of one chunk of the batch, and their norms if need be."""
    gradients, losses, aux = call.gradients()
    formed, runs = Formed(gradients.grads()), isinstance(gradients, Formed)
    if not call.is_checked:
        return Numbers(losses, losses, None, gradients=formed), aux
    numbers = numbers_of(formed, losses, _NO_TERMS, is_definition=call.is_definition)
    return replace(numbers, runs_examples=runs), aux


def _norms(limits: Limits, call: Call) -> tuple[Numbers, Any]:
    """Return the gradient norms of one chunk of the batch."""
    gradients, losses, aux = call.gradients()
    numbers = numbers_of(
        gradients,
        losses,
        _NO_TERMS,
        limits=limits,
        is_definition=call.is_definition,
        is_checked=call.is_checked,
    )
    return numbers, aux


def clipped_numbers(call: Call, bounds: Mapping[str, Any], clipping: str) -> tuple[Numbers, Any]:
    """Return the clipped sum of one chunk of the batch, with its norms and factors."""
    gradients, losses, aux = call.gradients()
    second_pass: Callable[[Factors], SecondPass] | None = None
    if call.method == "two_pass" and isinstance(gradients, Captured) and call.parameters:
        if not is_narrow([losses]):
            second_pass = partial(_SecondPass, call, gradients, losses)
    try:
        numbers = numbers_of(
            gradients,
            losses,
            Terms(1.0, bounds, clipping, call.mask),
            second_pass=second_pass,
            is_definition=call.is_definition,
            is_checked=call.is_checked,
        )
    except _PassesDifferError:
        return clipped_numbers(replace(call, method="book_keeping"), bounds, clipping)
    return numbers, aux


_NO_TERMS = Terms(1.0, {}, "flat", None)


class _PassesDifferError(Exception):
    """The second forward computes another function of the data than the first."""


class _SecondPass:
    """Clipped sum by a backward of the reweighted losses, with the first pass's random numbers.

    The losses of both passes must agree, and so must the gradient sums of the smallest parameters:
    a loss can hardly depend on the dropout masks while its gradient does. The captured gradients
    of the first pass are freed when the second begins.
    """

    def __init__(self, call: Call, gradients: Captured, losses: Tensor, factors: Factors) -> None:
        self._call, self._gradients, self._losses = call, gradients, losses
        smallest = sorted(call.parameters, key=lambda name: call.parameters[name].numel())
        self._witnesses = {
            name: (gradients.sum(name, factors.of[name], None), factors.lengths(name))
            for name in smallest[:WITNESSES]
        }

    def __call__(self, weights: Tensor) -> dict[str, Tensor]:
        """Return the sum of weights (n,) times per-sample gradients."""
        call, start = self._call, self._call.start
        assert start is not None  # kept for every call of "two_pass"
        self._gradients.forget()  # so that two passes need no more memory than one

        def losses() -> Tensor:
            out = call.loss_fn(call.model, *call.batch.arguments())
            return out[0] if call.has_aux else out

        with call.unchanged(), start.replayed(call.model):
            sums = reweighted(losses, call.parameters, weights, self._losses)
        if sums is None:
            raise _PassesDifferError
        for name, (total, length) in self._witnesses.items():
            if float((sums[name] - total).norm()) > 1e-2 * length:
                raise _PassesDifferError
        self._witnesses = {}  # their sums hold for the weights of the first call only
        return sums


def check_numbers(call: Call, numbers: Numbers, compute: Compute) -> None:
    """Compare the numbers of one chunk of the batch with their definition, if a check is due."""
    start = call.start
    if not call.is_checked or start is None:
        return

    def losses_of(
        model: nn.Module, batch: Batch
    ) -> list[Callable[[], tuple[Tensor, list[Tensor]]]]:
        def run() -> tuple[Tensor, list[Tensor]]:
            out = call.loss_fn(model, *batch.arguments())
            losses = check_losses(split_aux(out, call.has_aux)[0], batch.n)
            return losses, [losses]

        return [run]

    def again(other: Reference) -> Numbers:
        with other.starts[0].replayed(other.model):
            own = call.on(other.model, other.batch, dict(other.parameters))
            return compute(replace(own, mask=other.mask))[0]

    reference = Reference(
        losses_of, call.model, call.batch, call.parameters, [start], mask=call.mask
    )
    with call.unchanged():
        compared = identity.check(
            reference,
            numbers,
            again,
            seed=call.cache.next_seed() if call.drawn is None else call.drawn,
            is_first=call.purpose not in call.cache.checked,
            what=f"the result of {call.purpose[1]}",
        )
    if compared:
        call.was_compared = True
        call.cache.checked.add(call.purpose)
