# SPDX-License-Identifier: Apache-2.0
"""The processes of `jax.distributed` that train one model together, and what they tell each other.

Every word that is exchanged says where its process stands, so that processes which are at different
places stop with an error that names both, instead of taking each other's words for something else.
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

from dualdp.agreement import differences

_PLACE, _LENGTH, _INLINE = 8, 8, 32  # bytes of the head of a word: hash of the place, length, start
#: Words that XLA puts before the error of a broken connection; some come as ValueError.
_LOST = re.compile("(ABORTED|CANCELLED|DEADLINE_EXCEEDED|INTERNAL|UNAVAILABLE|UNKNOWN): ")
Result = TypeVar("Result")


class Group:
    """All processes of the program, seen from one of them.

    Attributes:
        rank: number of this process.
        size: number of processes.

    Guarantees:
        Processes at different places stop.  [test_two_processes_are_one_run]
        A process that is lost stops the others.  [test_a_killed_process_stops_the_other]
    """

    def __init__(self) -> None:
        self.rank, self.size = jax.process_index(), jax.process_count()

    @classmethod
    def current(cls) -> Group | None:
        """The group of this program; None with one process."""
        return cls() if jax.process_count() > 1 else None

    @classmethod
    def of(cls, devices: Any) -> Group | None:
        """The group whose devices a mesh spans; None where they are all of one process.

        Raises:
            ValueError: the devices are of several processes, but not of all.
        """
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
        """Whether this process writes the ledger and the checkpoints."""
        return self.rank == 0

    # ------------------------------------------------------------------ words

    def gather(self, place: str, word: bytes = b"") -> list[bytes]:
        """The word of every process, by rank; each must be at the same place.

        Args:
            place: where this process stands, such as "step 3".
            word: up to 32 bytes travel at once, more take a second exchange.

        Raises:
            RuntimeError: a process is elsewhere, or is lost.
        """
        head = _digest(place)[:_PLACE] + len(word).to_bytes(_LENGTH, "little") + word[:_INLINE]
        with self.collective(place):
            heads = _exchanged(head, _PLACE + _LENGTH + _INLINE)
        if len({head[:_PLACE] for head in heads}) > 1:
            self._refuse_places(place)
        lengths = [int.from_bytes(head[_PLACE : _PLACE + _LENGTH], "little") for head in heads]
        words = [head[_PLACE + _LENGTH :] for head in heads]
        if max(lengths) > _INLINE:
            with self.collective(place):
                words = _exchanged(word, _rounded(max(lengths)))
        return [word[:length] for word, length in zip(words, lengths, strict=True)]

    def _refuse_places(self, place: str) -> None:
        """Say where each process stands; all are here when they differ."""
        with self.collective(place):
            found = _exchanged(place.encode()[:128], 128)
        places = [word.rstrip(b"\0").decode() for word in found]
        other = next(rank for rank, there in enumerate(places) if there != places[0])
        raise RuntimeError(
            f"Process 0 is at {places[0]} and process {other} at {places[other]}. Expected every "
            "process to do the same: the same number of batches, and each call of this library on "
            "all of them (make_private, save_checkpoint, load_checkpoint, resume)."
        )

    def same(
        self, what: str, value: Any, hint: str = "Start all of them alike.", *, shown: bool = True
    ) -> None:
        """Refuse values that are not the same on all processes.

        Args:
            what: name of the value.
            value: plain JSON data.
            hint: what to do.
            shown: whether the error may print the values; not those that come from private data.

        Raises:
            ValueError: they differ, on every process; the first field that does is named.
        """
        text = json.dumps(value, sort_keys=True)
        place = f"the comparison of {what}"
        if len(set(self.gather(place, _digest(text)))) == 1:
            return
        values = [json.loads(word) for word in self.gather(place, text.encode())]
        for rank, theirs in enumerate(values):
            for field, ours, other in differences(values[0], theirs, what):
                says = (
                    f"is {ours} on process 0 and {other}" if shown else "differs on process 0 and"
                )
                raise ValueError(
                    f"The processes disagree: {field} {says} on process {rank}. Expected the "
                    f"same on all {self.size}. {hint}"
                )

    def from_first(self, place: str, value: Result | None = None) -> Result:
        """The value of process 0, on every process; anything that can be pickled."""
        body = pickle.dumps(value) if self.is_first else b""
        heads = self.gather(place, len(body).to_bytes(_LENGTH, "little"))
        size = int.from_bytes(heads[0], "little")
        with self.collective(place):
            sent = multihost_utils.broadcast_one_to_all(_padded(body, _rounded(size)))
        found: Result = pickle.loads(np.asarray(sent).tobytes()[:size])
        return found

    def by_first(self, place: str, call: Callable[[], Result]) -> Result:
        """What a call gives on process 0, which alone makes it; its errors are raised on all."""
        outcome: tuple[Any, Exception | None] | None = None
        if self.is_first:
            try:
                outcome = call(), None
            except Exception as error:  # noqa: BLE001
                outcome = None, _sendable(error)
        result, failed = self.from_first(place, outcome)
        if failed is not None:
            raise outcome[1] if outcome and outcome[1] else failed
        found: Result = result
        return found

    @contextlib.contextmanager
    def collective(self, place: str) -> Iterator[None]:
        """Say what a failed collective means.

        Raises:
            RuntimeError: one that failed inside.
        """
        try:
            yield
        except (jax.errors.JaxRuntimeError, ValueError) as error:
            if not _LOST.match(str(error)):
                raise
            reason = str(error).splitlines()[0]
            raise RuntimeError(
                f"Process {self.rank} of {self.size} lost another process at {place} "
                f"({reason}). This step can't be finished: end all processes and start them "
                "again from the last checkpoint (load_checkpoint)."
            ) from error


def _sendable(error: Exception) -> Exception:
    """The error, or one that says the same and can be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _digest(text: str) -> bytes:
    """SHA-256 of a text."""
    return hashlib.sha256(text.encode()).digest()


def _rounded(size: int) -> int:
    """The next power of two, so that few lengths are compiled for."""
    return int(1 << max(size - 1, 63).bit_length())


def _padded(word: bytes, size: int) -> Any:
    """(size,) uint8, zeros after the word."""
    return np.frombuffer(word[:size].ljust(size, b"\0"), np.uint8)


def _exchanged(word: bytes, size: int) -> list[bytes]:
    """The words of all processes, each padded to so many bytes."""
    return [row.tobytes() for row in multihost_utils.process_allgather(_padded(word, size))]
