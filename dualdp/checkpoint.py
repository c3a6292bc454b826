# SPDX-License-Identifier: Apache-2.0
"""Checkpoint files of a run: arrays, plan and position; key and ledger are separate files.

The file is safetensors, so any reader of that format finds the arrays, and it contains no code. One
array is a JSON document, as bytes, since the format's own metadata end at 100 MB. The document has
the number of lines of the ledger and the hash of the last, not the text.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dualdp import _validate
from dualdp.ledger.ledger import Ledger, saved_lines
from dualdp.plan.plan import PrivacyPlan
from dualdp.randomness import RootKey

_FORMAT = "dualdp_checkpoint"
_VERSION = 2
_DOCUMENT = "document"  # array with the document; version 1 had it in the metadata
Arrays = Mapping[str, NDArray[Any]]
Path_ = str | os.PathLike[str]


def _digest(arrays: Arrays, text: str) -> str:
    """SHA-256 of the document and of every array with its name, dtype and shape."""
    state = hashlib.sha256(text.encode())
    for name in sorted(arrays):
        array = np.asarray(arrays[name], order="C")
        state.update(repr((name, array.dtype.str, array.shape)).encode())
        state.update(array.reshape(-1).view(np.uint8).data if array.size else b"")
    return state.hexdigest()


def write(path: Path_, arrays: Arrays, document: Mapping[str, Any]) -> None:
    """Write a checkpoint atomically: the old file remains until the new one is complete on disk.

    A bfloat16 array, which NumPy lacks, is passed as uint16; `document["bfloat16"]` lists its name.

    Guarantees:
        A process that is killed, or a disk that is full, leaves the old file as it was.
            [test_a_failed_save_leaves_the_old_checkpoint]
    """
    from safetensors.numpy import save

    text = json.dumps({_FORMAT: _VERSION})
    packed = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    body = json.dumps({**document, _FORMAT: _VERSION}, allow_nan=False)
    packed[_DOCUMENT] = np.frombuffer(body.encode(), np.uint8)
    data = save(packed, metadata={"document": text, "sha256": _digest(packed, text)})
    target = Path(_validate.new_file("path", path))
    with _validate.file_errors("written", target, "a folder with room that may be written to"):
        _replace(target, data)
    handle = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(handle)  # flushes the rename to the disk
    finally:
        os.close(handle)


def _replace(target: Path, data: bytes) -> None:
    """Write a file under another name, and give it its own once it is on the disk."""
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


def read(path: Path_) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """Return arrays and document of a checkpoint, after verifying its SHA-256."""
    from safetensors import SafetensorError, safe_open

    name = _validate.path("path", path)
    expected = "a file of save_checkpoint"
    if numbers(name):
        expected += "; load_sharded_checkpoint reads this folder"
    with _validate.file_errors("read", name, expected), open(name, "rb"):
        pass  # its own errors name neither the file nor the cause
    try:
        with safe_open(name, framework="numpy") as file:
            metadata = file.metadata() or {}
            arrays = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(
            f"{name} is truncated or no safetensors file ({error}). Expected a file of "
            "save_checkpoint; take an older one."
        ) from error
    if set(metadata) != {"document", "sha256"}:
        raise ValueError(
            f"{name} is a safetensors file of something else: it has the metadata "
            f"{sorted(metadata)}. Expected a file of save_checkpoint."
        )
    if _digest(arrays, metadata["document"]) != metadata["sha256"]:
        raise ValueError(
            f"{name} was changed after it was written: its SHA-256 differs. Take an older one."
        )
    document = _parsed(metadata["document"], name)
    if _DOCUMENT in arrays:
        document = _parsed(arrays.pop(_DOCUMENT).tobytes(), name)
    del document[_FORMAT]
    return arrays, without_text(document)


def _parsed(text: str | bytes, name: str) -> dict[str, Any]:
    """JSON object of a text, of a version that can be read."""
    try:
        found = json.loads(text)
    except (RecursionError, ValueError):
        found = None
    if not isinstance(found, dict):
        raise ValueError(
            f"{name} holds no JSON object that says what it is. Expected a file of save_checkpoint."
        )
    require_version(found, name)
    return found


def without_text(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the document without the ledger's text, which version 1 contained."""
    state = document.get("ledger")
    if not isinstance(state, dict) or "text" not in state:
        return dict(document)
    num_lines, chained = saved_lines(state)
    kept = {name: value for name, value in state.items() if name != "text"}
    return {**document, "ledger": {**kept, "num_lines": num_lines, "hash": chained}}


def require_version(document: Mapping[str, Any], name: str) -> None:
    """Raise if a document (of the file or folder `name`) is of a later version, or of none."""
    found = document.get(_FORMAT)
    if isinstance(found, int) and found > _VERSION:
        raise ValueError(_validate.newer(name, "checkpoint", found, _VERSION))
    if found not in (1, _VERSION):
        raise ValueError(
            f"{name} has version {found!r} of the checkpoint's format. Expected one up to "
            f"{_VERSION}: a file of save_checkpoint."
        )


def key_path(path: Path_) -> Path:
    """Return the default path of the key of a checkpoint."""
    return Path(f"{os.fspath(path)}.key")


def ledger_path(path: Path_) -> Path:
    """Return the path to which a ledger in memory is written when its run is saved."""
    return Path(f"{os.fspath(path)}.ledger")


def numbered(folder: Path_, number: int) -> Path:
    """Return the path of one sharded checkpoint in a folder."""
    return Path(folder).resolve() / str(number)


def make_folder(folder: Path_) -> None:
    """Make the folder of sharded checkpoints, unless it exists."""
    with _validate.file_errors("written", folder, "a new folder, or that of earlier checkpoints"):
        Path(folder).mkdir(parents=True, exist_ok=True)


def numbers(folder: Path_) -> list[int]:
    """Return the numbers of complete sharded checkpoints in a folder, sorted."""
    found = Path(folder).iterdir() if Path(folder).is_dir() else ()
    return sorted(int(entry.name) for entry in found if entry.name.isdigit())


def require_numbered(folder: Path_, number: int) -> None:
    """Raise if a folder lacks the checkpoint of this number; 0 means that there is none."""
    if not number or not numbered(folder, number).is_dir():
        raise FileNotFoundError(
            f"{os.fspath(folder)} holds no checkpoint. Expected a folder of "
            "save_sharded_checkpoint, which every process sees."
        )


def relocated(document: Mapping[str, Any], origin: Path_, path: Path_) -> dict[str, Any]:
    """Return the document of another file's or folder's checkpoint, and copy its key here."""
    source, target = key_path(origin), key_path(path)
    if source.exists() and not target.exists():
        RootKey.load(source).save(target)
    elif source.exists() and RootKey.load(source) != RootKey.load(target):
        raise ValueError(
            f"{target} holds the key of another run. Expected another path for this run's "
            "checkpoint, or that file moved away."
        )
    file = Path(origin).resolve().parent / document["ledger_file"]
    relative = os.path.relpath(file, Path(path).resolve().parent)
    return {**without_text(document), "ledger_file": relative}


def pack_run(ledger: Ledger, path: Path_) -> dict[str, Any]:
    """Return the entries about its run of a checkpoint at `path`; save ledger and key to the disk.

    A ledger in memory is written to `<path>.ledger` from now on, so that later releases are on
    record too. The key is written to `<path>.key`, mode 0600, unless the plan has a seed. Whoever
    has both files can remove the noise, so publish neither with the model.
    """
    root = ledger.plan.root.require_secret()
    beside = key_path(path)
    if root.seed is None and beside.exists() and RootKey.load(beside) != root:
        raise ValueError(
            f"{beside} holds the key of another run. Expected another path for this run's "
            "checkpoints, or that file moved away."
        )
    state = ledger.state()
    if ledger.path is None:
        ledger.write_to(ledger_path(path))
    if root.seed is None and not beside.exists():
        ledger.plan.save_key(beside)
    ledger.sync()
    folder = Path(path).resolve().parent
    return {
        _FORMAT: _VERSION,
        "plan": json.loads(ledger.plan.to_json()),
        "ledger": state,
        "ledger_file": os.path.relpath(Path(str(ledger.path)).resolve(), folder),
    }


def unpack_run(
    document: Mapping[str, Any],
    path: Path_,
    key: RootKey | Path_ | None = None,
    ledger: Path_ | None = None,
) -> Ledger:
    """Return the ledger (with its plan) of a checkpoint, ready for the next step.

    Without `key` it is read from `<path>.key`. Without `ledger` the file is the one that the
    document of `pack_run` names or, if that one is missing, `<path>.ledger`.
    """
    require_version({_FORMAT: 1, **document}, os.fspath(path))
    try:
        text, state = json.dumps(document["plan"]), document["ledger"]
        named = Path(path).resolve().parent / document["ledger_file"]
        has_seed = document["plan"]["seed"] is not None
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"{os.fspath(path)} says nothing of its run ({error}). Expected a file of "
            "save_checkpoint."
        ) from error
    if key is None and not has_seed:
        key = key_path(path)
        if not key.exists():
            raise FileNotFoundError(
                f"{key} does not exist. Expected the key file of the run; pass key= if it lies "
                "elsewhere."
            )
    plan = PrivacyPlan.from_json(text, key=key)
    beside = ledger_path(path)
    found = named if named.exists() or not beside.exists() else beside
    file = Path(ledger) if ledger is not None else found
    if not file.exists():
        raise FileNotFoundError(
            f"{file} does not exist. Expected the ledger that the run went on writing after this "
            "checkpoint; pass ledger= if it lies elsewhere."
        )
    return Ledger.resume(plan, state, file)
