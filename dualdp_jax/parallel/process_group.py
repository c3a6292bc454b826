# SPDX-License-Identifier: Apache-2.0
"""Group of the `jax.distributed` processes that train one model, and their messages.

Every message carries the name of its step or call, so that processes at different ones stop with an
error that names both, instead of mistaking one message for another.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import pickle
import re
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from dualdp.ledger.differences import differences

_POINT, _LENGTH, _INLINE = 8, 8, 32  # bytes of a message's header: hash of point, length, start
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
    def of(cls, devices: Any) -> Group | None:
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

    def gather(self, point: str, message: bytes = b"") -> list[bytes]:
        """Return the message of every process, by rank; all must pass the same `point`.

        `point` names the step or call, such as "step 3". A message of more than 32 bytes takes a
        second exchange.

        Raises:
            RuntimeError: a process is elsewhere, or is lost.
        """
        length = len(message).to_bytes(_LENGTH, "little")
        with self.collective(point):
            heads = _exchanged(
                _digest(point)[:_POINT] + length + message[:_INLINE], _POINT + _LENGTH + _INLINE
            )
            if len({head[:_POINT] for head in heads}) > 1:
                found = _exchanged(point.encode()[:128], 128)
                points = [name.rstrip(b"\0").decode() for name in found]
                other = next(rank for rank, name in enumerate(points) if name != points[0])
                raise RuntimeError(
                    f"Process 0 is at {points[0]} and process {other} at {points[other]}. Expected "
                    "every process to do the same: the same number of batches, and each call of "
                    "this library on all of them (make_private, save_checkpoint, load_checkpoint, "
                    "resume)."
                )
            lengths = [int.from_bytes(head[_POINT : _POINT + _LENGTH], "little") for head in heads]
            messages = [head[_POINT + _LENGTH :] for head in heads]
            if max(lengths) > _INLINE:
                messages = _exchanged(message, _rounded(max(lengths)))
        return [found[:length] for found, length in zip(messages, lengths, strict=True)]

    def require_same(
        self, what: str, value: Any, hint: str = "Start all of them alike.", *, shown: bool = True
    ) -> None:
        """Refuse, on every process, plain JSON data that are not the same on all.

        The error names the first field that differs, and prints no values from private data
        (`shown=False`).
        """
        text = json.dumps(value, sort_keys=True)
        point = f"the comparison of {what}"
        if len(set(self.gather(point, _digest(text)))) == 1:
            return
        values = [json.loads(found) for found in self.gather(point, text.encode())]
        for rank, theirs in enumerate(values):
            for field, ours, other in differences(values[0], theirs, what):
                says = (
                    f"is {ours} on process 0 and {other}" if shown else "differs on process 0 and"
                )
                raise ValueError(
                    f"The processes disagree: {field} {says} on process {rank}. Expected the "
                    f"same on all {self.size}. {hint}"
                )

    def broadcast(self, point: str, value: Result | None = None) -> Result:
        """Broadcast the value of process 0, anything that can be pickled, to every process."""
        body = pickle.dumps(value) if self.is_first else b""
        heads = self.gather(point, len(body).to_bytes(_LENGTH, "little"))
        size = int.from_bytes(heads[0], "little")
        with self.collective(point):
            sent = multihost_utils.broadcast_one_to_all(_padded(body, _rounded(size)))
        found: Result = pickle.loads(np.asarray(sent).tobytes()[:size])
        return found

    def on_first(self, point: str, call: Callable[[], Result]) -> Result:
        """Call on process 0 alone; return its result, or raise its error, on every process."""
        outcome: tuple[Any, Exception | None] | None = None
        if self.is_first:
            try:
                outcome = call(), None
            except Exception as error:  # noqa: BLE001
                outcome = None, _sendable(error)
        result, failed = self.broadcast(point, outcome)
        if failed is not None:
            raise outcome[1] if outcome and outcome[1] else failed
        found: Result = result
        return found

    @contextlib.contextmanager
    def collective(self, point: str) -> Iterator[None]:
        """Context that explains the failure of a collective operation by a lost process."""
        try:
            yield
        except (jax.errors.JaxRuntimeError, ValueError) as error:
            if not _LOST.match(str(error)):
                raise
            reason = str(error).splitlines()[0]
            raise RuntimeError(
                f"Process {self.rank} of {self.size} lost another process at {point} "
                f"({reason}). This step can't be finished: end all processes and start them "
                "again from the last checkpoint (load_checkpoint)."
            ) from error


def _sendable(error: Exception) -> Exception:
    """The error itself, or a RuntimeError with its text if it can't be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def _rounded(size: int) -> int:
    """Power of two >= size and >= 64, so that few lengths are compiled."""
    return int(1 << max(size - 1, 63).bit_length())


def _padded(message: bytes, size: int) -> Any:
    """Message as (size,) uint8, padded with zeros."""
    return np.frombuffer(message[:size].ljust(size, b"\0"), np.uint8)


def _exchanged(message: bytes, size: int) -> list[bytes]:
    """Messages of all processes, each padded to `size` bytes."""
    return [row.tobytes() for row in multihost_utils.process_allgather(_padded(message, size))]
