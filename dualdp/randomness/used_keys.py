# SPDX-License-Identifier: Apache-2.0
"""Marker files that record that a key has begun its run.

One marker is beside each key file (`<key>.used`). Another is in a folder of this machine, named by
the key's SHA-256, so that a copy of the key file is recognized too. Each holds the path of the
run's ledger and the hash of that ledger's line at the last opening; a copy of the ledger without
that line is thereby recognized.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from dualdp._validate import AccountingError

_files: dict[str, set[str]] = {}  # SHA-256 -> key files that this process read or wrote


@dataclass(frozen=True)
class Mark:
    """Content of a marker file; the one of dualdp 0.1.0 is empty."""

    ledger: str = ""  # path of the run's ledger; "" if it is kept in memory
    opened: str = ""  # hash of the ledger's last line when the run was last begun or resumed
    key: str = ""  # SHA-256; a deleted key file may have left the marker of another key


def note_file(sha256: str, path: str | os.PathLike[str]) -> None:
    """Register a key file that this process read or wrote."""
    _files.setdefault(sha256, set()).add(os.path.abspath(path))


def forget_file(sha256: str, path: str | os.PathLike[str]) -> None:
    """Unregister a key file that could not be written."""
    _files.get(sha256, set()).discard(os.path.abspath(path))


def beside(path: str | os.PathLike[str]) -> Path:
    """Return the path of the marker of a key file."""
    return Path(f"{os.fspath(path)}.used")


def folders() -> list[Path]:
    """Return candidate folders of this machine for markers; the first writable one is used."""
    state = os.environ.get("XDG_STATE_HOME") or Path("~/.local/state").expanduser()
    user = os.getuid() if hasattr(os, "getuid") else 0
    return [Path(state, "dualdp"), Path(tempfile.gettempdir(), f"dualdp-{user}")]


def marks(sha256: str) -> list[tuple[Path, Mark]]:
    """Return (path, mark) of a key: beside its known files, then in this machine's folders."""
    files = sorted(_files.get(sha256, ()))
    if not files:
        return []  # a key without a file exists in this process only
    paths = (*map(beside, files), *(folder / sha256 for folder in folders()))
    found = [(path, mark) for path in paths if (mark := _read(path)) is not None]
    return [(path, mark) for path, mark in found if mark.key in ("", sha256)]


def _read(path: Path) -> Mark | None:
    """Mark in a file; an empty one for malformed text, None if there is no file."""
    try:
        data = json.loads(path.read_text(encoding="utf-8", errors="replace"))
        return Mark(str(data["ledger"]), str(data["opened"]), str(data["key"]))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (KeyError, TypeError, ValueError, RecursionError):
        return Mark()


def leave(sha256: str, mark: Mark, *, is_new: bool) -> None:
    """Write the markers of a key that has a file; none may exist if the run is new."""
    if not _files.get(sha256):
        return
    files = sorted(path for path in _files[sha256] if os.path.exists(path))
    text, made = json.dumps(asdict(replace(mark, key=sha256))), list[Path]()
    flags = os.O_WRONLY | os.O_CREAT | (os.O_EXCL if is_new else os.O_TRUNC)
    try:
        for path in (_folder() / sha256, *map(beside, files)):
            if (left := _read(path)) is not None and left.key not in ("", sha256):
                path.unlink(missing_ok=True)
            file = os.open(path, flags, 0o644)
            made.append(path)
            try:
                os.write(file, text.encode())
            finally:
                os.close(file)
    except BaseException as error:
        for path in made if is_new else ():
            path.unlink(missing_ok=True)
        if isinstance(error, FileExistsError):
            raise AccountingError(
                f"Another process began a run with this key just now: it left {error.filename}. "
                "Expected one run for one key; make a new plan for a new run."
            ) from None
        if isinstance(error, OSError):
            raise AccountingError(
                f"The mark {error.filename}, which says that this key has begun its run, can't be "
                f"written ({error.strerror}). Expected a folder that can be written, so that no "
                "second run repeats the noise; copy the key file to one."
            ) from None
        raise


def _folder() -> Path:
    """First writable folder for markers of this machine, created if needed."""
    *others, last = folders()
    for folder in others:
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            if os.access(folder, os.W_OK):
                return folder
    last.mkdir(parents=True, exist_ok=True)
    return last
