# SPDX-License-Identifier: Apache-2.0
"""Sharded checkpoint of a run: a folder to which every process writes its own shards, by Orbax.

Plan, position and ledger are those of the single file, into which the folder can be consolidated.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from typing import Any

import jax

from dualdp import checkpoint
from dualdp.checkpoint import PathLike, RunDocument
from dualdp_jax.checkpoint import single_file
from dualdp_jax.parallel.process_group import Group, on_first
from dualdp_jax.training.engine import PrivacyEngine
from dualdp_jax.training.step import TrainState


def save_sharded_checkpoint(folder: PathLike, *, state: TrainState, engine: PrivacyEngine) -> None:
    """Write a run between two steps; each process writes its own shards of the state.

    The folder holds numbered checkpoints; older ones are deleted once the new one is complete. The
    ledger lies beside it as `<folder>.ledger`, as with `save_checkpoint`. All processes must call
    this, with a folder on a shared file system.

    Args:
        folder: path of the checkpoints; created if needed.
        state: `TrainState` of the last step, every leaf an array or a number.
        engine: `PrivacyEngine` of the run.

    Raises:
        ModuleNotFoundError: Orbax is not installed.
        TypeError: the state is none, or holds a leaf that can't be saved.

    Guarantees:
        A save that is interrupted leaves the older checkpoint.
            [test_an_interrupted_sharded_save_leaves_the_older_one]
        Resumed, on this mesh or another, the run goes on where it was.
            [test_a_sharded_checkpoint_loads_on_other_meshes]
    """
    single_file.check_saved(state, engine)
    ocp = _orbax()

    arrays, group = single_file.named_arrays(state), engine.group

    def describe() -> tuple[int, RunDocument]:
        checkpoint.make_folder(folder)
        document = single_file.run_document(state, engine, folder)
        document["arrays"] = {name: [str(a.dtype), list(a.shape)] for name, a in arrays.items()}
        return 1 + max(checkpoint.numbers(folder), default=0), document

    number, document = on_first(group, "the sharded checkpoint", describe)
    args = ocp.args
    parts = args.Composite(arrays=args.StandardSave(arrays), run=args.JsonSave(document))
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as writer:
        writer.save(checkpoint.numbered(folder, number), args=parts)

    def clear() -> None:
        for older in checkpoint.numbers(folder):
            if older < number:
                shutil.rmtree(checkpoint.numbered(folder, older))

    on_first(group, "the end of the sharded checkpoint", clear)


def load_sharded_checkpoint(
    folder: PathLike, *, like: TrainState, ledger: PathLike | None = None
) -> tuple[TrainState, PrivacyEngine]:
    """Read the newest run that `save_sharded_checkpoint` wrote, perhaps on another mesh.

    The arguments are those of `load_checkpoint`; each leaf gets the sharding that it has in `like`.

    Returns:
        `(state, engine)`; `engine.resume(..., data_sharding=...)` goes on with the run.

    Raises:
        FileNotFoundError: the folder holds no whole checkpoint, or the ledger is missing.
        ModuleNotFoundError: Orbax is not installed.
        ValueError: it is of another model or optimizer.
    """
    single_file.check_like(like)
    number, document = _document(folder)
    single_file.check_fits(document["arrays"], like)
    arrays = _arrays(folder, number, single_file.named_arrays(like))
    state = single_file.restored_state(arrays, document["position"], like)
    return state, single_file.loaded_engine(state, document, folder, ledger)


def consolidate_checkpoint(folder: PathLike, path: PathLike) -> None:
    """Write the newest checkpoint of a folder as a file of `save_checkpoint`, on one process.

    Its ledger is not moved.

    Args:
        folder: path given to `save_sharded_checkpoint`.
        path: path of the file; an existing one is replaced.

    Raises:
        FileNotFoundError: the folder holds no whole checkpoint.
        ModuleNotFoundError: Orbax is not installed.
    """
    number, document = _document(folder)
    types = {name: jax.ShapeDtypeStruct(s, t) for name, (t, s) in document["arrays"].items()}
    moved = checkpoint.relocated(document, folder, path)
    del moved["arrays"]
    single_file.write_file(path, _arrays(folder, number, types), moved)


def _orbax() -> Any:
    """Import Orbax, which only sharded checkpoints need."""
    try:
        import orbax.checkpoint as ocp
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "Sharded checkpoints need the package orbax-checkpoint, which is not installed. Run "
            "pip install orbax-checkpoint, or use save_checkpoint."
        ) from error
    return ocp


def _document(folder: PathLike) -> tuple[int, RunDocument]:
    """Number and document of the newest checkpoint of a folder, the same on all processes."""
    ocp = _orbax()

    group = Group.current()
    newest = on_first(
        group, "the newest checkpoint", lambda: max(checkpoint.numbers(folder), default=0)
    )
    checkpoint.require_numbered(folder, newest)
    document = _restored(folder, newest, run=ocp.args.JsonRestore())["run"]
    checkpoint.require_version(document, str(folder))
    return newest, document


def _arrays(folder: PathLike, number: int, like: Mapping[str, Any]) -> dict[str, Any]:
    """Arrays of a checkpoint, sharded like the same leaf of `like`, or NumPy arrays."""
    target = _orbax().args.StandardRestore(dict(like))
    return dict(_restored(folder, number, arrays=target)["arrays"])


def _restored(folder: PathLike, number: int, **parts: Any) -> Mapping[str, Any]:
    """Parts of a checkpoint, by Orbax."""
    ocp = _orbax()
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as reader:
        name = checkpoint.numbered(folder, number)
        return reader.restore(name, args=ocp.args.Composite(**parts))  # type: ignore[no-any-return]
