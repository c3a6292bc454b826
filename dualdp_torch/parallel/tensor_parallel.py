# SPDX-License-Identifier: Apache-2.0
"""Models under `parallelize_module`: every process computes with its piece of the parameters.

All processes of the group see the same examples, and call the model together. A parameter that was
cut is a `DTensor`; the others are whole on every process. The squared norm of an example's gradient
is the sum of those of the pieces, to which a whole parameter adds once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dualdp_torch.parallel.fsdp import is_sharded, is_tensor_parallel, refuse_two_dimensions
from dualdp_torch.parallel.process_group import Group, fingerprints
from dualdp_torch.rules.base import Tensor

#: Methods that take what each layer saw, or run every example alone.
METHODS = ("auto", "book_keeping", "materialize", "loop")


def local_of(tensor: Tensor) -> Tensor:
    """Return the piece of a `DTensor` that lies here; any other tensor as it is."""
    if not is_sharded(tensor):
        return tensor
    found: Any = tensor.to_local()  # type: ignore[attr-defined]
    return found.wait() if hasattr(found, "wait") else found  # type: ignore[no-any-return]


def like(p: Tensor, local: Tensor) -> Tensor:
    """Return a tensor that is cut as the parameter `p`, from its piece here."""
    if not is_sharded(p):
        return local
    from torch.distributed.tensor import DTensor

    cut: Any = p
    found: Tensor = DTensor.from_local(
        local, cut.device_mesh, cut.placements, run_check=False, shape=p.shape, stride=p.stride()
    )
    return found


def length(tensor: Tensor) -> float:
    """Return the L2 norm of a whole tensor, also of one that is cut: then on all processes."""
    found = torch.linalg.vector_norm(local_of(tensor), dtype=torch.float64)
    if _axis(tensor) is None:
        return float(found)
    square = found.square_()
    dist.all_reduce(square, group=tensor.device_mesh.get_group())  # type: ignore[attr-defined]
    return math.sqrt(float(square))


def check_pieces(module: nn.Module) -> None:
    """Refuse parameters that are cut otherwise than into equal pieces of one axis.

    Raises:
        TypeError: such a parameter; its name, placements and mesh are in the message.
    """
    refuse_two_dimensions(module)
    if not is_tensor_parallel(module):
        return
    from torch.distributed.tensor import Replicate, Shard

    for name, p in module.named_parameters():
        if not is_sharded(p):
            continue
        cut: Any = p
        mesh, placements = cut.device_mesh, tuple(cut.placements)
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


def split_of(module: nn.Module, method: str) -> TensorParallel | None:
    """Return the pieces of a tensor parallel model for a call, or None for any other model.

    Raises:
        TypeError: a parameter is cut otherwise than into equal pieces over all processes.
        ValueError: the method runs the layers under vmap, or again with other factors.
    """
    check_pieces(module)
    found = TensorParallel.of(module)
    if found is not None and method not in METHODS:
        raise ValueError(
            f"method={method!r} came with a tensor parallel model (parallelize_module), whose "
            "layers it would run under vmap or again with other factors. Expected one of "
            f"{METHODS}."
        )
    return found


class TensorParallel:
    """Trained parameters of a model under `parallelize_module`, and the processes that share it.

    Attributes:
        parameters: mapping from name to the parameter, a `DTensor` or a tensor.
        whole: mapping from name to the tensor of each parameter that every process holds whole.
        group: `Group` of the processes.
    """

    def __init__(self, module: nn.Module) -> None:
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        cut: Any = next(p for p in module.parameters() if is_sharded(p))
        self.parameters: dict[str, Tensor] = {**trained}
        self.group = Group(cut.device_mesh.get_group())
        self.whole = {name: local_of(p) for name, p in trained.items() if _axis(p) is None}

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
        self.group.sent["all_reduce"] += table.numel() * table.element_size()
        return dict(zip(of, table.unbind(0), strict=True))

    def largest(self, numbers: Tensor) -> Tensor:
        """Return the elementwise maximum over the processes."""
        found = numbers.clone()
        with self.group.collective("a decision"):
            dist.all_reduce(found, dist.ReduceOp.MAX, group=self.group.process_group)
        return found

    def total(self, name: str, local: Tensor) -> Tensor:
        """Return the sum of one parameter, cut as it is; a whole one has the bits of rank 0."""
        if name in self.whole:
            local = local.contiguous()
            with self.group.collective(f"the sum of {name!r}"):
                dist.broadcast(local, group=self.group.process_group, group_src=0)
        return like(self.parameters[name], local)

    def require_same_batch(self, tensors: list[Tensor]) -> None:
        """Refuse examples that are not the same, in the same order, on all processes."""
        self.group.require_same(
            "the batch",
            [[*map(list, (t.shape for t in tensors))], fingerprints(tensors)],
            "Tensor parallelism (parallelize_module) takes the same examples in the same order on "
            "every process: draw and shuffle them from one seed.",
            shown=False,
        )


def _axis(tensor: Any) -> int | None:
    """Axis along which a tensor is cut, or None if it is whole."""
    if not is_sharded(tensor):
        return None
    (placement,) = tensor.placements
    return None if placement.is_replicate() else int(placement.dim)
