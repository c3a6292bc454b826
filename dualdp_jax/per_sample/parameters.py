# SPDX-License-Identifier: Apache-2.0
"""Split of a pytree or an `nnx.Module` into trained leaves and everything else."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterator, Sequence
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
    names: list[str]  # the same paths as text, such as "Dense_0/kernel"
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

    Args:
        what: pytree of parameters or `nnx.Module`.
        trainable: pytree of bools like `what` (for nnx like `nnx.state(what, nnx.Param)`), or a
            prefix of it; None trains every inexact leaf.

    Raises:
        TypeError: a leaf that would be trained is no real floating array.
        ValueError: `trainable` has another structure.
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
    """Kind of each leaf of a flattened tree: trained, other array, or fixed."""

    def __init__(self, tree: Any, is_trained: Callable[[int, KeyPath, Any], bool]) -> None:
        flat, self.treedef = jax.tree_util.tree_flatten_with_path(tree)
        self.kinds = [
            "trained" if is_trained(i, path, leaf) else "other" if _is_array(leaf) else "fixed"
            for i, (path, leaf) in enumerate(flat)
        ]
        sorted_out: dict[str, list[Any]] = {"trained": [], "other": [], "fixed": []}
        for kind, item in zip(self.kinds, flat, strict=True):
            sorted_out[kind].append(item)
        self.paths = [path for path, _ in sorted_out["trained"]]
        self.trained = [jnp.asarray(leaf) for _, leaf in sorted_out["trained"]]
        self.others = [jnp.asarray(leaf) for _, leaf in sorted_out["other"]]
        self.fixed = [leaf for _, leaf in sorted_out["fixed"]]

    def arrays(self, leaves: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Split the leaves of such a tree into trained and other arrays."""
        pairs = list(zip(self.kinds, leaves, strict=True))
        trained = [leaf for kind, leaf in pairs if kind == "trained"]
        return trained, [leaf for kind, leaf in pairs if kind == "other"]

    def fill(self, trained: Sequence[Any], others: Sequence[Any], fixed: Sequence[Any]) -> Any:
        """Rebuild the tree from these leaves."""
        sources: dict[str, Iterator[Any]] = {
            "trained": iter(trained), "other": iter(others), "fixed": iter(fixed)
        }  # fmt: skip
        return jax.tree.unflatten(self.treedef, [next(sources[kind]) for kind in self.kinds])

    def like(self, values: Sequence[Any]) -> Any:
        """Rebuild the tree with values at the trained leaves and None elsewhere."""
        return self.fill(values, [None] * len(self.others), [None] * len(self.fixed))


def _from_pytree(what: Any, trainable: Any) -> Parameters:
    flags, settings = _flags(what, trainable), compat.holds_equinox(what)
    slots = _Slots(
        what, lambda i, path, leaf: _is_trained(path_name(path), leaf, flags[i], settings)
    )

    names = [path_name(path) for path in slots.paths]
    if any(name.startswith("batch_stats/") for name in names):
        raise UnsupportedLayerError(
            "The parameters hold the collection 'batch_stats', running statistics that would be "
            "trained. Freeze it by trainable={'params': True, 'batch_stats': False}, or hand over "
            "variables['params'] and use GroupNorm or LayerNorm."
        )

    def whole(trained: Sequence[Any], others: Sequence[Any]) -> Any:
        return slots.fill(trained, others, slots.fixed)

    def call(loss_fn: Any, trained: Any, others: Any, position: Any, args: Any, kwargs: Any) -> Any:
        return loss_fn(whole(trained, others), *args, **kwargs)

    return Parameters(
        trained=slots.trained,
        others=slots.others,
        paths=slots.paths,
        names=names,
        like=slots.like,
        whole=whole,
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
        parts = slots.fill(trained, others, slots.fixed)
        run = lambda copy: loss_fn(copy, *args, **kwargs)  # noqa: E731
        return _run_unchanged(nnx, graphdef, parts, run, rewritten)

    paths = [compat.variable_path(path[1:]) for path in slots.paths]
    return Parameters(
        trained=slots.trained,
        others=slots.others,
        paths=paths,
        names=[path_name(path) for path in paths],
        like=lambda values: slots.like(values)[0],
        whole=lambda trained, others: slots.fill(trained, others, slots.fixed)[0],
        arrays=arrays,
        call=call,
        keyed=lambda others, key: rekey(
            others, lambda i, keys: _keys_like(keys, jax.random.fold_in(key, i))
        ),
        module=lambda state: nnx.merge(graphdef, *slots.fill(*arrays(state), slots.fixed)),
    )


def _fold_in(keys: Any, number: Any) -> Any:
    """Fold an integer into a random key, or into each of an array of them (`nnx.split_rngs`)."""
    fold = jax.random.fold_in
    for _ in keys.shape:
        fold = jax.vmap(fold, (0, None))
    return fold(keys, number)


def _keys_like(keys: Any, key: Any) -> Any:
    """Return the key, or as many keys drawn from it as there are in an array of them."""
    return jax.random.split(key, keys.shape) if keys.shape else key


def variable_name(path: KeyPath) -> str:
    """Return the path of an nnx variable as text."""
    return path_name(compat.variable_path(path))


def _run_unchanged(
    nnx: Any,
    graphdef: Any,
    parts: Any,
    function: Callable[[Any], Any],
    rewritten: tuple[str, ...],
) -> Any:
    """Call the function on the module of these parts; refuse a call that changes a variable.

    The next example would not see the change, as it would in a plain loop. What `sow` keeps for
    the loss (`nnx.Intermediate`) may change, and parameters under the paths `rewritten`.
    """
    leaves, treedef = jax.tree.flatten(parts)

    def run(leaves: list[Any]) -> tuple[Any, Any]:
        copy = nnx.merge(graphdef, *jax.tree.unflatten(treedef, leaves))
        result = function(copy)
        filters = nnx.Param, nnx.RngState, nnx.Intermediate
        _, params, _, _, rest = nnx.split(copy, *filters, ...)
        return result, (params, rest)

    def guarded(leaves: Sequence[Any]) -> tuple[Any, Any]:
        params, _, rest = jax.tree.unflatten(treedef, leaves)
        return params, rest

    result, after = run(leaves)
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
        # is the array that came in.
        indices = jax.tree.leaves(guarded(range(len(leaves))))
        jaxpr, _ = compat.open_jaxpr(compat.trace(lambda leaves: run(leaves)[1], leaves)[0])
        triples = zip(new, jaxpr.outvars, indices, strict=True)
        same = {path for path, var, i in triples if compat.input_behind(jaxpr, var) == i}
        wrong = [path for path in wrong if path not in same]
    if wrong:
        raise UnsupportedLayerError(
            f"loss_fn changed the variable {variable_name(wrong[0][1:])!r} of the "
            "module, so one example would act on another. Expected a pure function of the "
            "parameters; use GroupNorm or LayerNorm for BatchNorm, or its running average "
            "(module.eval())."
        )
    return result
