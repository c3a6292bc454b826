# SPDX-License-Identifier: Apache-2.0
"""One call of the per-sample functions, in normal form: trained leaves, rows, loss of one row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dualdp import UnsupportedLayerError
from dualdp_jax import compat
from dualdp_jax.parameters import Parameters, split

Row = tuple[list[Any], Any]  # arrays of one example, and its position


class Program(NamedTuple):
    """The loss of one example as jax sees it.

    Attributes:
        jaxpr: open, of (trained leaves, row); its first result is the loss, the others are aux.
        consts: arrays that it closes over.
        structure: of (loss, aux).
    """

    jaxpr: Any
    consts: Sequence[Any]
    structure: Any


class Call(NamedTuple):
    """What every method works on.

    Attributes:
        parameters: the model, taken apart.
        rows: arrays (n, ...) and positions (n,); `jax.vmap` over both gives single examples.
        num_examples: n.
        loss: (trained leaves, row) to (loss (), aux) of one example.
        known: the loss traced, where that was done already.
    """

    parameters: Parameters
    rows: Row
    num_examples: int
    loss: Callable[[list[Any], Row], tuple[Any, Any]]
    known: Program | None = None

    @property
    def program(self) -> Program:
        """The loss traced, for rows of these shapes."""
        if self.known is not None:
            return self.known
        types = jax.tree.map(compat.type_of_row, self.rows)
        return program_of(self.loss, self.parameters.trained, types)


def program_of(loss: Callable[..., Any], trained: list[Any], row: Any) -> Program:
    """A loss traced for parameters and a row of these types."""
    closed, structure = compat.trace(loss, trained, row)
    return Program(*compat.open_jaxpr(closed), structure)


def traced(call: Call) -> Call:
    """The same call, its loss traced once for all who ask; n >= 1."""
    return call._replace(known=call.program)


def build(
    loss_fn: Callable[..., Any],
    what: Any,
    batch: tuple[Any, ...],
    *,
    has_aux: bool,
    key: Any,
    trainable: Any,
    positions: Any = None,
) -> Call:
    """Check the arguments of a call and bring them to normal form; `loss_fn` is not called yet.

    Args:
        loss_fn: (what, *example) to a scalar, or to (scalar, aux) with `has_aux`.
        what: pytree of parameters, `nnx.Module`, or `Parameters` from an earlier split.
        batch: arguments after `what`; every array leaf has the examples on axis 0.
        has_aux: whether `loss_fn` returns (loss, aux).
        key: jax random key, one is folded out of it per example; None: `loss_fn` takes no key.
        trainable: pytree of bools, see `parameters.split`.
        positions: (n,) integers that tell the examples' randomness apart; None for 0, 1, ...
    """
    parameters = what if isinstance(what, Parameters) else split(what, trainable)
    arrays, num_examples, rebuild = split_batch(batch)
    if positions is None:
        positions = np.arange(num_examples, dtype=np.uint32)
    check_key(key)

    def loss(trained: list[Any], row: Row) -> tuple[Any, Any]:
        example, position = row
        kwargs = {} if key is None else {"key": jax.random.fold_in(key, position)}
        result = parameters.call(
            loss_fn, trained, parameters.others, position, rebuild(example), kwargs
        )
        return checked_loss(result, has_aux)

    rows = ([jnp.asarray(leaf) for leaf in arrays], jnp.asarray(positions))
    call = Call(parameters, rows, num_examples, loss)
    inside = compat.manual_axes((rows, parameters.trained, parameters.others, key))
    return _of_each_device(call, inside) if inside and num_examples else call


def _of_each_device(call: Call, inside: set[str]) -> Call:
    """A call inside a `shard_map`, so that the gradient of an example stays on its device.

    jax adds up the gradient of what is the same on all devices over the devices; they have other
    examples, so the parameters are marked as values of each device.

    Args:
        call: with the arrays of one device.
        inside: names of the axes of the `shard_map`.

    Raises:
        UnsupportedLayerError: the loss of an example, or its gradient, is spread over devices.
    """
    jaxpr = call.program.jaxpr
    exchanged = compat.collectives(jaxpr, inside)
    if exchanged:
        raise UnsupportedLayerError(
            f"loss_fn exchanges numbers between devices ({', '.join(sorted(exchanged))}), so the "
            "loss of one example would depend on others. Expected the loss of one example; to "
            "split one over devices use a mesh of automatic axes instead of shard_map."
        )
    axes = compat.varying_axes(jaxpr.outvars[0].aval)
    named = zip(call.parameters.names, call.parameters.trained, strict=True)
    split = [name for name, leaf in named if compat.varying_axes(leaf) - axes]
    if split:
        raise UnsupportedLayerError(
            f"The parameters {split} differ between devices over which the examples do not, so a "
            "norm would be that of one part. Expected them whole on each device of the shard_map, "
            "or a mesh of automatic axes."
        )
    mark = lambda leaf: compat.vary(leaf, axes)  # noqa: E731
    trained = [mark(leaf) for leaf in call.parameters.trained]
    rows = jax.tree.map(mark, call.rows)
    return call._replace(parameters=replace(call.parameters, trained=trained), rows=rows)


def split_batch(batch: tuple[Any, ...]) -> tuple[list[Any], int, Callable[[list[Any]], Any]]:
    """Array leaves of a batch, their common length, and the way back with one example's leaves."""
    flat, treedef = jax.tree_util.tree_flatten_with_path(batch)
    is_array = [isinstance(leaf, jax.Array | np.ndarray) for _, leaf in flat]
    lengths: dict[str, int] = {}
    for (path, leaf), array in zip(flat, is_array, strict=True):
        if array:
            lengths[f"batch{jax.tree_util.keystr(path)}"] = _num_rows(path, leaf)
    if not lengths:
        raise ValueError(
            "The batch holds no array, so it has no examples. Expected arrays with the examples "
            "on axis 0 after the parameters."
        )
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name}: {n}" for name, n in lengths.items())
        raise ValueError(
            f"The arrays of the batch have different numbers of examples ({listed}). Expected the "
            "same number on axis 0 of each."
        )

    _refuse_lists_of_numbers(batch, next(iter(lengths.values())))

    def rebuild(example: list[Any]) -> Any:
        items = iter(example)
        leaves = [
            next(items) if array else leaf for (_, leaf), array in zip(flat, is_array, strict=True)
        ]
        return jax.tree.unflatten(treedef, leaves)

    arrays = [leaf for (_, leaf), array in zip(flat, is_array, strict=True) if array]
    return arrays, next(iter(lengths.values())), rebuild


def _refuse_lists_of_numbers(batch: Any, n: int) -> None:
    """Refuse a list of one number for each example, all of which every example would get."""
    is_list = lambda node: isinstance(node, list)  # noqa: E731
    for node in filter(is_list, jax.tree.leaves(batch, is_leaf=is_list)):
        if len(node) == n and all(isinstance(value, bool | int | float) for value in node):
            raise TypeError(
                f"The batch holds a list of {n} Python numbers, one for each example, and lists "
                "are handed on whole: every example would see the numbers of all others. Expected "
                "an array, such as np.asarray(y)."
            )


def _num_rows(path: Any, leaf: Any) -> int:
    """Length of axis 0 of one batch leaf."""
    name = f"batch{jax.tree_util.keystr(path)}"
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "OUSMm":
        raise TypeError(
            f"{name} has dtype {leaf.dtype}. Expected numbers; pass text and objects in a list or "
            "a tuple, they are handed on unchanged."
        )
    if leaf.ndim == 0:
        raise ValueError(
            f"{name} is an array without axes. Expected the examples on axis 0; pass constants as "
            "Python numbers, or close over them."
        )
    return int(leaf.shape[0])


def check_key(key: Any) -> None:
    """Refuse anything but one jax random key (typed, or the older (2,) uint32)."""
    if key is None:
        return
    is_typed = isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    if not isinstance(key, jax.Array | np.ndarray) or key.ndim != (0 if is_typed else 1):
        raise TypeError(
            f"key={key!r} is not one random key. Expected jax.random.key(...); one key per example "
            "is folded out of it."
        )


def checked_loss(result: Any, has_aux: bool) -> tuple[Any, Any]:
    """(loss (), aux) of what `loss_fn` returned for one example."""
    if has_aux and not (isinstance(result, tuple) and len(result) == 2):
        raise TypeError(
            f"has_aux=True, but loss_fn returned a {type(result).__name__}. Expected (loss, aux)."
        )
    loss, aux = result if has_aux else (result, None)
    if isinstance(loss, tuple | list | dict) or loss is None:
        raise TypeError(
            f"loss_fn returned a {type(loss).__name__} for one example. Expected a scalar; use "
            "has_aux=True to return (loss, aux)."
        )
    try:
        loss = jnp.asarray(loss)
    except TypeError as error:
        raise TypeError(
            f"loss_fn returned a {type(loss).__name__} for one example. Expected a scalar."
        ) from error
    if loss.shape != () or not jnp.issubdtype(loss.dtype, jnp.floating):
        raise ValueError(
            f"loss_fn returned {loss.dtype}{list(loss.shape)} for one example. Expected a real "
            "scalar, shape (): the loss of that example alone, without a batch axis."
        )
    return loss, jax.tree.map(_aux_leaf, aux)


def _aux_leaf(leaf: Any) -> Any:
    """An auxiliary output as an array."""
    try:
        return jnp.asarray(leaf)
    except TypeError as error:
        raise TypeError(
            f"loss_fn returned {leaf!r} in aux. Expected arrays; they are stacked over "
            "the examples."
        ) from error
