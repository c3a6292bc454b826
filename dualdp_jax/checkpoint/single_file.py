# SPDX-License-Identifier: Apache-2.0
"""Checkpoint of a run: state, plan and position in one file, the ledger beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from dualdp import _validate, checkpoint
from dualdp.checkpoint import PathLike, RunDocument
from dualdp.ledger.ledger import Ledger
from dualdp.plan.plan import PrivacyPlan
from dualdp.porting import convert_checkpoint
from dualdp_jax.compat import PyTree, leaf_paths, spans_devices
from dualdp_jax.parallel.mesh import whole
from dualdp_jax.parallel.process_group import Group, on_first
from dualdp_jax.training.engine import Loaded, PrivacyEngine
from dualdp_jax.training.step import TrainState

Array = jax.Array | np.ndarray
Arrays = dict[str, np.ndarray]


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
    arrays = {name: whole(array) for name, array in named_arrays(state).items()}

    def write() -> None:
        write_file(path, arrays, run_document(state, engine, path))

    on_first(engine.group, "the checkpoint", write)


def write_file(path: PathLike, arrays: Arrays, document: RunDocument) -> None:
    """Write arrays and document of a checkpoint; bfloat16, which NumPy lacks, as uint16."""
    low = [name for name, array in arrays.items() if array.dtype == ml_dtypes.bfloat16]
    stored = {**arrays, **{name: arrays[name].view(np.uint16) for name in low}}
    checkpoint.write(path, stored, {**document, "bfloat16": low})


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
            f"mapping={mapping!r} came for a file of JAX. Expected it for one of torch alone."
        )
    for name in document.get("bfloat16", ()):
        arrays[name] = arrays[name].view(ml_dtypes.bfloat16)
    check_fits({name: (array.dtype, array.shape) for name, array in arrays.items()}, like)
    state = restored_state(arrays, document["position"], like)
    return state, loaded_engine(state, document, path, ledger)


def converted(
    arrays: Arrays, document: RunDocument, like: TrainState, mapping: Mapping[str, str] | None
) -> tuple[Arrays, RunDocument]:
    """Convert a torch checkpoint to the one that this backend would have written for this state."""
    check_like(like)
    wanted = {name: (x.shape, str(x.dtype)) for name, x in named_arrays(like).items()}
    found: tuple[Arrays, Any] = convert_checkpoint.to_jax(arrays, document, wanted, mapping)
    return found


def run_document(state: TrainState, engine: PrivacyEngine, path: PathLike) -> RunDocument:
    """Return the document of a checkpoint, with the ledger brought to the disk."""
    settings = dict(engine.step_saved)
    return checkpoint.describe_run(
        engine.ledger,
        path,
        stack="jax",
        settings=settings,
        trained=settings.pop("trained", ()),
        parameters=[name for name, _ in leaf_paths(state.params)],
        pass_end=engine.pass_end,
    )


def check_saved(state: TrainState, engine: PrivacyEngine) -> None:
    """Refuse what is no state or engine, before anything is saved."""
    if not isinstance(engine, PrivacyEngine):
        raise TypeError(f"engine is {_validate.kind(engine)}. Expected the run's PrivacyEngine.")
    if not isinstance(state, TrainState):
        raise TypeError(f"state is {_validate.kind(state)}. Expected the TrainState of a step.")


def loaded_engine(
    state: TrainState, document: RunDocument, path: PathLike, ledger: PathLike | None
) -> PrivacyEngine:
    """Return the engine of a checkpoint's run; process 0 has its ledger's file, all its record."""
    group = Group.current()
    if group is not None:
        group.require_same("the checkpoint", document, "Give all of them the same file.")

    opened = list[Ledger]()

    def first() -> str:
        opened.append(checkpoint.open_run(document, path, ledger))
        return opened[0].to_json()

    text = on_first(group, "the checkpoint's ledger", first)
    if not opened:
        before = text.rstrip("\n").rpartition("\n")[0]  # without the line of the new segment
        other = Ledger.resume(
            before + "\n",
            plan=PrivacyPlan.from_json(json.dumps(document["plan"])),
            step=document["position"],
            bound=document["bound"],
        )
        opened.append(other)
    saved = {**document["settings"], "trained": document["trained"]}
    run = Loaded(state, document["pass_end"], saved)
    return PrivacyEngine.loaded(run, opened[0], group)


def named_arrays(state: TrainState) -> dict[str, Any]:
    """Return the saved leaves by name, "params/<path>" or "optimizer/<path>", as arrays.

    A random key is its key data; settings of a model, which are no numbers, are left out.
    """
    arrays: dict[str, Any] = {}
    for prefix, tree in (("params", state.params), ("optimizer", state.opt_state)):
        for path, leaf in leaf_paths(tree):
            name = f"{prefix}/{path}"
            if callable(leaf) or isinstance(leaf, str):
                continue
            if name in arrays:
                raise ValueError(
                    f"Two leaves of the state have the name {name!r}. Expected keys without dots."
                )
            if not isinstance(leaf, jax.Array | np.ndarray | np.generic | bool | int | float):
                raise TypeError(
                    f"The leaf {name!r} is {_validate.kind(leaf)}. Expected arrays and numbers."
                )
            data = jax.random.key_data(leaf) if _is_key(leaf) else leaf  # type: ignore[arg-type]
            arrays[name] = data if isinstance(data, jax.Array) else np.asarray(data)
    return arrays


def _is_key(leaf: PyTree) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def check_like(like: TrainState) -> None:
    """Refuse anything but a `TrainState`."""
    if not isinstance(like, TrainState):
        raise TypeError(
            f"like is {_validate.kind(like)}. Expected dpj.TrainState.create(params, optimizer)."
        )


def check_fits(saved: Mapping[str, tuple[Any, Any]], like: TrainState) -> None:
    """Refuse saved leaves, name to (dtype, shape), with other names or types than the state's."""
    wanted = named_arrays(like)
    missing, unknown = sorted(wanted.keys() - saved.keys()), sorted(saved.keys() - wanted.keys())
    if missing or unknown:
        raise ValueError(
            f"The checkpoint lacks {missing} and holds {unknown} beside what `like` has. Expected "
            "a state of the model and the optimizer that were saved."
        )
    for name, expected in wanted.items():
        dtype, shape = saved[name]
        if tuple(shape) != expected.shape or dtype != expected.dtype:
            raise ValueError(
                f"{name!r} is {dtype}{list(shape)} in the checkpoint but {expected.dtype}"
                f"{list(expected.shape)} in `like`. Expected the model and optimizer saved."
            )


def restored_state(arrays: Mapping[str, Array], position: int, like: TrainState) -> TrainState:
    """Return the saved state, in the structure and with the kinds of leaves of `like`."""

    def restored(name: str, leaf: PyTree) -> PyTree:
        array = arrays.get(name)
        if array is None:
            return leaf
        if _is_key(leaf):
            return jax.random.wrap_key_data(jnp.asarray(array), impl=jax.random.key_impl(leaf))
        if isinstance(leaf, bool | int | float) and not isinstance(leaf, np.generic):
            return array.item()
        if isinstance(array, np.ndarray) and spans_devices(leaf):
            return jax.make_array_from_callback(leaf.shape, leaf.sharding, array.__getitem__)
        return jnp.asarray(array)

    def tree(prefix: str, part: PyTree) -> PyTree:
        new = [restored(f"{prefix}/{path}", leaf) for path, leaf in leaf_paths(part)]
        return jax.tree.unflatten(jax.tree.structure(part), new)

    return TrainState(tree("params", like.params), tree("optimizer", like.opt_state), position)
