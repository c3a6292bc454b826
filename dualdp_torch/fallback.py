# SPDX-License-Identifier: Apache-2.0
"""The two ways that need no rule: `vmap` over examples, and one example at a time."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.utils import _pytree as pytree

from dualdp import UnsupportedLayerError

from .batch import Batch, check_losses, join_aux
from .gradients import Formed
from .parts import wide
from .rules.base import Tensor
from .uses import refuse_reentrant_checkpoints

Generators = tuple[Tensor, list[Tensor]]


def generator_state() -> Generators:
    """The states of the host's generator and of those of all devices that are in use.

    A forward may move its inputs, so theirs is not the only device that it draws on.
    """
    return torch.get_rng_state(), _on_devices()


def _on_devices() -> list[Tensor]:
    """The states of the generators of CUDA devices, if any is in use."""
    states: list[Tensor] = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return states


@contextlib.contextmanager
def replayed(state: Generators) -> Iterator[None]:
    """The same random numbers again, after which the generators go on where they were."""
    with torch.random.fork_rng(range(len(state[1]))):
        torch.set_rng_state(state[0])
        for device, of_device in enumerate(state[1]):
            torch.cuda.set_rng_state(of_device, device)
        yield


def reweighted(
    losses: Callable[[], Tensor], parameters: Mapping[str, Tensor], factors: Tensor
) -> dict[str, Tensor]:
    """Name -> gradient of the sum of factor times loss: the second pass (Lee & Kifer 2021)."""
    with torch.enable_grad():
        each = losses()
        total = (each * factors.to(each.dtype)).sum()
    found: tuple[Tensor | None, ...] = (None,) * len(parameters)
    if total.requires_grad:
        found = torch.autograd.grad(total, [*parameters.values()], allow_unused=True)
    return {
        name: torch.zeros_like(p, dtype=wide(p.dtype)) if g is None else g.to(wide(p.dtype))
        for (name, p), g in zip(parameters.items(), found, strict=True)
    }


class _Call(nn.Module):
    """The loss as a module, so that `functional_call` replaces the model's parameters in it."""

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Any], has_aux: bool) -> None:
        super().__init__()
        self.model = model
        self._loss_fn, self._has_aux = loss_fn, has_aux

    def forward(self, *example: Any) -> tuple[Tensor, tuple[Tensor, list[Tensor]]]:
        """Loss of a batch of one, and (loss, tensors of aux) without gradient."""
        out = self._loss_fn(self.model, *example)
        losses, aux = out if self._has_aux else (out, None)
        loss = check_losses(losses, 1).squeeze(0)
        leaves, self.aux_spec = pytree.tree_flatten(aux)
        self.aux_leaves = leaves
        return loss, (loss.detach(), [leaf.detach() for leaf in leaves if torch.is_tensor(leaf)])

    def aux(self, tensors: list[Tensor]) -> Any:
        """The auxiliary output with the tensors of all examples, (n, 1, ...), joined."""
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
    """Gradients of every example by `torch.func.vmap(grad)`; dropout differs per example."""
    call = _Call(model, loss_fn, has_aux)
    values = {f"model.{name}": p.detach() for name, p in parameters.items()}
    tensors = [t.detach() for t in batch.tensors()]

    def loss(values: dict[str, Tensor], tensors: list[Tensor]) -> Any:
        example = batch.with_tensors([t.unsqueeze(0) for t in tensors])
        return functional_call(call, values, example)

    each = vmap(grad(loss, has_aux=True), in_dims=(None, 0), randomness=randomness)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "There is a performance drop", UserWarning)
            formed, (losses, tensors_of_aux) = each(values, tensors)
    except (RuntimeError, NotImplementedError) as error:
        first_line = str(error).strip().split("\n")[0]
        raise UnsupportedLayerError(
            f'torch.func.vmap can\'t run this model ({first_line}). Use method="loop", which is '
            "exact for every model."
        ) from error
    aux = call.aux(tensors_of_aux)
    return Formed({name: formed[f"model.{name}"] for name in parameters}), losses, aux


def again_by_vmap(
    model: nn.Module,
    loss_fn: Callable[..., Any],
    batch: Batch,
    parameters: Mapping[str, Tensor],
) -> Formed:
    """Gradients of a forward that was run before, which may not draw random numbers."""
    try:
        found, _, _ = by_vmap(model, loss_fn, batch, parameters, False, randomness="error")
    except UnsupportedLayerError as error:
        if "random" not in str(error):
            raise
        raise UnsupportedLayerError(
            "The model draws its randomness (dropout) itself and goes through vmap, which can't "
            "draw those of the recorded forward again. Use a grad_sample_mode without vmap if that "
            "was asked for, else clipped_grad_sum."
        ) from error
    return found


def by_loop(
    model: nn.Module,
    loss_fn: Callable[..., Any],
    batch: Batch,
    parameters: Mapping[str, Tensor],
    has_aux: bool,
) -> tuple[Formed, Tensor, Any]:
    """Gradients of every example, one at a time: slow, obvious, the truth."""
    formed: dict[str, list[Tensor]] = {name: [] for name in parameters}
    losses, auxes = [], []
    for k in range(batch.n):
        out = loss_fn(model, *batch.rows(slice(k, k + 1)).arguments())
        loss, aux = out if has_aux else (out, None)
        loss = check_losses(loss, 1)
        found: tuple[Tensor | None, ...] = (None,) * len(parameters)
        if loss.requires_grad:
            found = torch.autograd.grad(loss.sum(), [*parameters.values()], allow_unused=True)
        if k == 0 or any(g is None for g in found):
            refuse_reentrant_checkpoints(loss)
        for (name, p), g in zip(parameters.items(), found, strict=True):
            formed[name].append(torch.zeros_like(p) if g is None else g.to_dense())
        losses.append(loss.detach())
        auxes.append(aux)
    stacked = {name: torch.stack([g.detach() for g in gs]) for name, gs in formed.items()}
    return Formed(stacked), torch.cat(losses), join_aux(auxes, [1] * batch.n)
