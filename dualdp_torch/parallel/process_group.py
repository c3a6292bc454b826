# SPDX-License-Identifier: Apache-2.0
"""Group of the processes that train one model, its messages and reductions.

Every message names the step or call that its process has reached, its point. Processes that have
reached different points stop with an error that names both, instead of waiting for each other.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch._utils import _unflatten_dense_tensors
from torch.nn.parallel import DistributedDataParallel

from dualdp import exactness
from dualdp_torch.rules.base import Tensor

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
Result = TypeVar("Result")


class Group:
    """`torch.distributed` group as seen from one of its processes.

    Attributes:
        process_group: process group of torch; None for the default one.
        rank: rank of this process in it, 0 without `torch.distributed`.
        size: number of processes, 1 for a process that trains by itself.

    Guarantees:
        A process that is lost makes the others stop in the time limit of the process group.
            [test_a_killed_rank_stops_the_others]
        Processes at different places stop.  [test_ranks_at_different_places_are_told]
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        self.process_group, self.rank, self.size = process_group, 0, 1
        if dist.is_available() and dist.is_initialized():
            self.rank, self.size = dist.get_rank(process_group), dist.get_world_size(process_group)

    @property
    def is_first(self) -> bool:
        """True on rank 0, which writes the ledger and the checkpoints."""
        return self.rank == 0

    def gather(self, point: str, value: Result) -> list[Result]:
        """Return the value of every process, by rank; each must have reached the same `point`.

        A point is the name of a step or call, such as "step 3". Values are pickled, so small.
        """
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        with self.collective(point):
            dist.all_gather_object(found, (point, value), group=self.process_group)
        points = [theirs for theirs, _ in found]
        other = next((rank for rank, theirs in enumerate(points) if theirs != points[0]), None)
        if other is not None:
            raise RuntimeError(
                f"Rank 0 is at {points[0]} and rank {other} at {points[other]}. Expected every "
                "process to do the same: the same number of batches, and each call of this library "
                "on all of them (make_private, save_checkpoint, load_checkpoint, resume)."
            )
        return [theirs for _, theirs in found]

    def each(self, point: str, call: Callable[[], Result] | None) -> list[Result]:
        """Return what a call returned on every process, by rank; None does nothing here.

        If it fails on another process, all stop; an error of this one is raised as it is.
        """
        result, error = None, None
        try:
            result = None if call is None else call()
        except Exception as failed:  # noqa: BLE001
            error = failed
        text = None if error is None else f"{type(error).__name__}: {error}"
        found = self.gather(point, (result, text))
        if error is not None:
            raise error
        for rank, (_, failure) in enumerate(found):
            if failure is not None:
                raise RuntimeError(f"Rank {rank} stopped at {point}, so all do. {failure}")
        return [result for result, _ in found]  # type: ignore[misc]

    def word(self, point: str, call: Callable[[], Result]) -> Result:
        """Return what a call returns on rank 0; its error stops all."""
        return self.each(point, call if self.is_first else None)[0]

    def on_all(self, point: str, call: Callable[[], Result]) -> Result:
        """Return what a call returns on this process, once it has succeeded on all."""
        kept: list[Result] = []
        self.each(point, lambda: kept.append(call()))  # results may be large: they are not sent
        return kept[0]

    def require_same(
        self, what: str, value: Any, hint: str = "Start all of them alike.", *, shown: bool = True
    ) -> None:
        """Refuse plain data that is not the same on all processes, by the first field that differs.

        `what` is its name, and `hint` the advice of the error. With shown=False values that were
        computed from private data are kept out of the error.
        """
        value = json.loads(json.dumps(value, sort_keys=True, default=repr))
        values = self.gather(f"the comparison of {what}", value)
        for rank, theirs in enumerate(values):
            for field, ours, other in _differences(values[0], theirs, what):
                ours, other = (ours, other) if shown else ("one", "another")
                raise ValueError(
                    f"The processes disagree: {field} is {ours} on rank 0 and {other} on rank "
                    f"{rank}. Expected the same on all {self.size}. {hint}"
                )

    def largest(self, number: int, device: torch.device) -> int:
        """Return the maximum of a number over the processes, for a decision of all."""
        found = torch.tensor(number, device=device)
        with self.collective("a decision"):
            dist.all_reduce(found, dist.ReduceOp.MAX, group=self.process_group)
        return int(found)

    def summed(self, point: str, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the sums over the processes, which have the same names in the same order.

        Tensors of one device and dtype are reduced together, and are views of one array.

        Guarantees:
            The same bits on all processes.  [test_ranks_end_where_one_ends]
        """
        kinds: dict[Any, list[str]] = {}
        for name, total in sums.items():
            kinds.setdefault((total.device, total.dtype), []).append(name)
        found: dict[str, Tensor] = {}
        for names in kinds.values():
            parts = [sums[name] for name in names]
            # `cat` copies even one tensor: two sums may share it, and it would be reduced twice.
            flat = torch.cat([part.reshape(-1) for part in parts])
            with self.collective(point):
                dist.all_reduce(flat, group=self.process_group)
            found |= zip(names, _unflatten_dense_tensors(flat, parts), strict=True)
        return {name: found[name] for name in sums}

    def compare_sums(
        self, point: str, own: Mapping[str, Tensor], total: Mapping[str, Tensor], seed: int
    ) -> None:
        """Compare reduced sums with each process's own, along random signs that all draw alike.

        Raises:
            ExactnessError: they are not what the processes had, added up.
        """
        generator, rows = torch.Generator().manual_seed(seed), list[tuple[float, float, float]]()
        for name, mine in own.items():
            signs = 2 * torch.randint(2, mine.shape, generator=generator, dtype=torch.int8) - 1
            signs = signs.to(mine)
            ours, theirs = ((t * signs).sum(dtype=torch.float64) for t in (mine, total[name]))
            rows.append((float(ours), float(theirs), float(torch.linalg.vector_norm(mine))))
        each = np.array(self.gather(f"the sums of {point}", rows))  # (processes, names, 3)
        along, size = each[..., 0].sum(0), each[..., 2].sum(0)
        errors = abs(each[..., 1] - along) / np.where(size > 0, size, 1)  # (processes, names)
        for name, found, length in zip(own, errors.T, size, strict=True):
            precision = str(own[name].dtype).removeprefix("torch.")
            if math.isfinite(length) and not (found <= exactness.TOLERANCE[precision]).all():
                error = exactness.power_of_ten(float(found.sum()))
                raise exactness.ExactnessError(
                    "A spot check failed: the sum over the processes differs from what each of "
                    f"them had, added up, by {error} of it (parameter {name!r}). Nothing was "
                    "released for this batch. Report it, with the backend of the process group and "
                    "the version of torch.",
                    relative_error=error,
                    unprotected_details={"errors": found.tolist()},
                )

    @contextlib.contextmanager
    def collective(self, point: str) -> Iterator[None]:
        """Name rank and `point` in the error of a collective that fails inside the context."""
        try:
            yield
        except RuntimeError as error:  # torch's DistBackendError is a subclass
            lines = str(error).strip().splitlines()
            raise RuntimeError(
                f"Rank {self.rank} of {self.size} lost another process at {point} "
                f"({lines[0] if lines else repr(error)}). This step can't be finished: end all "
                "processes and start them again from the last checkpoint (load_checkpoint)."
            ) from error


def _differences(ours: Any, theirs: Any, name: str) -> Iterator[tuple[str, str, str]]:
    """Yield (field, ours, theirs) for every leaf in which two JSON values differ."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key in dict.fromkeys([*ours, *theirs]):
            pair = ours.get(key, "nothing"), theirs.get(key, "nothing")
            yield from _differences(*pair, f"{name}[{key!r}]")
    elif isinstance(ours, list) and isinstance(theirs, list):
        if len(ours) != len(theirs):
            yield f"the length of {name}", str(len(ours)), str(len(theirs))
        for index, pair in enumerate(zip(ours, theirs, strict=False)):
            yield from _differences(*pair, f"{name}[{index}]")
    elif ours != theirs:
        yield name, repr(ours), repr(theirs)


def as_integers(tensor: Tensor) -> Tensor:
    """Return the bits of a contiguous (..., k) tensor as integers, (..., k) or (..., 2 k)."""
    tensor = torch.view_as_real(tensor).flatten(-2) if tensor.is_complex() else tensor
    return tensor.view(_BITS[tensor.element_size()])


def fingerprints(tensors: Iterable[Tensor]) -> list[int]:
    """Return a number for each tensor: the sum of its bits as integers, modulo 2^64."""
    sums = [
        as_integers(t.detach().contiguous().reshape(-1)).sum(dtype=torch.int64) for t in tensors
    ]
    if len({number.device for number in sums}) > 1:
        sums = [number.cpu() for number in sums]
    numbers: list[int] = torch.stack(sums).tolist() if sums else []
    return numbers


#: Attributes that keep DDP from reducing gradients, broadcasting buffers and wrapping outputs: the
#: engine reduces the clipped sums, and every process keeps its own buffers.
QUIET = {
    "require_backward_grad_sync": False,
    "require_forward_param_sync": False,
    "find_unused_parameters": False,
    "static_graph": False,
}


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the model inside `DistributedDataParallel`; any other module as it is."""
    inner: nn.Module = module.module if isinstance(module, DistributedDataParallel) else module
    return inner


def modules_of(model: nn.Module) -> list[nn.Module]:
    """Return the modules of a model, each once, level by level.

    Every private call walks the model; this takes a third of the time of `model.modules()`.
    """
    found, met = [model], {model}
    for module in found:  # grows
        for child in module._modules.values() if module._modules else ():
            if child is not None and child not in met:
                met.add(child)
                found.append(child)
    return found


def group_of(module: nn.Module) -> Group:
    """Return the group that trains a module: that of its DDP wrapper, else the default one.

    A wrapper is refused that does something to gradients or parameters that we would undo.
    """
    if not isinstance(module, DistributedDataParallel):
        return Group()
    for name, does in (
        ("mixed_precision", module.mixed_precision is not None),
        ("a communication hook", bool(module._comm_hooks)),
        ("delay_all_reduce_named_params", bool(module._delay_all_reduce_params)),
    ):
        if does:
            raise ValueError(
                f"DistributedDataParallel came with {name}, but its own reduction is not used: "
                "clipped sums are reduced in float32. Expected the wrapper without it; use "
                "torch.autocast for mixed precision."
            )
    return Group(module.process_group)
