# SPDX-License-Identifier: Apache-2.0
"""Methods without rules: `vmap` over examples, and a loop over single examples."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import _engine_run_backward
from torch.func import functional_call, grad, vmap
from torch.utils import _pytree as pytree

from dualdp._validate import UnsupportedLayerError
from dualdp_torch.per_sample.batch import Batch, check_losses, join_aux
from dualdp_torch.per_sample.gradients import Formed
from dualdp_torch.per_sample.parameter_use import USE_LOOP, ChangedInPlaceError, graph_nodes
from dualdp_torch.rules.base import Tensor, wide


def plain_gradients(
    loss: Callable[[], Tensor], parameters: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the gradient of one scalar by plain `backward()`; every `p.grad` is restored.

    `torch.autograd.grad` would miss a part: functions that differentiate by themselves, such as
    reversible blocks, add to `p.grad`. A tensor outside of `parameters` is left as it was.
    """
    with gradients_set_aside(parameters), torch.enable_grad():
        total = loss()
        if total.requires_grad:
            with gradients_set_aside(_other_leaves(total, parameters)):
                _backward(total)
        return {name: _widened(p, p.grad) for name, p in parameters.items()}


def _other_leaves(total: Tensor, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the leaves of a graph that are no parameters, such as a loss's own, by numbers."""
    own = {id(p) for p in parameters.values()}
    leaves = [getattr(node, "variable", None) for node in graph_nodes([total.grad_fn])]
    others = [leaf for leaf in leaves if leaf is not None and id(leaf) not in own]
    return {str(number): leaf for number, leaf in enumerate(others)}


def each_by_autograd(
    loss_of: Callable[[int], Tensor], n: int, parameters: Mapping[str, Tensor]
) -> Formed:
    """Return the gradients of `loss_of(0)` to `loss_of(n - 1)`, each by plain autograd."""
    found = [plain_gradients(partial(loss_of, row), parameters) for row in range(n)]
    return Formed({name: torch.stack([g[name] for g in found]) for name in parameters})


def _backward(total: Tensor, inputs: Sequence[Tensor] = ()) -> tuple[Tensor | None, ...]:
    """Run a backward; return the gradients of `inputs`, or add those of all leaves to `grad`.

    `torch.autograd.grad` and `backward` would switch off the function modes that are active, such
    as one without randomness, in activation checkpoints that run again.
    """
    arguments = (total,), (torch.ones_like(total),), False, False, tuple(inputs), True
    found: Any = _engine_run_backward(*arguments, accumulate_grad=not inputs)
    return found if inputs else ()


def _widened(p: Tensor, grad: Tensor | None) -> Tensor:
    """Return a parameter's gradient, or zeros if it has none, float32 or wider."""
    if grad is None:
        return torch.zeros_like(p, dtype=wide(p.dtype))
    return grad.detach().to_dense().to(wide(p.dtype))


@contextlib.contextmanager
def gradients_set_aside(parameters: Mapping[str, Tensor]) -> Iterator[None]:
    """Context in which every `p.grad` is None; restores the gradients at its end."""
    kept = {name: p.grad for name, p in parameters.items()}
    _set_aside.append(kept)
    try:
        for p in parameters.values():
            p.grad = None
        yield
    finally:
        _set_aside.pop()
        for name, p in parameters.items():
            p.grad = kept[name]


def are_set_aside() -> bool:
    """True inside `gradients_set_aside`, where a running backward is the engine's own."""
    return bool(_set_aside)


_set_aside: list[Any] = []  # global: hooks may run in another thread than the backward


#: Largest relative difference by rounding between the losses of two equal forwards.
_ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-5}
_ROUNDING_OF_VMAP = {torch.float64: 1e-8, torch.float32: 1e-3}
#: Error of a model that is computed again by vmap after it was changed.
CHANGED = (
    "What the model computes changed between its forward and the reading of its gradients (by "
    "optimizer.step()): weights, buffers, inputs, attributes or hooks. This model goes through "
    "vmap, which computes it again then. Change them after optimizer.step()."
)


def reweighted(
    losses: Callable[[], Tensor], parameters: Mapping[str, Tensor], factors: Tensor
) -> dict[str, Tensor]:
    """Return name -> gradient of the sum of factor times loss: the second pass."""
    with torch.enable_grad():
        each = losses()
        total = (each * factors.to(each.dtype)).sum()
    found: tuple[Tensor | None, ...] = (None,) * len(parameters)
    if total.requires_grad:
        found = _backward(total, [*parameters.values()])
    pairs = zip(parameters.items(), found, strict=True)
    return {name: _widened(p, g) for (name, p), g in pairs}


def is_same_forward(ours: Tensor, theirs: Tensor, share: float | None = None) -> bool:
    """True if the losses of two forwards are equal up to rounding, or up to a share of them."""
    # Outputs may be the largest tensors of a step: compare an eighth at a time.
    pairs = list(zip(*(torch.atleast_1d(x).chunk(8) for x in (ours, theirs)), strict=True))
    total = sum(t.abs().nansum(dtype=wide(theirs.dtype)) for _, t in pairs)
    mean = total / sum(t.isnan().logical_not_().sum() for _, t in pairs)
    share = _ROUNDING.get(theirs.dtype, 2e-2) if share is None else share

    def apart(a: Tensor, b: Tensor) -> bool:
        far = (a - b).abs_() > (b.abs() + mean).mul_(share)
        return bool((far | (a.isfinite() != b.isfinite())).any())

    return not any(apart(a, b) for a, b in pairs)


class _Call(nn.Module):
    """Loss as a module, so that `functional_call` replaces the model's parameters in it."""

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Any], has_aux: bool) -> None:
        super().__init__()
        self.model = model
        self._loss_fn, self._has_aux = loss_fn, has_aux

    def forward(self, *example: Any) -> tuple[Tensor, tuple[Tensor, list[Tensor]]]:
        """Return the loss of a batch of one, and (loss, tensors of aux) without gradient."""
        out = self._loss_fn(self.model, *example)
        losses, aux = out if self._has_aux else (out, None)
        loss = check_losses(losses, 1).squeeze(0)
        self.aux_leaves, self.aux_spec = pytree.tree_flatten(aux)
        tensors = [leaf.detach() for leaf in self.aux_leaves if torch.is_tensor(leaf)]
        return loss, (loss.detach(), tensors)

    def aux(self, tensors: list[Tensor]) -> Any:
        """Return aux with the tensors of all examples, (n, rows, ...), joined."""
        queue = iter(t.flatten(0, 1) if t.dim() > 1 else t for t in tensors)
        leaves = [next(queue) if torch.is_tensor(leaf) else leaf for leaf in self.aux_leaves]
        return pytree.tree_unflatten(leaves, self.aux_spec)


def by_vmap(
    model: nn.Module,
    loss_fn: Callable[..., Any],
    batch: Batch,
    parameters: Mapping[str, Tensor],
    has_aux: bool,
    randomness: str = "different",
) -> tuple[Formed, Tensor, Any]:
    """Return gradients, losses and aux by `torch.func.vmap(grad)`; dropout differs per example."""
    call = _Call(model, loss_fn, has_aux)
    values = {f"model.{name}": p.detach() for name, p in parameters.items()}
    tensors = [t.detach().unflatten(0, (batch.n, batch.rows_per_unit)) for t in batch.tensors()]

    def loss(values: dict[str, Tensor], tensors: list[Tensor]) -> Any:
        return functional_call(call, values, batch.with_tensors(tensors))

    each = vmap(grad(loss, has_aux=True), in_dims=(None, 0), randomness=randomness)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "There is a performance drop", UserWarning)
            formed, (losses, tensors_of_aux) = each(values, tensors)
    except (RuntimeError, NotImplementedError) as error:
        first = str(error).strip().split("\n")[0].split(". ")[0].rstrip(".")
        raise UnsupportedLayerError(
            f"torch.func.vmap can't run this model ({first}). {USE_LOOP}"
        ) from error
    # Detached from what else the loss is computed from, such as a parameter of its own.
    grads = Formed({name: formed[f"model.{name}"].detach() for name in parameters})
    return grads, losses.detach(), call.aux(tensors_of_aux)


def again_by_vmap(
    model: nn.Module,
    loss_fn: Callable[..., Any],
    batch: Batch,
    parameters: Mapping[str, Tensor],
    outputs: Sequence[Tensor],
) -> Formed:
    """Return gradients of a repeated forward, which may not draw random numbers.

    `loss_fn` also returns the outputs, which are compared with those of the first forward.
    """
    try:
        found, _, again = by_vmap(model, loss_fn, batch, parameters, True, randomness="error")
    except UnsupportedLayerError as error:
        if "random" not in str(error):
            raise
        raise UnsupportedLayerError(
            "The model draws its randomness (dropout) itself and goes through vmap, which can't "
            f"draw those of the recorded forward again. {USE_LOOP}"
        ) from error
    if not _are_outputs(again, outputs):
        raise ChangedInPlaceError(CHANGED)
    return found


def _are_outputs(again: Sequence[Tensor], outputs: Sequence[Tensor]) -> bool:
    """True if outputs that were computed again are the first ones, up to rounding."""
    for ours, theirs in zip(again, outputs, strict=True):
        share = _ROUNDING_OF_VMAP.get(theirs.dtype, 1e-1) * (10 if theirs.is_cuda else 1)
        if not is_same_forward(ours.reshape(theirs.shape), theirs, share):
            return False
    return True


def again_by_loop(
    model: nn.Module,
    loss_fn: Callable[..., Any],
    batch: Batch,
    parameters: Mapping[str, Tensor],
    outputs: Sequence[Tensor],
) -> Formed | None:
    """Return gradients of a forward repeated for each example alone; None if it is another one."""
    found, _, again = by_loop(model, loss_fn, batch, parameters, True)
    return found if _are_outputs([out.detach() for out in again], outputs) else None


def by_loop(
    model: nn.Module,
    loss_fn: Callable[..., Any],
    batch: Batch,
    parameters: Mapping[str, Tensor],
    has_aux: bool,
) -> tuple[Formed, Tensor, Any]:
    """Return gradients, losses and aux, computed one example at a time by plain autograd."""
    losses: list[Tensor] = []
    auxes: list[tuple[Any, int]] = []

    def loss_of(row: int) -> Tensor:
        out = loss_fn(model, *batch.rows(slice(row, row + 1)).arguments())
        loss, aux = out if has_aux else (out, None)
        losses.append(check_losses(loss, 1).detach())
        auxes.append((aux, 1))
        return loss.sum()

    formed = each_by_autograd(loss_of, batch.n, parameters)
    return formed, torch.cat(losses), join_aux(auxes, batch.rows_per_unit)
