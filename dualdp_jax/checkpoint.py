# SPDX-License-Identifier: Apache-2.0
"""A run in files: state, plan and ledger in one, the secret key in another."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from dualdp import checkpoint, translate
from dualdp.ledger import Ledger
from dualdp.plan import PrivacyPlan
from dualdp.randomness import RootKey
from dualdp_jax import compat
from dualdp_jax.agreement import LOADED, Account
from dualdp_jax.distributed import Group
from dualdp_jax.engine import PrivacyEngine
from dualdp_jax.sharding import whole
from dualdp_jax.training import TrainState

PathLike = str | os.PathLike[str]
Arrays = dict[str, np.ndarray]


def save_checkpoint(path: PathLike, *, state: TrainState, engine: PrivacyEngine) -> None:
    """Write a run between two steps, in one go: the old file stays until the new one is whole.

    Beside it lie `<path>.key`, the secret key (mode 0600), and the ledger, which the run goes on
    writing: `<path>.ledger` unless the engine was given a file. On several processes all of them
    call this, and the first one writes; `save_sharded_checkpoint` lets each write its own part.

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
    leaves = {name: plain(name, leaf) for name, leaf in named(state).items()}

    def on_host() -> Arrays:
        return {name: whole(leaf) for name, leaf in leaves.items()}

    def write(arrays: Arrays) -> None:
        write_file(path, arrays, described(state, engine, path))

    engine.written("the checkpoint", on_host, write)


def write_file(path: PathLike, arrays: Arrays, document: Mapping[str, Any]) -> None:
    """The file of a checkpoint; NumPy has no bfloat16, which goes as uint16."""
    bfloat16 = [name for name, array in arrays.items() if array.dtype == ml_dtypes.bfloat16]
    packed = {**arrays, **{name: arrays[name].view(np.uint16) for name in bfloat16}}
    checkpoint.write(path, packed, {**document, "bfloat16": bfloat16})


def described(state: TrainState, engine: PrivacyEngine, path: PathLike) -> dict[str, Any]:
    """The document of a checkpoint, with ledger and key safe on the disk."""
    return {
        "stack": "jax",
        "position": engine.ledger.position,
        "step": int(state.step),
        "leaves": [name for name, _ in _paths(state.params)],
        **checkpoint.pack_run(engine.ledger, path),
    }


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
    check_like(like)
    arrays, document = checkpoint.read(path)
    if document.get("stack") == "torch":
        arrays, document = crossed(arrays, document, like, mapping)
    elif document.get("stack") != "jax" or mapping is not None:
        raise ValueError(
            f"{os.fspath(path)} was saved by {document.get('stack')!r}, mapping={mapping!r}. "
            "Expected a file of either backend, with a mapping only for one of torch's."
        )
    for name in document["bfloat16"]:
        arrays[name] = arrays[name].view(ml_dtypes.bfloat16)
    check_names(arrays, like)
    leaves = {name: _from_numpy(name, arrays[name], leaf) for name, leaf in named(like).items()}
    state = filled(leaves, document, like)
    return state, resumed_engine(state, document, path, key, ledger)


def resumed_engine(
    state: TrainState,
    document: Mapping[str, Any],
    path: PathLike,
    key: RootKey | PathLike | None,
    ledger: PathLike | None,
) -> PrivacyEngine:
    """The engine of a checkpoint's run; of several processes, the first has its ledger."""

    def open_ledger() -> Ledger:
        resumed = checkpoint.unpack_run(document, path, key, ledger)
        try:
            resumed.plan.claim(resumed, recorder=LOADED, source="", resumed=True)
        except BaseException:
            resumed.close()
            raise
        return resumed

    def followed(root: RootKey) -> PrivacyPlan:
        return PrivacyPlan.from_json(json.dumps(document["plan"]), key=root)

    group = Group.current()
    if group is None:
        return PrivacyEngine.loaded(open_ledger(), state)
    group.same("the checkpoint", document, "Give all of them the same file.")
    account = Account(group)
    return PrivacyEngine.loaded(account.resumed(open_ledger, followed), state, account)


def crossed(
    arrays: Arrays,
    document: Mapping[str, Any],
    like: TrainState,
    mapping: Mapping[str, Any] | None,
) -> tuple[Arrays, dict[str, Any]]:
    """A checkpoint of the other stack as this one would have written it for this state."""
    leaves = {name: _to_numpy(name, leaf) for name, leaf in named(like).items()}
    wanted = {name: (leaf.shape, str(leaf.dtype)) for name, leaf in leaves.items()}
    arrays, document = translate.to_jax(arrays, document, wanted, mapping)
    return arrays, {**document, "leaves": [name for name, _ in _paths(like.params)]}


def check_like(like: Any) -> None:
    """Refuse what is no state.

    Raises:
        TypeError: it is none.
    """
    if not isinstance(like, TrainState):
        raise TypeError(
            f"like is a {type(like).__name__}. Expected dpj.TrainState.create(params, optimizer)."
        )


def check_names(found: Mapping[str, Any], like: TrainState) -> None:
    """Refuse a checkpoint of other leaves.

    Raises:
        ValueError: names differ.
    """
    wanted = named(like)
    missing, unknown = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
    if missing or unknown:
        raise ValueError(
            f"The checkpoint lacks {missing} and holds {unknown} beside what `like` has. Expected "
            "a state of the model and the optimizer that were saved."
        )


def filled(leaves: Mapping[str, Any], document: Mapping[str, Any], like: TrainState) -> TrainState:
    """The saved state, in the structure of `like`."""

    def tree(prefix: str, part: Any) -> Any:
        new = [leaves.get(f"{prefix}/{name}", leaf) for name, leaf in _paths(part)]
        return jax.tree.unflatten(jax.tree.structure(part), new)

    params, opt_state = tree("params", like.params), tree("optimizer", like.opt_state)
    return TrainState(params, opt_state, document["step"])


# ---------------------------------------------------------------------- names and leaves


def _paths(tree: Any) -> list[tuple[str, Any]]:
    """(path joined by ".", leaf) of every leaf."""
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    paths = [(compat.variable_path(path), leaf) for path, leaf in flat]
    return [(jax.tree_util.keystr(path, simple=True, separator="."), leaf) for path, leaf in paths]


def named(state: TrainState) -> dict[str, Any]:
    """Name -> leaf of what is saved: "params/<path>" and "optimizer/<path>".

    Raises:
        TypeError: it is no state.
        ValueError: two leaves have one name.
    """
    if not isinstance(state, TrainState):
        raise TypeError(f"state is a {type(state).__name__}. Expected the TrainState of a step.")
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


def is_key(leaf: Any) -> bool:
    """Whether a leaf is a typed random key, which is saved as its words."""
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def plain(name: str, leaf: Any) -> Any:
    """A leaf as an array of numbers; a random key as its words.

    Raises:
        TypeError: it is no number.
    """
    if is_key(leaf):
        return jax.random.key_data(leaf)
    if not isinstance(leaf, jax.Array | np.ndarray | np.generic | bool | int | float):
        raise TypeError(
            f"The leaf {name!r} is a {type(leaf).__name__}. Expected arrays and numbers; what "
            "is no number can't be in a checkpoint."
        )
    return leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)


def _to_numpy(name: str, leaf: Any) -> np.ndarray:
    """A leaf as an array on the host, whole."""
    return whole(plain(name, leaf))


def check_kind(name: str, dtype: Any, shape: Any, like: Any) -> None:
    """Refuse a leaf of another kind.

    Raises:
        ValueError: another shape or dtype.
    """
    expected = plain(name, like)
    if tuple(shape) != expected.shape or dtype != expected.dtype:
        raise ValueError(
            f"{name!r} is {dtype}{list(shape)} in the checkpoint but {expected.dtype}"
            f"{list(expected.shape)} in `like`. Expected the model and optimizer that were saved."
        )


def revived(array: Any, like: Any) -> Any:
    """The leaf that was saved as `plain`, of the kind of `like`."""
    if is_key(like):
        return jax.random.wrap_key_data(jnp.asarray(array), impl=jax.random.key_impl(like))
    if isinstance(like, bool | int | float) and not isinstance(like, np.generic):
        return array.item()
    return jnp.asarray(array)


def _from_numpy(name: str, array: np.ndarray, like: Any) -> Any:
    """The leaf that was saved, where `like` lies.

    Raises:
        ValueError: another shape or dtype.
    """
    check_kind(name, array.dtype, array.shape, like)
    if compat.spans_devices(like) and not is_key(like):
        return jax.make_array_from_callback(array.shape, like.sharding, lambda index: array[index])
    return revived(array, like)
