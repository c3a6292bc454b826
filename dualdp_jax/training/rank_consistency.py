# SPDX-License-Identifier: Apache-2.0
"""Comparison of the plan, data, model and state of all processes of a run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from dualdp.ledger.follower import secret_of
from dualdp.plan.plan import PrivacyPlan
from dualdp.randomness import RootKey
from dualdp_jax.parallel.mesh import local_shards, placement_digest
from dualdp_jax.parallel.process_group import Group

_ROWS = 16  # rows of the data that are compared


def one_plan(group: Group, plan: PrivacyPlan) -> PrivacyPlan:
    """Return one plan for all processes, with process 0's key; plans must not differ otherwise."""
    public = json.loads(plan.to_json())
    sha256 = public.pop("key_sha256")
    group.require_same("the plan", public, "Give all of them one plan, or the same arguments.")
    root = RootKey(*group.broadcast("the key", secret_of(plan) if group.is_first else None))
    if root.sha256 == sha256 and plan.root == root:
        return plan
    return PrivacyPlan.from_json(json.dumps({**public, "key_sha256": root.sha256}), key=root)


def check_data(group: Group, arrays: Sequence[Any], users: str | None) -> None:
    """Refuse processes with different data: one example could be in two shards of a step.

    `users` is the keyed digest of the rows of each user, or None.
    """
    group.require_same("the arrays of the data", [_kind(array) for array in arrays])
    group.require_same("users", users, "Give all of them the same users=.", shown=False)
    rows = np.unique(np.linspace(0, len(arrays[0]) - 1, _ROWS).astype(np.int64))
    samples = [_sha256([np.asarray(array[rows])]) for array in arrays]
    hint = "Give all of them the whole data; each reads the rows of its devices only."
    group.require_same(
        f"the data, of which {len(rows)} rows were compared", samples, hint, shown=False
    )


def check_run(group: Group, run: Any, state: Any) -> None:
    """Refuse processes that would train different models, or from other numbers."""
    group.require_same("the run", {
        "parameters": {
            name: [str(leaf.dtype), list(leaf.shape), str(leaf.sharding.spec)]
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
    leaves = [leaf for leaf in leaves if not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended)]
    check_replicas(group, "the first state", leaves, _sha256(local_shards(leaves)))


def check_replicas(group: Group, point: str, arrays: Sequence[Any], digest: str) -> list[bytes]:
    """Refuse other numbers in the same parts of two processes; return the digests by rank.

    `digest` is hexadecimal, of this process's shards; 16 bytes of it are compared.
    """
    ours = bytes.fromhex(digest)[:16], bytes.fromhex(placement_digest(arrays))[:16]
    gathered = group.gather(point, b"".join(ours))
    found = [both[:16] for both in gathered]
    first: dict[bytes, int] = {}
    for rank, both in enumerate(gathered):
        other = first.setdefault(both[16:], rank)
        if found[other] != found[rank]:
            raise RuntimeError(
                f"Process {other} and process {rank} hold other numbers at {point}, where both "
                "should hold the same. Expected parameters that are placed alike, from one seed or "
                "one checkpoint; start all processes again."
            )
    return found


def _kind(array: Any) -> list[Any]:
    """Dtype and shape as plain data."""
    return [str(getattr(array, "dtype", type(array))), list(np.shape(array))]


def _sha256(arrays: Sequence[Any]) -> str:
    """SHA-256 of the shapes, dtypes and bytes of some arrays, in hex."""
    arrays = [np.asarray(array, order="C") for array in arrays]
    state = hashlib.sha256(repr([(array.shape, array.dtype.str) for array in arrays]).encode())
    for array in arrays:
        if array.size:
            state.update(array.reshape(-1).view(np.uint8).data)
    return state.hexdigest()
