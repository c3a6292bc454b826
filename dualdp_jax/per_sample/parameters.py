# SPDX-License-Identifier: Apache-2.0
"""Split of a pytree or an `nnx.Module` into trained leaves and everything else."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dualdp import _validate
from dualdp._validate import UnsupportedLayerError
from dualdp_jax import compat

KeyPath = tuple[Any, ...]


@dataclass(frozen=True)
class Parameters:
    """Model split into trained leaves and other arrays."""

    trained: list[Any]  # arrays whose gradient is taken, in the order of `jax.tree.leaves`
    others: list[Any]  # arrays that are passed on: frozen leaves, rng state, running statistics
    paths: list[KeyPath]  # tree path of each trained leaf
    #: callable (values per trained leaf) -> pytree like the model, None at other leaves.
    like: Callable[[Sequence[Any]], Any]
    #: callable (trained, others) -> the parameters as the user holds them.
    whole: Callable[[Sequence[Any], Sequence[Any]], Any]
    #: callable, inverse of `whole`: parameters -> (trained, others).
    arrays: Callable[[Any], tuple[list[Any], list[Any]]]
    #: callable (loss_fn, trained, others, position, args, kwargs) -> loss of one example.
    call: Callable[..., Any]
    #: callable (others, key) -> others, with rng state derived from the key (nnx only).
    keyed: Callable[[Sequence[Any], Any], list[Any]]
    #: callable, parameters as the user holds them -> `nnx.Module`; None for a pytree.
    module: Callable[[Any], Any] | None = None

    @property
    def names(self) -> list[str]:
        """Path of each trained leaf as text, such as "Dense_0/kernel"."""
        return [path_name(path) for path in self.paths]

    @property
    def groups(self) -> list[str]:
        """Per-layer clipping group of each trained leaf: its path without the last key."""
        return [path_name(path[:-1]) for path in self.paths]

    @property
    def dtype(self) -> Any:
        """Dtype of norms and factors: float32, or float64 if one leaf is."""
        return jnp.result_type(jnp.float32, *(leaf.dtype for leaf in self.trained))


def path_name(path: KeyPath) -> str:
    """Return a tree path as text, keys joined by "/"."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def split(what: Any, trainable: Any = None) -> Parameters:
    """Split a pytree of parameters or an `nnx.Module` into trained and other leaves.

    `trainable` is a pytree of bools like `what` (for nnx like `nnx.state(what, nnx.Param)`), or a
    prefix of it; None trains every inexact leaf.
    """
    if hasattr(what, "opt_state"):
        held = "params" if hasattr(what, "params") else "model"
        raise TypeError(
            f"The parameters are a {type(what).__name__}, which holds an optimizer's state too. "
            f"Expected its parameters alone: say state.{held}."
        )
    nnx = compat.flax_module(what)
    return _from_pytree(what, trainable) if nnx is None else _from_module(nnx, what, trainable)


def _flags(tree: Any, trainable: Any) -> list[bool | None]:
    """One bool per leaf, None for each leaf if `trainable` is None."""
    if trainable is None:
        return [None] * len(jax.tree.leaves(tree))
    try:
        full = jax.tree.map(lambda flag, part: jax.tree.map(lambda _: flag, part), trainable, tree)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"trainable does not have the structure of the parameters. Expected a pytree of bools "
            f"like them, or a prefix of it: {error}"
        ) from error
    flags = jax.tree.leaves(full)
    for flag in flags:
        if not isinstance(flag, bool | np.bool_):
            raise TypeError(
                f"trainable holds {flag!r}, {_validate.kind(flag)}. Expected Python bools, known "
                "before tracing."
            )
    return [bool(flag) for flag in flags]


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | np.generic)


def _is_trained(name: str, leaf: Any, flag: bool | None, numbers_are_settings: bool) -> bool:
    """True if a leaf is trained; refuses leaves that are neither frozen nor trainable."""
    is_number = isinstance(leaf, numbers.Number) and not numbers_are_settings
    if flag is False or not (is_number or _is_array(leaf)):
        return False
    dtype = jnp.result_type(leaf) if is_number else leaf.dtype
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(
            f"The parameter {name!r} is {dtype}. Expected a real floating array; freeze it by "
            "trainable= (a pytree of bools with False there) or take it out of the parameters."
        )
    return True


class _Slots:
    """Places of the trained leaves and other arrays of a tree, and its other leaves."""

    def __init__(self, tree: Any, is_trained: Callable[[int, KeyPath, Any], bool]) -> None:
        flat, self.treedef = jax.tree_util.tree_flatten_with_path(tree)
        flags = [is_trained(i, path, leaf) for i, (path, leaf) in enumerate(flat)]
        self.trained_at = [i for i, flag in enumerate(flags) if flag]
        self.others_at = [i for i, (_, x) in enumerate(flat) if not flags[i] and _is_array(x)]
        self.paths = [flat[i][0] for i in self.trained_at]
        held = {*self.trained_at, *self.others_at}
        self.fixed = [None if i in held else leaf for i, (_, leaf) in enumerate(flat)]
        arrays = self.arrays([leaf for _, leaf in flat])
        self.trained, self.others = (list(map(jnp.asarray, part)) for part in arrays)

    def arrays(self, leaves: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Split the leaves of such a tree into trained and other arrays."""
        leaves = [leaf for leaf, _ in zip(leaves, self.fixed, strict=True)]
        return [leaves[i] for i in self.trained_at], [leaves[i] for i in self.others_at]

    def fill(self, trained: Sequence[Any], others: Sequence[Any]) -> Any:
        """Rebuild the tree from these arrays."""
        leaves = list(self.fixed)
        for places, values in ((self.trained_at, trained), (self.others_at, others)):
            for i, value in zip(places, values, strict=True):
                leaves[i] = value
        return jax.tree.unflatten(self.treedef, leaves)

    def like(self, values: Sequence[Any]) -> Any:
        """Rebuild the tree with values at the trained leaves and None elsewhere."""
        found = dict(zip(self.trained_at, values, strict=True))
        return jax.tree.unflatten(self.treedef, map(found.get, range(len(self.fixed))))


def _from_pytree(what: Any, trainable: Any) -> Parameters:
    flags, settings = _flags(what, trainable), compat.holds_equinox(what)
    slots = _Slots(
        what, lambda i, path, leaf: _is_trained(path_name(path), leaf, flags[i], settings)
    )
    if any(path_name(path).startswith("batch_stats/") for path in slots.paths):
        raise UnsupportedLayerError(
            "The parameters hold the collection 'batch_stats', running statistics that would be "
            "trained. Freeze it by trainable={'params': True, 'batch_stats': False}, or hand over "
            "variables['params'] and use GroupNorm or LayerNorm."
        )

    def call(loss_fn: Any, trained: Any, others: Any, position: Any, args: Any, kwargs: Any) -> Any:
        return loss_fn(slots.fill(trained, others), *args, **kwargs)

    return Parameters(
        trained=slots.trained,
        others=slots.others,
        paths=slots.paths,
        like=slots.like,
        whole=slots.fill,
        arrays=lambda tree: slots.arrays(jax.tree.leaves(tree)),
        call=call,
        keyed=lambda others, key: list(others),
    )


def _from_module(nnx: Any, module: Any, trainable: Any) -> Parameters:
    """Split an `nnx.Module`: `nnx.Param` is trained, other state is carried and guarded.

    Values that earlier calls sowed are left out: every example begins without them.
    """
    if nnx.state(module, nnx.Intermediate):
        module = nnx.clone(module)
        nnx.pop(module, nnx.Intermediate)
    graphdef, *states = nnx.split(module, nnx.Param, nnx.RngState, ...)
    flags = _flags(states[0], trainable)

    def is_trained(i: int, path: KeyPath, leaf: Any) -> bool:
        is_param = i < len(flags)  # the leaves of states[0] come first
        return is_param and _is_trained(variable_name(path[1:]), leaf, flags[i], False)

    slots = _Slots(tuple(states), is_trained)
    carried = jax.tree.leaves(tuple(states))[len(flags) :]
    arrays = lambda state: slots.arrays([*jax.tree.leaves(state), *carried])  # noqa: E731
    rewritten = tuple(  # at every call, from these parameters alone
        "/".join(map(str, (*path, "layer_instance/")))
        for path, part in nnx.iter_modules(module)
        if isinstance(part, nnx.WeightNorm)
    )

    def rekey(others: Sequence[Any], fold: Callable[[int, Any], Any]) -> list[Any]:
        is_key = lambda leaf: jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)  # noqa: E731
        return [fold(i, leaf) if is_key(leaf) else leaf for i, leaf in enumerate(others)]

    def call(loss_fn: Any, trained: Any, others: Any, position: Any, args: Any, kwargs: Any) -> Any:
        others = rekey(others, lambda i, keys: _fold_in(keys, position))
        parts = slots.fill(trained, others)
        return _run_unchanged(nnx, graphdef, parts, loss_fn, (args, kwargs), rewritten)

    return Parameters(
        trained=slots.trained,
        others=slots.others,
        paths=[compat.variable_path(path[1:]) for path in slots.paths],
        like=lambda values: slots.like(values)[0],
        whole=lambda trained, others: slots.fill(trained, others)[0],
        arrays=arrays,
        call=call,
        keyed=lambda others, key: rekey(others, lambda i, keys: _keys_like(keys, key, i)),
        module=lambda state: nnx.merge(graphdef, *slots.fill(*arrays(state))),
    )


def _fold_in(keys: Any, number: Any) -> Any:
    """Fold an integer into a random key, or into each of an array of them (`nnx.split_rngs`)."""
    fold = jax.random.fold_in
    for _ in keys.shape:
        fold = jax.vmap(fold, (0, None))
    return fold(keys, number)


def _keys_like(keys: Any, key: Any, number: int) -> Any:
    """Return a key folded from `key`, or as many drawn from it as there are in an array of them."""
    key = jax.random.fold_in(key, number)
    return jax.random.split(key, keys.shape) if keys.shape else key


def variable_name(path: KeyPath) -> str:
    """Return the path of an nnx variable as text."""
    return path_name(compat.variable_path(path))


def _run_unchanged(
    nnx: Any,
    graphdef: Any,
    parts: Any,
    function: Callable[..., Any],
    arguments: tuple[tuple[Any, ...], dict[str, Any]],
    rewritten: tuple[str, ...],
) -> Any:
    """Call the function on the module of these parts; refuse a call that changes a variable.

    The next example would not see the change, as it would in a plain loop. What `sow` keeps for
    the loss (`nnx.Intermediate`) may change, parameters under the paths `rewritten`, and counters:
    variables whose new value depends on no example, parameter or random key.
    """
    leaves, treedef = jax.tree.flatten(parts)
    given, given_tree = jax.tree.flatten(arguments)
    arrays = [leaf for leaf in given if _is_array(leaf)]

    def run(leaves: list[Any], arrays: list[Any]) -> tuple[Any, Any]:
        copy = nnx.merge(graphdef, *jax.tree.unflatten(treedef, leaves))
        filled = iter(arrays)
        args, kwargs = jax.tree.unflatten(
            given_tree, [next(filled) if _is_array(leaf) else leaf for leaf in given]
        )
        result = function(copy, *args, **kwargs)
        filters = nnx.Param, nnx.RngState, nnx.Intermediate
        _, params, _, _, rest = nnx.split(copy, *filters, ...)
        return result, (params, rest)

    def guarded(leaves: Sequence[Any]) -> tuple[Any, Any]:
        params, _, rest = jax.tree.unflatten(treedef, leaves)
        return params, rest

    result, after = run(leaves, arrays)
    states = guarded(leaves), after
    old, new = (dict(jax.tree_util.tree_flatten_with_path(state)[0]) for state in states)
    wrong = [path for path in [*old, *new] if path not in old or path not in new]
    if not wrong:
        wrong = [
            path
            for path in new
            if old[path] is not new[path] and not variable_name(path[1:]).startswith(rewritten)
        ]
    if wrong and old.keys() == new.keys() and all(map(_is_array, leaves)):
        # Transformations of nnx return variables as new arrays: look whether a variable provably
        # is the array that came in, or one that moves alike whatever the example.
        indices = jax.tree.leaves(guarded(range(len(leaves))))
        own = set(jax.tree.leaves(guarded(range(len(leaves)))[1]))  # no parameters, no random state
        closed, _ = compat.trace(lambda *inputs: run(*inputs)[1], leaves, arrays)
        jaxpr, consts = compat.open_jaxpr(closed)

        def is_kept(position: int) -> bool:
            if compat.input_behind(jaxpr, jaxpr.outvars[position]) == indices[position]:
                return True
            used = compat.inputs_in_use(jaxpr, [i == position for i in range(len(indices))])
            known = not any(map(compat.is_traced, consts))
            return known and {i for i, flag in enumerate(used) if flag} <= own

        places = {path: position for position, path in enumerate(new)}
        wrong = [path for path in wrong if not is_kept(places[path])]
    if wrong:
        raise UnsupportedLayerError(
            f"loss_fn changed the variable {variable_name(wrong[0][1:])!r} of the "
            "module, so one example would act on another. Expected a pure function of the "
            "parameters; use GroupNorm or LayerNorm for BatchNorm, or its running average "
            "(module.eval())."
        )
    return result
