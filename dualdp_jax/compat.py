# SPDX-License-Identifier: Apache-2.0
"""Adapter for everything that differs between releases of jax, or is internal to jax."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
from jax._src import core as _core
from jax._src.interpreters import partial_eval as _partial_eval
from jax.extend import core as _extend
from jax.sharding import AxisType

Literal = _extend.Literal
PyTree = Any  # of arrays; jax has no type for it
Jaxpr = _extend.Jaxpr
Equation = _extend.JaxprEqn
KeyPath = jax.tree_util.KeyPath
Function = Callable[..., PyTree]
#: () -> False inside a transformation of jax, also one without traced arguments.
is_eager = _core.trace_state_clean
P = ParamSpec("P")
T = TypeVar("T")


def first_line(error: Exception) -> str:
    """Return what an error says, without its explanations."""
    return str(error).partition("\n")[0].rstrip(".")


def is_traced(*values: PyTree) -> bool:
    """True if any leaf is abstract, inside `jit`, `grad`, `vmap` or `scan`."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(values))


def is_of_this_trace(value: PyTree) -> bool:
    """True for a traced value that does not come from outside of the innermost transformation."""
    return getattr(value, "_trace", None) is _core.trace_ctx.trace


def wrap_key(data: PyTree) -> Any:
    """Return a typed threefry key from (2,) uint32 key data."""
    return jax.random.wrap_key_data(data, impl="threefry2x32")


def flax_module(value: PyTree) -> Any:
    """Return `flax.nnx` if the value is one of its modules, else None; never imports flax."""
    nnx = sys.modules.get("flax.nnx")
    return nnx if nnx is not None and isinstance(value, nnx.Module) else None


def holds_equinox(value: PyTree) -> bool:
    """True if a pytree contains an Equinox module, whose Python numbers are settings."""
    equinox = sys.modules.get("equinox")
    return equinox is not None and bool(nodes_of(value, equinox.Module))


def nodes_of(tree: PyTree, kind: type) -> list[Any]:
    """Return the nodes of a pytree that are of this type."""
    nodes = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, kind))
    return [node for node in nodes if isinstance(node, kind)]


def variable_path(path: KeyPath) -> KeyPath:
    """Return the path of an nnx variable without the attribute that holds its array."""
    return path[:-1] if path and getattr(path[-1], "name", None) == "value" else path


def leaf_paths(tree: PyTree) -> list[tuple[str, Any]]:
    """Return (path as text, leaf) of every leaf."""
    return [
        (jax.tree_util.keystr(variable_path(path), simple=True, separator="."), leaf)
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
    ]


def varying_axes(value: PyTree) -> frozenset[str]:
    """Return the `shard_map` axes over which a value differs between devices, by its type.

    The type records them only under `check_vma=True`, which is the default.
    """
    aval = jax.typeof(value) if isinstance(value, jax.Array) else value
    axes = getattr(aval, "mat", None) or getattr(aval, "manual_axis_type", None)
    return frozenset(() if axes is None else axes.varying)


def vary(value: PyTree, axes: frozenset[str]) -> Any:
    """Mark a value as varying over these axes, so that its cotangents are not summed over them.

    The gradient of a value that is the same on all devices is summed over the devices.
    """
    missing = tuple(sorted(axes - varying_axes(value)))
    return jax.lax.pcast(value, missing, to="varying") if missing else value


def varying_zeros(shape: tuple[int, ...], dtype: np.dtype, axes: frozenset[str]) -> Any:
    """Return zeros marked as varying over these axes."""
    return vary(jnp.zeros(shape, dtype), axes)


def type_of_row(rows: PyTree) -> Any:
    """Return shape, dtype and axes of one row of (n, ...)."""
    if rows.shape[0] == 0:
        return jax.ShapeDtypeStruct(rows.shape[1:], rows.dtype)
    return jax.eval_shape(lambda x: x[0], rows)


def manual_axes(values: PyTree) -> set[str]:
    """Return the names of the `shard_map` axes that enclose arrays."""
    return {name for name, _, is_manual in _mesh_axes(values) if is_manual}


def collectives(jaxpr: Jaxpr, axes: set[str]) -> set[str]:
    """Return the names of the primitives in a jaxpr that communicate over some axes."""
    found = set()
    for eqn in equations(jaxpr):
        given = [eqn.params.get(key, ()) for key in ("axes", "axis_name")]
        used = {name for names in given for name in (names if type(names) is tuple else (names,))}
        if used & axes and eqn.primitive.name not in ("pvary", "pcast", "axis_index"):
            found.add(eqn.primitive.name)
    return found


#: Primitives that only wrap a jaxpr, with the parameter that holds it.
WRAPPERS = {
    "jit": "jaxpr",
    "closed_call": "call_jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
}


def open_jaxpr(jaxpr: PyTree) -> tuple[Any, Sequence[Any]]:
    """Return (open jaxpr, constants) of a closed or open jaxpr."""
    return (jaxpr.jaxpr, jaxpr.consts) if hasattr(jaxpr, "consts") else (jaxpr, ())


def scan_sizes(eqn: Equation) -> tuple[int, int]:
    """Return the numbers of constants and of carried values among the inputs of a scan."""
    if "num_consts" in eqn.params:  # until jax 0.11
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = eqn.params["ft_in"].update(list(eqn.invars)).unpack()
    return len(list(consts)), len(list(carry))


def bind(eqn: Equation, *values: PyTree) -> list[Any]:
    """Evaluate one equation on other values."""
    bound = eqn.primitive.get_bind_params(eqn.params)
    functions, params = ([], bound) if isinstance(bound, dict) else bound
    with eqn.ctx.manager:
        out = eqn.primitive.bind(*functions, *values, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


def trace(function: Function, *shapes: PyTree) -> tuple[Any, Any]:
    """Return the closed jaxpr of a function, and the structure of its result."""
    closed, result = jax.make_jaxpr(function, return_shape=True)(*shapes)
    return closed, jax.tree.structure(result)


def fingerprint(jaxpr: Jaxpr) -> Hashable:
    """Return a hashable key of an open jaxpr, equal for equal programs."""
    inputs = [*jaxpr.constvars, *jaxpr.invars]
    numbers = {var: i for i, var in enumerate(inputs)}

    def of(var: PyTree) -> Hashable:
        return (repr(var.val), str(var.aval)) if isinstance(var, Literal) else numbers[var]

    equations = []
    for eqn in jaxpr.eqns:
        operands = tuple(map(of, eqn.invars))
        numbers |= {var: len(numbers) + i for i, var in enumerate(eqn.outvars)}
        params = tuple((key, _fingerprint_of(value)) for key, value in sorted(eqn.params.items()))
        results = tuple(str(var.aval) for var in eqn.outvars)
        equations.append((eqn.primitive.name, operands, results, params))
    types = tuple(str(var.aval) for var in inputs)
    return types, tuple(equations), tuple(map(of, jaxpr.outvars))


def _fingerprint_of(value: PyTree, depth: int = 0) -> Hashable:
    """Key of an equation's parameter; for functions their code and that of their closures."""
    if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
        return fingerprint(open_jaxpr(value)[0])
    if isinstance(value, tuple | list):
        return tuple(_fingerprint_of(part, depth) for part in value)
    function = value
    while callable(function) and (name := next(filter(partial(hasattr, function), _HELD), None)):
        function = getattr(function, name)
    if isinstance(function, types.FunctionType):
        inner = _closure_of(function) if depth <= _DEPTH else ()
        parts = [_fingerprint_of(part, depth + 1) for part in inner if callable(part)]
        return function.__code__, *parts
    if isinstance(value, str | bytes | int | float | bool | type(None)):
        return type(value).__name__, value
    return type(value).__name__, "" if callable(value) else repr(value)


_DEPTH = 6  # depth of functions inside functions
#: Where jax, and `functools.partial`, hold the function of a custom rule or a callback.
_HELD = ("f", "func", "rule", "callback_func")


def _closure_of(function: PyTree) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # an empty cell
            yield cell.cell_contents


def compiled_quickly(jaxpr: Jaxpr) -> dict[str, bool | int] | None:
    """Return compiler options of a program that runs seldom: compiling is what it costs.

    XLA's older way to make code for a CPU is quicker to compile; with indices narrower than 32 bits
    it may write beyond an array (found in jaxlib 0.10.2).
    """
    if jax.default_backend() != "cpu":
        return None
    options = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    narrow = any(jnp.issubdtype(d, jnp.integer) and d.itemsize < 4 for d in dtypes_of(jaxpr))
    if jaxlib.__version__.startswith("0.10.") and not narrow:  # others may not know these options
        quick = {"xla_cpu_use_fusion_emitters": False, "xla_cpu_parallel_codegen_split_count": 1}
        options.update(quick)
    return options


def evaluated(jaxpr: Jaxpr, consts: PyTree, *inputs: PyTree) -> list[Any]:
    """Evaluate an open jaxpr."""
    return list(jax.core.eval_jaxpr(jaxpr, consts, *inputs))


def setting(name: str) -> Any:
    """Return a setting of jax on this thread."""
    return getattr(jax.config, name)


def promoting(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a public function to compute by jax's default promotion of dtypes and ranks.

    What a stricter setting of the user's accepts, it gives the same numbers.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return function(*args, **kwargs)

    return call


def inputs_in_use(jaxpr: Jaxpr, outputs: Sequence[bool]) -> list[bool]:
    """Return, per input, True if the marked outputs depend on it, also through nested jaxprs."""
    return list(_partial_eval.dce_jaxpr(jaxpr, list(outputs))[1])


def without_zero_products(jaxpr: Jaxpr) -> Jaxpr:
    """Return the jaxpr in which a product with the constant 0 depends on no other factor."""
    eqns = []
    for eqn in jaxpr.eqns:
        zeros: list[Any] = [v for v in eqn.invars if isinstance(v, Literal) and np.all(v.val == 0)]
        is_zero = eqn.primitive.name == "mul" and zeros
        eqns.append(eqn.replace(invars=zeros[:1] * 2) if is_zero else eqn)
    return jaxpr.replace(eqns=eqns)


def input_behind(jaxpr: Jaxpr, var: PyTree) -> int | None:
    """Return the index of the input that a variable provably equals, through calls and loops."""
    if var in jaxpr.invars:
        return int(jaxpr.invars.index(var))
    for eqn in jaxpr.eqns:
        name = "scan" if eqn.primitive.name == "scan" else WRAPPERS.get(eqn.primitive.name)
        if name is None or var not in eqn.outvars:
            continue
        position = eqn.outvars.index(var)
        inner, _ = open_jaxpr(eqn.params["jaxpr" if name == "scan" else name])
        index = input_behind(inner, inner.outvars[position])
        if index is None:
            return None
        if name == "scan":  # passes an input on in its own carry, or in stacked slices
            num_consts, num_carry = scan_sizes(eqn)
            if position < num_carry and index != num_consts + position:
                return None
            if position >= num_carry and index < num_consts + num_carry:
                return None
        return input_behind(jaxpr, eqn.invars[index])
    return None


def low_precision_dtypes(jaxpr: Jaxpr) -> set[str]:
    """Return the floating formats below float32 in a jaxpr, nested ones included."""
    floating = {dtype for dtype in dtypes_of(jaxpr) if jnp.issubdtype(dtype, jnp.floating)}
    rounding = [e.params for e in equations(jaxpr) if e.primitive.name == "reduce_precision"]
    few = {params["mantissa_bits"] for params in rounding if params["mantissa_bits"] < 23}
    names = {dtype.name for dtype in floating if dtype.itemsize < 4}
    return names | {f"{bits} bits of mantissa" for bits in few}


def dtypes_of(jaxpr: Jaxpr) -> set[Any]:
    """Return the dtypes of the inputs of a jaxpr and of all results, nested ones included."""
    variables = [*jaxpr.invars, *(var for eqn in equations(jaxpr) for var in eqn.outvars)]
    return {getattr(var.aval, "dtype", None) for var in variables} - {None}


def multiplies_by_default(jaxpr: Jaxpr) -> bool:
    """True if a product of matrices leaves its precision to the device."""
    highest = (jax.lax.Precision.HIGHEST,) * 2
    products = [e for e in equations(jaxpr) if "precision" in e.params]
    return any(eqn.params["precision"] not in (highest, highest[0]) for eqn in products)


def equations(jaxpr: Jaxpr) -> Iterator[Any]:
    """Yield the equations of an open jaxpr, those of nested jaxprs included."""
    yield from jaxpr.eqns
    for inner in _extend.subjaxprs(jaxpr):
        yield from equations(inner)


def primitives_of(eqn: Equation) -> set[str]:
    """Return the names of an equation's primitives, those of nested jaxprs included."""
    inner = [e for jaxpr in _core.jaxprs_in_params(eqn.params) for e in equations(jaxpr)]
    return {e.primitive.name for e in [eqn, *inner]}


def has_own_backward(eqn: Equation) -> bool:
    """True if an equation contains a user's backward pass (`custom_vjp`), at any depth."""
    return any(name.startswith("custom_vjp_call") for name in primitives_of(eqn))


Map = Callable[[Function], Function]  # function of one example -> of all


def mapping(convolves: Callable[[], bool], arrays: PyTree) -> Map:
    """Return the map from a function of one example to one of all: `jax.vmap` where XLA is right.

    `convolves` () is True if examples have kernels, or kernel gradients, of their own.
    Convolutions with a kernel per example become one with batch groups, of which XLA's partitioner
    loses most when arrays are spread over devices (found in jax 0.10.2; a test watches it). There,
    and for an operation without a batching rule (`jax.lax.ragged_dot`), examples go one by one.
    """
    return one_by_one if may_span_devices(arrays) and convolves() else all_at_once


def all_at_once(function: Function) -> Function:
    """Map a function of one example over all by `jax.vmap`, or one by one if jax cannot."""

    def each(rows: PyTree) -> Any:
        try:
            return jax.vmap(function)(rows)
        except NotImplementedError:  # an operation without a batching rule
            return one_by_one(function)(rows)

    return each


def one_by_one(function: Function) -> Function:
    """Map a function of one example over all with `jax.lax.map`."""
    return lambda rows: jax.lax.map(function, rows)


def _shardings(values: PyTree) -> list[Any]:
    """Shardings in the types of arrays; inside `jit` those of `in_shardings` are unknown."""
    leaves = [leaf for leaf in jax.tree.leaves(values) if isinstance(leaf, jax.Array)]
    return [jax.typeof(leaf).sharding for leaf in leaves]


def _mesh_axes(values: PyTree) -> Iterator[tuple[str, int, bool]]:
    """(name, size, True if of a `shard_map`) of each axis of the meshes that arrays lie on."""
    for mesh in {sharding.mesh for sharding in _shardings(values)}:
        for (name, size), kind in zip(mesh.shape.items(), mesh.axis_types, strict=True):
            yield name, size, kind is AxisType.Manual


def spans_devices(values: PyTree) -> bool:
    """True if an array is known to lie on a mesh of several devices, also inside `jit`.

    Axes of an enclosing `shard_map` do not count: inside it the program is that of one device.
    """
    return any(size > 1 and not is_manual for _, size, is_manual in _mesh_axes(values))


def may_span_devices(values: PyTree) -> bool:
    """True if arrays may lie on several devices once the program is compiled.

    Inside `jit` types do not record the shardings of `in_shardings` or of a constraint.
    """
    leaves = [leaf for leaf in jax.tree.leaves(values) if is_traced(leaf)]
    unknown = any(jax.typeof(leaf).sharding.mesh.empty for leaf in leaves)
    return spans_devices(values) or (unknown and jax.device_count() > 1)


def is_sharded_in_type(values: PyTree) -> bool:
    """True if an array's type holds its sharding, as on meshes with explicit axes."""
    return any(any(sharding.spec) for sharding in _shardings(values))
