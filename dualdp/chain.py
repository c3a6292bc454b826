# SPDX-License-Identifier: Apache-2.0
"""An append-only text file whose every line carries the hash of all lines before it."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any, Self

_START = "0" * 64
_LONGEST = 1 << 26  # characters of one line; a longer one is no ledger's

Record = dict[str, Any]


def link(previous: str, record: Record) -> str:
    """SHA-256 of a record, chained to that of the record before it."""
    body = json.dumps(record, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(f"{previous}\n{body}".encode()).hexdigest()


def parse(text: str, name: str = "The text") -> list[Record]:
    """The records of a chain, each proved to follow the one before it.

    Args:
        text: lines as `Chain` writes them; a last line without its newline was torn by a crash and
            is left out, since nothing is released before its line is whole.
        name: of the text, for errors.

    Raises:
        ValueError: a line that is broken, edited, missing or out of order; it is named.
    """
    records: list[Record] = []
    previous = _START
    for number, line in enumerate(text.split("\n")[:-1], 1):
        try:
            if len(line) > _LONGEST:
                raise ValueError("too long")
            record = json.loads(line, parse_constant=_refuse_constant)
            found = record.pop("hash")
            expected = link(previous, record)
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(
                f"{name} is broken at line {number}: no record of a ledger. Expected the file as "
                "dualdp wrote it; restore it from a copy."
            ) from error
        if found != expected:
            raise ValueError(
                f"{name} is broken at line {number}: its hash does not follow from the lines "
                "before it, so a line was edited, removed or moved. Restore it from a copy."
            )
        records.append(record)
        previous = expected
    return records


def _refuse_constant(word: str) -> None:
    """NaN and infinities are no JSON."""
    raise ValueError(word)


class Chain:
    """Records in memory, and in a file where there is one.

    Args:
        records: that are in the chain already.

    Guarantees:
        After `append` returns, a killed process leaves the record in the file.
            [test_a_killed_process_leaves_its_records]
        A failed write leaves file and memory as they were.  [test_a_full_disk_changes_nothing]
        Two processes never write one file.  [test_one_file_has_one_writer]
    """

    def __init__(self, records: Iterable[Record] = ()) -> None:
        self.records: list[Record] = []
        self.lines: list[str] = []
        self.path: str | None = None
        self._file: int | None = None
        self._hash = _START
        for record in records:
            self.append(record)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """The chain of an existing file, locked; a torn last line is cut off.

        Raises:
            ValueError: the file is broken, or another run has it.
        """
        file = _locked(path, os.O_RDWR)
        try:
            with os.fdopen(os.dup(file), "rb") as reader:
                data = reader.read()
            chain = cls(parse(data.decode(errors="replace"), os.fspath(path)))
            os.ftruncate(file, data.rfind(b"\n") + 1)
            os.lseek(file, 0, os.SEEK_END)
        except BaseException:
            os.close(file)
            raise
        chain.path, chain._file = os.fspath(path), file
        return chain

    def write_to(self, path: str | os.PathLike[str]) -> None:
        """Begin a new file with the records so far, and append to it from now on.

        Raises:
            FileExistsError: there is a file at `path` already.
        """
        try:
            file = _locked(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        except FileExistsError as error:
            raise FileExistsError(
                f"{os.fspath(path)} exists. Expected a new path for the ledger of a new run, or "
                "load_checkpoint to go on with the run that wrote it."
            ) from error
        try:
            _write(file, self.text().encode())
        except BaseException:
            os.close(file)
            os.unlink(path)
            raise
        self.close()
        self.path, self._file = os.fspath(path), file

    def append(self, record: Record) -> None:
        """Add one record, in the file before in memory."""
        chained, before = link(self._hash, record), len(self.lines)
        line = json.dumps({**record, "hash": chained}, sort_keys=True, allow_nan=False)
        start = None if self._file is None else os.fstat(self._file).st_size
        try:
            if self._file is not None:
                _write(self._file, f"{line}\n".encode())
            self.records.append(record)
            self.lines.append(line)
            self._hash = chained
        except BaseException:  # a full disk, or an interrupt at any of these lines
            del self.records[before:], self.lines[before:]
            if self._file is not None and start is not None:
                os.ftruncate(self._file, start)
                os.lseek(self._file, start, os.SEEK_SET)
            raise

    def text(self) -> str:
        """Every line, each with its newline."""
        return "".join(f"{line}\n" for line in self.lines)

    def sync(self) -> None:
        """Bring the file to the disk, past a power cut."""
        if self._file is not None:
            os.fsync(self._file)

    def close(self) -> None:
        """Give the file back; records stay readable and may still be added in memory."""
        if self._file is not None:
            os.close(self._file)
        self._file = None

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing() and getattr(self, "_file", None) is not None:
            self.close()


def _locked(path: str | os.PathLike[str], flags: int) -> int:
    """An open file that no other run has.

    Raises:
        ValueError: another run has it.
    """
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
    """Write all of it."""
    done = 0
    while done < len(data):
        done += os.write(file, data[done:])
