# SPDX-License-Identifier: Apache-2.0
"""Checkpoint in a folder, to which every process writes its own shards by `torch.distributed`.

Its document is that of the single file; a folder can be consolidated to one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path as Folder
from types import ModuleType
from typing import Any

import torch
from torch import nn

from dualdp import checkpoint
from dualdp.checkpoint import RunDocument
from dualdp_torch.checkpoint.single_file import (
    Path,
    generator_states,
    load_run,
    require_savable,
    run_document,
    run_tensors,
    write_file,
)
from dualdp_torch.parallel.fsdp import is_sharded
from dualdp_torch.parallel.process_group import Group, group_of
from dualdp_torch.rules.base import Tensor
from dualdp_torch.training.arguments import check_kinds
from dualdp_torch.training.engine import PrivacyEngine

_DOCUMENT = "run.json"


def save_sharded_checkpoint(
    folder: Path, *, model: nn.Module, optimizer: torch.optim.Optimizer, engine: PrivacyEngine
) -> None:
    """Write a run between two steps; each process writes its own shards.

    The folder holds numbered checkpoints; older ones are removed once the new one is complete. The
    ledger is `<folder>.ledger` unless the engine was given one. All processes call this, on a
    folder that all of them can access. All else is as with `save_checkpoint`.

    Guarantees:
        A save that is interrupted leaves the older checkpoint.
            [test_an_interrupted_sharded_save_leaves_the_older_one]
        Resumed, on as many processes or others, the run goes on where it was.
            [test_sharded_checkpoints_load_on_other_numbers_of_processes]
    """
    require_savable(model, optimizer, engine)
    group, device = engine.group, next(iter(engine.parameters.values())).device
    tensors = run_tensors(model, optimizer) | generator_states(device, group.rank)

    def begin() -> tuple[Folder, Folder, RunDocument]:
        checkpoint.make_folder(folder)
        number = 1 + max(checkpoint.numbers(folder), default=0)
        whole = checkpoint.numbered(folder, number)
        part = whole.with_name(f".{number}.part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        return part, whole, run_document(engine, model, optimizer, folder)

    part, whole, document = group.word(f"the document of {engine.ledger.position} steps", begin)
    with _dcp() as dcp:
        dcp.save(tensors, checkpoint_id=part, no_dist=group.size == 1)

    def complete() -> None:
        document["files"] = {file.name: _sha256(file) for file in sorted(part.iterdir())}
        with (part / _DOCUMENT).open("w") as out:
            json.dump(document, out, allow_nan=False)
            out.flush()
            os.fsync(out.fileno())
        part.rename(whole)
        for older in checkpoint.numbers(folder):
            if older < int(whole.name):
                shutil.rmtree(checkpoint.numbered(folder, older))

    group.word("the end of the checkpoint", complete)


def load_sharded_checkpoint(
    folder: Path,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    ledger: Path | None = None,
) -> PrivacyEngine:
    """Load a run into a model and an optimizer; `engine.resume(data_loader=)` continues it.

    The newest checkpoint of `save_sharded_checkpoint` is read. The number of processes may have
    changed, and the model may be sharded or not. The index of torch's format is a pickle: load only
    folders that you trust. All else is as with `load_checkpoint`.

    Raises:
        FileNotFoundError: the folder holds no whole checkpoint, or the ledger is missing.
        ValueError: it is edited, or does not fit model or optimizer.
    """
    check_kinds(model, optimizer, "model")
    group = group_of(model)
    newest, document = group.word("load_sharded_checkpoint", lambda: _newest(folder))
    tensors = _loaded(newest, run_tensors(model, optimizer), group)
    return load_run(tensors, document, folder, ledger, model, optimizer)


def consolidate_checkpoint(folder: Path, path: Path) -> None:
    """Convert the newest checkpoint of a folder to a file of `save_checkpoint`, on one process.

    Its ledger is that of the folder, which is not moved: go on from one of the two, or give the
    other a copy of the ledger.

    Args:
        folder: folder of `save_sharded_checkpoint`.
        path: path of the new file; an existing one is replaced.

    Raises:
        FileNotFoundError: the folder holds no whole checkpoint.
        ValueError: it is edited.

    Guarantees:
        One process goes on from the file as from the folder.
            [test_a_consolidated_checkpoint_goes_on_in_one_process]
    """
    newest, document = _newest(folder)
    del document["files"]
    tensors = _loaded(newest, {}, None)  # by this process alone
    write_file(path, tensors, checkpoint.relocated(document, folder, path))


@contextlib.contextmanager
def _dcp() -> Iterator[ModuleType]:
    """Context of `torch.distributed.checkpoint`, which does not warn of a single process."""
    import torch.distributed.checkpoint as dcp  # slow

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield dcp


def _loaded(folder: Folder, ours: Mapping[str, Tensor], group: Group | None) -> dict[str, Tensor]:
    """Tensors of a checkpoint by name, sharded like those of model and optimizer."""
    with _dcp() as dcp:
        saved = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
        tensors = {name: _room(name, entry, ours) for name, entry in saved.items()}
        dcp.load(tensors, checkpoint_id=folder, no_dist=group is None or group.size == 1)
    return tensors


def _room(name: str, entry: Any, ours: Mapping[str, Tensor]) -> Tensor:
    """Empty tensor for a saved one, sharded like its parameter or the parameter of its slot."""
    parameter = name if name in ours else f"params/{name.split('/', 2)[-1]}"
    like, dtype = ours.get(parameter), entry.properties.dtype
    if like is not None and is_sharded(like) and like.shape == entry.size:
        return torch.zeros_like(like, dtype=dtype)
    return torch.zeros(entry.size, dtype=dtype)


def _newest(folder: Path) -> tuple[Folder, RunDocument]:
    """Newest checkpoint of a folder and its document; refuse files that were changed since."""
    number = max(checkpoint.numbers(folder), default=0)
    checkpoint.require_numbered(folder, number)
    newest = checkpoint.numbered(folder, number)
    document = json.loads((newest / _DOCUMENT).read_text())
    checkpoint.require_version(document, os.fspath(folder))
    for name, digest in document["files"].items():
        file = newest / name
        if not file.is_file() or _sha256(file) != digest:
            raise ValueError(
                f"{file} was changed or removed after it was written. Expected a folder as "
                "save_sharded_checkpoint left it; take another checkpoint."
            )
    return newest, document


def _sha256(file: Folder) -> str:
    with file.open("rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()
