# SPDX-License-Identifier: Apache-2.0
"""Models under FSDP2 (`torch.distributed.fsdp.fully_shard`): parameters in pieces, sums to match.

Outside of forward and backward a parameter is a `DTensor`, of which each process holds some rows;
inside it is a plain tensor that FSDP gathers and frees. The capture sees the plain one. Gradients
of parameters never exist, so FSDP's own reduction has nothing to do: the clipped sum of one
parameter at a time is formed, reduce-scattered and dropped.

FSDP gathers parameters by collectives in forward and backward, so all processes must call the model
equally often. What a process decides by its own data is therefore decided together.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

from .batch import Batch
from .distributed import Group
from .noise import Piece
from .parts import wide
from .rules.base import Tensor

#: Methods that need no more than one layer's gradient on one process.
METHODS = ("auto", "book_keeping", "two_pass")
#: Its name since torch 2.13, or before.
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_ALIKE = (  # what to do about processes that go other ways
    "Drop layers, choose experts and losses alike on all (from a generator with the same seed), or "
    'use clipping="flat" with grad_sample_mode="auto".'
)
#: Examples of one process that all of them examine the model on.
_SAMPLE = 8


def is_sharded(parameter: Tensor) -> bool:
    """Whether a tensor is a `DTensor`; nobody has made one where the class was never imported."""
    tensors = sys.modules.get("torch.distributed.tensor")
    return tensors is not None and isinstance(parameter, tensors.DTensor)


def fsdp_layers(module: nn.Module) -> list[Any]:
    """The modules that `fully_shard` was called on."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return []
    return [layer for layer in module.modules() if isinstance(layer, fsdp.FSDPModule)]


def check_sharded(module: nn.Module, method: str) -> None:
    """Refuse what can't be done for a model in pieces; anything goes for other models.

    Args:
        module: the model.
        method: of the per-sample gradients.

    Raises:
        TypeError: a trainable parameter is in pieces otherwise than by `fully_shard` over all
            processes, or not at all while others are.
        ValueError: the method needs whole gradients of many layers at once.
    """
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    pieces = {name: p for name, p in trained.items() if is_sharded(p)}
    if not pieces:
        return
    whole = sorted(trained.keys() - pieces.keys())
    if whole:
        raise TypeError(
            f"The trainable parameters {whole} are not sharded while others are. Expected "
            "fully_shard on the whole model, without ignored_params; freeze what is ignored."
        )
    for name, p in pieces.items():
        _check_placement(name, p)
    if not fsdp_layers(module):
        raise TypeError(
            f"The parameters {sorted(pieces)} are DTensors, but no layer was given to fully_shard. "
            "Expected fully_shard(model), which gathers them in forward."
        )
    if method not in METHODS:
        raise ValueError(
            f"method={method!r} holds per-sample gradients of every layer at once, which a model "
            f"under fully_shard is too large for. Expected one of {METHODS}."
        )


def refuse_pieces(module: nn.Module, call: str) -> None:
    """Refuse a model in pieces where whole tensors are written or read.

    Args:
        module: the model.
        call: what was called, of which there is one with "_sharded" in its name.

    Raises:
        TypeError: it is in pieces.
    """
    if any(is_sharded(p) for p in module.parameters()):
        instead = call.replace("_checkpoint", "_sharded_checkpoint")
        raise TypeError(
            f"{call} came with a model under fully_shard, which no process holds whole. Expected "
            f"{instead}; consolidate_checkpoint makes one file of its folder."
        )


def _check_placement(name: str, p: Any) -> None:
    """Refuse pieces that are not rows over all processes."""
    mesh, placements = p.device_mesh, tuple(p.placements)
    rows = len(placements) == 1 and placements[0].is_shard(0)
    if not rows or mesh.size() != dist.get_world_size():
        raise TypeError(
            f"Parameter {name!r} has the placements {placements} on {mesh}. Expected Shard(0) on "
            "one mesh dimension over all processes, as fully_shard(module) does without a mesh of "
            "its own."
        )


class Shards:
    """The trained parameters of a model under `fully_shard`, outside and inside its forward.

    Args:
        module: the model; each of its layers is gathered once, one after the other.

    Attributes:
        parameters: name -> `DTensor`, what the optimizer holds.
        plain: name -> what forward and backward see; without memory outside of them.
        pieces: name -> which numbers this process holds.
        group: the processes.
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
        """The shards of a model, or None if it has none; all processes call it."""
        trained = [p for p in module.parameters() if p.requires_grad]
        return cls(module) if any(is_sharded(p) for p in trained) else None

    def _gathered(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """Name -> the tensor that takes the parameter's place in forward, the same every time."""
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
        """Which numbers of a parameter this process holds."""
        rows, width = _rows_of_each(p, self.group.size), math.prod(p.shape[1:])
        return Piece(min(self.group.rank * rows, p.shape[0]) * width, p.numel())

    # ------------------------------------------------------------------ sums

    def reduce(self, name: str, total: Tensor) -> Tensor:
        """This process' rows of the sum over all processes of a parameter's gradient.

        Args:
            name: of the parameter.
            total: of its whole shape; the same dtype on all.

        Raises:
            RuntimeError: a process is lost.
        """
        p, group = self.parameters[name], self.group
        rows = _rows_of_each(p, group.size)
        missing = rows * group.size - len(total)
        if missing:
            total = torch.cat([total, total.new_zeros(missing, *total.shape[1:])])
        piece = total.new_empty(rows, *total.shape[1:])
        with group.collective(f"the sum of {name!r}"):
            _reduce_scatter(piece, total.contiguous(), group=group.process_group)
        group.sent["reduce_scatter"] += total.numel() * total.element_size()
        return piece[: len(p.to_local())]

    def require_same_order(self, names: Iterable[str]) -> None:
        """Refuse sums that were formed in another order than those of the other processes.

        Reduced as the backward forms them, they would have met the sums of other parameters.

        Args:
            names: of the parameters, in the order in which their sums were reduced.

        Raises:
            ValueError: the order differs; nothing was released.
        """
        self.group.same("the order of the sums", list(names), _ALIKE)

    def gradient(self, name: str, piece: Tensor) -> Tensor:
        """What the optimizer finds in `p.grad`: a `DTensor` of the parameter's dtype."""
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

    def digest(self, sums: Mapping[str, Tensor]) -> np.ndarray[Any, Any]:
        """Bytes that depend on the sums of all processes, the same on each."""
        state = hashlib.sha256()
        for name, piece in sums.items():
            state.update(repr((name, piece.dtype, piece.shape)).encode())
            state.update(piece.detach().cpu().contiguous().view(torch.uint8).numpy().data)
        digests = self.group.gather("the digest of the sums", state.digest())
        return np.frombuffer(b"".join(digests), np.uint8)

    # ------------------------------------------------------------------ decisions

    def first_that(self, holds: bool) -> int | None:
        """The first process where something holds, the same answer on all."""
        size = self.group.size
        found = size - self.largest(size - self.group.rank if holds else 0)
        return found if found < size else None

    def largest(self, number: int) -> int:
        """The largest of the numbers of all processes."""
        found = torch.tensor(int(number), device=next(iter(self.plain.values())).device)
        with self.group.collective("a decision"):
            dist.all_reduce(found, dist.ReduceOp.MAX, group=self.group.process_group)
        return int(found)

    def require_same_way(self, uses: Iterable[Iterable[str]]) -> None:
        """Refuse a forward that used other layers than those of the other processes.

        Sums that are reduced as the backward forms them meet in its order, which must be the same.

        Args:
            uses: names of the parameters of each use, in the order of the forward.

        Raises:
            ValueError: the order differs between processes.
        """
        self.group.same("the layers that the model used", [sorted(names) for names in uses], _ALIKE)

    def sample_of(self, rank: int, batch: Batch) -> Batch:
        """A few examples of one process, on all."""
        few = batch.rows(slice(0, _SAMPLE)).arguments() if rank == self.group.rank else None
        few = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.cpu(), few)
        few = self.group.gather("the examination of the model", few)[rank]
        device = batch.tensors()[0].device
        return Batch(pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), few))

    def explain(self, error: BaseException | None) -> None:
        """Say what to do about an error of FSDP's own collectives, if it is one."""
        trace = error.__traceback__ if error is not None else None
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        if error is not None and trace is not None:
            if str(trace.tb_frame.f_globals.get("__name__")).startswith("torch.distributed."):
                error.add_note(
                    f"Rank {self.group.rank} of {self.group.size} lost another process while a "
                    "layer was gathered. End all processes and start them again from the last "
                    "checkpoint (load_sharded_checkpoint)."
                )

    @contextlib.contextmanager
    def gathered(self, names: Iterable[str]) -> Iterator[None]:
        """The layers that hold these parameters have them whole inside."""
        layers = list(dict.fromkeys(self._owners[name] for name in names))
        for layer in layers:
            layer.unshard()
        try:
            yield
        finally:
            for layer in layers:
                layer.reshard()

    # ------------------------------------------------------------------ the second pass

    def reweighted(self, losses: Callable[[], Tensor], factors: Tensor) -> dict[str, Tensor]:
        """Name -> piece of the gradient of the sum of factor times loss, reduced as it comes.

        Factors that are all zero stand for a batch that counts for nothing, whatever it holds.
        """
        nothing, found = not bool(factors.any()), dict[str, Tensor]()

        def arrived(name: str, p: Any) -> None:
            grad, p.grad = p.grad, None
            empty = nothing or grad is None
            found[name] = self.reduce(name, zeros(p) if empty else grad.to(wide(p.dtype)))

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
                found[name] = self.reduce(name, zeros(p))
        self.require_same_order(found)
        return {name: found[name] for name in self.plain}


class Terms(NamedTuple):
    """What a batch's gradients are clipped with, known when the batch is handed out.

    Attributes:
        scale: what undoes the loss's reduction: n for a mean, 1 for a sum.
        bounds: clipping group -> bound.
        clipping: one of `dualdp.clipping.CLIPPING`.
        mask: (n,) bool, False for padding, or None.
    """

    scale: float
    bounds: Mapping[str, Any]
    clipping: str
    mask: Tensor | None


def zeros(p: Tensor) -> Tensor:
    """No gradient, in the shape of the parameter's and the precision of its sum."""
    return torch.zeros(p.shape, dtype=wide(p.dtype), device=p.device)


def _rows_of_each(p: Tensor, size: int) -> int:
    """Rows that each process has room for; the last ones may have fewer, or none."""
    return -(-p.shape[0] // size)
