# SPDX-License-Identifier: Apache-2.0
"""Checks before a run begins: loss and optimizer are traced, and all processes compared."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dualdp import _validate, adam
from dualdp.plan.plan import PrivacyPlan
from dualdp.plan.units import UserRows, user_rows
from dualdp.randomness import SegmentBits, fresh_bits
from dualdp_jax import compat
from dualdp_jax.compat import PyTree
from dualdp_jax.noise.noise import Array
from dualdp_jax.parallel.process_group import Group
from dualdp_jax.per_sample.call import split_batch
from dualdp_jax.rules.arrays import widen
from dualdp_jax.training.loader import Rows, examples_of
from dualdp_jax.training.step import Arrays, Augment, PrivateStep, TrainState

_ROWS = 16  # rows of the data that are compared
_SETTINGS = ("method", "needs_key", "has_aux", "keep_batch_dim", "views")  # that are compared
_NO_BATCH = (
    "The engine clips and adds the noise: instead of optax.contrib.dpsgd or "
    "differentially_private_aggregate, which take axis 0 for a batch, expected a plain optimizer, "
    "such as optax.sgd(0.1)."
)


def units_of(
    data: PyTree, users: PyTree, augment: Augment | None = None
) -> tuple[UserRows | None, int]:
    """Return the rows of each user, or None, and the number of users, or that of rows."""
    if users is not None and augment is not None:
        raise ValueError(
            "users and augment= came together. Expected one of the two: a unit is the rows of a "
            "user or the views of a row."
        )
    _, num_rows, _ = split_batch(examples_of(data))
    rows = None if users is None else user_rows(users, num_rows=num_rows)
    return rows, num_rows if rows is None else rows.num_users


def check_loss(run: PrivateStep, examples: tuple[PyTree, ...]) -> None:
    """Trace the loss of one example, to refuse an unsuitable one, or too many rows for keys."""
    units, k = run.plan.num_examples, run.rows_of_each
    if units * k * run.views > 2**32:
        raise ValueError(
            f"{k * run.views} rows or views of {units} units are more than the 2^32 keys of a "
            "step. Expected fewer."
        )
    arrays, _, _ = split_batch(examples)
    weights = None if run.loader.users is None else np.ones(k, run.dtype)
    index = np.zeros(1, np.uint32)
    rows = Rows([leaf[np.zeros(k, int)] for leaf in arrays], None, index, weights)

    def loss(model: Arrays, rows: Rows, key: Array) -> Array:
        if run.augment is not None:
            example = run.loader.origin.rebuild([leaf[0] for leaf in rows.arrays])
            check_augment(run.augment, example, compat.wrap_key(key))
        return run.call(model, rows, key).rows[1]

    model = run.parameters.trained, run.parameters.others
    jax.eval_shape(loss, model, rows, np.zeros(2, np.uint32))
    if run.data_mesh is not None:
        run.program = None  # that of a shard is traced inside of the shard_map


def check_optimizer(run: PrivateStep) -> None:
    """Trace two updates of the optimizer, to refuse those that do not fit the parameters.

    An `adam_bc` also refuses correlated noise, and what changes the gradient before it.

    Raises:
        TypeError: the optimizer wants more than gradients and parameters, or its updates have
            another structure, shape or kind of dtype than the parameters.
        ValueError: the update of some leaves is the same whatever the gradients are.
    """
    like, names, trained = run.parameters.like, run.parameters.names, run.parameters.trained
    if run.takes_noise:
        adam.require_independent(run.plan)
    params, stddev = like(trained), jax.ShapeDtypeStruct((), run.dtype)
    grads = like([jax.ShapeDtypeStruct(x.shape, widen(x).dtype) for x in trained])

    def twice(grads: PyTree, opt_state: PyTree, *rest: PyTree) -> tuple[PyTree, PyTree]:
        updates, opt_state = run.update(grads[0], opt_state, *rest)
        return updates, run.update(grads[1], opt_state, *rest)[0]

    try:
        traced = jax.make_jaxpr(twice, return_shape=True)
        closed, (updates, _) = traced((grads, grads), run.opt_state, params, stddev)
    except Exception as error:
        raise TypeError(
            "optimizer.update failed on the noisy gradients, its state and params: "
            f"{compat.first_line(error)}. Expected an optimizer that needs no more; one that "
            "evaluates the loss, as L-BFGS, would look at the data again; optax.lookahead goes "
            f"into a loop of your own (make_loader), with its fast parameters. {_NO_BATCH}"
        ) from error
    found, expected = map(str, map(jax.tree.structure, (updates, params)))
    if found != expected:
        raise TypeError(
            f"The optimizer's updates have the structure {found}, and the trained parameters "
            f"{expected}. Expected an update for each of them. {_NO_BATCH}"
        )
    for name, update, leaf in zip(names, jax.tree.leaves(updates), trained, strict=True):
        if update.shape != leaf.shape or not jnp.issubdtype(update.dtype, jnp.floating):
            raise TypeError(
                f"The optimizer's update of {name!r} is {update.dtype}{list(update.shape)}, and "
                f"the parameter {leaf.dtype}{list(leaf.shape)}. Expected the same. {_NO_BATCH}"
            )
    count, free = len(trained), []
    jaxpr = compat.without_zero_products(closed.jaxpr)  # such as by a learning rate of 0
    for k, name in enumerate(names, count):  # of the outputs the second `count` are later updates
        used = compat.inputs_in_use(jaxpr, [i == k for i in range(2 * count)])
        free += [] if any(used[: 2 * count]) else [name]
    # An optimizer that changes nothing at all, and only keeps what it gets, trains no leaf less.
    if 0 < len(free) < count:
        raise ValueError(
            f"The optimizer's update of {free} is the same whatever the gradients are, as with "
            "optax.set_to_zero, and their gradients would still enter the clipping. Expected "
            "trainable= (a pytree of bools) with False there, and the optimizer of the others."
        )


def check_views(views: int, augment: Augment | None) -> int:
    """Return the validated number of views."""
    views = _validate.integer("views", views, minimum=1)
    if augment is None and views > 1 or not (augment is None or callable(augment)):
        raise TypeError(
            f"views={views} came with augment={augment!r}. Expected augment=, a function (example, "
            "key) -> one view, without which all views would be equal."
        )
    return views


def check_augment(augment: Augment, example: tuple[PyTree, ...], key: jax.Array) -> None:
    """Call `augment` on one example, while it is traced, to refuse an unsuitable one."""
    expected = "Expected a function (example, key) -> one view, such a tuple, written with jax."
    try:
        view = augment(example, key)
    except Exception as error:
        raise TypeError(
            f"augment failed for one example, a tuple of {len(example)}, without a batch axis: "
            f"{compat.first_line(error)}. {expected}"
        ) from error
    if not isinstance(view, tuple) or len(view) != len(example):
        raise TypeError(
            f"augment returned {_validate.kind(view)} for an example that is a tuple of "
            f"{len(example)}. {expected}"
        )


def agreed(
    group: Group | None,
    plan: PrivacyPlan,
    accountant: str | None,
    examples: tuple[PyTree, ...],
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
    group.require_same("the arrays of the data", [str(jax.typeof(leaf)) for leaf in arrays])
    of_users = None if users is None else _sha256([users.starts, users.order])
    group.require_same("users", of_users, "Give all of them the same users=.", shown=False)
    secret, chosen = group.on_first("the first words", lambda: (bits.secret, fresh_bits(8 * _ROWS)))
    rows = np.frombuffer(chosen, np.uint64) % np.uint64(len(arrays[0]))
    samples = [_sha256([array[rows.astype(np.int64)]]) for array in arrays]
    hint = "Give all of them the whole data; each reads the rows of its devices only."
    what = f"the data, of which {_ROWS} rows were compared"
    group.require_same(what, samples, hint, shown=False)
    return SegmentBits(plan.seed, secret)


def check_run(group: Group, run: PrivateStep, state: TrainState) -> None:
    """Refuse processes that would train different models, or from other numbers."""
    assert run.data_mesh is not None
    leaves: Any = run.parameters.trained
    trained = zip(run.parameters.names, leaves, strict=True)
    group.require_same("the run", {
        "parameters": {name: f"{jax.typeof(x)} {x.sharding.spec}" for name, x in trained},
        "optimizer": [str(jax.typeof(leaf)) for leaf in jax.tree.leaves(state.opt_state)],
        "mesh": [str(run.data_mesh.mesh.shape), run.data_mesh.axes],
        "step": state.step,
        **{name: getattr(run, name) for name in _SETTINGS},
    })  # fmt: skip
    whole = [
        leaf
        for leaf in jax.tree.leaves(state)
        if isinstance(leaf, jax.Array)
        and leaf.is_fully_replicated
        and not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended)
    ]
    hint = "Build the model from one seed on all of them, or load one checkpoint."
    group.require_same("the first state", _sha256(whole), hint, shown=False)


def _sha256(arrays: Sequence[Array]) -> str:
    """SHA-256 of the shapes, dtypes and bytes of some arrays, in hex."""
    state = hashlib.sha256(repr([jax.typeof(array) for array in arrays]).encode())
    for array in arrays:
        state.update(np.asarray(array, order="C").tobytes())
    return state.hexdigest()
