# SPDX-License-Identifier: Apache-2.0
"""Stand-in inputs: concrete arrays with the shapes and dtypes of traced ones, and valid indices."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dualdp_jax import compat

_UNKNOWN = 2  # exclusive bound of integers without a known limit


class Trial(NamedTuple):
    """Distribution of stand-in parameters and rows.

    Attributes:
        name: str, short name.
        kind: "normal", "positive", or "near": positions nearly equal in one array and of opposite
            signs in the next, so that sums over them cancel.
        weights: float, scale of the parameters.
        rows: pair of scales, of the even and the odd arrays of the batch.
    """

    name: str
    kind: str
    weights: float
    rows: tuple[float, float]


#: The last three break Gram forms: squares flushed to zero, and sums that cancel.
TRIALS = (
    Trial("usual", "normal", 1.0, (1.0, 1.0)),
    Trial("large", "normal", 3.0, (10.0, 10.0)),
    Trial("positive", "positive", 1.0, (1.0, 1.0)),
    Trial("small", "normal", 0.1, (1.0, 1e-3)),
    Trial("tiny by huge", "normal", 1.0, (1e-21, 1e18)),
    Trial("huge by tiny", "normal", 1.0, (1e18, 1e-21)),
    Trial("cancelling", "near", 1.0, (1.0, 1.0)),
)
#: For a large model, of which each trial is slow.
TRIALS_OF_LARGE = (TRIALS[0], TRIALS[4], TRIALS[6])
#: Cancelling sums at the largest scale with finite norms, where error bounds may overflow.
EDGE = Trial("edge of overflow", "near", 1e-6, (1.0, 1.0))


def fill(
    trial: Trial, trained: Sequence[Any], rows: Sequence[Any], count: int, limits: dict[int, int]
) -> tuple[list[Any], list[Any]]:
    """Return parameters and rows for a trial.

    `limits` maps an input number (parameters first) to the exclusive upper bound of its integers;
    see `index_limits`.
    """
    rng = np.random.default_rng(len(trial.name))
    kind = "positive" if trial.kind == "positive" else "normal"
    weights = [
        array(t.shape, t.dtype, rng, kind, trial.weights / math.sqrt(_fan_in(t.shape)))
        for t in trained
    ]
    batch = []
    for i, t in enumerate(rows):
        shape, limit = (count, *t.shape), limits.get(len(trained) + i)
        kind = trial.kind if trial.kind != "near" or i % 2 == 0 else "opposite"
        batch.append(array(shape, t.dtype, rng, kind, trial.rows[i % 2], limit))
    return weights, batch


def array(
    shape: tuple[int, ...],
    dtype: Any,
    rng: np.random.Generator,
    kind: str = "normal",
    scale: float = 1.0,
    limit: int | None = None,
) -> Any:
    """Return a random NumPy array, or random keys; integers lie in [0, limit)."""
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        keys = jax.random.split(jax.random.key(int(rng.integers(1 << 30))), math.prod(shape))
        return keys.reshape(shape)
    if jnp.issubdtype(dtype, jnp.bool_):
        return rng.random(shape) < 0.5
    if jnp.issubdtype(dtype, jnp.integer):
        most = min(limit or _UNKNOWN, int(jnp.iinfo(dtype).max) + 1)
        return rng.integers(0, max(most, 1), shape).astype(dtype)
    numbers = rng.normal(size=shape)
    if kind == "positive":
        numbers = np.abs(numbers) + 0.1
    if kind in ("near", "opposite") and len(shape) > 2:
        numbers = numbers[:, :1] + 1e-5 * numbers
    if kind == "opposite" and len(shape) > 2:
        signs = np.where(np.arange(shape[1]) % 2, -1.0, 1.0)
        numbers = numbers * signs.reshape(-1, *(1,) * (len(shape) - 2))
    return (numbers * scale).astype(dtype)


def _fan_in(shape: tuple[int, ...]) -> int:
    """Number of inputs of a weight of this shape; 1 for a vector."""
    return max(math.prod(shape[:-1]), 1) if len(shape) > 1 else 1


def index_limits(jaxpr: Any) -> dict[int, int]:
    """Return upper bounds for the integer inputs of a program from their use as indices.

    Each operation that takes indices, or compares with a range, bounds the inputs that the index
    is computed from; the least bound holds.

    Returns:
        Mapping from input number (closed-over arrays come last) to exclusive upper bound, for
        inputs from which an index is computed.
    """
    limits: dict[int, int] = {}
    variables = [*jaxpr.invars, *jaxpr.constvars]
    _follow(jaxpr, {var: {i} for i, var in enumerate(variables)}, {}, limits)
    return limits


def _follow(
    jaxpr: Any, made_of: dict[Any, set[int]], counts: dict[Any, int], limits: dict[int, int]
) -> list[set[int]]:
    """Collect limits from a jaxpr; return, per result, the program inputs it is computed from.

    `made_of` maps a variable to the program inputs it is computed from, `counts` a variable to the
    length of the iota it holds, `limits` an input to its exclusive upper bound; all three are
    extended.
    """

    def of(var: Any) -> set[int]:
        return set() if isinstance(var, compat.Literal) else made_of.get(var, set())

    for eqn in jaxpr.eqns:
        for var, size in _indices(eqn, counts):
            for number in of(var):
                limits[number] = min(limits.get(number, size), max(size, 1))
        results = [set().union(*map(of, eqn.invars)) for _ in eqn.outvars]
        for inner in compat.jaxprs_of(eqn):
            operands = eqn.invars[len(eqn.invars) - len(inner.invars) :]
            if len(operands) == len(inner.invars):
                counted = {
                    own: counts[var]
                    for own, var in zip(inner.invars, operands, strict=True)
                    if not isinstance(var, compat.Literal) and var in counts
                }
                origins = dict(zip(inner.invars, map(of, operands), strict=True))
                found = _follow(inner, origins, counted, limits)
                if len(found) == len(results):
                    results = [a | b for a, b in zip(results, found, strict=True)]
        for var, result in zip(eqn.outvars, results, strict=True):
            if jnp.issubdtype(getattr(var.aval, "dtype", np.float32), jnp.integer):
                made_of[var] = result
    return [of(var) for var in jaxpr.outvars]


def _indices(eqn: Any, counts: dict[Any, int]) -> Iterator[tuple[Any, int]]:
    """Yield the operands that an equation takes as indices, with their exclusive upper bounds."""
    name, params, inputs = eqn.primitive.name, eqn.params, eqn.invars
    shape = getattr(inputs[0].aval, "shape", ()) if inputs else ()
    if name == "gather":
        numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
        axes = numbers.start_index_map
        yield inputs[1], min((shape[a] - sizes[a] + 1 for a in axes), default=1)
    elif name.startswith("scatter"):
        axes = params["dimension_numbers"].scatter_dims_to_operand_dims
        yield inputs[1], min((shape[axis] for axis in axes), default=1)
    elif name == "dynamic_slice":
        for axis, index in enumerate(inputs[1:]):
            yield index, shape[axis] - params["slice_sizes"][axis] + 1
    elif name == "dynamic_update_slice":
        for axis, index in enumerate(inputs[2:]):
            yield index, shape[axis] - inputs[1].aval.shape[axis] + 1
    elif name == "select_n":
        yield inputs[0], len(inputs) - 1
    elif name == "cond":
        yield inputs[0], len(params["branches"])
    elif name == "iota":
        counts[eqn.outvars[0]] = params["shape"][params["dimension"]]
    elif name == "eq":  # as in one_hot
        for one, other in (inputs, inputs[::-1]):
            if not isinstance(other, compat.Literal) and other in counts:
                yield one, counts[other]
    if len(inputs) == 1 and not isinstance(inputs[0], compat.Literal) and inputs[0] in counts:
        counts[eqn.outvars[0]] = counts[inputs[0]]
