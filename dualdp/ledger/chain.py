# SPDX-License-Identifier: Apache-2.0
"""Append-only text file in which every line ends with the hash of all lines up to it.

    {"dualdp_ledger":2,"plan":{...},...,"h":"Xr1a..."}
    {"r":[0,1.1,0.05],"h":"p0Qz..."}

A line is a JSON object. Its last entry, `h`, is the SHA-256 (base64, without padding) of the hash
before it, a newline, and the object without `h`, byte for byte as it stands in the line.
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import json
import os
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Self

from dualdp import _validate

Record = dict[str, Any]

FORMAT = "dualdp_ledger"
VERSION = 2
_START = "A" * 43
_RELEASE = '{"r":['
_TAIL = len(',"h":""}') + 43
_NEW_FILE = (
    "a new path, in a folder that exists, for the ledger of a new run; load_checkpoint goes on "
    "with the run that wrote one"
)
_RUNS_LEDGER = (
    "the file of a run's ledger: the ledger= of its PrivacyEngine, or <checkpoint>.ledger beside "
    "its checkpoint"
)
_ROOM = "a disk with room: no step is released without its record"


def chained(previous: str, body: str) -> str:
    """Return the line of a JSON object that follows the line with the hash `previous`."""
    digest = hashlib.sha256(f"{previous}\n{body}".encode()).digest()
    return f'{body[:-1]},"h":"{base64.urlsafe_b64encode(digest)[:43].decode()}"}}'


class Parsed(NamedTuple):
    """Lines of a chain that were read and verified."""

    lines: list[str]
    records: list[Record]
    torn: str  # a last line without its end, cut short by a crash; "" if there is none


def parse(text: str, name: str = "The text") -> Parsed:
    """Return the lines of a ledger, after verifying that each follows the one before it.

    Raises:
        ValueError: a line is broken, edited, missing or out of order, or the text is no ledger, or
            one of another version.
    """
    *lines, torn = text.split("\n")
    foreign = f"{name} is not a ledger. Expected a file or text that dualdp wrote."
    if not lines:
        raise ValueError(foreign)
    records: list[Record] = []
    previous = _START
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            version, own_hash = record.get(FORMAT), record.pop("h", None)
        except (AttributeError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(
                f"{name} is broken at line {number}: no record of a ledger. Expected the file as "
                "dualdp wrote it (no checkpoint, plan or log); restore it from a copy."
            ) from error
        if number == 1 and version != VERSION:
            if isinstance(version, int):
                raise ValueError(_validate.newer(name, "ledger", version, VERSION))
            raise ValueError(foreign)
        if chained(previous, line[:-_TAIL] + "}") != line:
            raise ValueError(
                f"{name} is broken at line {number}: its hash does not follow from the lines "
                "before it, so a line was edited, removed or moved. Restore it from a copy."
            )
        records.append(record)
        previous = own_hash
    return Parsed(lines, records, torn)


def is_text(source: str | os.PathLike[str]) -> bool:
    """Return True for the text of a ledger, False for a path."""
    return isinstance(source, str) and source.lstrip().startswith("{")


def read_text(source: str | os.PathLike[str]) -> tuple[str, str]:
    """Return (text, name) of a ledger: `source` itself if it begins as one, else the file there."""
    if is_text(source):
        return str(source), "The text"
    name = _validate.path("ledger", source)
    with (
        _validate.file_errors("read", name, _RUNS_LEDGER),
        open(name, encoding="utf-8", errors="replace", newline="\n") as file,
    ):
        return file.read(), name


def require_new(path: str | os.PathLike[str]) -> str:
    """Return the absolute path of a file that can be made there, and make none yet."""
    name = _validate.path("ledger", path)
    with _validate.file_errors("written", name, _NEW_FILE):
        os.close(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
    os.unlink(name)
    return os.path.abspath(name)


class Chain:
    """Chained lines in memory and, optionally, in a file that this process alone writes.

    Guarantees:
        After `append` returns, a killed process leaves the line in the file.
            [test_a_killed_process_leaves_its_records]
        A failed write or an interrupt leaves file and memory alike, with the line or without it.
            [test_a_full_disk_changes_nothing, test_an_interrupt_at_any_line_counts_no_step_twice]
        Two processes never write one file.  [test_one_file_has_one_writer]
        Every line that is written can be read.  [test_a_long_line_is_read_again]
    """

    def __init__(self, lines: Iterable[str] = ()) -> None:
        self._lines = list(lines)
        self.path: str | None = None
        self._file = -1
        self._close: weakref.finalize[..., Chain] | None = None
        # Number of lines, and length of the file in bytes, that count. What lies beyond them is an
        # append that did not end: an interrupt may come between any two lines of `append`.
        self._committed = len(self._lines), 0
        self._may_have_tail = False  # the file may have bytes beyond, of a torn or failed line

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> tuple[Self, Parsed]:
        """Return the chain of an existing file, locked, and what it holds.

        The first line that is appended takes the place of a torn one.
        """
        name = _validate.path("ledger", path)
        with _validate.file_errors("read", name, _RUNS_LEDGER):
            file = _locked(name, os.O_RDWR)
        try:
            with os.fdopen(os.dup(file), "rb") as reader:
                data = reader.read()
            parsed = parse(data.decode(errors="replace"), name)
        except BaseException:
            os.close(file)
            raise
        chain = cls(parsed.lines)
        chain._own(file, name, data.rfind(b"\n") + 1)
        chain._may_have_tail = bool(parsed.torn)
        return chain, parsed

    def _own(self, file: int, path: str, end: int) -> None:
        """Append to this file from now on.

        An flock belongs to the open file and not to the process, so a fork would hold it too: the
        fork's copy of the descriptor is closed. A POSIX lock would be lost as soon as this process
        opened the file a second time, to read it, and closed that.
        """
        self._file, self.path = file, os.path.abspath(path)
        self._close = weakref.finalize(self, os.close, file)
        os.register_at_fork(after_in_child=self._close)
        self._committed = len(self), end

    def write_to(self, path: str | os.PathLike[str]) -> None:
        """Write the lines to a new file, and append to that file from now on."""
        name = _validate.path("ledger", path)
        with _validate.file_errors("written", name, _NEW_FILE):
            file = _locked(name, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            data = self.text().encode()
            with _validate.file_errors("written", name, _ROOM):
                _write(file, data, 0)
        except BaseException:
            os.close(file)
            os.unlink(name)
            raise
        self.close()
        self._own(file, name, len(data))

    def append(self, record: Mapping[str, Any]) -> None:
        """Add one record, to the file before memory."""
        self._require_own()
        body = json.dumps(record, separators=(",", ":"), allow_nan=False)
        line, (count, end) = chained(self.last_hash, body), self._committed
        data = f"{line}\n".encode()
        del self._lines[count:]
        had_tail, self._may_have_tail = self._may_have_tail, True
        try:
            if self.path is not None:
                with _validate.file_errors("written", self.path, _ROOM):
                    _write(self._file, data, end)
                    if had_tail:  # which may be longer than the new line
                        os.ftruncate(self._file, end + len(data))
            self._lines.append(line)
            self._committed = count + 1, end + len(data)
        except BaseException:  # a full disk, or an interrupt at any of these lines
            # A torn line found on opening may be a release: it stays until a line counts it.
            if self.path is not None and not had_tail:
                os.ftruncate(self._file, self._committed[1])
                self._may_have_tail = False
            raise
        self._may_have_tail = False

    def _require_own(self) -> None:
        """Raise if the file is closed, or if another program changed it.

        The lock keeps other runs away, not other programs; a size that is not ours shows them.
        """
        if self.path is None:
            return
        if self._close is None or not self._close.alive:  # closed here, or this is a fork
            raise ValueError(
                f"{self.path} is closed, so a release would not be on record. Expected no step "
                "after ledger.close() or engine.detach(); load_checkpoint goes on with a run."
            )
        state, (_, end) = os.fstat(self._file), self._committed
        is_ours = state.st_size >= end if self._may_have_tail else state.st_size == end
        if not state.st_nlink or not is_ours:
            raise ValueError(
                f"{self.path} was removed, replaced or changed by another program while a run "
                "writes it, so a release would not be on record there. Nothing was recorded. "
                f"Expected its {len(self)} lines, which ledger.to_json() returns: write them "
                "there, and go on from a checkpoint."
            )

    def __len__(self) -> int:
        """Return the number of lines."""
        return self._committed[0]

    def records(self, start: int = 0) -> Iterator[Record]:
        """Yield the records from the line `start` on."""
        for line in self._lines[start : len(self)]:
            record = json.loads(line)
            del record["h"]
            yield record

    @property
    def last_hash(self) -> str:
        """Hash of the last line."""
        return self.hash_at(len(self))

    def hash_at(self, count: int) -> str:
        """Return the hash of the first `count` lines."""
        return self._lines[count - 1][-45:-2] if count else _START

    def text(self) -> str:
        """Return every line, each with its newline."""
        return "".join(f"{line}\n" for line in self._lines[: len(self)])

    def sync(self) -> None:
        """Flush the file to the disk (fsync)."""
        if self.path is not None:
            self._require_own()
            os.fsync(self._file)

    def close(self) -> None:
        """Close and unlock the file; lines stay readable, and no more can be added."""
        if self._close is not None:
            self._close()


def _locked(path: str, flags: int) -> int:
    """Descriptor of a file that no other run has open; raises if another run has it."""
    file = os.open(path, flags, 0o644)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(file)
        raise ValueError(
            f"{path} is in use by another run. Expected one run for one ledger; end that run "
            "(engine.detach()) first, or go on with a copy of the ledger as ledger=."
        ) from error
    except BaseException:
        os.close(file)
        raise
    return file


def is_torn_release(torn: str) -> bool:
    """Return True if a line that was cut short is, or may be, that of a release."""
    return bool(torn) and (torn.startswith(_RELEASE) or _RELEASE.startswith(torn))


def _write(file: int, data: bytes, offset: int) -> None:
    """Write all of the data; one pwrite may write a part."""
    done = 0
    while done < len(data):
        done += os.pwrite(file, data[done:], offset + done)
