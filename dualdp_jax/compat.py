# SPDX-License-Identifier: Apache-2.0
"""The one module that touches what differs between releases of jax, or is internal to it."""

from __future__ import annotations

import contextlib
import math
import sys
import types
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax._src import core as _core
from jax._src.interpreters import partial_eval as _partial_eval
from jax.extend import core as _extend
from jax.sharding import AxisType

Literal = _extend.Literal


def is_traced(*values: Any) -> bool:
    """Whether any leaf of the values is an abstract one, inside `jit`, `grad`, `vmap` or `scan`."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(values))


def in_trace() -> bool:
    """Whether Python runs inside a transformation of jax, also one without traced arguments."""
    return not _core.trace_state_clean()


def wrap_key(data: Any) -> Any:
    """(2,) uint32, as made by `plan.step_key`, to a typed threefry key."""
    return jax.random.wrap_key_data(data, impl="threefry2x32")


def check_counter_layout() -> None:
    """Refuse the old order of threefry counters, under which the normals are not portable."""
    if not getattr(jax.config, "jax_threefry_partitionable"):  # noqa: B009 - unknown to mypy
        raise ValueError(
            "jax_threefry_partitionable=False gives other normals than the plan's. Expected jax's "
            "default; remove jax.config.update('jax_threefry_partitionable', False)."
        )


def flax_module(value: Any) -> Any:
    """`flax.nnx` when the value is one of its modules, else None; flax is never imported for it."""
    nnx = sys.modules.get("flax.nnx")
    return nnx if nnx is not None and isinstance(value, nnx.Module) else None


def holds_equinox(value: Any) -> bool:
    """Whether a pytree is or contains an Equinox module, whose Python numbers are settings."""
    equinox = sys.modules.get("equinox")
    if equinox is None:
        return False
    nodes = jax.tree.leaves(value, is_leaf=lambda node: isinstance(node, equinox.Module))
    return any(isinstance(node, equinox.Module) for node in nodes)


def is_flax_state(value: Any) -> bool:
    """Whether the value is an `nnx.State`, whose leaves sit inside variables."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(value, nnx.State)


def variable_path(path: tuple[Any, ...]) -> tuple[Any, ...]:
    """The path of an nnx variable, less the attribute that holds its array."""
    return path[:-1] if path and getattr(path[-1], "name", None) == "value" else path


# ---------------------------------------------------------------------- axes of a shard_map


def varying_axes(value: Any) -> frozenset[str]:
    """Axes of a `shard_map` over which the devices hold other numbers of a value, as its type says.

    The type says it under `check_vma=True` alone, which is the default.
    """
    aval = jax.typeof(value) if isinstance(value, jax.Array) else value
    axes = getattr(aval, "mat", None) or getattr(aval, "manual_axis_type", None)
    return frozenset(getattr(aval, "vma", None) or () if axes is None else axes.varying)


def vary(value: Any, axes: frozenset[str]) -> Any:
    """The value, marked as one that differs over these axes, so that nothing sums its cotangents.

    The gradient of a value that is the same on all devices is the sum over the devices.
    """
    missing = tuple(sorted(axes - varying_axes(value)))
    if not missing:
        return value
    if hasattr(jax.lax, "pcast"):
        return jax.lax.pcast(value, missing, to="varying")
    pvary: Any = getattr(jax.lax, "pvary")  # noqa: B009, jax before pcast
    return pvary(value, missing)


def type_of(value: Any) -> Any:
    """Shape, dtype and axes of a value, as an argument of `jax.eval_shape` and `make_jaxpr`."""
    return jax.eval_shape(lambda x: x, value)


def type_of_row(rows: Any) -> Any:
    """The same of one row of (n, ...)."""
    if rows.shape[0] == 0:
        return jax.ShapeDtypeStruct(rows.shape[1:], rows.dtype)
    return jax.eval_shape(lambda x: x[0], rows)


def manual_axes(values: Any) -> set[str]:
    """Names of the axes of the `shard_map`s that arrays are inside of."""
    return {
        name
        for sharding in _shardings(values)
        for name, kind in zip(sharding.mesh.axis_names, sharding.mesh.axis_types, strict=True)
        if kind is AxisType.Manual
    }


def collectives(jaxpr: Any, axes: set[str]) -> set[str]:
    """Names of the primitives in a jaxpr that exchange numbers over some axes."""
    found = set()
    for eqn in equations(jaxpr):
        given = [eqn.params.get(key, ()) for key in ("axes", "axis_name")]
        used = {name for names in given for name in (names if type(names) is tuple else (names,))}
        if used & axes and eqn.primitive.name not in ("pvary", "pcast", "axis_index"):
            found.add(eqn.primitive.name)
    return found


# ---------------------------------------------------------------------- jaxprs

#: Primitives that only wrap a jaxpr, with the parameter that holds it.
WRAPPERS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
}


def open_jaxpr(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """(open jaxpr, constants) of a jaxpr that may be closed or not."""
    return (jaxpr.jaxpr, jaxpr.consts) if hasattr(jaxpr, "consts") else (jaxpr, ())


def scan_sizes(eqn: Any) -> tuple[int, int]:
    """Number of constants and of carried values among the inputs of a scan."""
    if "num_consts" in eqn.params:  # until jax 0.11
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = eqn.params["ft_in"].update(list(eqn.invars)).unpack()
    return len(list(consts)), len(list(carry))


def bind(eqn: Any, *values: Any) -> list[Any]:
    """Run one equation on other values."""
    bound = eqn.primitive.get_bind_params(eqn.params)
    functions, params = ([], bound) if isinstance(bound, dict) else bound
    with eqn.ctx.manager:
        out = eqn.primitive.bind(*functions, *values, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


def trace(function: Callable[..., Any], *shapes: Any) -> tuple[Any, Any]:
    """Closed jaxpr of a function, and the structure of its result."""
    closed, result = jax.make_jaxpr(function, return_shape=True)(*shapes)
    return closed, jax.tree.structure(result)


def fingerprint(jaxpr: Any) -> Hashable:
    """What an open jaxpr computes, to be compared with that of others; equal for equal programs."""
    numbers = {var: i for i, var in enumerate([*jaxpr.constvars, *jaxpr.invars])}

    def of(var: Any) -> Hashable:
        if isinstance(var, Literal):
            return repr(var.val), str(var.aval)
        return numbers[var]

    equations = []
    for eqn in jaxpr.eqns:
        operands = tuple(map(of, eqn.invars))
        numbers |= {var: len(numbers) + i for i, var in enumerate(eqn.outvars)}
        params = tuple((key, _fingerprint_of(value)) for key, value in sorted(eqn.params.items()))
        results = tuple(str(var.aval) for var in eqn.outvars)
        equations.append((eqn.primitive.name, operands, results, params))
    inputs = tuple(str(var.aval) for var in [*jaxpr.constvars, *jaxpr.invars])
    return inputs, tuple(equations), tuple(map(of, jaxpr.outvars))


def _fingerprint_of(value: Any, depth: int = 0) -> Hashable:
    """What a parameter of an equation holds: of functions their code and that of their closures."""
    if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
        return fingerprint(open_jaxpr(value)[0])
    if isinstance(value, tuple | list):
        return tuple(_fingerprint_of(part, depth) for part in value)
    function = getattr(value, "f", value)  # jax wraps the functions of custom rules
    if isinstance(function, types.FunctionType):
        if depth > _DEPTH:
            return function.__code__
        cells = [cell for cell in function.__closure__ or () if _is_full(cell)]
        held = (cell.cell_contents for cell in cells)
        inner = [part for part in held if callable(part)]
        return function.__code__, tuple(_fingerprint_of(part, depth + 1) for part in inner)
    if isinstance(value, str | bytes | int | float | bool | type(None)):
        return type(value).__name__, value
    return type(value).__name__, "" if callable(value) else repr(value)


_DEPTH = 6  # of functions inside functions


def _is_full(cell: Any) -> bool:
    """Whether a closure's cell holds anything yet."""
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def compiled(function: Callable[..., Any], inputs: Sequence[Any], options: Any) -> Any:
    """A function compiled for inputs like these, by these options where the compiler has them."""
    lowered = jax.jit(function).lower(*inputs)
    try:
        return lowered.compile(compiler_options=options)
    except (jax.errors.JaxRuntimeError, ValueError):
        return lowered.compile()


def evaluated(jaxpr: Any, consts: Any, *inputs: Any) -> list[Any]:
    """The outputs of an open jaxpr."""
    return list(jax.core.eval_jaxpr(jaxpr, consts, *inputs))


def setting(name: str) -> Any:
    """A setting of jax, as it is on this thread."""
    return getattr(jax.config, name)


def thread_settings() -> Callable[[], Any]:
    """The settings of this thread that decide about numbers, as a context for another thread."""
    x64, precision = setting("jax_enable_x64"), setting("jax_default_matmul_precision")
    promotion = setting("jax_numpy_dtype_promotion")

    @contextlib.contextmanager
    def settings() -> Iterator[None]:
        with (
            jax.enable_x64(x64),
            jax.default_matmul_precision(precision),
            jax.numpy_dtype_promotion(promotion),
            jax.numpy_rank_promotion("allow"),
            jax.debug_nans(False),
            jax.debug_infs(False),
            jax.transfer_guard("allow"),
        ):
            yield

    return settings


def inputs_in_use(jaxpr: Any, outputs: Sequence[bool]) -> list[bool]:
    """Which inputs of an open jaxpr the marked outputs depend on, through nested jaxprs too."""
    return list(_partial_eval.dce_jaxpr(jaxpr, list(outputs))[1])


def input_behind(jaxpr: Any, var: Any) -> int | None:
    """Which input of an open jaxpr a variable provably is, handed on by calls and loops."""
    if var in jaxpr.invars:
        return int(jaxpr.invars.index(var))
    for eqn in jaxpr.eqns:
        name = "scan" if eqn.primitive.name == "scan" else WRAPPERS.get(eqn.primitive.name)
        if name is None or var not in eqn.outvars:
            continue
        position = eqn.outvars.index(var)
        inner, _ = open_jaxpr(eqn.params["jaxpr" if name == "scan" else name])
        index = input_behind(inner, inner.outvars[position])
        if index is None or (name == "scan" and not _is_slot(eqn, index, position)):
            return None
        return input_behind(jaxpr, eqn.invars[index])
    return None


def _is_slot(eqn: Any, index: int, position: int) -> bool:
    """Whether a scan's result at the position is its input: the same carry, or stacked slices."""
    num_consts, num_carry = scan_sizes(eqn)
    if position < num_carry:
        return index == num_consts + position
    return index >= num_consts + num_carry


def low_precision_dtypes(jaxpr: Any) -> set[str]:
    """Floating formats below float32 that a jaxpr computes in, nested jaxprs included."""
    variables = [var for eqn in jaxpr.eqns for var in eqn.outvars] + list(jaxpr.invars)
    dtypes: set[Any] = {getattr(var.aval, "dtype", None) for var in variables} - {None}
    floating = {d for d in dtypes if jnp.issubdtype(d, jnp.floating)}
    found = {d.name for d in floating if d.itemsize < 4}
    rounding = [eqn.params for eqn in jaxpr.eqns if eqn.primitive.name == "reduce_precision"]
    few = {params["mantissa_bits"] for params in rounding if params["mantissa_bits"] < 23}
    found |= {f"{bits} bits of mantissa" for bits in few}
    return found.union(*(low_precision_dtypes(inner) for inner in _extend.subjaxprs(jaxpr)))


def computes_in(jaxpr: Any, dtype: Any) -> bool:
    """Whether a number of this dtype occurs in a jaxpr, nested ones included."""
    variables = [*jaxpr.invars, *(var for eqn in equations(jaxpr) for var in eqn.outvars)]
    return any(getattr(var.aval, "dtype", None) == dtype for var in variables)


def multiplies_by_default(jaxpr: Any) -> bool:
    """Whether a product of matrices leaves its precision to the device."""
    highest = (jax.lax.Precision.HIGHEST,) * 2
    products = [e for e in equations(jaxpr) if "precision" in e.params]
    return any(eqn.params["precision"] not in (highest, highest[0]) for eqn in products)


def equations(jaxpr: Any) -> Iterator[Any]:
    """The equations of an open jaxpr, those of nested jaxprs included."""
    yield from jaxpr.eqns
    for inner in _extend.subjaxprs(jaxpr):
        yield from equations(inner)


def jaxprs_of(eqn: Any) -> list[Any]:
    """The open jaxprs among the parameters of an equation."""
    return list(_core.jaxprs_in_params(eqn.params))


def primitives_of(eqn: Any) -> set[str]:
    """Names of the primitives of an equation, those of nested jaxprs included."""
    return {eqn.primitive.name}.union(
        e.primitive.name for j in jaxprs_of(eqn) for e in equations(j)
    )


def has_own_backward(eqn: Any) -> bool:
    """Whether a backward that somebody wrote (`custom_vjp`) is in an equation, at any depth."""
    return any(name.startswith("custom_vjp_call") for name in primitives_of(eqn))


def _shardings(values: Any) -> list[Any]:
    """What jax knows of where arrays lie; inside `jit` not what comes by `in_shardings`."""
    leaves = [leaf for leaf in jax.tree.leaves(values) if isinstance(leaf, jax.Array)]
    return [jax.typeof(leaf).sharding for leaf in leaves]


def spans_devices(values: Any) -> bool:
    """Whether an array is known to lie on a mesh of several devices, also inside `jit`.

    Axes that a `shard_map` has taken over do not count: there the program is that of one device.
    """
    return any(_num_parts(sharding.mesh) > 1 for sharding in _shardings(values))


def may_span_devices(values: Any) -> bool:
    """Whether arrays may turn out to lie on several devices once the program is compiled.

    Inside `jit` the types do not say what comes by `in_shardings`, or from a constraint.
    """
    if spans_devices(values):
        return True
    leaves = [leaf for leaf in jax.tree.leaves(values) if is_traced(leaf)]
    unknown = any(jax.typeof(leaf).sharding.mesh.empty for leaf in leaves)
    return unknown and jax.device_count() > 1


def _num_parts(mesh: Any) -> int:
    """Devices of a mesh that the partitioner spreads an array over."""
    kinds = zip(mesh.shape.values(), mesh.axis_types, strict=True)
    return math.prod(size for size, kind in kinds if kind is not AxisType.Manual)


def is_sharded_in_type(values: Any) -> bool:
    """Whether the type of an array says how it is spread, as on meshes with explicit axes."""
    return any(any(sharding.spec) for sharding in _shardings(values))
