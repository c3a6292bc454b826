# SPDX-License-Identifier: Apache-2.0
"""A run in a folder, to which every process writes its own pieces by `torch.distributed`.

Plan, position and ledger are those of the single file, into which the folder can be consolidated.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path as Folder
from typing import Any

import torch
from torch import nn

from dualdp import checkpoint, leaves
from dualdp.randomness import RootKey

from . import weights
from .agreement import resumed_by_first
from .arguments import Settings
from .checkpoint import (
    Path,
    _below,
    _generators,
    _model_restorer,
    _of,
    _of_rank,
    _set_generators,
    _to_numpy,
    _values,
)
from .distributed import Group, group_of, on_all
from .engine import PrivacyEngine
from .optimizer_state import named_state, restorer
from .rules.base import Tensor
from .sharded import fsdp_layers, is_sharded

_DOCUMENT = "run.json"


def save_sharded_checkpoint(
    folder: Path, *, model: nn.Module, optimizer: torch.optim.Optimizer, engine: PrivacyEngine
) -> None:
    """Write a run between two steps; each process writes the pieces that it holds.

    The folder holds numbered checkpoints; older ones go once the new one is whole. Key and ledger
    lie beside it as `<folder>.key` and `<folder>.ledger`, as with `save_checkpoint`. All processes
    call this, on a folder that all of them see.

    Args:
        folder: of the checkpoints; it is made if needed.
        model: the one the engine trains.
        optimizer: the one the engine uses.
        engine: attached.

    Raises:
        RuntimeError: a logical batch is half done, see `engine.is_between_steps`.
        TypeError: the optimizer keeps something else than tensors and plain values.
        ValueError: another model or optimizer.

    Guarantees:
        A save that is interrupted leaves the older checkpoint.
            [test_an_interrupted_sharded_save_leaves_the_older_one]
        Resumed, on as many processes or others, the run goes on where it was.
            [test_sharded_checkpoints_load_on_other_numbers_of_processes]
    """
    settings, group = engine.standing(model, optimizer), engine.group
    tensors, described = _state(model, optimizer)
    rank = 0 if group is None else group.rank
    tensors |= _own_generators(engine, rank)
    number = _first(
        group, "the sharded checkpoint", lambda: 1 + max(checkpoint.numbers(folder), default=0)
    )
    part = checkpoint.numbered(folder, number).with_name(f".{number}.part")

    def describe() -> dict[str, Any]:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        return {
            "stack": "torch",
            "position": engine.ledger.position,
            "settings": asdict(settings),
            "trained": list(engine.parameters),
            "optimizer": described,
            "layout": weights.layout(model),
            "noise_layout": leaves.to_json(engine.noise_layout or ()),
            **checkpoint.pack_run(engine.ledger, folder),
        }

    document = _first(group, f"the document of {engine.ledger.position} steps", describe)
    with _quiet():
        _dcp().save(tensors, checkpoint_id=part, no_dist=group is None)
    ours = part.glob(f"__{rank}_*")
    written = _all(group, "the digests", lambda: {file.name: _sha256(file) for file in ours})

    def complete() -> None:
        digests = {name: digest for files in written for name, digest in files.items()}
        others = (file for file in sorted(part.iterdir()) if file.name not in digests)
        document["files"] = digests | {file.name: _sha256(file) for file in others}
        with (part / _DOCUMENT).open("w") as out:
            json.dump(document, out, allow_nan=False)
            out.flush()
            os.fsync(out.fileno())
        part.rename(checkpoint.numbered(folder, number))
        for older in checkpoint.numbers(folder):
            if older < number:
                shutil.rmtree(checkpoint.numbered(folder, older))

    _first(group, "the end of the checkpoint", complete)


def load_sharded_checkpoint(
    folder: Path,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    key: RootKey | Path | None = None,
    ledger: Path | None = None,
) -> PrivacyEngine:
    """Bring a run back into a model and an optimizer; `engine.resume(data_loader=)` goes on.

    Steps that were released after the checkpoint are run again, as with `load_checkpoint`. The
    number of processes may be another one, and the model may be whole or in pieces. The index of
    torch's format is a pickle: load only folders that you trust.

    Args:
        folder: of `save_sharded_checkpoint`, of which the newest checkpoint is read.
        model: of the same architecture; its parameters and buffers are overwritten.
        optimizer: over it, of the same kind and groups; its state is overwritten.
        key: the key or its file; None for `<folder>.key`, or the plan's seed.
        ledger: the run's ledger file, if it was moved.

    Returns:
        An engine that knows what was spent; call its `resume`.

    Raises:
        FileNotFoundError: the folder holds no whole checkpoint, or key or ledger is missing.
        ValueError: it is edited, or does not fit model or optimizer.
    """
    group = group_of(model)
    rank, size = (0, 1) if group is None else (group.rank, group.size)
    number, document = _first(group, "load_sharded_checkpoint", lambda: _document(folder))
    on_all(
        group, "the files", lambda: _check_files(folder, number, document, slice(rank, None, size))
    )
    tensors = _loaded(checkpoint.numbered(folder, number), _state(model, optimizer)[0], group)
    put_model = _model_restorer(model, tensors, document["trained"])
    put_optimizer = restorer(optimizer, model, _below("optimizer/", tensors), document["optimizer"])
    resumed = resumed_by_first(
        group, document["plan"], lambda: checkpoint.unpack_run(document, folder, key, ledger)
    )
    generators = _of(rank, _below("generator/", tensors))
    try:
        engine = PrivacyEngine.loaded(
            resumed,
            Settings(**document["settings"]),
            model,
            optimizer,
            lambda: _set_generators(generators),
            group,
        )
    except BaseException:
        resumed.close()
        raise
    put_model()
    put_optimizer()
    engine.noise_layout = leaves.from_json(document["noise_layout"]) or None
    return engine


def consolidate_checkpoint(folder: Path, path: Path) -> None:
    """Make the file of `save_checkpoint` from the newest checkpoint in a folder, on one process.

    The run itself goes on from either of them, not from both; its ledger stays where it is, and
    `<path>.key` is made a copy of `<folder>.key`.

    Args:
        folder: of `save_sharded_checkpoint`.
        path: of the file; an existing one is replaced.

    Raises:
        FileNotFoundError: the folder holds no whole checkpoint.
        ValueError: it is edited, or `<path>.key` is another run's.

    Guarantees:
        One process goes on from the file as from the folder.
            [test_a_consolidated_checkpoint_goes_on_in_one_process]
    """
    number, document = _document(folder)
    _check_files(folder, number, document)
    del document["files"]
    tensors = _loaded(checkpoint.numbered(folder, number), {}, None)
    document = checkpoint.moved(document, folder, path)
    document["bfloat16"] = [n for n, tensor in tensors.items() if tensor.dtype == torch.bfloat16]
    checkpoint.write(path, {n: _to_numpy(tensor) for n, tensor in tensors.items()}, document)


# ---------------------------------------------------------------------- one process and the others


def _first(group: Group | None, place: str, call: Any) -> Any:
    """What a call gives on rank 0, on all; nobody goes on before it is done."""
    return call() if group is None else group.by_first(place, call)


def _all(group: Group | None, place: str, call: Any) -> list[Any]:
    """What a call gives on each process, by rank."""
    return [call()] if group is None else group.together(place, call)


def _state(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Parameters, buffers and slots of the optimizer by name, and the optimizer's plain data."""
    for layer in fsdp_layers(model):
        layer.reshard()
    tensors = {f"{kind}/{name}": value.detach() for kind, name, value in _values(model)}
    slots, described = named_state(optimizer, model)
    return tensors | {f"optimizer/{name}": value for name, value in slots.items()}, described


def _own_generators(engine: PrivacyEngine, rank: int) -> dict[str, Tensor]:
    """The states of this process' generators, under names of its own."""
    device = next(iter(engine.parameters.values())).device
    states = _generators(device).items()
    return {f"generator/{_of_rank(name, rank)}": state for name, state in states}


# ---------------------------------------------------------------------- torch's format


def _dcp() -> Any:
    """`torch.distributed.checkpoint`, which takes its time to import."""
    import torch.distributed.checkpoint as dcp

    return dcp


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """It warns of being alone, which is no fault."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield


def _loaded(folder: Folder, ours: Mapping[str, Tensor], group: Group | None) -> dict[str, Tensor]:
    """Name -> tensor of a checkpoint, in pieces where the model's or optimizer's are."""
    dcp = _dcp()
    saved = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors = {name: _room(name, entry, ours) for name, entry in saved.items()}
    with _quiet():
        dcp.load(tensors, checkpoint_id=folder, no_dist=group is None)
    return tensors


def _room(name: str, entry: Any, ours: Mapping[str, Tensor]) -> Tensor:
    """Memory for a saved tensor, in pieces like the parameter that it is, or is a slot of."""
    parameter = name if name in ours else f"params/{name.split('/', 2)[-1]}"
    like, dtype = ours.get(parameter), entry.properties.dtype
    if like is not None and is_sharded(like) and like.shape == entry.size:
        return torch.zeros_like(like, dtype=dtype)
    return torch.zeros(entry.size, dtype=dtype)


# ---------------------------------------------------------------------- files


def _document(folder: Path) -> tuple[int, dict[str, Any]]:
    """Number and document of the newest checkpoint.

    Raises:
        FileNotFoundError: there is none.
    """
    newest = max(checkpoint.numbers(folder), default=0)
    checkpoint.require_numbered(folder, newest)
    return newest, json.loads((checkpoint.numbered(folder, newest) / _DOCUMENT).read_text())


def _check_files(
    folder: Path, number: int, document: Mapping[str, Any], which: slice = slice(None)
) -> None:
    """Refuse files that are not as they were written; a process looks at some of them.

    Raises:
        ValueError: one is not.
    """
    for name, digest in sorted(document["files"].items())[which]:
        file = checkpoint.numbered(folder, number) / name
        if not file.is_file() or _sha256(file) != digest:
            raise ValueError(
                f"{file} was changed or removed after it was written. Expected a folder as "
                "save_sharded_checkpoint left it; take another checkpoint."
            )


def _sha256(file: Folder) -> str:
    """Digest of a file."""
    with file.open("rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()
