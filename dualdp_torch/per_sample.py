# SPDX-License-Identifier: Apache-2.0
"""Per-sample gradients, their norms, and their clipped sum, of a whole model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from .batch import join_aux
from .call import Call
from .clip import clip_and_sum, clipping_bounds, refuse_two_pass, whole_norms
from .fallback import Generators, generator_state, replayed, reweighted
from .gradients import Gradients
from .parts import is_narrow, wide
from .rules.base import Tensor

LossFn = Callable[..., Any]


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

    Returns:
        name -> (n, *shape); with `has_aux` a pair of that and aux.

    Raises:
        UnsupportedLayerError: the losses depend on other examples.
        TypeError, ValueError: a wrong argument or loss.
    """
    call = Call.checked(loss_fn, model, batch, method, has_aux, physical_batch_size, max_memory)
    found: list[dict[str, Tensor]] = []
    auxes, sizes = [], []
    for _, piece in call.pieces():
        gradients, _, aux = piece.gradients()
        found.append(gradients.grads())
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
) -> Any:
    """L2 norm of every example's gradient.

    Args:
        loss_fn: as in `per_sample_grads`.
        model: as there.
        *batch: as there.
        per_parameter: a norm for each parameter instead of the whole gradient's.
        method: as there.
        physical_batch_size: as there.
        max_memory: as there.
        has_aux: as there.

    Returns:
        (n,), or name -> (n,), float32 or wider; with `has_aux` a pair of that and aux.

    Raises:
        UnsupportedLayerError: the losses depend on other examples.
        TypeError, ValueError: a wrong argument or loss.
    """
    call = Call.checked(loss_fn, model, batch, method, has_aux, physical_batch_size, max_memory)
    found, auxes, sizes = [], [], []
    for _, piece in call.pieces():
        gradients, _, aux = piece.gradients()
        found.append(gradients.sq_norms(None))
        auxes.append(aux)
        sizes.append(piece.batch.n)
    squares = {
        name: torch.cat([part[name] for part in found])
        if found
        else torch.zeros(0, dtype=wide(p.dtype), device=p.device)
        for name, p in call.parameters.items()
    }
    norms: Any = whole_norms(squares, call.batch.n)
    if per_parameter:
        norms = {name: square.sqrt() for name, square in squares.items()}
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
) -> ClippedGradSum:
    """Sum over examples of gradients scaled to norm at most C.

    Args:
        loss_fn: as in `per_sample_grads`.
        model: as there.
        *batch: as there.
        max_grad_norm: C > 0, a number or scalar tensor; with clipping="per_layer" also a mapping
            module path -> bound.
        clipping: "flat"; "per_layer", each module's parameters to C / sqrt(modules); "automatic",
            C / (norm + 0.01).
        mask: (n,) bool, False for padding.
        method: as there.
        physical_batch_size: as there.
        max_memory: as there.
        has_aux: as there.

    Returns:
        `(grads, norms, losses, aux)`; grads float32, or float64 where the parameters are.

    Raises:
        UnsupportedLayerError: the losses depend on other examples.
        TypeError, ValueError: a wrong argument or loss.

    Guarantees:
        Every example's contribution has norm <= C (1 + 1e-4).  [test_every_contribution_is_bounded]
        A masked example, or one whose norm is not finite, contributes exactly zero.
            [test_masked_and_nan_examples_contribute_nothing]

    Source: Abadi et al. 2016, Algorithm 1; Bu et al. 2023 (book-keeping).
    """
    call = Call.checked(
        loss_fn, model, batch, method, has_aux, physical_batch_size, max_memory, mask
    )
    bounds = clipping_bounds(call.parameters, clipping, max_grad_norm)
    refuse_two_pass(method, clipping)
    grads: dict[str, Tensor] = {}
    norms, losses, auxes, sizes = [], [], [], []
    for _, piece in call.pieces():
        part = _clipped_piece(piece, bounds, clipping)
        for name, total in part.grads.items():
            grads[name] = grads[name].add_(total) if name in grads else total
        norms.append(part.norms)
        losses.append(part.losses)
        auxes.append(part.aux)
        sizes.append(piece.batch.n)
    if not norms:
        grads = {n: torch.zeros_like(p, dtype=wide(p.dtype)) for n, p in call.parameters.items()}
        norms = losses = [whole_norms({name: g.new_zeros(0) for name, g in grads.items()}, 0)]
    return ClippedGradSum(
        grads,
        torch.cat(norms),
        torch.cat(losses),
        join_aux(auxes, sizes) if has_aux else None,
    )


def _clipped_piece(piece: Call, bounds: Mapping[str, Any], clipping: str) -> ClippedGradSum:
    """The clipped sum of one piece of the batch."""
    passes_twice = piece.method == "two_pass" and bool(piece.parameters)
    state = generator_state() if passes_twice else None
    gradients, losses, aux = piece.gradients()
    second_pass = None
    if state is not None and not is_narrow([losses]):
        second_pass = partial(_second_pass, piece, gradients, state)
    grads, norms = clip_and_sum(
        gradients,
        piece.batch.n,
        bounds,
        clipping,
        piece.mask,
        second_pass,
    )
    if piece.mask is not None:
        losses = losses.where(piece.mask.to(losses.device), 0)
    return ClippedGradSum(grads, norms, losses, aux)


def _second_pass(
    piece: Call, gradients: Gradients, state: Generators, factors: Tensor
) -> dict[str, Tensor]:
    """The clipped sum by a backward of the reweighted losses, under the same random numbers."""
    gradients.forget()  # two passes need the memory of one

    def losses() -> Tensor:
        out = piece.loss_fn(piece.model, *piece.batch.arguments())
        return out[0] if piece.has_aux else out

    with replayed(state):
        return reweighted(losses, piece.parameters, factors)
