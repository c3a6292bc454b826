# SPDX-License-Identifier: Apache-2.0
"""Public functions: per-sample gradients of a model, their norms, and their clipped sum."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from dualdp.exactness import ExactnessError
from dualdp_torch.per_sample.batch import Batch, check_losses, join_aux, split_aux
from dualdp_torch.per_sample.call import Call, Options, unchanged
from dualdp_torch.per_sample.checks import identity
from dualdp_torch.per_sample.checks.identity import Numbers, Reference
from dualdp_torch.per_sample.clip import (
    WITNESSES,
    PassesDifferError,
    SecondPass,
    Terms,
    clipping_bounds,
    refuse_two_pass,
)
from dualdp_torch.per_sample.gradients import Formed, Limits, added_up, one_group
from dualdp_torch.per_sample.numbers import numbers_of
from dualdp_torch.per_sample.parameter_use import never_compiled
from dualdp_torch.per_sample.units import mark_of, require_bound
from dualdp_torch.rules.base import Tensor, is_narrow, wide

LossFn = Callable[..., Any]


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
    **options: Any,
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
    call = Call.of(loss_fn, model, batch, Options(**options), ("per_sample_grads",))
    found = {name: [_empty(p)] for name, p in call.parameters.items()}
    auxes: list[tuple[Any, int]] = []
    for _, numbers in _of_chunks(call, partial(_computed, is_formed=True), auxes):
        for name, grad in numbers.gradients.grads().items() if numbers.gradients else ():
            found[name].append(grad)
    parameters = call.parameters
    grads = {name: torch.cat(each).to(parameters[name].dtype) for name, each in found.items()}
    return _with_aux(call, grads, auxes)


@never_compiled
def per_sample_norms(
    loss_fn: LossFn,
    model: nn.Module,
    *batch: Any,
    per_parameter: bool = False,
    **options: Any,
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
    call = Call.of(loss_fn, model, batch, Options(**options), purpose)
    limits = Limits() if per_parameter else Limits(one_group)
    whole, auxes = list[Tensor](), list[tuple[Any, int]]()
    each = {name: [_empty(p).flatten()] for name, p in call.parameters.items()}
    for _, numbers in _of_chunks(call, partial(_computed, limits=limits), auxes):
        whole.append(numbers.norms)
        for name, lengths in numbers.lengths.items():
            each[name].append(lengths)
    if per_parameter:
        return _with_aux(call, {name: torch.cat(found) for name, found in each.items()}, auxes)
    return _with_aux(call, torch.cat(whole or [_no_norms(call)]), auxes)


@never_compiled
def clipped_grad_sum(
    loss_fn: LossFn,
    model: nn.Module,
    *batch: Any,
    max_grad_norm: float | Tensor | Mapping[str, float],
    clipping: str = "flat",
    mask: Tensor | None = None,
    **options: Any,
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
    call = Call.of(loss_fn, model, batch, Options(**options), purpose, mask)
    bounds = clipping_bounds(call.parameters, clipping, max_grad_norm)
    require_bound(found, max_grad_norm)
    refuse_two_pass(call.options.method, clipping)
    grads = dict[str, Tensor]()
    norms, losses, auxes = list[Tensor](), list[Tensor](), list[tuple[Any, int]]()
    terms = Terms(1.0, bounds, clipping, None)
    for chunk, numbers in _of_chunks(call, partial(_computed, terms=terms), auxes):
        for name, total in (numbers.sums or {}).items():
            grads[name] = grads[name].add_(total) if name in grads else total
        norms.append(numbers.norms)
        each = numbers.losses
        losses.append(each if chunk.mask is None else each.where(chunk.mask.to(each.device), 0))
    if not norms:
        grads = {n: torch.zeros_like(p, dtype=wide(p.dtype)) for n, p in call.parameters.items()}
        norms = losses = [_no_norms(call)]
    aux = join_aux(auxes, call.batch.rows_per_unit) if call.options.has_aux else None
    return ClippedGradSum(grads, torch.cat(norms), torch.cat(losses), aux)


#: Function of a chunk that returns its numbers, and aux.
Compute = Callable[[Call], tuple[Numbers, Any]]


def _of_chunks(
    call: Call, compute: Compute, auxes: list[tuple[Any, int]]
) -> Iterator[tuple[Call, Numbers]]:
    """Yield (chunk, checked numbers) of every chunk; (aux, size) joins `auxes`."""
    is_due = None
    for chunk in call.chunks():
        is_due = call.is_due if is_due is None else is_due
        chunk.is_checked = is_due and (chunk.mask is None or bool(chunk.mask.any()))
        while True:
            numbers, aux = compute(chunk)
            try:
                is_due = is_due and not was_compared(chunk, numbers, compute)
                break
            except ExactnessError as error:
                if not chunk.falls_back(error):
                    raise
        auxes.append((aux, chunk.batch.n))
        yield chunk, numbers


def _empty(p: Tensor) -> Tensor:
    """Return (0, *shape) zeros, the gradients of a parameter in a batch without examples."""
    return torch.zeros((0, *p.shape), dtype=wide(p.dtype), device=p.device)


def _no_norms(call: Call) -> Tensor:
    """Return (0,) norms, for a batch without examples, in the precision of the parameters."""
    empty = {n: torch.zeros(0, dtype=wide(p.dtype)) for n, p in call.parameters.items()}
    return added_up(empty, str, 0).whole


def _with_aux(call: Call, found: Any, auxes: list[tuple[Any, int]]) -> Any:
    """Return what was found, and with `has_aux` the joined aux of the chunks."""
    return (found, join_aux(auxes, call.batch.rows_per_unit)) if call.options.has_aux else found


_WITHOUT_CLIPPING = Terms(1.0, {}, "flat", None)


def _computed(
    call: Call,
    terms: Terms = _WITHOUT_CLIPPING,
    limits: Limits | None = None,
    is_formed: bool = False,
) -> tuple[Numbers, Any]:
    """Return the numbers of one chunk of the batch, and aux: gradients, norms, or a clipped sum."""
    gradients, losses, aux = call.gradients()
    runs_examples = isinstance(gradients, Formed)
    second_pass = None
    if call.options.method == "two_pass" and not runs_examples and call.start:
        contexts = partial(unchanged, call.model), partial(call.start.replayed, call.model)
        if terms.bounds and call.parameters and not is_narrow([losses]):
            second_pass = SecondPass(
                lambda: _forward(call, call.model, call.batch)[0],
                losses,
                call.parameters,
                contexts,
                witnesses=WITNESSES,
            )
    try:
        numbers = numbers_of(
            Formed(gradients.grads()) if is_formed else gradients,
            losses,
            terms._replace(mask=call.mask),
            limits=limits,
            second_pass=second_pass,
            is_definition=call.is_definition,
            is_checked=call.is_checked,
        )
        return replace(numbers, runs_examples=runs_examples), aux
    except PassesDifferError:
        call = replace(call, options=replace(call.options, method="book_keeping"))
        return _computed(call, terms, limits)


def _forward(call: Call, model: nn.Module, batch: Batch) -> tuple[Tensor, list[Tensor]]:
    """Return the (n,) losses of a plain forward, and what shows a row that depends on others."""
    out = call.loss_fn(model, *batch.arguments())
    losses = check_losses(split_aux(out, call.options.has_aux)[0], batch.n)
    return losses, [losses]


def was_compared(call: Call, numbers: Numbers, compute: Compute, seed: int | None = None) -> bool:
    """True if a check of the numbers of a chunk was due; they were compared with the definition."""
    start = call.start
    if not call.is_checked or start is None:
        return False

    def again(other: Reference) -> Numbers:
        with other.starts[0].replayed(other.model):
            return compute(call.on(other.model, other.batch, other.parameters, other.mask))[0]

    given = call.model, call.batch, call.parameters, [start], call.mask
    with unchanged(call.model):
        compared = identity.check(
            Reference(lambda *of: [partial(_forward, call, *of)], *given),
            numbers,
            again,
            seed=call.cache.next_seed() if seed is None else seed,
            is_first=call.purpose not in call.cache.checked,
            what=f"the result of {call.purpose[1]}",
        )
    if compared:
        call.cache.checked.add(call.purpose)
    return compared
