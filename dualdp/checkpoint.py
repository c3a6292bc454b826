# SPDX-License-Identifier: Apache-2.0
"""Checkpoint files of a run: its arrays and one document, the same on both stacks.

    document = describe_run(engine.ledger, path, stack="torch", ...)  # the ledger is in a file now
    write(path, arrays, document)

    arrays, document = read(path)
    ledger = open_run(document, path)                                 # a new segment of the run

The file is safetensors, so any reader of that format finds the arrays, and it contains no code. One
array is the document, JSON as bytes, since the format's own metadata end at 100 MB. It holds the
plan, the position and where the ledger ended, neither the ledger's text nor any key.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import numpy as np
from numpy.typing import NDArray

from dualdp import _validate
from dualdp.ledger.ledger import Ledger
from dualdp.plan.plan import PrivacyPlan

_FORMAT = "dualdp_checkpoint"
_VERSION = 3
_DOCUMENT = "document"  # array with the document
Arrays = Mapping[str, NDArray[Any]]
PathLike = str | os.PathLike[str]


class LedgerEnd(TypedDict):
    """Where the ledger of a run ended when its checkpoint was written."""

    file: str  # path from the checkpoint's folder
    num_lines: int
    hash: str  # of the last of these lines


class RunDocument(TypedDict):
    """What a checkpoint says of its run; `RUN` are the entries that no stack changes."""

    dualdp_checkpoint: int  # version of this document
    stack: str  # "torch" or "jax": whose names the arrays and parameters have
    plan: dict[str, Any]  # JSON of the PrivacyPlan
    position: int  # the next step
    pass_end: int  # step at which the pass ends in which this was saved; 0 between passes
    bound: float | None  # C of the next step, if it is adaptive
    ledger: LedgerEnd
    settings: dict[str, Any]  # arguments of the engine that a resumed run keeps
    trained: list[str]  # names of the trained parameters
    parameters: list[str]  # names of all parameters, in order
    bfloat16: NotRequired[list[str]]  # arrays that are stored as uint16
    optimizer: NotRequired[dict[str, Any]]  # torch: plain data of the optimizer
    layout: NotRequired[dict[str, Any]]  # torch: kinds of the modules, tied parameters
    noise_layout: NotRequired[list[Any]]  # torch: JAX's order and shapes for portable noise
    arrays: NotRequired[dict[str, Any]]  # of a folder: dtype and shape of each array
    files: NotRequired[dict[str, str]]  # of a folder: SHA-256 of each file


#: Entries of a document that are the same on both stacks.
RUN = (_FORMAT, "plan", "position", "pass_end", "bound", "ledger")


def describe_run(
    ledger: Ledger,
    path: PathLike,
    *,
    stack: str,
    settings: Mapping[str, Any],
    trained: Iterable[str],
    parameters: Iterable[str],
    pass_end: int = 0,
) -> RunDocument:
    """Return the document of a checkpoint at `path`, with the ledger brought to the disk.

    A ledger in memory is written to `<path>.ledger`, or the next free `<path>.ledger.2`, from now
    on, so that later releases are on record too.
    """
    if not Path(_validate.path("path", path)).is_dir():  # of a sharded checkpoint
        _validate.new_file("path", path)
    beside, number = f"{os.fspath(path)}.ledger", 2
    while os.path.lexists(beside):  # of another run, which is not overwritten
        beside, number = f"{os.fspath(path)}.ledger.{number}", number + 1
    ledger.write_to(beside)
    ledger.chain.sync()
    folder = Path(path).resolve().parent
    return {
        "dualdp_checkpoint": _VERSION,
        "stack": stack,
        "plan": json.loads(ledger.plan.to_json()),
        "position": ledger.position,
        "pass_end": pass_end,
        "bound": ledger.max_grad_norm if ledger.plan.is_adaptive else None,
        "ledger": {
            "file": os.path.relpath(Path(str(ledger.path)).resolve(), folder),
            "num_lines": len(ledger.chain),
            "hash": ledger.chain.last_hash,
        },
        "settings": dict(settings),
        "trained": list(trained),
        "parameters": list(parameters),
    }


def open_run(document: RunDocument, path: PathLike, ledger: PathLike | None = None) -> Ledger:
    """Return the ledger, with its plan, of a checkpoint's run, in a new segment.

    Steps that were released after the checkpoint stay accounted, and are further releases when they
    run again.

    Args:
        document: of the checkpoint.
        path: path of the checkpoint.
        ledger: path of the run's ledger; None for the file that the document names or, if that is
            missing, `<path>.ledger`.

    Raises:
        FileNotFoundError: there is no ledger.
        ValueError: the document is broken, or the ledger does not continue what was saved.
    """
    require_version(document, os.fspath(path))
    try:
        plan, end = PrivacyPlan.from_json(json.dumps(document["plan"])), document["ledger"]
        known, named = (end["num_lines"], end["hash"]), Path(path).resolve().parent / end["file"]
        position, bound = document["position"], document["bound"]
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"{os.fspath(path)} says nothing of its run ({error!r}). Expected a file of "
            "save_checkpoint."
        ) from error
    beside = Path(f"{os.fspath(path)}.ledger")
    file = named if named.exists() or not beside.exists() else beside
    file = file if ledger is None else Path(_validate.path("ledger", ledger))
    if not file.exists():
        raise FileNotFoundError(
            f"{file} does not exist. Expected the ledger that the run went on writing after this "
            "checkpoint; pass ledger= if it lies elsewhere."
        )
    return Ledger.resume(file, plan=plan, step=position, bound=bound, known=known)


def write(path: PathLike, arrays: Arrays, document: Mapping[str, Any]) -> None:
    """Write a checkpoint atomically: the old file remains until the new one is complete on disk.

    A bfloat16 array, which NumPy lacks, is passed as uint16; `document["bfloat16"]` lists its name.

    Guarantees:
        A process that is killed, or a disk that is full, leaves the old file as it was.
            [test_a_failed_save_leaves_the_old_checkpoint]
    """
    from safetensors.numpy import save

    packed = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    body = json.dumps({**document, _FORMAT: _VERSION}, allow_nan=False)
    packed[_DOCUMENT] = np.frombuffer(body.encode(), np.uint8)
    data = save(packed, metadata={_FORMAT: str(_VERSION), "sha256": digest(packed)})
    target = Path(_validate.new_file("path", path))
    with _validate.file_errors("written", target, "a folder with room that may be written to"):
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # flushes the rename to the disk
    finally:
        os.close(folder)


def digest(arrays: Arrays) -> str:
    """Return the SHA-256 of every array with its name, dtype and shape."""
    state = hashlib.sha256()
    for name in sorted(arrays):
        array = np.asarray(arrays[name], order="C")
        state.update(repr((name, array.dtype.str, array.shape)).encode())
        state.update(array.reshape(-1).view(np.uint8).data if array.size else b"")
    return state.hexdigest()


def read(path: PathLike) -> tuple[dict[str, NDArray[Any]], RunDocument]:
    """Return arrays and document of a checkpoint, after verifying its SHA-256.

    Raises:
        OSError: the file can't be read.
        ValueError: it is truncated, edited, foreign, or of another version.
    """
    from safetensors import SafetensorError, safe_open

    name = _validate.path("path", path)
    with _validate.file_errors("read", name, "a file of save_checkpoint"), open(name, "rb"):
        pass  # the errors of safetensors name neither the file nor the cause
    try:
        with safe_open(name, framework="numpy") as file:
            metadata = file.metadata() or {}
            arrays = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(
            f"{name} is truncated or no safetensors file ({error}). Expected a file of "
            "save_checkpoint; take an older one."
        ) from error
    if metadata.get(_FORMAT) != str(_VERSION):
        raise ValueError(_validate.newer(name, "checkpoint", metadata.get(_FORMAT), _VERSION))
    if digest(arrays) != metadata.get("sha256"):
        raise ValueError(
            f"{name} was changed after it was written: its SHA-256 differs. Take an older one."
        )
    try:
        document: Any = json.loads(arrays.pop(_DOCUMENT).tobytes())
        require_version(document, name)
    except (AttributeError, KeyError, RecursionError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{name} says nothing of its run ({error!r:.80}). Expected a file of save_checkpoint."
        ) from error
    return arrays, document


def require_version(document: Mapping[str, Any], name: str) -> None:
    """Raise if a document (of the file or folder `name`) is of another version, or of none."""
    if document.get(_FORMAT) != _VERSION:
        raise ValueError(_validate.newer(name, "checkpoint", document.get(_FORMAT), _VERSION))


def numbered(folder: PathLike, number: int) -> Path:
    """Return the path of one sharded checkpoint in a folder."""
    return Path(folder).resolve() / str(number)


def make_folder(folder: PathLike) -> None:
    """Make the folder of sharded checkpoints, unless it exists."""
    with _validate.file_errors("written", folder, "a new folder, or that of earlier checkpoints"):
        Path(folder).mkdir(parents=True, exist_ok=True)


def numbers(folder: PathLike) -> list[int]:
    """Return the numbers of complete sharded checkpoints in a folder, sorted."""
    found = Path(folder).iterdir() if Path(folder).is_dir() else ()
    return sorted(int(entry.name) for entry in found if entry.name.isdigit())


def require_numbered(folder: PathLike, number: int) -> None:
    """Raise if a folder lacks the checkpoint of this number; 0 means that there is none."""
    if not number or not numbered(folder, number).is_dir():
        raise FileNotFoundError(
            f"{os.fspath(folder)} holds no checkpoint. Expected a folder of "
            "save_sharded_checkpoint, which every process sees."
        )


def relocated(document: RunDocument, origin: PathLike, path: PathLike) -> RunDocument:
    """Return the document of another file's or folder's checkpoint for one at `path`."""
    end = document["ledger"]
    file = Path(origin).resolve().parent / end["file"]
    relative = os.path.relpath(file, Path(path).resolve().parent)
    return {**document, "ledger": {**end, "file": relative}}
