# SPDX-License-Identifier: Apache-2.0
"""Models under `parallelize_module`: every process computes with its piece of the parameters.

All processes of the group see the same examples, and call the model together. A parameter that was
cut is a `DTensor`; the others are whole on every process. The squared norm of an example's gradient
is the sum of those of the pieces, to which a whole parameter adds once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from dualdp import exactness
from dualdp._validate import UnsupportedLayerError
from dualdp.randomness.universal_hash import Hashed
from dualdp_torch.noise.noise import Cut
from dualdp_torch.parallel.fsdp import (
    has_sharded,
    is_sharded,
    is_tensor_parallel,
    like,
    sharded_parameters,
)
from dualdp_torch.parallel.process_group import Group, fingerprints, unwrapped
from dualdp_torch.parallel.sum_hash import hash_sums
from dualdp_torch.rules.base import Tensor, lengths

Result = TypeVar("Result")
#: Methods that take what each layer saw, or run every example alone.
METHODS = ("auto", "book_keeping", "materialize", "loop")


def local_of(tensor: Tensor) -> Tensor:
    """Return the piece of a `DTensor` that lies here; any other tensor as it is."""
    if not is_sharded(tensor):
        return tensor
    found: Any = tensor.to_local()  # type: ignore[attr-defined]
    return found.wait() if hasattr(found, "wait") else found  # type: ignore[no-any-return]


def is_whole(tensor: Tensor) -> bool:
    """True if every process holds the whole tensor, as a `DTensor` or not."""
    return not is_sharded(tensor) or all(p.is_replicate() for p in tensor.placements)  # type: ignore[attr-defined]


def cut_of(tensor: Tensor) -> str:
    """Return the placements of a tensor as text; "" for one that is no `DTensor`."""
    return str(tensor.placements) if is_sharded(tensor) else ""  # type: ignore[attr-defined]


#: Norms between this and its inverse have squares in the range of float32.
_LEAST_LENGTH = 1e-15


def length(tensor: Tensor) -> float:
    """Return the L2 norm of a whole tensor, also of one that is cut: then on all processes."""
    local = local_of(tensor)
    found = lengths(local[None]).double().squeeze(0)
    if not _LEAST_LENGTH < found < 1 / _LEAST_LENGTH:  # float32 squares under- or overflow
        found = torch.linalg.vector_norm(local, dtype=torch.float64)
    if _axis(tensor) is None:
        return float(found)
    square = found.square_()
    dist.all_reduce(square, group=tensor.device_mesh.get_group())  # type: ignore[attr-defined]
    return math.sqrt(float(square))


def _check_pieces(module: nn.Module) -> None:
    """Refuse parameters that are cut otherwise than into equal pieces of one axis."""
    from torch.distributed.tensor import Replicate, Shard

    for name, p in sharded_parameters(module).items():
        mesh, placements = p.device_mesh, tuple(p.placements)
        is_covered = len(placements) == 1 and type(placements[0]) in (Shard, Replicate)
        if not is_covered or mesh.size() != dist.get_world_size():
            raise TypeError(
                f"Parameter {name!r} has the placements {placements} on {mesh}. Expected Shard or "
                "Replicate on one mesh dimension over all processes: tensor parallelism "
                "(parallelize_module) is covered alone, not together with data parallelism."
            )
        axis = _axis(p)
        if axis is not None and p.shape[axis] % mesh.size():
            raise TypeError(
                f"Parameter {name!r} of shape {tuple(p.shape)} is cut along axis {axis} into "
                f"{mesh.size()} pieces of unequal size. Expected a size that the number of "
                "processes divides; pad the layer."
            )


def refuse_data_parallel(module: nn.Module, loader: DataLoader[Any]) -> None:
    """Refuse a tensor parallel model together with what divides the examples among processes."""
    if not is_tensor_parallel(unwrapped(module)):
        return
    if module is not unwrapped(module):
        raise TypeError(
            "A tensor parallel model (parallelize_module) came inside DistributedDataParallel. "
            "Expected the model itself: tensor parallelism is covered alone, not together with "
            "data parallelism."
        )
    if isinstance(loader.sampler, DistributedSampler):
        raise ValueError(
            "data_loader has a DistributedSampler, but a tensor parallel model "
            "(parallelize_module) takes the same examples on every process. Expected a plain "
            "DataLoader with the batch size of the whole."
        )


def refuse_fused(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Refuse foreach=True and fused=True for `DTensor`s and whole tensors, which torch can't."""
    if not is_tensor_parallel(module):
        return
    for group in optimizer.param_groups:
        names = [name for name in ("foreach", "fused") if group.get(name)]
        if names and len({is_sharded(p) for p in group["params"] if p.requires_grad}) > 1:
            raise ValueError(
                f"optimizer has {names[0]}=True for parameters of a tensor parallel model "
                "(parallelize_module), of which some are DTensors and others are not: torch can't "
                "update both in one call. Expected an optimizer without it, or a group for each."
            )


def split_of(module: nn.Module, method: str) -> TensorParallel | None:
    """Return the pieces of a tensor parallel model for a call, or None for any other model.

    Raises:
        TypeError: a parameter is cut along two mesh dimensions, or otherwise than into equal
            pieces over all processes.
        ValueError: the method runs the layers under vmap, or again with other factors.
    """
    if not has_sharded(module):
        return None
    for name, p in sharded_parameters(module).items():
        if sum(not placement.is_replicate() for placement in p.placements) > 1:
            raise TypeError(
                f"Parameter {name!r} has the placements {tuple(p.placements)} on {p.device_mesh}. "
                "Expected fully_shard(model) or tensor parallelism (parallelize_module), each "
                "alone: the two together are not covered."
            )
    if not is_tensor_parallel(module):
        return None
    _check_pieces(module)
    if method not in METHODS:
        raise ValueError(
            f"method={method!r} came with a tensor parallel model (parallelize_module), whose "
            "layers it would run under vmap or again with other factors. Expected one of "
            f"{METHODS}."
        )
    return TensorParallel(module)


def on_all_alike(model: nn.Module, found: Result, error: Callable[[Result], float]) -> Result:
    """Return what has the largest error on any process of a tensor parallel model; here of others.

    A check then passes or fails on all processes, which repeat it together.
    """
    split = TensorParallel.of(model)
    return found if split is None else max(split.group.gather("a spot check", found), key=error)


class Along(NamedTuple):
    """Length of a tensor and of its projection on one direction, in one precision."""

    along: float
    length: float
    precision: str

    def agrees(self, other: Along) -> bool:
        """True if the other is that of the same tensor, up to rounding."""
        size = max(self.length, other.length)
        tolerance = exactness.TOLERANCE.get(self.precision, 1e-2)
        return abs(self.along - other.along) <= tolerance * size


class TensorParallel:
    """Trained parameters of a model under `parallelize_module`, and the processes that share it."""

    def __init__(self, module: nn.Module) -> None:
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        mesh = next(iter(sharded_parameters(module).values())).device_mesh
        self.parameters: dict[str, Tensor] = {**trained}
        self.group = Group(mesh.get_group())
        # Tensors that every process holds whole, and pieces of the other ones.
        self.whole = {name: local_of(p) for name, p in trained.items() if _axis(p) is None}
        self.cuts = {
            name: Cut(p.shape, axis, mesh.get_local_rank() * (p.shape[axis] // mesh.size()))
            for name, p in trained.items()
            if (axis := _axis(p)) is not None
        }

    @classmethod
    def of(cls, module: nn.Module) -> TensorParallel | None:
        """Return the pieces of a tensor parallel model, or None for any other model."""
        return cls(module) if is_tensor_parallel(module) else None

    def added(self, of: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return name -> (n,) sums of the squares of all pieces, the same bits on all processes."""
        if not of:
            return {}
        dtype = max((squares.dtype for squares in of.values()), key=lambda dtype: dtype.itemsize)
        table = torch.stack([squares.to(dtype) for squares in of.values()])
        if not self.group.is_first:
            table[[row for row, name in enumerate(of) if name in self.whole]] = 0
        with self.group.collective("the norms"):
            dist.all_reduce(table, group=self.group.process_group)
        return dict(zip(of, table.unbind(0), strict=True))

    def require_same_norms(self, of: Mapping[str, Tensor], whole: Tensor, precision: str) -> None:
        """Refuse a parameter that all hold whole if each process has its own gradient of it.

        `of` has the (n,) squares on this process by name, `whole` (n,) squared norms of whole
        gradients. All processes refuse alike.
        """
        here = [name for name in of if name in self.whole]
        if not here:
            return
        table = torch.stack([of[name].to(whole) for name in here]).nan_to_num(0, 0, 0)
        largest, negated = self.group.largest(torch.stack([table, -table]))
        tolerance = exactness.TOLERANCE[precision]
        is_other = largest + negated > tolerance * (largest + tolerance * whole)
        names = [here[row] for row in is_other.any(1).nonzero().flatten().tolist()]
        if names:
            raise UnsupportedLayerError(
                f"Every process holds the parameters {names} whole, but their gradients differ "
                "between processes: they are used on a piece of a tensor, inside of a part that is "
                "cut, so each process has a share of the gradient only. Expected SequenceParallel "
                "for their layer (for a norm of heads with sequence_dim=2), parameters that are "
                "used on whole tensors, or frozen ones."
            )

    def gradient(self, name: str, piece: Tensor) -> Tensor:
        """Return the value of `p.grad` for the optimizer, cut as the parameter and of its dtype."""
        p = self.parameters[name]
        local = local_of(p.detach())
        return like(p, piece.to(local).view_as(local))

    def hashes(self, secret: bytes, sums: Mapping[str, Tensor]) -> list[Hashed]:
        """`Shards.hashes`; sums that every process holds whole are in those of the first."""
        own = [t for name, t in sums.items() if self.group.is_first or name not in self.whole]
        found = self.group.gather("the hash of the sums", hash_sums(secret, own))
        return [part for parts in found for part in parts]

    def like(self, pieces: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors that are cut as the parameters of their names, from their pieces here."""
        return {name: like(self.parameters[name], local) for name, local in pieces.items()}

    def total(self, name: str, local: Tensor) -> Tensor:
        """Return the sum of one parameter, cut as it is; a whole one has the bits of rank 0."""
        if name in self.whole:
            local = local.contiguous()
            with self.group.collective(f"the sum of {name!r}"):
                dist.broadcast(local, group=self.group.process_group, group_src=0)
        return like(self.parameters[name], local)

    @staticmethod
    def summary(cotangents: Sequence[Tensor | None]) -> list[Along]:
        """Return lengths and projections of the gradients of the outputs, to be compared."""
        return [_along(grad) for grad in cotangents if grad is not None]

    def require_same_loss(
        self, point: str, summary: list[Along] | None, failure: Exception | None
    ) -> None:
        """Refuse a loss whose gradients differ by more than rounding on another process.

        A check's `failure`, here or there, is raised on all processes.
        """
        each, failures = zip(*self.group.gather(point, (summary, failure)), strict=True)
        for error in (failure, *failures):
            if error is not None:
                raise error from None
        for rank, theirs in enumerate(each):
            pairs = list(zip(each[0], theirs, strict=False))
            if len(theirs) != len(each[0]) or not all(ours.agrees(own) for ours, own in pairs):
                raise ValueError(
                    f"The processes disagree: the loss of {point} is one on rank 0 and another on "
                    f"rank {rank}. Tensor parallelism (parallelize_module) takes the same loss on "
                    "every process: the same labels and weights, random numbers from one seed, and "
                    "whole outputs (RowwiseParallel(), ColwiseParallel(output_layouts=Replicate()))"
                    "."
                )

    def require_same_batch(self, tensors: list[Tensor]) -> None:
        """Refuse examples that are not the same, in the same order, on all processes."""
        self.group.require_same(
            "the batch",
            [[*map(list, (t.shape for t in tensors))], fingerprints(tensors)],
            "Tensor parallelism (parallelize_module) takes the same examples in the same order on "
            "every process: draw and shuffle them from one seed.",
            shown=False,
        )


def _along(grad: Tensor) -> Along:
    """Projection of the gradient of an output, whose rows that are not finite count as zero."""
    rows = torch.atleast_1d(grad.detach()).unsqueeze(-1).flatten(1)
    weights = torch.arange(rows.shape[1], device=rows.device).cos().to(rows.dtype)
    each = (rows @ weights).double().nan_to_num(0, 0, 0)
    turns = torch.arange(len(each), device=each.device).double().add_(1).sin_()
    length = torch.linalg.vector_norm(rows, dim=1).double().nan_to_num(0, 0, 0).norm()
    precision = str(grad.dtype).removeprefix("torch.")
    return Along(float(each @ turns), float(length), precision)


def _axis(tensor: Any) -> int | None:
    """Axis along which a tensor is cut, or None if it is whole."""
    if not is_sharded(tensor):
        return None
    (placement,) = tensor.placements
    return None if placement.is_replicate() else int(placement.dim)
