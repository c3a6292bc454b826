# SPDX-License-Identifier: Apache-2.0
"""A run in files: state, plan and ledger in one, the secret key in another."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from dualdp import checkpoint, translate
from dualdp.randomness import RootKey
from dualdp_jax import compat
from dualdp_jax.engine import PrivacyEngine
from dualdp_jax.training import TrainState

PathLike = str | os.PathLike[str]
Arrays = dict[str, np.ndarray]


def save_checkpoint(path: PathLike, *, state: TrainState, engine: PrivacyEngine) -> None:
    """Write a run between two steps, in one go: the old file stays until the new one is whole.

    Beside it lie `<path>.key`, the secret key (mode 0600), and the ledger, which the run goes on
    writing: `<path>.ledger` unless the engine was given a file.

    Args:
        path: of the file; an existing one is replaced.
        state: of the last step, every leaf an array or a number.
        engine: of the run.

    Raises:
        TypeError: the state is none, or holds a leaf that can't be saved.
        ValueError: two leaves have one name, or `<path>.key` is another run's.

    Guarantees:
        Resumed, the run is bitwise the one that was not interrupted.
            [test_a_resumed_run_is_the_uninterrupted_one]
        A step that is run again with anything changed has other noise, and both are accounted.
            [test_a_changed_replay_gets_new_noise_and_both_are_accounted]
    """
    if not isinstance(state, TrainState):
        raise TypeError(f"state is a {type(state).__name__}. Expected the TrainState of a step.")
    arrays = {name: _to_numpy(name, leaf) for name, leaf in _named(state).items()}
    document = {
        "stack": "jax",
        "position": engine.ledger.position,
        "step": int(state.step),
        "leaves": [name for name, _ in _paths(state.params)],
        "bfloat16": [name for name, a in arrays.items() if a.dtype == ml_dtypes.bfloat16],
        **checkpoint.pack_run(engine.ledger, path),
    }
    for name in document["bfloat16"]:
        arrays[name] = arrays[name].view(np.uint16)
    checkpoint.write(path, arrays, document)


def load_checkpoint(
    path: PathLike,
    *,
    like: TrainState,
    key: RootKey | PathLike | None = None,
    ledger: PathLike | None = None,
    mapping: Mapping[str, str] | None = None,
) -> tuple[TrainState, PrivacyEngine]:
    """Read a run that `save_checkpoint` wrote; `engine.resume(...)` goes on with it.

    Args:
        path: of the checkpoint.
        like: a state of the same model and optimizer, such as `TrainState.create(params,
            optimizer)`, for structure, shapes and dtypes.
        key: the key or its file; None for `<path>.key`.
        ledger: the run's ledger file, if it was moved.
        mapping: for a file of the torch stack, as in `dualdp.port.match`.

    Returns:
        `(state, engine)`.

    Raises:
        FileNotFoundError: checkpoint, key or ledger is missing.
        TypeError: `like` is no state.
        ValueError: the file is truncated, edited or foreign, or of another model or optimizer.
    """
    if not isinstance(like, TrainState):
        raise TypeError(
            f"like is a {type(like).__name__}. Expected dpj.TrainState.create(params, optimizer)."
        )
    arrays, document = checkpoint.read(path)
    if document.get("stack") == "torch":
        arrays, document = crossed(arrays, document, like, mapping)
    elif document.get("stack") != "jax" or mapping is not None:
        raise ValueError(
            f"{os.fspath(path)} was saved by {document.get('stack')!r}, mapping={mapping!r}. "
            "Expected a file of either backend, with a mapping only for one of torch's."
        )
    state = _state(arrays, document, like)
    resumed = checkpoint.unpack_run(document, path, key, ledger)
    resumed.plan.claim(resumed=True)
    return state, PrivacyEngine.loaded(resumed, state)


def crossed(
    arrays: Arrays,
    document: Mapping[str, Any],
    like: TrainState,
    mapping: Mapping[str, Any] | None,
) -> tuple[Arrays, dict[str, Any]]:
    """A checkpoint of the other stack as this one would have written it for this state."""
    leaves = {name: _to_numpy(name, leaf) for name, leaf in _named(like).items()}
    wanted = {name: (leaf.shape, str(leaf.dtype)) for name, leaf in leaves.items()}
    arrays, document = translate.to_jax(arrays, document, wanted, mapping)
    return arrays, {**document, "leaves": [name for name, _ in _paths(like.params)]}


def _state(arrays: Arrays, document: Mapping[str, Any], like: TrainState) -> TrainState:
    """The saved state, in the structure of `like`.

    Raises:
        ValueError: names, shapes or dtypes differ.
    """
    for name in document["bfloat16"]:
        arrays[name] = arrays[name].view(ml_dtypes.bfloat16)
    wanted = _named(like)
    missing, unknown = sorted(wanted.keys() - arrays.keys()), sorted(arrays.keys() - wanted.keys())
    if missing or unknown:
        raise ValueError(
            f"The checkpoint lacks {missing} and holds {unknown} beside what `like` has. Expected "
            "a state of the model and the optimizer that were saved."
        )
    leaves = {name: _from_numpy(name, arrays[name], leaf) for name, leaf in wanted.items()}

    def filled(prefix: str, tree: Any) -> Any:
        new = [leaves.get(f"{prefix}/{name}", leaf) for name, leaf in _paths(tree)]
        return jax.tree.unflatten(jax.tree.structure(tree), new)

    params, opt_state = filled("params", like.params), filled("optimizer", like.opt_state)
    return TrainState(params, opt_state, document["step"])


# ---------------------------------------------------------------------- names and leaves


def _paths(tree: Any) -> list[tuple[str, Any]]:
    """(path joined by ".", leaf) of every leaf."""
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    paths = [(compat.variable_path(path), leaf) for path, leaf in flat]
    return [(jax.tree_util.keystr(path, simple=True, separator="."), leaf) for path, leaf in paths]


def _named(state: TrainState) -> dict[str, Any]:
    """Name -> leaf of what is saved: "params/<path>" and "optimizer/<path>".

    Raises:
        ValueError: two leaves have one name.
    """
    found: dict[str, Any] = {}
    for prefix, tree in (("params", state.params), ("optimizer", state.opt_state)):
        for path, leaf in _paths(tree):
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


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _to_numpy(name: str, leaf: Any) -> np.ndarray:
    """A leaf as an array; a random key as its words."""
    if _is_key(leaf):
        leaf = jax.random.key_data(leaf)
    if not isinstance(leaf, jax.Array | np.ndarray | np.generic | bool | int | float):
        raise TypeError(
            f"The leaf {name!r} is a {type(leaf).__name__}. Expected arrays and numbers; what "
            "is no number can't be in a checkpoint."
        )
    return np.asarray(leaf)


def _from_numpy(name: str, array: np.ndarray, like: Any) -> Any:
    """The leaf that was saved, of the kind of `like`.

    Raises:
        ValueError: another shape or dtype.
    """
    expected = _to_numpy(name, like)
    if array.shape != expected.shape or array.dtype != expected.dtype:
        raise ValueError(
            f"{name!r} is {array.dtype}{list(array.shape)} in the checkpoint but {expected.dtype}"
            f"{list(expected.shape)} in `like`. Expected the model and optimizer that were saved."
        )
    if _is_key(like):
        return jax.random.wrap_key_data(jnp.asarray(array), impl=jax.random.key_impl(like))
    if isinstance(like, bool | int | float) and not isinstance(like, np.generic):
        return array.item()
    return jnp.asarray(array)
