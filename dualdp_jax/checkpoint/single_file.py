# SPDX-License-Identifier: Apache-2.0
"""Checkpoint of a run: state, plan and position in one file, the ledger beside it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import jax
import ml_dtypes
import numpy as np

from dualdp import checkpoint
from dualdp.checkpoint import PathLike, RunDocument
from dualdp.porting import convert_checkpoint
from dualdp_jax import compat
from dualdp_jax.checkpoint.run_state import (
    check_fits,
    check_like,
    check_saved,
    is_key,
    loaded_engine,
    named_arrays,
    named_leaves,
    restored_state,
    run_document,
)
from dualdp_jax.parallel.mesh import whole
from dualdp_jax.parallel.process_group import on_first
from dualdp_jax.training.engine import PrivacyEngine
from dualdp_jax.training.step import TrainState

Arrays = dict[str, np.ndarray[Any, Any]]


def save_checkpoint(path: PathLike, *, state: TrainState, engine: PrivacyEngine) -> None:
    """Write a run between two steps, atomically: an old file is kept until the new is complete.

    Beside it lies the ledger, to which the run keeps writing: `<path>.ledger` unless the engine was
    given a file. With several processes all must call this, and process 0 writes; with
    `save_sharded_checkpoint` each writes its own shards.

    Args:
        path: path of the file; an existing one is replaced.
        state: `TrainState` of the last step, every leaf an array or a number.
        engine: `PrivacyEngine` of the run.

    Raises:
        TypeError: the state is none, or holds a leaf that can't be saved.
        ValueError: two leaves have one name.

    Guarantees:
        Resumed, a run with a seed ends with the numbers of one that was not interrupted.
            [test_a_resumed_run_is_the_uninterrupted_one]
        Two resumed runs of one checkpoint have other noise and batches.
            [test_two_resumed_runs_differ]
    """
    check_saved(state, engine)
    group = engine.group
    arrays = {name: whole(array) for name, array in named_arrays(state).items()}
    low = [name for name, array in arrays.items() if array.dtype == ml_dtypes.bfloat16]
    arrays |= {name: arrays[name].view(np.uint16) for name in low}  # NumPy lacks bfloat16

    def write() -> None:
        checkpoint.write(path, arrays, {**run_document(state, engine, path), "bfloat16": low})

    on_first(group, "the checkpoint", write)


def load_checkpoint(
    path: PathLike,
    *,
    like: TrainState,
    ledger: PathLike | None = None,
    mapping: Mapping[str, str] | None = None,
) -> tuple[TrainState, PrivacyEngine]:
    """Read a run that `save_checkpoint` wrote; `engine.resume(...)` goes on with it.

    Args:
        path: path of the checkpoint.
        like: `TrainState` of the same model and optimizer, such as `TrainState.create(params,
            optimizer)`, for structure, shapes and dtypes.
        ledger: path of the run's ledger, if the file was moved.
        mapping: mapping of names for a file of the torch backend, see `dualdp.port.match`.

    Returns:
        `(state, engine)`.

    Raises:
        FileNotFoundError: checkpoint or ledger is missing.
        TypeError: `like` is no state.
        ValueError: the file is truncated, edited or foreign, or of another model or optimizer.
    """
    check_like(like)
    arrays, document = checkpoint.read(path)
    if document["stack"] == "torch":
        arrays, document = converted(arrays, document, like, mapping)
    elif mapping is not None:
        raise ValueError(
            f"mapping={mapping!r} came for {os.fspath(path)}, which JAX saved. Expected it for a "
            "file of torch alone."
        )
    for name in document.get("bfloat16", ()):
        arrays[name] = arrays[name].view(ml_dtypes.bfloat16)
    check_fits({name: (array.dtype, array.shape) for name, array in arrays.items()}, like)
    leaves: dict[str, Any] = dict(arrays)
    for name, leaf in named_leaves(like).items():
        if compat.spans_devices(leaf) and not is_key(leaf):
            read = arrays[name].__getitem__
            leaves[name] = jax.make_array_from_callback(leaf.shape, leaf.sharding, read)
    state = restored_state(leaves, document["position"], like)
    return state, loaded_engine(state, document, path, ledger)


def converted(
    arrays: Arrays, document: RunDocument, like: TrainState, mapping: Mapping[str, str] | None
) -> tuple[Arrays, RunDocument]:
    """Convert a torch checkpoint to the one that this backend would have written for this state."""
    check_like(like)
    ours = {name: whole(array) for name, array in named_arrays(like).items()}
    wanted = {name: (array.shape, str(array.dtype)) for name, array in ours.items()}
    found: tuple[Arrays, Any] = convert_checkpoint.to_jax(arrays, document, wanted, mapping)
    return found
