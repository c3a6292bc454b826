# SPDX-License-Identifier: Apache-2.0
"""Checkpoint of a run: state, plan and position in one file, secret key and ledger beside it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import jax
import ml_dtypes
import numpy as np

from dualdp import _validate, checkpoint
from dualdp.porting import convert_checkpoint
from dualdp.randomness import RootKey
from dualdp_jax import compat
from dualdp_jax.checkpoint.run_state import (
    PathLike,
    check_engine,
    check_fits,
    check_like,
    is_key,
    named_arrays,
    named_leaves,
    restored_state,
    resume_engine,
    run_document,
)
from dualdp_jax.compat import leaf_paths
from dualdp_jax.parallel.mesh import whole
from dualdp_jax.training.engine import PrivacyEngine
from dualdp_jax.training.step import TrainState

Arrays = dict[str, np.ndarray]


def save_checkpoint(path: PathLike, *, state: TrainState, engine: PrivacyEngine) -> None:
    """Write a run between two steps, atomically: an old file is kept until the new is complete.

    Beside it lie `<path>.key`, the secret key (mode 0600), and the ledger, to which the run keeps
    writing: `<path>.ledger` unless the engine was given a file. With several processes all must
    call this, and process 0 writes; with `save_sharded_checkpoint` each writes its own shards.

    Args:
        path: path of the file; an existing one is replaced.
        state: `TrainState` of the last step, every leaf an array or a number.
        engine: `PrivacyEngine` of the run.

    Raises:
        TypeError: the state is none, or holds a leaf that can't be saved.
        ValueError: two leaves have one name, or `<path>.key` is another run's.

    Guarantees:
        Resumed, the run is bitwise the one that was not interrupted.
            [test_a_resumed_run_is_the_uninterrupted_one]
        A step that is run again with anything changed has other noise, and both are accounted.
            [test_a_changed_replay_gets_new_noise_and_both_are_accounted]
    """
    check_engine(engine)
    arrays = named_arrays(state)

    def write(arrays: Arrays) -> None:
        _validate.new_file("path", path)
        write_file(path, arrays, run_document(state, engine, path))

    content = lambda: {name: whole(array) for name, array in arrays.items()}  # noqa: E731
    engine.written("the checkpoint", content, write)


def load_checkpoint(
    path: PathLike,
    *,
    like: TrainState,
    key: RootKey | PathLike | None = None,
    ledger: PathLike | None = None,
    mapping: Mapping[str, str] | None = None,
) -> tuple[TrainState, PrivacyEngine]:
    """Read a run that `save_checkpoint` wrote; `engine.resume(...)` continues it.

    Args:
        path: path of the checkpoint.
        like: `TrainState` of the same model and optimizer, such as `TrainState.create(params,
            optimizer)`, for structure, shapes and dtypes.
        key: `RootKey` or the path of its file; None for `<path>.key`.
        ledger: path of the run's ledger, if the file was moved.
        mapping: mapping of names for a file of the torch backend, see `dualdp.port.match`.

    Returns:
        `(state, engine)`.

    Raises:
        FileNotFoundError: checkpoint, key or ledger is missing.
        TypeError: `like` is no state.
        ValueError: the file is truncated, edited or foreign, or of another model or optimizer.
    """
    check_like(like)
    arrays, document = checkpoint.read(path)
    if document.get("stack") == "torch":
        arrays, document = converted(arrays, document, like, mapping)
    elif document.get("stack") != "jax" or mapping is not None:
        raise ValueError(
            f"{os.fspath(path)} was saved by {document.get('stack')!r}, mapping={mapping!r}. "
            "Expected a file of either backend, with a mapping only for one of torch's."
        )
    for name in document["bfloat16"]:
        arrays[name] = arrays[name].view(ml_dtypes.bfloat16)
    check_fits({name: (array.dtype, array.shape) for name, array in arrays.items()}, like)
    leaves: dict[str, Any] = dict(arrays)
    for name, leaf in named_leaves(like).items():
        if compat.spans_devices(leaf) and not is_key(leaf):
            read = arrays[name].__getitem__
            leaves[name] = jax.make_array_from_callback(leaf.shape, leaf.sharding, read)
    state = restored_state(leaves, document, like)
    return state, resume_engine(state, document, path, key, ledger)


def converted(
    arrays: Arrays, document: Mapping[str, Any], like: TrainState, mapping: Mapping[str, Any] | None
) -> tuple[Arrays, dict[str, Any]]:
    """Convert a torch checkpoint to the one that this backend would have written for this state."""
    check_like(like)
    ours = {name: whole(array) for name, array in named_arrays(like).items()}
    wanted = {name: (array.shape, str(array.dtype)) for name, array in ours.items()}
    pass_end = document["settings"]["pass_end"]
    arrays, document = convert_checkpoint.to_jax(arrays, document, wanted, mapping)
    leaves = [name for name, _ in leaf_paths(like.params)]
    return arrays, {**document, "leaves": leaves, "pass_end": pass_end}


def write_file(path: PathLike, arrays: Arrays, document: Mapping[str, Any]) -> None:
    """Write the file of a checkpoint; bfloat16, which NumPy lacks, is stored as uint16."""
    bfloat16 = [name for name, array in arrays.items() if array.dtype == ml_dtypes.bfloat16]
    packed = {**arrays, **{name: arrays[name].view(np.uint16) for name in bfloat16}}
    checkpoint.write(path, packed, {**document, "bfloat16": bfloat16})
