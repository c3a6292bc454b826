# SPDX-License-Identifier: Apache-2.0
"""Per-sample gradients, their norms, and their clipped sum, of a whole model."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from . import spot_check
from .batch import join_aux
from .call import Call
from .clip import (
    Factors,
    clip_factors,
    clipped_sums,
    clipping_bounds,
    norms_of,
    passes_again,
    refuse_two_pass,
    whole_norms,
)
from .fallback import reweighted
from .gradients import Captured, Formed, Limits
from .parts import is_narrow, wide
from .rules.base import Tensor
from .spot_check import Engine, Subject

LossFn = Callable[..., Any]
#: Parameters whose sums the two passes of "two_pass" are compared by.
WITNESSES = 3


class ClippedGradSum(NamedTuple):
    """What `clipped_grad_sum` returns.

    Attributes:
        grads: name -> sum over examples of clipped gradients.
        norms: (n,) norms before clipping; 0 for padding.
        losses: (n,) losses; 0 for padding.
        aux: auxiliary output of the loss function, or None.
    """

    grads: dict[str, Tensor]
    norms: Tensor
    losses: Tensor
    aux: Any


def per_sample_grads(
    loss_fn: LossFn,
    model: nn.Module,
    *batch: Any,
    method: str = "auto",
    physical_batch_size: int | None = None,
    max_memory: int | None = None,
    has_aux: bool = False,
    check: str = "first",
) -> Any:
    """Gradient of every example's own loss.

    Args:
        loss_fn: `loss_fn(model, *batch)` -> (n,) losses, one per example.
        model: the module; its trainable parameters are differentiated.
        *batch: tensors with the examples on axis 0, nested dicts and tuples of them, and anything
            else, which is handed on unchanged.
        method: one of `METHODS`; all are exact.
        physical_batch_size: work on this many examples at once.
        max_memory: bytes that one piece of the batch may keep; None: half of what is free.
        has_aux: `loss_fn` returns `(losses, aux)`.
        check: when two examples are compared with plain autograd of their own losses: at the
            "first" call of a model, loss, shapes (without n), dtypes, training flags and method, or
            "always", or "off".

    Returns:
        name -> (n, *shape); with `has_aux` a pair of that and aux.

    Raises:
        ExactnessError: a spot check failed.
        RuntimeError: the call is inside `torch.inference_mode()`.
        UnsupportedLayerError: the losses depend on other examples.
        TypeError, ValueError: a wrong argument or loss.
    """
    call = Call.checked(
        loss_fn,
        model,
        batch,
        method,
        has_aux,
        physical_batch_size,
        max_memory,
        check=check,
        purpose=("per_sample_grads",),
    )
    found: list[dict[str, Tensor]] = []
    auxes, sizes = [], []
    for _, piece in call.pieces():
        numbers, aux = _grads(piece)
        _check(piece, numbers, lambda call: _grads(call)[0])
        found.append(dict(numbers.formed or {}))
        auxes.append(aux)
        sizes.append(piece.batch.n)
    grads = {
        name: torch.cat([part[name] for part in found]).to(p.dtype)
        if found
        else p.new_zeros((0, *p.shape)).detach()
        for name, p in call.parameters.items()
    }
    return (grads, join_aux(auxes, sizes)) if has_aux else grads


def per_sample_norms(
    loss_fn: LossFn,
    model: nn.Module,
    *batch: Any,
    per_parameter: bool = False,
    method: str = "auto",
    physical_batch_size: int | None = None,
    max_memory: int | None = None,
    has_aux: bool = False,
    check: str = "first",
) -> Any:
    """L2 norm of every example's gradient.

    Args:
        loss_fn: as in `per_sample_grads`.
        model: as in `per_sample_grads`.
        *batch: as in `per_sample_grads`.
        per_parameter: a norm for each parameter instead of the whole gradient's.
        method: as in `per_sample_grads`.
        physical_batch_size: as in `per_sample_grads`.
        max_memory: as in `per_sample_grads`.
        has_aux: as in `per_sample_grads`.
        check: as in `per_sample_grads`.

    Returns:
        (n,), or name -> (n,), float32 or wider; with `has_aux` a pair of that and aux.

    Raises:
        ExactnessError: a spot check failed.
        RuntimeError: the call is inside `torch.inference_mode()`.
        UnsupportedLayerError: the losses depend on other examples.
        TypeError, ValueError: a wrong argument or loss.
    """
    call = Call.checked(
        loss_fn,
        model,
        batch,
        method,
        has_aux,
        physical_batch_size,
        max_memory,
        check=check,
        purpose=("per_sample_norms", "each" if per_parameter else "whole"),
    )
    limits = Limits() if per_parameter else Limits(lambda name: "")
    found, auxes, sizes = [], [], []
    for _, piece in call.pieces():
        numbers, aux = _norms(piece, limits)
        _check(piece, numbers, lambda call: _norms(call, limits)[0])
        found.append(numbers)
        auxes.append(aux)
        sizes.append(piece.batch.n)
    norms: Any = torch.cat([part.norms for part in found]) if found else _no_norms(call)
    if per_parameter:
        norms = {
            name: torch.cat([part.lengths[name] for part in found])
            if found
            else torch.zeros(0, dtype=wide(p.dtype), device=p.device)
            for name, p in call.parameters.items()
        }
    return (norms, join_aux(auxes, sizes)) if has_aux else norms


def clipped_grad_sum(
    loss_fn: LossFn,
    model: nn.Module,
    *batch: Any,
    max_grad_norm: float | Tensor | Mapping[str, float],
    clipping: str = "flat",
    mask: Tensor | None = None,
    method: str = "auto",
    physical_batch_size: int | None = None,
    max_memory: int | None = None,
    has_aux: bool = False,
    check: str = "first",
) -> ClippedGradSum:
    """Sum over examples of gradients scaled to norm at most C.

    Args:
        loss_fn: as in `per_sample_grads`.
        model: as in `per_sample_grads`.
        *batch: as in `per_sample_grads`.
        max_grad_norm: C > 0, a number or scalar tensor; with clipping="per_layer" also a mapping
            module path -> bound.
        clipping: "flat"; "per_layer", each module's parameters to C / sqrt(modules); "automatic",
            C / (norm + 0.01).
        mask: (n,) bool, False for padding.
        method: as in `per_sample_grads`.
        physical_batch_size: as in `per_sample_grads`.
        max_memory: as in `per_sample_grads`.
        has_aux: as in `per_sample_grads`.
        check: as in `per_sample_grads`; the sum over the batch is compared, too.

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
    call = Call.checked(
        loss_fn,
        model,
        batch,
        method,
        has_aux,
        physical_batch_size,
        max_memory,
        mask,
        check=check,
        purpose=("clipped_grad_sum", clipping),
    )
    bounds = clipping_bounds(call.parameters, clipping, max_grad_norm)
    refuse_two_pass(method, clipping)
    grads: dict[str, Tensor] = {}
    norms, losses, auxes, sizes = [], [], [], []
    for _, piece in call.pieces():
        numbers, aux = clipped_numbers(piece, bounds, clipping)
        _check(piece, numbers, lambda call: clipped_numbers(call, bounds, clipping)[0])
        for name, total in (numbers.sums or {}).items():
            grads[name] = grads[name].add_(total) if name in grads else total
        norms.append(numbers.norms)
        each = numbers.losses
        losses.append(each if piece.mask is None else each.where(piece.mask.to(each.device), 0))
        auxes.append(aux)
        sizes.append(piece.batch.n)
    if not norms:
        grads = {n: torch.zeros_like(p, dtype=wide(p.dtype)) for n, p in call.parameters.items()}
        norms = losses = [_no_norms(call)]
    return ClippedGradSum(
        grads,
        torch.cat(norms),
        torch.cat(losses),
        join_aux(auxes, sizes) if has_aux else None,
    )


def _no_norms(call: Call) -> Tensor:
    """(0,) norms of no examples, in the precision of the parameters."""
    empty = {n: torch.zeros(0, dtype=wide(p.dtype)) for n, p in call.parameters.items()}
    return whole_norms(empty, 0)


def _grads(call: Call) -> tuple[Engine, Any]:
    """The formed gradients of one piece of a batch, and aux."""
    gradients, losses, aux = call.gradients()
    formed = gradients.grads()
    row_of = lambda row: {name: grad[row] for name, grad in formed.items()}  # noqa: E731
    if not call.is_checked:
        return Engine(losses.new_empty(0), losses, row_of, formed=formed), aux
    norms = norms_of(Formed(formed), Limits(), call.batch.n)[1]
    numbers = Engine(
        norms,
        losses,
        row_of,
        formed=formed,
        sums={name: grad.sum(0) for name, grad in formed.items()},
        factors=dict.fromkeys(formed, torch.ones_like(norms)),
        runs_examples=isinstance(gradients, Formed),
    )
    return numbers, aux


def _norms(call: Call, limits: Limits) -> tuple[Engine, Any]:
    """The norms of one piece of a batch, and aux."""
    gradients, losses, aux = call.gradients()
    squares, norms, _ = norms_of(gradients, limits, call.batch.n)
    lengths = {name: square.sqrt().to(norms.dtype) for name, square in squares.items()}
    numbers = Engine(
        norms,
        losses,
        lambda row: {},
        lengths=lengths,
        doubt=gradients.doubt if call.is_checked else None,
        runs_examples=isinstance(gradients, Formed),
    )
    return numbers, aux


def clipped_numbers(call: Call, bounds: Mapping[str, Any], clipping: str) -> tuple[Engine, Any]:
    """The clipped sum of one piece of a batch, and aux."""
    gradients, losses, aux = call.gradients()
    factors = clip_factors(gradients, call.batch.n, bounds, clipping, call.mask)
    second_pass = None
    if (
        call.method == "two_pass"
        and isinstance(gradients, Captured)
        and call.parameters
        and not is_narrow([losses])
        and passes_again(gradients, factors.rows)
    ):
        second_pass = _SecondPass(call, gradients, factors, losses)

    def contribution(row: int) -> dict[str, Tensor]:
        only = factors.only(row)
        if second_pass is None:
            return clipped_sums(gradients, only)
        return second_pass(next(iter(only.of.values())))

    try:
        sums = clipped_sums(gradients, factors, second_pass)
    except _PassesDifferError:
        return clipped_numbers(replace(call, method="book_keeping"), bounds, clipping)
    numbers = Engine(
        factors.norms,
        losses,
        contribution,
        sums=sums,
        factors=factors.of,
        bounds=bounds,
        clipping=clipping,
        doubt=gradients.doubt if call.is_checked else None,
        runs_examples=isinstance(gradients, Formed),
    )
    return numbers, aux


class _PassesDifferError(Exception):
    """The second pass of a call is another function of the data than the first."""


class _SecondPass:
    """The clipped sum by a backward of the reweighted losses, under the same random numbers.

    The losses of both passes must agree, and so must the sums of the smallest parameters: where a
    loss hardly depends on the dropout masks, its gradient still does.

    Args:
        call: of the first pass.
        gradients: of the first pass, forgotten when the second one begins.
        factors: of the first pass.
        losses: (n,) of the first pass.
    """

    def __init__(self, call: Call, gradients: Captured, factors: Factors, losses: Tensor) -> None:
        self._call, self._gradients, self._losses = call, gradients, losses
        smallest = sorted(call.parameters, key=lambda name: call.parameters[name].numel())
        self._witnesses = {
            name: (gradients.sum(name, factors.of[name], None), factors.lengths(name))
            for name in smallest[:WITNESSES]
        }

    def __call__(self, weights: Tensor) -> dict[str, Tensor]:
        """The sum of weights (n,) times gradients.

        Raises:
            _PassesDifferError: this pass is another function of the data than the first.
        """
        call = self._call
        self._gradients.forget()  # two passes need the memory of one

        def losses() -> Tensor:
            out = call.loss_fn(call.model, *call.batch.arguments())
            return out[0] if call.has_aux else out

        with call.again():
            sums = reweighted(losses, call.parameters, weights, self._losses)
        if sums is None:
            raise _PassesDifferError
        for name, (total, length) in self._witnesses.items():
            if float((sums[name] - total).norm()) > 1e-2 * length:
                raise _PassesDifferError
        self._witnesses = {}  # they are of the first weights
        return sums


def _check(call: Call, numbers: Engine, again: Callable[[Call], Engine]) -> None:
    """Compare the numbers of one piece of a batch with the definition, if that is due.

    Raises:
        ExactnessError: they differ.
    """
    start = call.start
    if not call.is_checked or start is None:
        return
    subject = Subject(
        call.loss_fn, call.model, call.batch, call.parameters, start, call.has_aux, call.mask
    )

    def numbers_of(other: Subject) -> Engine:
        with other.start.replayed(other.model):
            return again(call.on(other.model, other.batch, dict(other.parameters)))

    with call.unchanged():
        compared = spot_check.check(
            subject,
            numbers,
            numbers_of,
            drawn=_drawn.random(),
            has_drawn=start.has_drawn(call.model),
            what=f"the result of {call.purpose[1]}",
        )
    if compared:
        call.compared()


_drawn = random.Random(0)  # which example a functional call is checked on
