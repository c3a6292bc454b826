# SPDX-License-Identifier: Apache-2.0
"""State and document of a run in a checkpoint: leaves by name, checks, and the loaded engine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dualdp import _validate, checkpoint
from dualdp.checkpoint import PathLike, RunDocument
from dualdp.ledger.ledger import Ledger
from dualdp.plan.plan import PrivacyPlan
from dualdp_jax.compat import leaf_paths
from dualdp_jax.parallel.process_group import Group, on_first
from dualdp_jax.training.engine import Loaded, PrivacyEngine
from dualdp_jax.training.step import TrainState


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


def check_saved(state: Any, engine: Any) -> None:
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

    def open_ledger(recalibrate: bool) -> Ledger:
        opened = list[Ledger]()

        def first() -> str:
            opened.append(checkpoint.open_run(document, path, ledger, recalibrate=recalibrate))
            return opened[0].to_json()

        text = on_first(group, "the checkpoint's ledger", first)
        if opened:
            return opened[0]
        before = text.rstrip("\n").rpartition("\n")[0]  # without the line of the new segment
        return Ledger.resume(
            before + "\n",
            plan=PrivacyPlan.from_json(json.dumps(document["plan"])),
            step=document["position"],
            bound=document["bound"],
            recalibrate=recalibrate,
        )

    saved = {**document["settings"], "trained": document["trained"]}
    return PrivacyEngine.loaded(Loaded(state, open_ledger, document["pass_end"], saved), group)


def named_leaves(state: TrainState) -> dict[str, Any]:
    """Return the saved leaves by name, "params/<path>" or "optimizer/<path>"."""
    found: dict[str, Any] = {}
    for prefix, tree in (("params", state.params), ("optimizer", state.opt_state)):
        for path, leaf in leaf_paths(tree):
            name = f"{prefix}/{path}"
            if callable(leaf) or isinstance(leaf, str):  # settings of a model, not numbers
                continue
            if name in found:
                raise ValueError(
                    f"Two leaves of the state have the name {name!r}, since a key holds a dot. "
                    "Expected keys without dots."
                )
            found[name] = leaf
    return found


def named_arrays(state: TrainState) -> dict[str, Any]:
    """Return the saved leaves by name as arrays of numbers; a random key as its key data."""
    arrays: dict[str, Any] = {}
    for name, leaf in named_leaves(state).items():
        if is_key(leaf):
            arrays[name] = jax.random.key_data(leaf)
        elif isinstance(leaf, jax.Array | np.ndarray | np.generic | bool | int | float):
            arrays[name] = leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)
        else:
            raise TypeError(
                f"The leaf {name!r} is {_validate.kind(leaf)}. Expected arrays and numbers; what "
                "is no number can't be in a checkpoint."
            )
    return arrays


def is_key(leaf: Any) -> bool:
    """True for a typed random key, which is saved as its key data."""
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def check_like(like: Any) -> None:
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
                f"{list(expected.shape)} in `like`. Expected the model and optimizer that were "
                "saved."
            )


def restored_state(arrays: Mapping[str, Any], position: int, like: TrainState) -> TrainState:
    """Return the saved state, in the structure and with the kinds of leaves of `like`."""

    def restored(array: Any, leaf: Any) -> Any:
        if is_key(leaf):
            return jax.random.wrap_key_data(jnp.asarray(array), impl=jax.random.key_impl(leaf))
        if isinstance(leaf, bool | int | float) and not isinstance(leaf, np.generic):
            return array.item()
        return jnp.asarray(array)

    def tree(prefix: str, part: Any) -> Any:
        named = [(f"{prefix}/{path}", leaf) for path, leaf in leaf_paths(part)]
        new = [restored(arrays[name], leaf) if name in arrays else leaf for name, leaf in named]
        return jax.tree.unflatten(jax.tree.structure(part), new)

    params, opt_state = tree("params", like.params), tree("optimizer", like.opt_state)
    return TrainState(params, opt_state, position)
