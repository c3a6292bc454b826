# SPDX-License-Identifier: Apache-2.0
"""Group of the `jax.distributed` processes that train one model, and their messages.

Every message carries its point, the name of its step or call, so that processes at different ones
stop with an error that names both, instead of mistaking one message for another.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import pickle
import re
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

_WORD = 8  # bytes of a hash, and of a length
#: Prefixes of XLA's errors for a broken connection; some are raised as ValueError.
_LOST = re.compile("(ABORTED|CANCELLED|DEADLINE_EXCEEDED|INTERNAL|UNAVAILABLE|UNKNOWN): ")
Result = TypeVar("Result")


class Group:
    """Group of all processes of the program, on the one of this rank.

    Guarantees:
        Processes at different places stop.  [test_two_processes_are_one_run]
        A process that is lost stops the others.  [test_a_killed_process_stops_the_other]
    """

    def __init__(self) -> None:
        self.rank, self.size = jax.process_index(), jax.process_count()

    @classmethod
    def current(cls) -> Group | None:
        """Return the group of this program; None with one process."""
        return cls() if jax.process_count() > 1 else None

    @classmethod
    def of(cls, devices: Iterable[jax.Device]) -> Group | None:
        """Return the group of the processes that own these devices; None if it is one process."""
        owners = {device.process_index for device in devices}
        if len(owners) == 1:
            return None
        if len(owners) < jax.process_count():
            raise ValueError(
                f"The mesh has devices of the processes {sorted(owners)}, but there are "
                f"{jax.process_count()}. Expected a mesh over devices of all processes, or of one."
            )
        return cls()

    @property
    def is_first(self) -> bool:
        """True on process 0, which writes the ledger and the checkpoints."""
        return self.rank == 0

    def gather(self, point: str, value: Result) -> list[Result]:
        """Return the value of every process, by rank; all must pass the same `point`.

        `value` is anything that can be pickled.

        Raises:
            RuntimeError: a process is elsewhere, or is lost.
        """
        body = pickle.dumps(value)
        with self.collective(point):
            head = _digest(point)[:_WORD] + len(body).to_bytes(_WORD, "little")
            heads = _exchanged(head, 2 * _WORD)
            if len({head[:_WORD] for head in heads}) > 1:
                names = [name.rstrip(b"\0").decode() for name in _exchanged(point.encode(), 128)]
                other = next(rank for rank, name in enumerate(names) if name != names[0])
                raise RuntimeError(
                    f"Process 0 is at {names[0]} and process {other} at {names[other]}. Expected "
                    "every process to do the same: the same number of batches, and each call of "
                    "this library on all of them (make_private, save_checkpoint, resume)."
                )
            lengths = [int.from_bytes(head[_WORD:], "little") for head in heads]
            # A power of two, so that few lengths are compiled.
            bodies = _exchanged(body, 1 << max(lengths).bit_length())
        return [pickle.loads(found) for found in bodies]  # which end before their padding

    def on_first(self, point: str, call: Callable[[], Result]) -> Result:
        """Call on process 0 alone; return its result, or raise its error, on every process."""
        result: Result | None = None
        failed: Exception | None = None
        if self.is_first:
            try:
                result = call()
            except Exception as error:  # noqa: BLE001
                failed = _sendable(error)
        found, refusal = self.gather(point, (result, failed))[0]
        if refusal is not None:
            raise failed or refusal
        return found  # type: ignore[return-value]  # process 0 has a result where it has no error

    def require_same(
        self,
        what: str,
        value: object,
        hint: str = "Start them alike.",
        *,
        shown: bool = True,
    ) -> None:
        """Refuse, on every process, plain JSON data that are not the same on all.

        The error names the first field that differs, and prints no values from private data
        (`shown=False`).
        """
        values = self.gather(f"the comparison of {what}", value)
        for rank, theirs in enumerate(values):
            if json.dumps(theirs, sort_keys=True) != json.dumps(values[0], sort_keys=True):
                field, ours, other = _difference(values[0], theirs, what)
                says = "differs on process 0 and"
                if shown:
                    says = f"is {ours!r} on process 0 and {other!r}"
                raise ValueError(
                    f"The processes disagree: {field} {says} on process {rank}. Expected the "
                    f"same on all {self.size}. {hint}"
                )

    @contextlib.contextmanager
    def collective(self, point: str) -> Iterator[None]:
        """Context that explains the failure of a collective operation by a lost process."""
        try:
            yield
        except (jax.errors.JaxRuntimeError, ValueError) as error:
            if not _LOST.match(str(error)):
                raise
            reason, *_ = str(error).splitlines()
            raise RuntimeError(
                f"Process {self.rank} of {self.size} lost another process at {point} "
                f"({reason}). End all processes, and start them again from the last checkpoint."
            ) from error


def on_first(group: Group | None, point: str, call: Callable[[], Result]) -> Result:
    """Run a call on process 0, or here without a group, and return its result on all processes."""
    return call() if group is None else group.on_first(point, call)


def _difference(ours: object, theirs: object, name: str) -> tuple[str, object, object]:
    """Name of the first field in which two JSON values differ, and both values."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key in {**ours, **theirs}:
            if ours.get(key) != theirs.get(key):
                return _difference(ours.get(key), theirs.get(key), f"{name}[{key!r}]")
    return name, ours, theirs


def _sendable(error: Exception) -> Exception:
    """The error itself, or a RuntimeError with its text if it can't be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def _exchanged(message: bytes, size: int) -> list[bytes]:
    """Messages of all processes, each padded to `size` bytes."""
    padded = np.frombuffer(message[:size].ljust(size, b"\0"), np.uint8)
    return [row.tobytes() for row in multihost_utils.process_allgather(padded)]
