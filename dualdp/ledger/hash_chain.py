# SPDX-License-Identifier: Apache-2.0
"""Append-only text file in which every line has the hash of all lines up to it."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Self

from dualdp import _validate

_START = "0" * 64
#: Largest number of characters in a line; a longer line is neither written nor read.
LONGEST = 1 << 26
_NEW_FILE = (
    "a new path, in a folder that exists, for the ledger of a new run; load_checkpoint goes on "
    "with the run that wrote one"
)
_RUNS_LEDGER = (
    "the file of a run's ledger: the ledger= of its PrivacyEngine, or <checkpoint>.ledger beside "
    "its checkpoint"
)
_ROOM = "a disk with room: no step is released without its record"

Record = dict[str, Any]


class Link(NamedTuple):
    """One line of a chain."""

    record: Record
    line: str
    hash: str  # of all lines up to this one
    end: int  # length of the file up to and with this line, bytes; 0 without a file


def link(previous: str, record: Record) -> str:
    """Return the SHA-256 of a record, chained to the hash of the record before it."""
    body = json.dumps(record, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(f"{previous}\n{body}".encode()).hexdigest()


def read_text(source: str | os.PathLike[str]) -> tuple[str, str]:
    """Return (text, name) of a chain: `source` itself if it begins as one, else the file there."""
    if isinstance(source, str) and source.lstrip().startswith("{"):
        return source, "The text"
    name = _validate.path("ledger", source)
    with (
        _validate.file_errors("read", name, _RUNS_LEDGER),
        open(name, encoding="utf-8", errors="replace") as file,
    ):
        return file.read(), name


def _of_pairs(pairs: list[tuple[str, Any]]) -> Record:
    """Return a JSON object; refuse two entries of one name, of which a reader may see the other."""
    record = dict(pairs)
    if len(record) < len(pairs):
        raise ValueError("two entries of one name")
    return record


def parse(text: str, name: str = "The text") -> list[Record]:
    """Return the records of a chain, after verifying that each follows the one before it.

    A last line without its newline was cut short by a crash and is left out: nothing is released
    before its line is complete. A line that is broken, edited, missing or out of order is named.
    """
    records: list[Record] = []
    previous = _START
    for number, line in enumerate(text.split("\n")[:-1], 1):
        try:
            if len(line) > LONGEST:
                raise ValueError("too long")
            record = json.loads(line, object_pairs_hook=_of_pairs)
            found = record.pop("hash")
            expected = link(previous, record)  # raises for NaN and infinities, which are not JSON
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(
                f"{name} is broken at line {number}: no record of a ledger. Expected the file as "
                "dualdp wrote it (no checkpoint, plan or log); restore it from a copy."
            ) from error
        if found != expected:
            raise ValueError(
                f"{name} is broken at line {number}: its hash does not follow from the lines "
                "before it, so a line was edited, removed or moved. Restore it from a copy."
            )
        records.append(record)
        previous = expected
    return records


class Chain:
    """Chained records in memory and, optionally, in a file.

    Guarantees:
        After `append` returns, a killed process leaves the record in the file.
            [test_a_killed_process_leaves_its_records]
        A failed write or an interrupt leaves file and memory alike, with the record or without it.
            [test_a_full_disk_changes_nothing, test_an_interrupt_at_any_line_counts_no_step_twice]
        Two processes never write one file.  [test_one_file_has_one_writer]
        Every line that is written can be read.  [test_a_line_too_long_to_be_read_is_not_written]
    """

    def __init__(self, records: Iterable[Record] = ()) -> None:
        self.links: list[Link] = []  # one list, so that adding a line is atomic
        self.path: str | None = None
        self._file: int | None = None
        self._pid = os.getpid()
        self._tried = b""  # line that is being written
        for record in records:
            self.append(record)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """Return the chain of an existing file, locked; an incomplete last line is cut off."""
        path = _validate.path("ledger", path)
        with _validate.file_errors("read", path, _RUNS_LEDGER):
            file = _locked(path, os.O_RDWR)
        try:
            with os.fdopen(os.dup(file), "rb") as reader:
                data = reader.read()
            chain = cls(parse(data.decode(errors="replace"), os.fspath(path)))
            end = data.rfind(b"\n") + 1
            os.ftruncate(file, end)
            os.lseek(file, 0, os.SEEK_END)
            if chain.links:
                chain.links[-1] = chain.links[-1]._replace(end=end)
        except BaseException:
            os.close(file)
            raise
        chain.path, chain._file = os.path.abspath(path), file
        return chain

    def write_to(self, path: str | os.PathLike[str]) -> None:
        """Write the records to a new file, and append to that file from now on."""
        path = _validate.path("ledger", path)
        with _validate.file_errors("written", path, _NEW_FILE):
            file = _locked(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            text = self.text().encode()
            with _validate.file_errors("written", path, _ROOM):
                _write(file, text)
            self.close()
            if self.links:
                self.links[-1] = self.links[-1]._replace(end=len(text))
            self.path, self._file = os.path.abspath(path), file
        except BaseException:
            self.path = self._file = None
            os.close(file)
            os.unlink(path)
            raise

    def append(self, record: Record) -> None:
        """Add one record, to the file before memory."""
        if self.path is not None and self._file is None:
            raise ValueError(
                f"{self.path} is closed, so a release would not be on record. Expected no step "
                "after ledger.close() or engine.detach(); load_checkpoint goes on with a run."
            )
        self._mend()
        chained, end = link(self.last_hash, record), 0
        line = json.dumps({**record, "hash": chained}, sort_keys=True, allow_nan=False)
        if len(line) > LONGEST:
            raise ValueError(
                f"A record of the ledger takes {len(line)} characters, more than the {LONGEST} "
                "that are read again. Expected a plan whose schedules have a name, such as "
                "'linear', instead of a table of all steps."
            )
        try:
            if self._file is not None:
                self._tried = data = f"{line}\n".encode()
                with _validate.file_errors("written", str(self.path), _ROOM):
                    _write(self._file, data)
                end = self._end + len(data)
            self.links.append(Link(record, line, chained, end))
        except BaseException:  # a full disk, or an interrupt at any of these lines
            self._mend()
            raise

    @property
    def _end(self) -> int:
        """Length of the file that the records in memory account for."""
        return self.links[-1].end if self.links else 0

    def _mend(self) -> None:
        """Cut off what a failed `append` left in the file; refuse a file that others changed."""
        if self._file is None or self._pid != os.getpid():  # a fork does not know the last lines
            return
        own, rest = os.fstat(self._file), os.pread(self._file, len(self._tried) + 1, self._end)
        try:
            is_there = os.path.samestat(own, os.stat(str(self.path)))
        except OSError:
            is_there = False
        if not is_there or own.st_size < self._end or not self._tried.startswith(rest):
            raise ValueError(
                f"{self.path} was {'changed' if is_there else 'replaced or removed'} by another "
                "program while a run writes it, so a release would not be on record there. Nothing "
                f"was recorded. Expected its {len(self)} lines, which ledger.to_json() returns: "
                "write them there, and go on from a checkpoint."
            )
        if rest:
            os.ftruncate(self._file, self._end)
            os.lseek(self._file, self._end, os.SEEK_SET)

    def continues_at(self, path: str) -> bool:
        """Return True if the chain at another path has lines that this one lacks, or a run now."""
        try:
            with open(path, "rb") as other:
                if self._file is not None and os.path.sameopenfile(other.fileno(), self._file):
                    return False
                text = other.read()
                fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # it was moved, or is on another machine
            return False
        return not self.text().encode().startswith(text[: text.rfind(b"\n") + 1])

    def __len__(self) -> int:
        """Return the number of records."""
        return len(self.links)

    @property
    def records(self) -> list[Record]:
        """All records."""
        return [made.record for made in self.links]

    @property
    def last_hash(self) -> str:
        """Hash of the last line."""
        return self.hash_at(len(self.links))

    def hash_at(self, count: int) -> str:
        """Return the hash of the first `count` lines."""
        return self.links[count - 1].hash if count else _START

    def holds(self, chained: str) -> bool:
        """Return True if a line has this hash."""
        return any(made.hash == chained for made in self.links)

    def text(self) -> str:
        """Return every line, each with its newline."""
        return "".join(f"{made.line}\n" for made in self.links)

    def sync(self) -> None:
        """Flush the file to the disk (fsync)."""
        self._mend()
        if self._file is not None:
            os.fsync(self._file)

    def close(self) -> None:
        """Close and unlock the file; records stay readable, and no more can be added."""
        if self._file is not None:
            os.close(self._file)
        self._file = None

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing() and getattr(self, "_file", None) is not None:
            self.close()


def _locked(path: str | os.PathLike[str], flags: int) -> int:
    """Descriptor of a file that no other run has open; raises if another run has it."""
    file = os.open(path, flags, 0o644)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(file)
        raise ValueError(
            f"{os.fspath(path)} is in use by another run. Expected one run for one ledger; end "
            "that run (engine.detach()) first."
        ) from error
    return file


def _write(file: int, data: bytes) -> None:
    done = 0
    while done < len(data):
        done += os.write(file, data[done:])
