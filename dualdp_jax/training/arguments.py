# SPDX-License-Identifier: Apache-2.0
"""Checks of a loss and an optimizer before a run begins, by tracing them with one example."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dualdp import adam
from dualdp.plan.units import UserRows, rows_of_data
from dualdp_jax import compat
from dualdp_jax.per_sample.call import split_batch
from dualdp_jax.rules.arrays import widen
from dualdp_jax.training.loader import examples_of
from dualdp_jax.training.step import CompiledStep, Rows, TrainState
from dualdp_jax.training.views import check_augment


def arguments_of(data: Any, loss_fn: Callable[..., Any], needs_key: bool) -> tuple[Any, ...]:
    """Return the data as arguments of the loss after the parameters.

    A list is one argument, unless the loss takes its parts as arguments and not the whole list.
    """
    examples = examples_of(data)
    if isinstance(data, list) and not _takes(loss_fn, examples, needs_key):
        if _takes(loss_fn, tuple(data), needs_key):
            return tuple(data)
    return examples


def rows_of(data: Any, users: Any, augment: Any = None) -> UserRows | None:
    """Return the rows of each user of the data; None for None."""
    if users is not None and augment is not None:
        raise ValueError(
            "users and augment= came together, and a unit is the rows of a user or the views of a "
            "row. Expected one of the two; needs_key=True gives loss_fn a key for each row."
        )
    return rows_of_data(users, split_batch(examples_of(data))[1])


def num_units(data: Any, rows: UserRows | None) -> int:
    """Return the number of users, or that of rows."""
    return split_batch(examples_of(data))[1] if rows is None else rows.num_users


def _takes(loss_fn: Callable[..., Any], examples: tuple[Any, ...], needs_key: bool) -> bool:
    """True if a loss can be called with the parameters and these arguments, by its signature."""
    try:
        inspect.signature(loss_fn).bind(None, *examples, **({"key": None} if needs_key else {}))
    except (TypeError, ValueError):  # other arguments, or no signature
        return False
    return True


def check_loss(run: CompiledStep, examples: tuple[Any, ...]) -> None:
    """Trace the loss of one example, to refuse an unsuitable one, or too many rows for keys."""
    _check_key_argument(run.loss_fn, run.needs_key, examples)
    users, k = run.plan.num_examples, run.rows_of_each
    if users * k > 2**32:
        raise ValueError(
            f"rows_per_unit={k} of {users} users are more than the 2^32 keys of a step. Expected "
            f"at most {2**32 // users}."
        )
    leaves, _, rebuild = split_batch(examples)
    kind = lambda dtype: jax.dtypes.canonicalize_dtype(dtype, allow_extended_dtype=True)  # noqa: E731
    shapes = [jax.ShapeDtypeStruct((k, *x.shape[1:]), kind(x.dtype)) for x in leaves]
    index, key = (jax.ShapeDtypeStruct(shape, np.uint32) for shape in ((1,), (2,)))
    weights = jax.ShapeDtypeStruct((k,), run.parameters.dtype) if run.has_weights else None

    def loss(trained: list[Any], others: list[Any], rows: Any, key: Any) -> Any:
        if run.augment is not None:
            check_augment(run.augment, rebuild([x[0] for x in rows.arrays]), compat.wrap_key(key))
        return run.call(trained, others, rows, key).rows[1]

    parameters = run.parameters
    rows = Rows(shapes, None, index, weights)
    jax.eval_shape(loss, parameters.trained, parameters.others, rows, key)
    if run.data_mesh is not None:
        run.program = None  # that of a shard is traced inside of the shard_map


def check_optimizer(run: CompiledStep, state: TrainState) -> None:
    """Trace two updates of the optimizer, to refuse those that do not fit the parameters.

    An `adam_bc` also refuses correlated noise, and what changes the gradient before it.

    Raises:
        TypeError: the optimizer wants more than gradients and parameters, or its updates have
            another structure, shape or kind of dtype than the parameters.
        ValueError: the update of some leaves is the same whatever the gradients are.
    """
    like, (trained, _) = run.parameters.like, run.parameters.arrays(state.params)
    extra: dict[str, Any] = {}
    if run.takes_noise:
        adam.require_independent(run.plan)
        extra = {"noise_stddev": jax.ShapeDtypeStruct((), run.parameters.dtype)}
    given = like(trained)
    grads = like([jax.ShapeDtypeStruct(x.shape, widen(x).dtype) for x in trained])

    def twice(grads: Any, opt_state: Any, params: Any, **extra: Any) -> Any:
        updates, opt_state = run.update(grads[0], opt_state, params, **extra)
        _require_alike(updates, params, run.parameters.names)
        return run.update(grads[1], opt_state, params, **extra)[0]

    try:
        jaxpr = jax.make_jaxpr(twice)((grads, grads), state.opt_state, given, **extra).jaxpr
    except _NotAlike as error:
        raise TypeError(str(error)) from None
    except Exception as error:
        said = str(error).partition("\n")[0].rstrip(".")
        raise TypeError(
            f"optimizer.update failed on the noisy gradients, its state and params: {said}. "
            "Expected an optimizer that needs no more; one that evaluates the loss, such as "
            f"L-BFGS, would look at the data again. {_NO_BATCH}"
        ) from error
    num_grads = 2 * len(trained)
    free = [
        name
        for k, name in enumerate(run.parameters.names)
        if not any(_inputs_of(jaxpr, k)[:num_grads])
    ]
    # An optimizer that changes nothing at all, and only keeps what it gets, trains no leaf less.
    if 0 < len(free) < len(trained):
        raise ValueError(
            f"The optimizer's update of {free} is the same whatever the gradients are, as with "
            "optax.set_to_zero, and their gradients would still enter the clipping, which leaves "
            "less of what is trained. Expected trainable= (a pytree of bools) with False there, "
            "and the optimizer of the others."
        )


_NO_BATCH = (
    "The engine clips and adds the noise: instead of optax.contrib.dpsgd or "
    "differentially_private_aggregate, which take axis 0 for a batch, expected a plain optimizer, "
    "such as optax.sgd(0.1)."
)


class _NotAlike(Exception):
    """Updates that are not like the parameters."""


def _require_alike(updates: Any, params: Any, names: list[str]) -> None:
    """Raise unless updates have structure, shapes and kinds of dtypes of the parameters."""
    found, expected = map(str, map(jax.tree.structure, (updates, params)))
    if found != expected:
        raise _NotAlike(
            f"The optimizer's updates have the structure {found}, and the trained parameters "
            f"{expected}. Expected an update for each of them. {_NO_BATCH}"
        )
    leaves = zip(names, jax.tree.leaves(updates), jax.tree.leaves(params), strict=True)
    for name, update, leaf in leaves:
        if update.shape != leaf.shape or not jnp.issubdtype(update.dtype, jnp.floating):
            raise _NotAlike(
                f"The optimizer's update of {name!r} is {update.dtype}{list(update.shape)}, and "
                f"the parameter {leaf.dtype}{list(leaf.shape)}. Expected updates of the shapes of "
                f"the parameters. {_NO_BATCH}"
            )


def _inputs_of(jaxpr: Any, output: int) -> list[bool]:
    """For each input of a jaxpr, whether one output depends on it."""
    return compat.inputs_in_use(jaxpr, [k == output for k in range(len(jaxpr.outvars))])


def _check_key_argument(
    loss_fn: Callable[..., Any], needs_key: bool, examples: tuple[Any, ...]
) -> None:
    """Refuse a `loss_fn` whose argument `key` does not match `needs_key`."""
    try:
        signature = inspect.signature(loss_fn)
        given = signature.bind_partial(None, *examples).arguments
    except (TypeError, ValueError):  # no signature, or another number of arguments
        return
    wanted = signature.parameters.get("key")
    if wanted is None:
        takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
        if needs_key and not takes_any:
            raise TypeError(
                "needs_key=True, but loss_fn takes no key. Expected loss_fn(params, *example, key)."
            )
    elif not needs_key and wanted.default is wanted.empty and "key" not in given:
        if wanted.kind in (wanted.POSITIONAL_OR_KEYWORD, wanted.KEYWORD_ONLY):
            raise TypeError("loss_fn takes key, which nothing gives. Pass needs_key=True.")
