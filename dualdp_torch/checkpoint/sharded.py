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
from dualdp_torch.checkpoint.run_state import (
    Path,
    generator_states,
    load_run,
    run_document,
    run_tensors,
    settings_of,
    to_numpy,
)
from dualdp_torch.parallel.fsdp import is_sharded
from dualdp_torch.parallel.process_group import Group, group_of, on_all, on_first
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
    settings, group = settings_of(model, optimizer, engine), engine.group
    rank = 0 if group is None else group.rank
    tensors, described = run_tensors(model, optimizer)
    tensors |= generator_states(next(iter(engine.parameters.values())).device, rank)
    number = on_first(
        group, "the sharded checkpoint", lambda: 1 + max(checkpoint.numbers(folder), default=0)
    )
    part = checkpoint.numbered(folder, number).with_name(f".{number}.part")

    def describe() -> RunDocument:
        shutil.rmtree(part, ignore_errors=True)
        checkpoint.make_folder(folder)
        part.mkdir()
        return run_document(engine, settings, model, described, folder)

    document = on_first(group, f"the document of {engine.ledger.position} steps", describe)
    with _dcp() as dcp:
        dcp.save(tensors, checkpoint_id=part, no_dist=group is None)

    def digests() -> dict[str, str]:
        return {file.name: _sha256(file) for file in part.glob(f"__{rank}_*")}

    written = [digests()] if group is None else group.each("the digests", digests)

    def complete() -> None:
        known = {name: digest for files in written for name, digest in files.items()}
        others = (file for file in sorted(part.iterdir()) if file.name not in known)
        document["files"] = known | {file.name: _sha256(file) for file in others}
        with (part / _DOCUMENT).open("w") as out:
            json.dump(document, out, allow_nan=False)
            out.flush()
            os.fsync(out.fileno())
        part.rename(checkpoint.numbered(folder, number))
        for older in checkpoint.numbers(folder):
            if older < number:
                shutil.rmtree(checkpoint.numbered(folder, older))

    on_first(group, "the end of the checkpoint", complete)


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
    rank, size = (0, 1) if group is None else (group.rank, group.size)
    number, document = on_first(group, "load_sharded_checkpoint", lambda: _document(folder))
    on_all(
        group, "the files", lambda: _check_files(folder, number, document, slice(rank, None, size))
    )
    like = run_tensors(model, optimizer)[0]
    tensors = _loaded(checkpoint.numbered(folder, number), like, group)
    return load_run(
        tensors,
        document,
        folder,
        ledger,
        model=model,
        inner=model,
        optimizer=optimizer,
        group=group,
    )


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
    number, document = _document(folder)
    _check_files(folder, number, document)
    del document["files"]
    tensors = _loaded(checkpoint.numbered(folder, number), {}, None)
    document = checkpoint.relocated(document, folder, path)
    document["bfloat16"] = [n for n, tensor in tensors.items() if tensor.dtype == torch.bfloat16]
    checkpoint.write(path, {n: to_numpy(tensor) for n, tensor in tensors.items()}, document)


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
        dcp.load(tensors, checkpoint_id=folder, no_dist=group is None)
    return tensors


def _room(name: str, entry: Any, ours: Mapping[str, Tensor]) -> Tensor:
    """Empty tensor for a saved one, sharded like its parameter or the parameter of its slot."""
    parameter = name if name in ours else f"params/{name.split('/', 2)[-1]}"
    like, dtype = ours.get(parameter), entry.properties.dtype
    if like is not None and is_sharded(like) and like.shape == entry.size:
        return torch.zeros_like(like, dtype=dtype)
    return torch.zeros(entry.size, dtype=dtype)


def _document(folder: Path) -> tuple[int, RunDocument]:
    """Number and document of the newest checkpoint; a folder without one is refused."""
    newest = max(checkpoint.numbers(folder), default=0)
    checkpoint.require_numbered(folder, newest)
    document = json.loads((checkpoint.numbered(folder, newest) / _DOCUMENT).read_text())
    checkpoint.require_version(document, os.fspath(folder))
    return newest, document


def _check_files(
    folder: Path, number: int, document: RunDocument, which: slice = slice(None)
) -> None:
    """Refuse files that were changed after they were written; `which` selects some of them."""
    for name, digest in sorted(document["files"].items())[which]:
        file = checkpoint.numbered(folder, number) / name
        if not file.is_file() or _sha256(file) != digest:
            raise ValueError(
                f"{file} was changed or removed after it was written. Expected a folder as "
                "save_sharded_checkpoint left it; take another checkpoint."
            )


def _sha256(file: Folder) -> str:
    with file.open("rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()
