# SPDX-License-Identifier: Apache-2.0
"""Comparison of the plan, data, model and state of all processes, before the first step."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from dualdp.plan.plan import PrivacyPlan
from dualdp.plan.units import UserRows
from dualdp.randomness import SegmentBits, fresh_bits
from dualdp_jax.parallel.process_group import Group
from dualdp_jax.training.step import CompiledStep, TrainState

_ROWS = 16  # rows of the data that are compared


def agreed(
    group: Group | None,
    plan: PrivacyPlan,
    accountant: str | None,
    examples: tuple[Any, ...],
    users: UserRows | None,
) -> SegmentBits:
    """Return the bits of a segment's batches; of several processes the same on all.

    Processes with another plan or other data are refused: one example could be in two shards.
    """
    bits = SegmentBits(plan.seed)
    if group is None:
        return bits
    hint = "Give all of them one plan, or the same arguments."
    group.require_same("the plan", {**json.loads(plan.to_json()), "engine": accountant}, hint)
    arrays = [leaf for leaf in jax.tree.leaves(examples) if hasattr(leaf, "shape")]
    group.require_same("the arrays of the data", [_kind(array) for array in arrays])
    of_users = None if users is None else _sha256([users.starts, users.order])
    group.require_same("users", of_users, "Give all of them the same users=.", shown=False)
    secret, chosen = group.on_first("the first words", lambda: (bits.secret, fresh_bits(8 * _ROWS)))
    rows = np.frombuffer(chosen, np.uint64) % np.uint64(len(arrays[0]))
    samples = [_sha256([np.asarray(array[rows.astype(np.int64)])]) for array in arrays]
    hint = "Give all of them the whole data; each reads the rows of its devices only."
    what = f"the data, of which {_ROWS} rows were compared"
    group.require_same(what, samples, hint, shown=False)
    return SegmentBits(plan.seed, secret)


def check_run(group: Group, run: CompiledStep, state: TrainState) -> None:
    """Refuse processes that would train different models, or from other numbers."""
    assert run.data_mesh is not None
    group.require_same("the run", {
        "parameters": {
            name: [str(leaf.dtype), list(leaf.shape), str(getattr(leaf.sharding, "spec", None))]
            for name, leaf in zip(run.parameters.names, run.parameters.trained, strict=True)
        },
        "optimizer": [_kind(leaf) for leaf in jax.tree.leaves(state.opt_state)],
        "mesh": {str(axis): size for axis, size in run.data_mesh.mesh.shape.items()},
        "data axes": list(run.data_mesh.axes),
        "method": run.method,
        "needs_key": run.needs_key,
        "has_aux": run.has_aux,
        "keep_batch_dim": run.keep_batch_dim,
        "views": run.views,
        "step": state.step,
    })  # fmt: skip
    leaves = [leaf for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array)]
    whole = [
        leaf
        for leaf in leaves
        if leaf.is_fully_replicated and not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended)
    ]
    hint = "Build the model from one seed on all of them, or load one checkpoint."
    group.require_same("the first state", _sha256(whole), hint, shown=False)


def _kind(array: Any) -> list[Any]:
    """Dtype and shape as plain data."""
    return [str(getattr(array, "dtype", type(array))), list(np.shape(array))]


def _sha256(arrays: Sequence[Any]) -> str:
    """SHA-256 of the shapes, dtypes and bytes of some arrays, in hex."""
    arrays = [np.asarray(array, order="C") for array in arrays]
    state = hashlib.sha256(repr([(array.shape, array.dtype.str) for array in arrays]).encode())
    for array in arrays:
        state.update(array.tobytes())
    return state.hexdigest()
