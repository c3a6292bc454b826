# SPDX-License-Identifier: Apache-2.0
"""Group of the `jax.distributed` processes that train one model, and their messages.

Every message carries its point, the name of its step or call, so that processes at different ones
stop with an error that names both, instead of mistaking one message for another.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import re
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from dualdp_jax.compat import PyTree

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
        body = pickle.dumps((point, value))
        with self.collective(point):
            lengths = _exchanged(len(body).to_bytes(8, "little"))
            # A power of two, so that few lengths are compiled; a pickle ends before its padding.
            longest = max(int.from_bytes(length, "little") for length in lengths)
            size = 1 << longest.bit_length()
            found = [pickle.loads(other) for other in _exchanged(body.ljust(size, b"\0"))]
        first, _ = found[0]
        for rank, (other, _) in enumerate(found):
            if other != first:
                raise RuntimeError(
                    f"Process 0 is at {first} and process {rank} at {other}. Expected "
                    "every process to do the same: the same number of batches, and each call of "
                    "this library on all of them (make_private, save_checkpoint, resume)."
                )
        return [theirs for _, theirs in found]

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
        value: PyTree,
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


def _difference(ours: PyTree, theirs: PyTree, name: str) -> tuple[str, PyTree, PyTree]:
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


def _exchanged(message: bytes) -> list[bytes]:
    """Messages of all processes, which have one length."""
    found = multihost_utils.process_allgather(np.frombuffer(message, np.uint8))
    return [row.tobytes() for row in found]
