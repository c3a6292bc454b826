# SPDX-License-Identifier: Apache-2.0
"""The processes that train one model together, and what they tell each other.

Every word that is exchanged says where its process stands, so that processes which are at different
places stop with an error that names both, instead of waiting for each other.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import pickle
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch._utils import _unflatten_dense_tensors
from torch.nn.parallel import DistributedDataParallel

from dualdp.agreement import differences

from .rules.base import Tensor

_BUCKET = 25 * 2**20  # bytes that are reduced at once
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
Result = TypeVar("Result")


class Group:
    """The processes of a `torch.distributed` group, seen from one of them.

    Args:
        process_group: of torch; None for the default one.

    Attributes:
        rank: number of this process in the group.
        size: number of processes, at least 2 for `Group.current`.
        sent: bytes that this process handed to "all_reduce" and to "gather" so far.
        process_group: as it was given.

    Guarantees:
        A process that is lost makes the others stop in the time limit of the process group.
            [test_a_killed_rank_stops_the_others]
        Processes at different places stop.  [test_ranks_at_different_places_are_told]
    """

    def __init__(self, process_group: Any = None) -> None:
        self.process_group = process_group
        self.rank, self.size = dist.get_rank(process_group), dist.get_world_size(process_group)
        self.sent: Counter[str] = Counter()

    @classmethod
    def current(cls, process_group: Any = None) -> Group | None:
        """The group that this process is in; None without one, or alone in it."""
        if not dist.is_available() or not dist.is_initialized():
            return None
        group = cls(process_group)
        return group if group.size > 1 else None

    @property
    def is_first(self) -> bool:
        """Whether this process writes the ledger and the checkpoints."""
        return self.rank == 0

    # ------------------------------------------------------------------ words

    def gather(self, place: str, value: Any = None) -> list[Any]:
        """The value of every process, by rank; each must be at the same place.

        Args:
            place: where this process stands, such as "step 3".
            value: anything that can be pickled, small.

        Raises:
            RuntimeError: a process is elsewhere, or is lost.
        """
        found: list[Any] = [None] * self.size
        self.sent["gather"] += len(pickle.dumps((place, value)))
        with self.collective(place):
            dist.all_gather_object(found, (place, value), group=self.process_group)
        places = [there for there, _ in found]
        other = next((rank for rank, there in enumerate(places) if there != places[0]), None)
        if other is not None:
            raise RuntimeError(
                f"Rank 0 is at {places[0]} and rank {other} at {places[other]}. Expected every "
                "process to do the same: the same number of batches, and each call of this library "
                "on all of them (make_private, save_checkpoint, load_checkpoint, resume)."
            )
        return [theirs for _, theirs in found]

    def together(self, place: str, call: Callable[[], Any]) -> list[Any]:
        """What a call gives on each process, by rank; small, since all of it is exchanged.

        Args:
            place: where this process stands.
            call: made on this process; its error is raised here, and told to the others.

        Raises:
            RuntimeError: the call failed on another process.
        """
        error: Exception | None = None
        ours: tuple[Any, str | None]
        try:
            ours = call(), None
        except Exception as failed:  # noqa: BLE001
            error, ours = failed, (None, f"{type(failed).__name__}: {failed}")
        found = self.gather(place, ours)
        if error is not None:
            raise error
        for rank, (_, failure) in enumerate(found):
            if failure is not None:
                raise RuntimeError(f"Rank {rank} stopped at {place}, so all do. {failure}")
        return [result for result, _ in found]

    def by_first(self, place: str, call: Callable[[], Result]) -> Result:
        """What a call gives on rank 0, which alone makes it; if it fails, all processes stop."""
        result: Result = self.together(place, call if self.is_first else lambda: None)[0]
        return result

    def from_first(self, place: str, value: Result | None = None) -> Result:
        """The value of rank 0, on every process."""
        result: Result = self.gather(place, value if self.is_first else None)[0]
        return result

    def same(
        self, what: str, value: Any, hint: str = "Start all of them alike.", *, shown: bool = True
    ) -> None:
        """Refuse values that are not the same on all processes.

        Args:
            what: name of the value.
            value: plain data: mappings, lists, numbers, words.
            hint: what to do.
            shown: the error may say the values, which were not computed from private data.

        Raises:
            ValueError: they differ, on every process; the first field that does is named.
        """
        place = f"the comparison of {what}"
        text = json.dumps(value, sort_keys=True, default=repr)
        if len(set(self.gather(place, hashlib.sha256(text.encode()).hexdigest()))) == 1:
            return
        values = self.gather(place, json.loads(text))  # long, so only when they differ
        for rank, theirs in enumerate(values):
            for field, ours, other in differences(values[0], theirs, what):
                ours, other = (ours, other) if shown else ("one", "another")
                raise ValueError(
                    f"The processes disagree: {field} is {ours} on rank 0 and {other} on rank "
                    f"{rank}. Expected the same on all {self.size}. {hint}"
                )

    def count(self, place: str, *numbers: int) -> tuple[int, ...]:
        """The sums of integers over the processes."""
        return tuple(map(sum, zip(*self.gather(place, numbers), strict=True)))

    # ------------------------------------------------------------------ tensors

    @contextlib.contextmanager
    def collective(self, place: str) -> Iterator[None]:
        """Say what a failed collective means.

        Raises:
            RuntimeError: one that failed inside.
        """
        try:
            yield
        except RuntimeError as error:  # torch's DistBackendError is one
            raise RuntimeError(
                f"Rank {self.rank} of {self.size} lost another process at {place} "
                f"({str(error).strip().splitlines()[0] if str(error).strip() else error!r}). This "
                "step can't be finished: end all processes and start them again from the last "
                "checkpoint (load_checkpoint)."
            ) from error


class Reduction:
    """Sums of tensors over the processes, which are sent while others are still being formed.

    Args:
        group: the processes.
        place: where this process stands.
        like: name -> tensor of that shape and device, the same on all processes.

    Guarantees:
        The same bits on all processes.  [test_ranks_end_where_one_ends]
    """

    def __init__(self, group: Group, place: str, like: Mapping[str, Tensor]) -> None:
        self._group, self._place, self._like = group, place, like
        self._missing, self._waiting = set(like), deque(_buckets(like))
        self._formed: dict[str, Tensor] = {}
        self._sent: list[tuple[Any, Tensor, list[str]]] = []

    def add(self, name: str, tensor: Tensor) -> None:
        """A tensor is formed; it stays as it is.

        Raises:
            RuntimeError: a process is lost.
        """
        self._missing.remove(name)
        self._formed[name] = tensor
        # In one order on all processes, whatever the order in which they form them.
        while self._waiting and self._missing.isdisjoint(self._waiting[0]):
            names = self._waiting.popleft()
            # A copy also of one alone: two sums may be one tensor, which would be reduced twice.
            flat = torch.cat([self._formed.pop(n).reshape(-1) for n in names])
            self._group.sent["all_reduce"] += flat.numel() * flat.element_size()
            with self._group.collective(self._place):
                work = dist.all_reduce(flat, group=self._group.process_group, async_op=True)
            self._sent.append((work, flat, names))

    def finish(self, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Name -> sum over the processes; tensors of one bucket are views of one array.

        Args:
            sums: all that were formed, added or not.

        Raises:
            RuntimeError: a process is lost.
        """
        for name in self._like:
            if name in self._missing:
                self.add(name, sums[name])
        totals: dict[str, Tensor] = {}
        for work, flat, names in self._sent:
            with self._group.collective(self._place):
                work.wait()
            shapes = [self._like[name] for name in names]
            totals.update(zip(names, _unflatten_dense_tensors(flat, shapes), strict=True))
        self._sent.clear()
        return {name: totals[name] for name in self._like}


def on_all(group: Group | None, place: str, call: Callable[[], Result]) -> Result:
    """What a call gives on this process, once it has not failed on any."""
    if group is None:
        return call()
    kept: list[Result] = []
    group.together(place, lambda: kept.append(call()))
    return kept[0]


def device_kind(device: torch.device) -> str:
    """What of a device decides the numbers that its generator draws."""
    if device.type != "cuda":
        return str(device)
    properties = torch.cuda.get_device_properties(device)
    return f"cuda {properties.name} {properties.multi_processor_count}"


def fingerprints(tensors: Iterable[Tensor]) -> list[int]:
    """A number for each tensor that depends on its bits: the sum of its words, modulo 2^64."""
    sums = []
    for tensor in tensors:
        flat = tensor.detach().contiguous().reshape(-1)
        flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
        sums.append(flat.view(_BITS[flat.element_size()]).sum(dtype=torch.int64))
    numbers: list[int] = torch.stack(_on_one_device(sums)).tolist() if sums else []
    return numbers


def _on_one_device(tensors: list[Tensor]) -> list[Tensor]:
    """The tensors, on the CPU if they lie on several devices."""
    places = {tensor.device for tensor in tensors}
    return tensors if len(places) == 1 else [tensor.cpu() for tensor in tensors]


def _buckets(sums: Mapping[str, Tensor]) -> Iterator[list[str]]:
    """Names of tensors of one device and dtype that are reduced together."""
    groups: dict[Any, list[str]] = {}
    for name, tensor in sums.items():
        groups.setdefault((tensor.device, tensor.dtype), []).append(name)
    for names in groups.values():
        bucket: list[str] = []
        size = 0
        for name in names:
            bucket.append(name)
            size += sums[name].numel() * max(4, sums[name].element_size())
            if size >= _BUCKET:
                yield bucket
                bucket, size = [], 0
        if bucket:
            yield bucket


# ---------------------------------------------------------------------- DistributedDataParallel

#: What keeps DDP from reducing gradients and buffers and from wrapping outputs; ours is reduced by
#: us, and buffers are those of the user's own process.
QUIET = {
    "require_backward_grad_sync": False,
    "require_forward_param_sync": False,
    "find_unused_parameters": False,
    "static_graph": False,
}


def unwrapped(module: nn.Module) -> nn.Module:
    """The model inside `DistributedDataParallel`; any other module as it is."""
    inner: nn.Module = module.module if isinstance(module, DistributedDataParallel) else module
    return inner


def group_of(module: nn.Module) -> Group | None:
    """The processes that train a module: those of its DDP wrapper, else the default ones.

    Raises:
        ValueError: the wrapper does something to gradients or parameters that we would undo.
    """
    if not isinstance(module, DistributedDataParallel):
        return Group.current()
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
    return Group.current(module.process_group)
