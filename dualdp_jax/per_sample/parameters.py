# SPDX-License-Identifier: Apache-2.0
"""Split of a pytree or an `nnx.Module` into trained leaves and everything else."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dualdp import _validate
from dualdp._validate import UnsupportedLayerError
from dualdp_jax import compat
from dualdp_jax.chunk import Frame, is_array

PyTree = Any
KeyPath = tuple[Any, ...]
Array = jax.Array
Arrays = Sequence[Array]
Held = tuple[Arrays, Arrays]  # (trained, others)
Loss = Callable[..., Any]


@dataclass(frozen=True)
class Parameters:
    """Pytree of parameters, split into trained leaves and other arrays.

    Attributes:
        trained: arrays whose gradient is taken, in the order of `jax.tree.leaves`.
        others: arrays that are passed on: frozen leaves, rng state, running statistics.
        names: path of each trained leaf as text, such as "Dense_0/kernel".
        groups: per-layer clipping group of each trained leaf: its path without the last key.
        treedef: structure of the tree.
        fixed: leaves of the tree that are no arrays, None in the place of an array.
        trained_at, others_at: places of these arrays among the leaves.
    """

    trained: list[Array]
    others: list[Array]
    names: list[str]
    groups: list[str]
    treedef: jax.tree_util.PyTreeDef
    fixed: list[Any]
    trained_at: list[int]
    others_at: list[int]

    @property
    def dtype(self) -> np.dtype:
        """Dtype of norms and factors: float32, or float64 if one leaf is."""
        return jnp.result_type(jnp.float32, *(leaf.dtype for leaf in self.trained))

    def like(self, values: Sequence[PyTree]) -> PyTree:
        """Return a tree like the model of a value for each trained leaf, None elsewhere."""
        found = dict(zip(self.trained_at, values, strict=True))
        return jax.tree.unflatten(self.treedef, map(found.get, range(len(self.fixed))))

    def whole(self, trained: Arrays, others: Arrays) -> PyTree:
        """Return the parameters as the user holds them, from these arrays."""
        leaves = list(self.fixed)
        places = zip([*self.trained_at, *self.others_at], [*trained, *others], strict=True)
        for place, value in places:
            leaves[place] = value
        return jax.tree.unflatten(self.treedef, leaves)

    def arrays(self, tree: PyTree) -> tuple[list[Array], list[Array]]:
        """Return (trained, others) of the parameters as the user holds them."""
        leaves = [leaf for leaf, _ in zip(jax.tree.leaves(tree), self.fixed, strict=True)]
        return [leaves[i] for i in self.trained_at], [leaves[i] for i in self.others_at]

    def keyed(self, others: Arrays, key: Array) -> list[Array]:
        """Return the other arrays with rng state derived from the key."""
        return list(others)

    def call(
        self, loss_fn: Loss, held: Held, position: Array, *args: PyTree, **kwargs: PyTree
    ) -> Any:
        """Return what the loss function returns for the example at a position of the batch."""
        return loss_fn(self.whole(*held), *args, **kwargs)


@dataclass(frozen=True)
class ModuleParameters(Parameters):
    """Parameters of an `nnx.Module`: `nnx.Param` is trained, other state is carried and guarded.

    Attributes:
        nnx: module `flax.nnx`.
        graphdef: structure of the user's module.
        rewritten: beginnings of the names of parameters that each call computes from others.
    """

    nnx: ModuleType
    graphdef: Any
    rewritten: tuple[str, ...]

    def like(self, values: Sequence[PyTree]) -> PyTree:  # noqa: D102
        return super().like(values)[0]

    def whole(self, trained: Arrays, others: Arrays) -> PyTree:  # noqa: D102
        return super().whole(trained, others)[0]

    def arrays(self, tree: PyTree) -> tuple[list[Array], list[Array]]:  # noqa: D102
        return super().arrays((tree, *super().whole(self.trained, self.others)[1:]))

    def keyed(self, others: Arrays, key: Array) -> list[Array]:  # noqa: D102
        folded = (jax.random.fold_in(key, i) for i, _ in enumerate(others))
        return [_keys_like(old, new) for old, new in zip(others, folded, strict=True)]

    def call(
        self, loss_fn: Loss, held: Held, position: Array, *args: PyTree, **kwargs: PyTree
    ) -> Any:
        """Call the function on a copy of the module; refuse a call that changes a variable.

        The next example would not see the change, as it would in a plain loop. What `sow` keeps for
        the loss (`nnx.Intermediate`) may change, rewritten parameters, and counters: variables
        whose new value depends on no example, parameter or random key.
        """
        others = [_folded(leaf, position) if _is_key(leaf) else leaf for leaf in held[1]]
        leaves, treedef = jax.tree.flatten(super().whole(held[0], others))
        frame, arrays = Frame((args, kwargs)), jax.tree.leaves((args, kwargs))
        arrays = list(filter(is_array, arrays))

        def run(leaves: list[PyTree], arrays: list[Array]) -> tuple[Any, tuple[PyTree, PyTree]]:
            copy = self.nnx.merge(self.graphdef, *jax.tree.unflatten(treedef, leaves))
            args, kwargs = frame.rebuild(arrays)
            result = loss_fn(copy, *args, **kwargs)
            filters = self.nnx.Param, self.nnx.RngState, self.nnx.Intermediate
            _, params, _, _, rest = self.nnx.split(copy, *filters, ...)
            return result, (params, rest)

        def guarded(leaves: Sequence[PyTree]) -> tuple[PyTree, PyTree]:
            params, _, rest = jax.tree.unflatten(treedef, leaves)
            return params, rest

        result, after = run(leaves, arrays)
        states = guarded(leaves), after
        old, new = (dict(jax.tree_util.tree_flatten_with_path(state)[0]) for state in states)
        names = {path: _path_name(compat.variable_path(path[1:])) for path in {**old, **new}}
        wrong = [path for path in names if old.get(path) is not new.get(path)]
        wrong = [path for path in wrong if not names[path].startswith(self.rewritten)]
        if wrong and old.keys() == new.keys() and all(map(_is_array, leaves)):
            # Transformations of nnx return variables as new arrays: look whether a variable
            # provably is the array that came in, or one that moves alike whatever the example.
            at = guarded(range(len(leaves)))
            closed, _ = compat.trace(lambda *inputs: run(*inputs)[1], leaves, arrays)
            kept = _kept(closed, jax.tree.leaves(at), set(jax.tree.leaves(at[1])))
            right = {path for path, is_kept in zip(new, kept, strict=True) if is_kept}
            wrong = [path for path in wrong if path not in right]
        if wrong:
            raise UnsupportedLayerError(
                f"loss_fn changed the variable {names[wrong[0]]!r} of the module, so one example "
                "would act on another. Expected a pure function of the parameters; use GroupNorm "
                "or LayerNorm for BatchNorm, or its running average (module.eval())."
            )
        return result


def _kept(closed: Any, inputs: list[int], counters: set[int]) -> list[bool]:
    """Per output of a program True if it is its own input, or depends on counters alone."""
    jaxpr, consts = compat.open_jaxpr(closed)
    is_known = not any(map(compat.is_traced, consts))
    found = []
    for place, var in enumerate(jaxpr.outvars):
        used = compat.inputs_in_use(jaxpr, [i == place for i in range(len(inputs))])
        is_counter = is_known and {i for i, flag in enumerate(used) if flag} <= counters
        found.append(is_counter or compat.input_behind(jaxpr, var) == inputs[place])
    return found


def split(what: PyTree, trainable: PyTree = None) -> Parameters:
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
    if nnx is not None:
        return _of_module(nnx, what, trainable)
    parameters = _of_leaves(Parameters, what, what, trainable)
    if any(name.startswith("batch_stats/") for name in parameters.names):
        raise UnsupportedLayerError(
            "The parameters hold the collection 'batch_stats', running statistics that would be "
            "trained. Freeze it by trainable={'params': True, 'batch_stats': False}, or hand over "
            "variables['params'] and use GroupNorm or LayerNorm."
        )
    return parameters


def _of_module(nnx: ModuleType, module: PyTree, trainable: PyTree) -> Parameters:
    """Split an `nnx.Module`, without values that earlier calls sowed."""
    if nnx.state(module, nnx.Intermediate):
        module = nnx.clone(module)
        nnx.pop(module, nnx.Intermediate)
    graphdef, *states = nnx.split(module, nnx.Param, nnx.RngState, ...)
    rewritten = tuple(  # at every call, from these parameters alone
        "/".join(map(str, (*path, "layer_instance/")))
        for path, part in nnx.iter_modules(module)
        if isinstance(part, nnx.WeightNorm)
    )
    own = {"nnx": nnx, "graphdef": graphdef, "rewritten": rewritten}
    return _of_leaves(ModuleParameters, tuple(states), states[0], trainable, **own)


def _of_leaves(
    kind: type[Parameters], tree: PyTree, params: PyTree, trainable: PyTree, **own: Any
) -> Parameters:
    """Split the leaves of a tree, of which those of `params` come first and may be trained."""
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    if kind is ModuleParameters:
        paths = list(map(compat.variable_path, paths))
    trained_at = _trained_at(params, paths, trainable)
    leaves, treedef = jax.tree.flatten(tree)
    arrays_at = [i for i, leaf in enumerate(leaves) if _is_array(leaf)]
    others_at = [i for i in arrays_at if i not in set(trained_at)]
    held = {*trained_at, *others_at}
    fixed = [None if i in held else leaf for i, leaf in enumerate(leaves)]
    names, groups = ([_path_name(paths[i][:end]) for i in trained_at] for end in (None, -1))
    trained, others = ([jnp.asarray(leaves[i]) for i in at] for at in (trained_at, others_at))
    return kind(trained, others, names, groups, treedef, fixed, trained_at, others_at, **own)


def _trained_at(params: PyTree, paths: list[KeyPath], trainable: PyTree) -> list[int]:
    """Places of the leaves that are trained, which have to be real floating numbers."""
    places = []
    are_settings = compat.holds_equinox(params)  # its Python numbers
    flat = zip(paths, jax.tree.leaves(params), _flags(params, trainable), strict=True)
    for place, (path, leaf, flag) in enumerate(flat):
        is_number = isinstance(leaf, numbers.Number) and not are_settings
        if not flag or not (is_number or _is_array(leaf)):
            continue
        places.append(place)
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            raise TypeError(
                f"The parameter {_path_name(path)!r} is {jnp.result_type(leaf)}. Expected a "
                "real floating array; freeze it by trainable= (a pytree of bools with False "
                "there) or take it out of the parameters."
            )
    return places


def _flags(tree: PyTree, trainable: PyTree) -> list[bool]:
    """One bool per leaf, True for each if `trainable` is None."""
    given = True if trainable is None else trainable
    try:
        full = jax.tree.map(lambda flag, part: jax.tree.map(lambda _: flag, part), given, tree)
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
    return flags


def _path_name(path: KeyPath) -> str:
    """Path as text, keys joined by "/"."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _folded(keys: Array, number: Array) -> Array:
    """Fold an integer into a random key, or into each of an array of them (`nnx.split_rngs`)."""
    fold = jax.random.fold_in
    for _ in keys.shape:
        fold = jax.vmap(fold, (0, None))
    return fold(keys, number)


def _keys_like(leaf: Array, key: Array) -> Array:
    """Return the key, or as many as the array holds, for an array of keys; others as they are."""
    if not _is_key(leaf):
        return leaf
    return jax.random.split(key, leaf.shape) if leaf.shape else key


def _is_key(leaf: Array) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _is_array(leaf: PyTree) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | np.generic)
