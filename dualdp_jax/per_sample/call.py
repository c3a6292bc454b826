# SPDX-License-Identifier: Apache-2.0
"""Normal form of a per-sample call: trained leaves, rows, and the loss of one example."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dualdp import _validate
from dualdp._validate import UnsupportedLayerError
from dualdp_jax import compat
from dualdp_jax.chunk import Frame, Origin, is_array
from dualdp_jax.per_sample import units
from dualdp_jax.per_sample.parameters import Parameters, split
from dualdp_jax.per_sample.program import Program
from dualdp_jax.per_sample.units import Array, PyTree, Row


@dataclass(frozen=True)
class Options:
    """Keywords that the three calls share.

    Attributes:
        method: str, one of `dualdp_jax.per_sample.methods.METHODS`, or "auto"; all are exact.
            "auto" takes the cheapest way, and goes on by "vmap", then "loop", where that does not
            support the loss or its first numbers differ from plain autodiff.
        physical_batch_size: int, examples processed at once; None for all.
        max_memory: int, bytes that a physical batch may hold for privacy (per-sample gradients, or
            the operands and output gradients of parameter uses); limits the physical batch size.
        has_aux: bool, True if `loss_fn` returns (loss, aux).
        key: random key; example k gets `fold_in(key, k)`.
        trainable: pytree of bools like the parameters, or a prefix of it; False freezes.
        keep_batch_dim: bool, True for a `loss_fn` that is written for a batch: it gets batches of
            one example, arrays with an axis 0 of length 1, and returns their mean loss.
        rows_per_unit: int K; the batch has n * K rows, of which unit u owns u * K .. u * K + K - 1.
            `loss_fn` gets one row, and one key per row, by its position in the batch; the gradient
            of a unit is that of the mean of its rows' losses. A loss that couples the rows of a
            unit takes the unit as ONE example, an array with a leading axis of K, instead.
        row_weights: (n * K,) real numbers; the loss of a unit is the sum of its rows' losses times
            these, instead of the mean; 0 marks padding. They may depend on rows of the same unit
            and on public facts only: normalized over the batch they void the bound. None for means.
        check: str; "first" compares the result with plain autodiff at the first call for a loss,
            parameters and shapes (without n), "always" at every call, "off" never. A call inside
            `jit` is not compared: it warns once, unless one of its kind was; see `check`.
        positions: (rows,) integers folded into `key`, one per row; None for 0, 1, ...; an engine's.
        program: that of an earlier call with arguments of the same types; an engine's.
        origin: that of the batch, if it is a `Chunk`.
    """

    method: str = "auto"
    physical_batch_size: int | None = None
    max_memory: int | None = None
    has_aux: bool = False
    key: Array | None = None
    trainable: PyTree = None
    keep_batch_dim: bool = False
    rows_per_unit: int | None = None
    row_weights: Array | None = None
    check: str = "first"
    positions: Array | None = None
    program: Program | None = None
    origin: Origin | None = None


class Call(NamedTuple):
    """One call of a per-sample function; the input of every method."""

    parameters: Parameters
    options: Options
    rows: Row  # arrays (n, ...) and positions (n,); `jax.vmap` over both gives single examples
    num_examples: int
    shared: PyTree  # what all examples share beside the parameters: other arrays, key
    program: Program  # loss of one example

    def by(self, method: str) -> Call:
        """Return the same call by this method."""
        return self._replace(options=replace(self.options, method=method))

    def loss(self, trained: list[Array], row: Row) -> tuple[Array, PyTree]:
        """Return (loss (), aux) of one example."""
        return self.program(trained, self.shared, row)


def build(
    loss_fn: Callable[..., Any], what: PyTree, batch: tuple[PyTree, ...], options: Options
) -> Call:
    """Check the arguments of a call, bring them to normal form, and trace the loss.

    `what` may be `Parameters` from an earlier split. The examples of the call are the units.
    Without any, `loss_fn` is not called.
    """
    key, positions = options.key, options.positions
    parameters = what if isinstance(what, Parameters) else split(what, options.trainable)
    arrays, num_rows, rebuild = split_batch(batch)
    if compat.is_sharded_in_type((arrays, parameters.trained)):
        raise UnsupportedLayerError(
            "The arrays are spread over a mesh with explicit axes, for which every operation would "
            "have to name its sharding. Expected a mesh of automatic axes: jax.make_mesh(shape, "
            "names, axis_types=(jax.sharding.AxisType.Auto,) * len(names))."
        )
    if positions is None:  # else the engine's
        if options.origin is None:  # else of a loader, which looked at all of the data
            refuse_unsplit_numbers(batch, num_rows)
        positions = jnp.arange(num_rows, dtype=jnp.uint32)
    rows_per_unit = units.check_rows(options.rows_per_unit, options.row_weights, num_rows)
    weights = units.check_weights(options.row_weights, num_rows, parameters.dtype)
    _check_key(key)
    named = {} if key is None else {"key": key}
    try:
        _validate.takes("loss_fn", loss_fn, "(params, *example)", what, *batch, **named)
    except TypeError as error:
        hint = " A key comes with needs_key=True of an engine, or key= of a call."
        raise TypeError(f"{error}{hint if 'key' in str(error) else ''}") from None

    def loss(trained: list[Array], shared: PyTree, row: Row) -> tuple[Array, PyTree]:
        (others, key), (example, position) = shared, row
        kwargs = {} if key is None else {"key": jax.random.fold_in(key, position)}
        args = rebuild([leaf[None] for leaf in example] if options.keep_batch_dim else example)
        result = parameters.call(of_one, (trained, others), position, *args, **kwargs)
        return _checked_loss(result, options)

    def of_one(model: PyTree, *arguments: PyTree, **kwargs: Any) -> Any:
        try:
            return loss_fn(model, *arguments, **kwargs)
        except (TypeError, ValueError, IndexError) as error:
            if type(error) not in (TypeError, ValueError, IndexError):
                raise
            raise _failure_of_one(error, arguments, options.keep_batch_dim) from error

    rows = [jnp.asarray(leaf) for leaf in arrays], jnp.asarray(positions)
    rows, loss_of = units.grouped(rows, loss, rows_per_unit, weights)
    shared, count = (parameters.others, key), num_rows // rows_per_unit
    trace = partial(Program.of, loss_of if count else _no_loss)
    program = options.program or trace(parameters.trained, shared, rows)
    call = Call(parameters, options, rows, count, shared, program)
    inside = compat.manual_axes((rows, parameters.trained, shared))
    return _of_each_device(call, inside, trace) if inside else call


def _no_loss(*_: PyTree) -> tuple[Array, PyTree]:
    return jnp.zeros(()), None


def _of_each_device(call: Call, inside: set[str], trace: Callable[..., Program]) -> Call:
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
    trained, rows = jax.tree.map(
        lambda leaf: compat.vary(leaf, axes), (call.parameters.trained, call.rows)
    )
    program = trace(trained, call.shared, rows) if axes else call.program
    parameters = replace(call.parameters, trained=trained)
    return call._replace(parameters=parameters, rows=rows, program=program)


def split_batch(batch: tuple[PyTree, ...]) -> tuple[list[Array], int, Callable[..., Any]]:
    """Return the array leaves of a batch, the number of examples, and a function to rebuild one."""
    lengths: dict[str, int] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        name = f"batch{jax.tree_util.keystr(path)}"
        is_foreign = hasattr(leaf, "__array__") and not isinstance(leaf, np.generic)
        if not is_array(leaf) and (isinstance(leaf, Iterator) or is_foreign):  # torch, for example
            raise TypeError(f"{name} is {_validate.kind(leaf)}. Expected a JAX or NumPy array.")
        if not is_array(leaf):
            continue
        if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "OUSMm":
            raise TypeError(
                f"{name} has dtype {leaf.dtype}. Expected numbers; pass text and objects in a list "
                "or a tuple, they are handed on unchanged."
            )
        if leaf.ndim == 0:
            raise ValueError(
                f"{name} is an array without axes. Expected the examples on axis 0; pass constants "
                "as Python numbers, or close over them."
            )
        lengths[name] = len(leaf)
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
    arrays = list(filter(is_array, jax.tree.leaves(batch)))
    return arrays, next(iter(lengths.values())), Frame(batch).rebuild


def refuse_unsplit_numbers(batch: PyTree, n: int) -> None:
    """Refuse a sequence of n numbers that is no array: every example would get all of them."""

    def is_one(node: PyTree) -> bool:
        is_sequence = isinstance(node, Sequence) and not isinstance(node, str)
        return is_sequence and len(node) == n > 1 and all(map(_holds_numbers, node))

    for node in jax.tree.leaves(batch, is_leaf=is_one):
        if is_one(node):
            raise TypeError(
                f"The batch holds a {type(node).__name__} of {n} Python numbers, one for each "
                "example, and only arrays are split: every example would see the numbers of all "
                "others. Expected an array, such as np.asarray(y)."
            )


def _holds_numbers(value: PyTree) -> bool:
    """True for a number, and for a list or tuple of numbers, of lists of numbers and so on."""
    leaves = jax.tree.leaves(value)
    return bool(leaves) and all(isinstance(x, numbers.Number | np.generic) for x in leaves)


def _check_key(key: PyTree) -> None:
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


def _failure_of_one(error: Exception, arguments: PyTree, keep_batch_dim: bool) -> Exception:
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


def _checked_loss(result: PyTree, options: Options) -> tuple[Array, PyTree]:
    """Return (loss (), aux) from the result of `loss_fn` for one example."""
    if options.has_aux and not (isinstance(result, tuple) and len(result) == 2):
        raise TypeError(
            f"has_aux=True, but loss_fn returned {_validate.kind(result)}. Expected (loss, aux)."
        )
    loss, aux = result if options.has_aux else (result, None)
    if not isinstance(loss, jax.Array | np.ndarray | np.generic | int | float | complex):
        raise TypeError(
            f"loss_fn returned {_validate.kind(loss)} for one example. Expected a scalar; use "
            "has_aux=True to return (loss, aux)."
        )
    loss = jnp.asarray(loss)
    if loss.shape != () or not jnp.issubdtype(loss.dtype, jnp.floating):
        how = "the mean over a batch of one" if options.keep_batch_dim else "without a batch axis"
        raise ValueError(
            f"loss_fn returned {loss.dtype}{list(loss.shape)} for one example. Expected a real "
            f"scalar, shape (): the loss of that example alone, {how}."
        )
    return loss, jax.tree.map(_aux_leaf, aux)


def _aux_leaf(leaf: PyTree) -> Any:
    try:
        return jnp.asarray(leaf)
    except TypeError as error:
        raise TypeError(
            f"loss_fn returned {leaf!r} in aux. Expected arrays; they are stacked over "
            "the examples."
        ) from error
