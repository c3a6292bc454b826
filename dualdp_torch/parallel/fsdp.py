# SPDX-License-Identifier: Apache-2.0
"""Models under FSDP2 (`torch.distributed.fsdp.fully_shard`): sharded parameters and clipped sums.

Outside of forward and backward a parameter is a `DTensor`, of which each process holds some rows;
inside it is a plain tensor that FSDP gathers and frees, which the capture records. Gradients of
parameters never exist, so FSDP's own reduction does nothing: the clipped sum of one parameter at a
time is formed, reduce-scattered and freed.

FSDP gathers parameters by collectives in forward and backward, so all processes must call the model
equally often, and decisions that depend on the data of one process are made together.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

from dualdp_torch.noise.noise import Piece
from dualdp_torch.parallel.process_group import Group
from dualdp_torch.rules.base import Tensor, wide

#: Methods that need no more than one layer's gradient on one process.
METHODS = ("auto", "book_keeping", "two_pass")
#: Named `reduce_scatter_single` since torch 2.13.
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_PLAIN = {torch.Tensor, nn.Parameter, type(None)}
_ALIKE = (  # hint for the error about processes that diverge
    "Drop layers, choose experts and losses alike on all (from a generator with the same seed), or "
    'use clipping="flat" with grad_sample_mode="auto".'
)


def is_sharded(parameter: Tensor | None) -> bool:
    """True if a tensor is a `DTensor`; does not import the class."""
    if type(parameter) in _PLAIN:  # nn.Parameter of a DTensor has the type DTensor
        return False
    tensors = sys.modules.get("torch.distributed.tensor")
    return tensors is not None and isinstance(parameter, tensors.DTensor)


def sharded_parameters(module: nn.Module) -> dict[str, Any]:
    """Return the parameters that are `DTensor`s by name, frozen ones included.

    Without that class, as in most programs, no parameter is looked at.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return {}
    return {name: p for name, p in module.named_parameters() if is_sharded(p)}


def fsdp_layers(module: nn.Module) -> list[Any]:
    """Return the modules that `fully_shard` was called on."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return [m for m in module.modules() if fsdp is not None and isinstance(m, fsdp.FSDPModule)]


def refuse_tensor_parallel(module: nn.Module, call: str, instead: str) -> None:
    """Refuse a model that computes with pieces of its parameters."""
    sharded = sharded_parameters(module)
    if sharded and not fsdp_layers(module):
        raise TypeError(
            f"The parameters {sorted(sharded)} are DTensors, but no layer was "
            "given to fully_shard. Expected fully_shard(model), which gathers them in forward, or "
            "the whole model on every process: tensor parallelism (parallelize_module) is not "
            f"covered by {call}; {instead}."
        )


def check_sharded(module: nn.Module, method: str) -> None:
    """Refuse a sharded model that cannot be trained privately; accept every other model.

    Raises:
        TypeError: a parameter is sharded otherwise than by `fully_shard` over all processes, or a
            trainable one not at all while others are.
        ValueError: the method needs whole gradients of many layers at once.
    """
    refuse_tensor_parallel(module, "dualdp_torch", "meshes of dualdp_jax have it")
    sharded = sharded_parameters(module)
    for name, p in sharded.items():
        mesh, placements = p.device_mesh, tuple(p.placements)
        is_by_rows = len(placements) == 1 and placements[0].is_shard(0)
        if not is_by_rows or mesh.size() != dist.get_world_size():
            raise TypeError(
                f"Parameter {name!r} has the placements {placements} on {mesh}. Expected Shard(0) "
                "on one mesh dimension over all processes, as fully_shard(model) does without a "
                "mesh of its own: tensor parallelism (parallelize_module) is not covered."
            )
    trained = {name for name, p in module.named_parameters() if p.requires_grad and sharded}
    whole = sorted(trained - sharded.keys())
    if whole and len(whole) < len(trained):
        raise TypeError(
            f"The trainable parameters {whole} are not sharded while others are. Expected "
            "fully_shard on the whole model, without ignored_params; freeze what is ignored."
        )
    if len(whole) < len(trained) and method not in METHODS:
        raise ValueError(
            f"method={method!r} holds per-sample gradients of every layer at once, which a model "
            f"under fully_shard is too large for. Expected one of {METHODS}."
        )


def refuse_sharded(module: nn.Module, call: str) -> None:
    """Refuse a sharded model in a call, such as "save_checkpoint", that handles whole tensors."""
    if sharded_parameters(module):
        instead = call.replace("_checkpoint", "_sharded_checkpoint")
        raise TypeError(
            f"{call} came with a model under fully_shard, which no process holds whole. Expected "
            f"{instead}; consolidate_checkpoint makes one file of its folder."
        )


class Shards:
    """Trained parameters of a model under `fully_shard`, outside and inside its forward.

    The layers are gathered once, one after the other.

    Attributes:
        parameters: mapping from name to the `DTensor` that the optimizer holds.
        plain: mapping from name to the tensor in forward and backward, freed outside of them.
        pieces: mapping from name to the `Piece` of the parameter that this process holds.
        group: `Group` of the processes.
    """

    def __init__(self, module: nn.Module) -> None:
        self._layers = fsdp_layers(module)
        for layer in self._layers:
            layer.reshard()
        trained: dict[str, Any] = {n: p for n, p in module.named_parameters() if p.requires_grad}
        self.parameters = trained
        self.group = Group(next(iter(trained.values())).device_mesh.get_group())
        self._owners: dict[str, Any] = {}
        self.plain = self._gathered(module)
        self.pieces = {name: self._piece(p) for name, p in trained.items()}

    @classmethod
    def of(cls, module: nn.Module) -> Shards | None:
        """Return the shards of a model, or None for an unsharded one; called on all processes."""
        trained = [p for p in module.parameters() if p.requires_grad]
        return cls(module) if any(map(is_sharded, trained)) else None

    def _gathered(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """Mapping from name to the parameter's plain tensor, which is the same in every forward."""
        found: dict[str, nn.Parameter] = {}
        for layer in self._layers:
            layer.unshard()
            for name in self.parameters:
                path, _, attribute = name.rpartition(".")
                value = module.get_submodule(path)._parameters[attribute]
                if name not in found and value is not None and not is_sharded(value):
                    found[name], self._owners[name] = value, layer
            layer.reshard()
        return {name: found[name] for name in self.parameters}

    def _piece(self, p: Any) -> Piece:
        rows, width = _rows_of_each(p, self.group.size), math.prod(p.shape[1:])
        return Piece(min(self.group.rank * rows, p.shape[0]) * width, p.numel())

    def reduce(self, name: str, total: Tensor) -> Tensor:
        """Return this process's rows of a whole gradient, summed over all processes."""
        p, group = self.parameters[name], self.group
        rows = _rows_of_each(p, group.size)
        missing = rows * group.size - len(total)
        if missing:
            total = torch.cat([total, total.new_zeros(missing, *total.shape[1:])])
        piece = total.new_empty(rows, *total.shape[1:])
        with group.collective(f"the sum of {name!r}"):
            _reduce_scatter(piece, total.contiguous(), group=group.process_group)
        return piece[: len(p.to_local())]

    def gradient(self, name: str, piece: Tensor) -> Tensor:
        """Return the value of `p.grad` for the optimizer: a `DTensor` of the parameter's dtype."""
        from torch.distributed.tensor import DTensor

        p = self.parameters[name]
        local = p.to_local()
        return DTensor.from_local(
            piece.to(local).view_as(local),
            p.device_mesh,
            p.placements,
            run_check=False,
            shape=p.shape,
            stride=p.stride(),
        )

    def first_that(self, holds: bool) -> int | None:
        """Return the first rank on which `holds` is true, or None; the same on all processes."""
        size, device = self.group.size, next(iter(self.plain.values())).device
        found = size - self.group.largest(size - self.group.rank if holds else 0, device)
        return found if found < size else None

    def require_same_layers(self, uses: Iterable[Iterable[str]]) -> None:
        """Refuse a forward that used other layers than on other processes.

        Sums are reduced in the order of the backward, which must therefore be the same everywhere.
        `uses` has the parameters' names of each use, in the order of the forward.
        """
        names = [sorted(held) for held in uses]
        self.group.require_same("the layers that the model used", names, _ALIKE)

    def sample_of(self, rank: int, arguments: Any, device: torch.device) -> Any:
        """Return the arguments that one process passed in, on every process and on its `device`."""
        few = arguments if rank == self.group.rank else None
        few = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.cpu(), few)
        few = self.group.gather("the examination of the model", few)[rank]
        return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), few)

    @contextlib.contextmanager
    def gathered(self, names: Iterable[str]) -> Iterator[None]:
        """Gather the layers that hold the named parameters for the duration of the context."""
        layers = list(dict.fromkeys(self._owners[name] for name in names))
        for layer in layers:
            layer.unshard()
        try:
            yield
        finally:
            for layer in layers:
                layer.reshard()

    def reweighted(self, losses: Callable[[], Tensor], factors: Tensor) -> dict[str, Tensor]:
        """Return each parameter's shard of the gradient of sum(factors * losses).

        Each gradient is reduced as soon as it is formed. If all factors are zero the gradients are
        zero, even where the losses are not finite.
        """
        nothing, found = not bool(factors.any()), dict[str, Tensor]()

        def arrived(name: str, p: Any) -> None:
            grad, p.grad = p.grad, None
            empty = nothing or grad is None
            whole = torch.zeros_like(p) if empty else grad
            found[name] = self.reduce(name, whole.to(wide(p.dtype)))

        handles = [
            p.register_post_accumulate_grad_hook(lambda p, name=name: arrived(name, p))
            for name, p in self.plain.items()
        ]
        try:
            with torch.enable_grad():
                each = losses()
                (each * factors.to(each.dtype)).sum().backward()
        finally:
            for handle in handles:
                handle.remove()
        for name, p in self.plain.items():
            if name not in found:
                arrived(name, p)
        # Another order of the backward would have mixed different parameters.
        self.group.require_same("the order of the sums", list(found), _ALIKE)
        return {name: found[name] for name in self.plain}


def _rows_of_each(p: Tensor, size: int) -> int:
    """Rows of the largest shard; the last processes may have fewer, or none."""
    return -(-p.shape[0] // size)
