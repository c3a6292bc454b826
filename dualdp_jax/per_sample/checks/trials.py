# SPDX-License-Identifier: Apache-2.0
"""Check of a call inside `jit`: the method on concrete stand-in inputs, while the call is traced.

A traced call has no numbers. So the loss is run on stand-ins of the same shapes and dtypes, with
the same method and the choices for the real number of examples, and compared with plain autodiff of
each stand-in's own loss. This happens once per program, in a thread of its own, in which no
transformation around the call is active.
"""

from __future__ import annotations

import contextlib
import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dualdp import exactness
from dualdp_jax import compat
from dualdp_jax.per_sample.call import Call, program_of
from dualdp_jax.per_sample.checks import spot_check, stand_ins
from dualdp_jax.per_sample.checks.spot_check import ADVICE, Measure
from dualdp_jax.per_sample.request import SUM, Request, answer
from dualdp_jax.rules.base import as_if

_MOST = 256  # cached verdicts
_FEW, _SOME = 2, 8  # rows of a trial, for large and other models
_SMALL = 2**22  # elements of _SOME gradients, above which a trial has _FEW rows
_LARGE = 2**27  # parameters above which nothing is tried: stand-ins would need too much memory
_BISECTIONS = 7  # on the way to the edge of overflow
_LEAST = 1e-12  # norms below this are not compared
_LARGEST = 1e19  # squares of larger norms overflow float32, and their examples are dropped
#: A trial tests the transform, not XLA's optimizations, which take most of the time.
_QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


class Verdict(NamedTuple):
    """Outcome of the trials of a program."""

    status: str  # "passed" or "not checked"
    trials: dict[str, str]  # mapping from trial name to its outcome
    reason: str = ""  # why nothing could be checked; else empty


_PASSED = Verdict("passed", {})
_verdicts: OrderedDict[Hashable, Verdict | exactness.ExactnessError] = OrderedDict()


def forget() -> None:
    """Clear the cache of verdicts."""
    _verdicts.clear()


def is_known(kind: Hashable) -> bool:
    """True if a check of this kind was remembered."""
    return kind in _verdicts


def remember(kind: Hashable, verdict: Verdict | exactness.ExactnessError = _PASSED) -> None:
    """Remember the outcome of a check; the oldest of many are forgotten."""
    _verdicts[kind] = verdict
    while len(_verdicts) > _MOST:
        _verdicts.popitem(last=False)


def examine(request: Request, call: Call, size: int, where: str, *, again: bool = False) -> Verdict:
    """Try a call that is being traced, or return the cached verdict of an earlier trial.

    Raises:
        ExactnessError: our numbers are not those of plain autodiff.
    """
    call = _outside(call)
    consts = tuple(map(_content, call.program.consts))
    kind = (kind_of(request, call), consts, call.num_examples, size)
    if again or not is_known(kind):
        try:
            remember(kind, _in_clean_thread(lambda: _tried(request, call, size, where)))
        except exactness.ExactnessError as error:
            remember(kind, error)
    found = _verdicts[kind]
    if isinstance(found, exactness.ExactnessError):
        raise found.with_traceback(None) from None
    return found


def _outside(call: Call) -> Call:
    """Call with its loss traced for types outside of any `shard_map`."""
    arrays = (call.parameters.trained, call.rows)
    if not compat.manual_axes(arrays):
        return call
    plain = lambda shape, leaf: jax.ShapeDtypeStruct(shape, leaf.dtype)  # noqa: E731
    trained = [plain(leaf.shape, leaf) for leaf in call.parameters.trained]
    row = jax.tree.map(lambda leaf: plain(leaf.shape[1:], leaf), call.rows)
    return call._replace(known=program_of(call.loss, trained, row), analysis=None)


def kind_of(request: Request, call: Call) -> Hashable:
    """Return a key of the request and the program of its loss; it leaves out the examples."""
    return (
        compat.fingerprint(call.program.jaxpr),
        len(call.parameters.trained),
        request.kind_key,
        compat.setting("jax_enable_x64"),
        compat.setting("jax_default_matmul_precision"),
    )


def _content(const: Any) -> Hashable:
    """Key of a closed-over constant: its numbers if they are few, else its type."""
    shape, dtype = jnp.shape(const), str(jnp.result_type(const))
    is_known = not compat.is_traced(const) and not jnp.issubdtype(
        jnp.result_type(const), jax.dtypes.extended
    )
    if is_known and math.prod(shape) <= 1024 and getattr(const, "is_fully_addressable", True):
        return shape, dtype, jax.device_get(const).tobytes()
    return shape, dtype


class StandInCall:
    """Compiled programs of one call on stand-ins: our answer, and the plain gradient.

    Args:
        request: `Request` to answer.
        call: `Call` of the trace; only its types are used.
        size: int, examples per chunk.
    """

    def __init__(self, request: Request, call: Call, size: int) -> None:
        self.request, self.call = request, call
        self.jaxpr, self.consts, _ = call.program
        self.measure = Measure.of(request, call.parameters.names)
        self.precision = spot_check.precision_of(self.jaxpr)
        variables = [var.aval for var in self.jaxpr.invars]
        count = len(call.parameters.trained)
        self.types = variables[:count], variables[count:-1]
        self.limits = stand_ins.index_limits(self.jaxpr)
        numbers = sum(math.prod(aval.shape) for aval in self.types[0])
        self.rows = min(call.num_examples, _SOME if numbers * _SOME <= _SMALL else _FEW)
        self.size = -(-self.rows // 2) if size < call.num_examples else self.rows
        self._programs: dict[str, Any] = {}

    def like(self, trained: Sequence[Any], rows: Any, consts: Sequence[Any]) -> Call:
        """Return a call with these numbers."""

        def loss(trained: Any, row: Any) -> tuple[Any, Any]:
            inputs = [*trained, *jax.tree.leaves(row)]
            return compat.evaluated(self.jaxpr, consts, *inputs)[0], None

        parameters = replace(self.call.parameters, trained=list(trained))
        return Call(parameters, rows, rows[1].shape[0], loss)

    def ours(self, *inputs: Any) -> Any:
        """Return (leaves, norms) of our answer, from (trained, rows, consts, bounds, mask)."""

        def program(trained: Any, rows: Any, consts: Any, bounds: Any, mask: Any) -> Any:
            call, request = self.like(trained, rows, consts), self.request
            if request.clip is not None:
                request = replace(request, clip=replace(request.clip, bounds=bounds))
            found = answer(request, call, mask if request.kind == SUM else None, self.size)
            return found.leaves, found.norms

        return self._compiled("ours", program, inputs)(*inputs)

    def plain(self, *inputs: Any) -> Any:
        """Return the plain gradient of one example, from (trained, row, consts)."""

        def program(trained: Any, row: Any, consts: Any) -> Any:
            rows = jax.tree.map(lambda leaf: leaf[None], row)
            return spot_check.plain_gradient(self.like(trained, rows, consts), row)

        return self._compiled("plain", program, inputs)(*inputs)

    def _compiled(self, name: str, program: Callable[..., Any], inputs: Any) -> Any:
        """Program compiled at its first use."""
        if name not in self._programs:
            self._programs[name] = compat.compiled(program, inputs, _QUICKLY)
        return self._programs[name]

    def inputs(self, trial: stand_ins.Trial) -> tuple[Any, Any, Any]:
        """Return stand-ins for (trained, rows, consts); constants that are known stay."""
        trained, arrays = stand_ins.fill(trial, *self.types, self.rows, self.limits)
        position = self.jaxpr.invars[-1].aval  # () or, of a unit, (rows per unit,)
        shape = (self.rows, *position.shape)
        positions = np.arange(math.prod(shape), dtype=position.dtype).reshape(shape)
        rng, first = np.random.default_rng(7), len(self.jaxpr.invars)
        consts = [
            stand_ins.array(const.shape, const.dtype, rng, limit=self.limits.get(first + i))
            if compat.is_traced(const)
            else const
            for i, const in enumerate(self.consts)
        ]
        return trained, (arrays, positions), consts

    def clipping_all(self, known: Sequence[list[float]]) -> tuple[Measure, dict[str, Any]]:
        """Return measure and bounds at which every example is clipped in every group."""
        measure = self.measure
        if measure.clip is None:
            return measure, {}
        bounds = {
            group: max(min(measure.of_group(lengths, group) for lengths in known) / 2, _LEAST)
            for group in sorted(set(measure.groups))
        }
        dtype = self.call.parameters.dtype
        measure = replace(measure, clip=replace(measure.clip, bounds=bounds))
        return measure, {g: np.asarray(c, dtype) for g, c in bounds.items()}


def _tried(request: Request, call: Call, size: int, where: str) -> Verdict:
    numbers = sum(leaf.size for leaf in call.parameters.trained)
    if numbers > _LARGE:
        return Verdict("not checked", {}, f"{numbers} parameters are too many for stand-ins")
    if call.program.jaxpr.effects:
        return Verdict("not checked", {}, "the loss has side effects, such as callbacks")
    found: dict[str, str] = {}
    try:
        with as_if(call.num_examples), np.errstate(all="ignore"):
            tried = StandInCall(request, call, size)
            for trial in stand_ins.TRIALS if tried.rows > _FEW else stand_ins.TRIALS_OF_LARGE:
                found[trial.name] = _outcome(tried, trial, where)
            edge = _edge(tried)
            if edge is not None:
                found[edge.name] = _outcome(tried, edge, where)
    except exactness.ExactnessError:
        raise
    except Exception as error:  # noqa: BLE001 - reported by `explain` as not checked
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        return Verdict("not checked", found, reason)
    if "agrees" in found.values():
        return Verdict("passed", found)
    return Verdict("not checked", found, "no stand-in gave numbers that could be compared")


def _outcome(tried: StandInCall, trial: stand_ins.Trial, where: str) -> str:
    """Outcome of one trial; a sum is compared as a whole, then for row 0 alone."""
    request = tried.request
    trained, rows, consts = inputs = tried.inputs(trial)
    plain = [tried.plain(trained, spot_check.row_at(rows, k), consts) for k in range(tried.rows)]
    known = [spot_check.lengths(grads) for grads in plain]
    norms = [math.hypot(*lengths) for lengths in known]
    if not all(map(math.isfinite, norms)) or min(norms) < _LEAST:
        return "not usable: norms are zero or no numbers"
    measure, bounds = tried.clipping_all(known)

    def judged(k: int, sides: exactness.Sides) -> str:
        def moved() -> float:
            return spot_check.amplified(
                lambda inputs: tried.plain(*inputs, consts),
                (trained, spot_check.row_at(rows, k)),
                exactness.UNIT[tried.precision],
                lambda start, other: spot_check.moved(measure, start, other),
            )

        if exactness.is_wrong(sides, tried.precision, lambda: None, moved):
            raise exactness.failure(
                sides,
                f"what {where} would give for an example of {trial.name!r} stand-in numbers",
                ADVICE,
                "the clipping bound" if request.kind == SUM else "its norm",
            )
        tolerance = exactness.TOLERANCE[tried.precision]
        return "agrees" if sides.error <= tolerance else "not usable: rounding is amplified"

    leaves, ours = tried.ours(*inputs, bounds, np.ones(tried.rows, bool))
    outcomes, compared = [], range(tried.rows)
    if request.kind == SUM:
        whole = _sides_of_all(measure, plain, known, leaves, spot_check.host(ours).tolist())
        outcomes.append(judged(*whole))
        leaves, ours = tried.ours(*inputs, bounds, np.arange(tried.rows) == 0)
        compared = range(1)
    for k in compared:
        sides = spot_check.sides_of(request, measure, plain[k], leaves, ours, k, known[k])
        if sides is not None:
            outcomes.append(judged(k, sides))
    if "agrees" in outcomes:
        return "agrees"
    return outcomes[0] if outcomes else "not usable: norms are too large to be squared"


def _sides_of_all(
    measure: Measure,
    plain: list[list[Any]],
    known: list[list[float]],
    leaves: list[Any],
    norms: list[float],
) -> tuple[int, exactness.Sides]:
    """Row with the worst norm, and both sides of the whole sum in that row's `Sides`.

    `plain` holds each row's plain gradient, `known` the norms of its leaves, `leaves` our sum, and
    `norms` our norm of each row.
    """
    factors = [
        measure.factors(lengths) if math.isfinite(norm) else [0.0] * len(lengths)
        for lengths, norm in zip(known, norms, strict=True)
    ]
    rests = [spot_check.in_double(leaf) for leaf in leaves]
    for own, row in zip(factors, plain, strict=True):
        rests = [
            rest - f * spot_check.in_double(grad)
            for rest, f, grad in zip(rests, own, row, strict=True)
        ]
    off = [abs(ours / math.hypot(*own) - 1) for ours, own in zip(norms, known, strict=True)]
    worst = max(range(len(off)), key=lambda k: off[k] if math.isfinite(off[k]) else -1)
    nothing = [0.0] * len(leaves)  # a sum may exceed the bound, so sizes are not compared here
    return worst, measure.sides(known[worst], norms[worst], spot_check.lengths(rests), nothing)


def _edge(tried: StandInCall) -> stand_ins.Trial | None:
    """Cancelling rows at the largest scale with finite gradient norms, by bisection; else None."""
    if tried.rows == _FEW:
        return None  # a large model, of which each run is slow

    def is_finite(power: float) -> bool:
        trial = stand_ins.EDGE._replace(rows=(10.0**power,) * 2)
        trained, rows, consts = tried.inputs(trial)
        norm = math.hypot(
            *spot_check.lengths(tried.plain(trained, spot_check.row_at(rows, 0), consts))
        )
        return math.isfinite(norm) and norm < _LARGEST

    low, high = 0.0, 18.5
    if is_finite(high) or not is_finite(low):
        return None
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if is_finite(middle) else (low, middle)
    return stand_ins.EDGE._replace(rows=(10.0**low,) * 2)


def _in_clean_thread(function: Callable[[], Any]) -> Any:
    """Call a function in a new thread, which has no trace, axis names or mesh."""
    settings = compat.thread_settings()

    def body() -> Any:
        with contextlib.ExitStack() as stack:
            for setting in settings:
                stack.enter_context(setting)
            return function()

    with ThreadPoolExecutor(1, "dualdp trial") as pool:
        return pool.submit(body).result()
