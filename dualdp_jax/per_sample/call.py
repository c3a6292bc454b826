# SPDX-License-Identifier: Apache-2.0
"""Normal form of a per-sample call: trained leaves, rows, and the loss of one example."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dualdp import _validate
from dualdp._validate import UnsupportedLayerError
from dualdp_jax import compat
from dualdp_jax.per_sample import units
from dualdp_jax.per_sample.parameters import Parameters, split

PyTree = Any
Row = tuple[list[Any], Any]  # arrays of one example, and its position in the batch


class Answer(NamedTuple):
    """Result of a call, or of some of its rows."""

    #: per trained leaf its per-sample gradients (n, *shape), their norms (n,), or its
    #: clipped sum.
    leaves: list[Any]
    norms: Any = None  # (n,) norms of the whole gradients; None for a request of gradients
    #: mapping from clipping group to factors (n,); empty unless a sum was requested.
    factors: dict[str, Any] = {}
    losses: Any = None  # (n,), 0 where the mask is False; None unless a sum was requested
    aux: Any = None  # pytree of (n, ...), stacked over the examples, or None


class Program(NamedTuple):
    """Traced jaxpr of the loss of one example."""

    #: open jaxpr over (trained leaves, shared arrays, row); its first result is the loss, the
    #: rest is aux.
    jaxpr: Any
    consts: Sequence[Any]  # arrays that the loss closes over
    structure: Any  # treedef of (loss, aux)


class Call(NamedTuple):
    """One call of a per-sample function; the input of every method."""

    parameters: Parameters  # `Parameters` of the model
    rows: Row  # arrays (n, ...) and positions (n,); `jax.vmap` over both gives single examples
    num_examples: int  # int n
    shared: Any  # pytree of what all examples share beside the parameters: other arrays, key
    #: callable (trained leaves, shared, row) -> (loss (), aux) of one example.
    loss_of: Callable[[list[Any], Any, Row], tuple[Any, Any]]
    live: Any = None  # (n,) bool, False for units whose rows all have weight 0; None for no such
    known: Program | None = None  # `Program` cached by `traced`, or None
    analysis: Any = None  # `capture.Analysis` cached by `methods.prepared`, or None

    @property
    def program(self) -> Program:
        """Traced loss for rows of these shapes."""
        if self.known is not None:
            return self.known
        row = jax.tree.map(compat.type_of_row, self.rows)
        closed, structure = compat.trace(self.loss_of, self.parameters.trained, self.shared, row)
        return Program(*compat.open_jaxpr(closed), structure)

    def loss(self, trained: list[Any], row: Row) -> tuple[Any, Any]:
        """Return (loss (), aux) of one example by the user's function."""
        return self.loss_of(trained, self.shared, row)

    def traced_loss(self, trained: list[Any], row: Row) -> Any:
        """Return the loss () of one example by the traced program; nothing is traced again."""
        inputs = jax.tree.leaves((trained, self.shared, row))
        return compat.evaluated(self.program.jaxpr, self.program.consts, *inputs)[0]


def traced(call: Call) -> Call:
    """Return the same call (n >= 1) with the traced loss cached."""
    return call._replace(known=call.program)


class Options(NamedTuple):
    """Arguments of `per_sample_grads` about loss, parameters and rows."""

    has_aux: bool = False
    key: Any = None
    trainable: Any = None
    keep_batch_dim: bool = False
    rows_per_unit: int | None = None
    row_weights: Any = None
    positions: Any = None  # (rows,) integers folded into `key`, one per row; None for 0, 1, ...
    program: Program | None = None  # of an earlier call with arguments of the same types


def build(loss_fn: Callable[..., Any], what: Any, batch: tuple[Any, ...], options: Options) -> Call:
    """Check the arguments of a call and bring them to normal form; `loss_fn` is not run on data.

    `what` may be `Parameters` from an earlier split. The examples of the call are the units.
    """
    has_aux, key, trainable, keep_batch_dim, rows_per_unit, row_weights, positions, _ = options
    parameters = what if isinstance(what, Parameters) else split(what, trainable)
    arrays, num_rows, rebuild = split_batch(batch)
    if positions is None:  # else the engine's, which looked at all of the data
        refuse_unsplit_numbers(batch, num_rows)
    if row_weights is not None and rows_per_unit is None:
        raise ValueError(
            "row_weights came without rows_per_unit, so that each row would be clipped alone. "
            "Expected rows_per_unit=K, the number of rows of a unit."
        )
    rows_per_unit = units.check_rows(1 if rows_per_unit is None else rows_per_unit, num_rows)
    weights = units.check_weights(row_weights, num_rows, parameters.dtype)
    _check_key(key)
    named = {} if key is None else {"key": key}
    _validate.takes("loss_fn", loss_fn, "(params, *example)", what, *batch, **named)
    if positions is None:
        positions = np.arange(num_rows, dtype=np.uint32)

    def loss(trained: list[Any], shared: Any, row: Row) -> tuple[Any, Any]:
        (others, key), (example, position) = shared, row
        kwargs = {} if key is None else {"key": jax.random.fold_in(key, position)}
        arguments = rebuild([leaf[None] for leaf in example] if keep_batch_dim else example)
        result = parameters.call(of_one, trained, others, position, arguments, kwargs)
        return _checked_loss(result, has_aux, keep_batch_dim)

    def of_one(model: Any, *arguments: Any, **kwargs: Any) -> Any:
        try:
            return loss_fn(model, *arguments, **kwargs)
        except (TypeError, ValueError, IndexError) as error:
            if type(error) not in (TypeError, ValueError, IndexError):
                raise
            raise _failure_of_one(error, arguments, keep_batch_dim) from error

    rows = ([jnp.asarray(leaf) for leaf in arrays], jnp.asarray(positions))
    shared = (parameters.others, key)
    call = Call(parameters, rows, num_rows, shared, loss, known=options.program)
    if rows_per_unit > 1 or weights is not None:
        rows, loss_of, live = units.grouped(rows, loss, rows_per_unit, weights)
        count = num_rows // rows_per_unit
        call = call._replace(rows=rows, num_examples=count, loss_of=loss_of, live=live)
    inside = compat.manual_axes((rows, parameters.trained, parameters.others, key))
    return _of_each_device(call, inside) if inside and call.num_examples else call


def _of_each_device(call: Call, inside: set[str]) -> Call:
    """Mark the parameters of a call inside a `shard_map` as varying over its devices.

    jax sums the gradient of a replicated parameter over the devices; each device has its own
    examples, so that sum would mix their gradients.
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
    """Return the array leaves of a batch, the number of examples, and a function to rebuild one."""
    flat, treedef = jax.tree_util.tree_flatten_with_path(batch)
    arrays: list[Any] = []
    lengths: dict[str, int] = {}
    for path, leaf in flat:
        name = f"batch{jax.tree_util.keystr(path)}"
        if isinstance(leaf, jax.Array | np.ndarray):
            lengths[name] = _num_rows(name, leaf)
            arrays.append(leaf)
        elif isinstance(leaf, Iterator) or (
            hasattr(leaf, "__array__") and not isinstance(leaf, np.generic)
        ):  # an array of another library, such as a torch tensor
            raise TypeError(f"{name} is {_validate.kind(leaf)}. Expected a JAX or NumPy array.")
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
    num_examples = next(iter(lengths.values()))
    others = [None if isinstance(x, jax.Array | np.ndarray) else (x,) for _, x in flat]

    def rebuild(example: list[Any]) -> Any:
        items = iter(example)
        leaves = [next(items) if other is None else other[0] for other in others]
        return jax.tree.unflatten(treedef, leaves)

    return arrays, num_examples, rebuild


def refuse_unsplit_numbers(batch: Any, n: int) -> None:
    """Refuse a sequence of n numbers that is no array: every example would get all of them."""
    for node in _sequences(batch):
        if len(node) == n > 1 and all(map(_holds_numbers, node)):
            raise TypeError(
                f"The batch holds a {type(node).__name__} of {n} Python numbers, one for each "
                "example, and only arrays are split: every example would see the numbers of all "
                "others. Expected an array, such as np.asarray(y)."
            )


def _sequences(tree: Any) -> Iterator[Any]:
    """Lists, tuples and other sequences of the items below a pytree, except text."""

    def is_sequence(node: Any) -> bool:
        return isinstance(node, Sequence) and not isinstance(node, str) and node is not tree

    for node in filter(is_sequence, jax.tree.leaves(tree, is_leaf=is_sequence)):
        yield node
        if isinstance(node, list | tuple):
            yield from _sequences(node)


def _holds_numbers(value: Any) -> bool:
    """True for a number, and for a list or tuple of numbers, of lists of numbers and so on."""
    if isinstance(value, list | tuple):
        return len(value) > 0 and all(map(_holds_numbers, value))
    return isinstance(value, bool | int | float | complex | np.generic)


def _num_rows(name: str, leaf: Any) -> int:
    """Number of examples (axis 0) of one batch leaf."""
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


def _check_key(key: Any) -> None:
    """Refuse anything but one jax random key (typed, or the older (2,) uint32)."""
    if key is None:
        return
    is_typed = isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    if not isinstance(key, jax.Array | np.ndarray) or key.ndim != (0 if is_typed else 1):
        raise TypeError(
            f"key={key!r} is not one random key. Expected jax.random.key(...); one key per example "
            "is folded out of it."
        )
    made = jax.random.key_impl(key) if is_typed else compat.setting("jax_default_prng_impl")
    if "rbg" in str(made):
        raise ValueError(
            f"key is of the implementation {str(made)!r}, whose numbers inside jax.vmap are not "
            "those of each key alone, so examples would share them. Expected "
            "jax.random.key(seed, impl='threefry2x32')."
        )


def _failure_of_one(error: Exception, arguments: Any, keep_batch_dim: bool) -> Exception:
    """Return the error of a loss that failed, with the arguments that it got."""
    arrays = [x for x in jax.tree.leaves(arguments) if isinstance(x, jax.Array)]
    got = ", ".join(f"{x.dtype}{list(x.shape)}" for x in arrays)
    kind, text = TypeError if isinstance(error, TypeError) else ValueError, str(error).rstrip(".")
    if keep_batch_dim:
        return kind(f"loss_fn failed for a batch of ONE example, here {got}: {text}.")
    return kind(
        f"loss_fn gets ONE example, without a batch axis, here {got}, and failed: {text}. "
        "Expected the loss of one example, as under jax.vmap; a loss that is written for a batch "
        "goes with keep_batch_dim=True, which gives it batches of one."
    )


def _checked_loss(result: Any, has_aux: bool, keep_batch_dim: bool) -> tuple[Any, Any]:
    """Return (loss (), aux) from the result of `loss_fn` for one example."""
    if has_aux and not (isinstance(result, tuple) and len(result) == 2):
        raise TypeError(
            f"has_aux=True, but loss_fn returned {_validate.kind(result)}. Expected (loss, aux)."
        )
    loss, aux = result if has_aux else (result, None)
    if isinstance(loss, tuple | list | dict) or loss is None:
        raise TypeError(
            f"loss_fn returned {_validate.kind(loss)} for one example. Expected a scalar; use "
            "has_aux=True to return (loss, aux)."
        )
    try:
        loss = jnp.asarray(loss)
    except TypeError as error:
        raise TypeError(
            f"loss_fn returned {_validate.kind(loss)} for one example. Expected a scalar."
        ) from error
    if loss.shape != () or not jnp.issubdtype(loss.dtype, jnp.floating):
        how = "the mean over a batch of one" if keep_batch_dim else "without a batch axis"
        raise ValueError(
            f"loss_fn returned {loss.dtype}{list(loss.shape)} for one example. Expected a real "
            f"scalar, shape (): the loss of that example alone, {how}."
        )
    return loss, jax.tree.map(_aux_leaf, aux)


def _aux_leaf(leaf: Any) -> Any:
    try:
        return jnp.asarray(leaf)
    except TypeError as error:
        raise TypeError(
            f"loss_fn returned {leaf!r} in aux. Expected arrays; they are stacked over "
            "the examples."
        ) from error
