# SPDX-License-Identifier: Apache-2.0
"""The check of a call inside `jit`: the transform tried on concrete stand-ins while it is traced.

A traced call has no numbers. So the loss is run on stand-ins of the same shapes and dtypes, through
the same method and with the choices that are made for the real number of examples, and compared
with plain autodiff of each stand-in's own loss. This happens once for a program, in a thread of its
own, in which none of the transformations around the call is active.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dualdp import exactness
from dualdp_jax import checks, compat, stand_ins
from dualdp_jax.call import Call, program_of
from dualdp_jax.checks import ADVICE, Measure
from dualdp_jax.request import SUM, Request, answer
from dualdp_jax.rules import RULES
from dualdp_jax.rules.kinds import as_if

_MOST = 256  # programs that are remembered
_FEW, _SOME = 2, 8  # rows of a trial
_SMALL = 2**22  # numbers of _SOME gradients, above which a trial has _FEW rows
_LARGE = 2**27  # parameters above which nothing is tried: stand-ins would take too much memory
_BISECTIONS = 7  # on the way to the edge of overflow
_LEAST = 1e-12  # norms below this say nothing
#: A trial is about the transform and not about XLA's optimizations, which take most of the time.
_QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


class Verdict(NamedTuple):
    """What the trials of a program showed.

    Attributes:
        status: "passed" or "not checked".
        trials: name -> what became of it.
        reason: why nothing could be checked; empty where something was.
    """

    status: str
    trials: dict[str, str]
    reason: str = ""


_verdicts: OrderedDict[Hashable, Verdict | exactness.ExactnessError] = OrderedDict()


def forget() -> None:
    """Take every program for a new one again."""
    _verdicts.clear()


def examine(request: Request, call: Call, size: int, where: str, *, again: bool = False) -> Verdict:
    """Try a call that is being traced, or say what came of it when it was tried before.

    Args:
        request: what is asked.
        call: the examples and their loss, n >= 1.
        size: examples worked on at once.
        where: what was called, for the error.
        again: try it although it was tried before.

    Raises:
        ExactnessError: our numbers are not those of plain autodiff.
    """
    call = _outside(call)
    known = _key(request, call, size)
    if again or known not in _verdicts:
        try:
            _verdicts[known] = _in_clean_thread(lambda: _tried(request, call, size, where))
        except exactness.ExactnessError as error:
            _verdicts[known] = error
        while len(_verdicts) > _MOST:
            _verdicts.popitem(last=False)
    found = _verdicts[known]
    if isinstance(found, exactness.ExactnessError):
        raise found.with_traceback(None) from None
    return found


def _outside(call: Call) -> Call:
    """The call, its loss traced with types that belong to no `shard_map`."""
    arrays = (call.parameters.trained, call.rows)
    if not compat.manual_axes(arrays):
        return call
    plain = lambda shape, leaf: jax.ShapeDtypeStruct(shape, leaf.dtype)  # noqa: E731
    trained = [plain(leaf.shape, leaf) for leaf in call.parameters.trained]
    row = jax.tree.map(lambda leaf: plain(leaf.shape[1:], leaf), call.rows)
    return call._replace(known=program_of(call.loss, trained, row))


def _key(request: Request, call: Call, size: int) -> Hashable:
    """What decides about the outcome of a trial."""
    clip, program = request.clip, call.program
    return (
        compat.fingerprint(program.jaxpr),
        tuple(_content(const) for const in program.consts),
        len(call.parameters.trained),
        request.kind,
        request.method,
        request.per_parameter,
        None if clip is None else (clip.clipping, tuple(clip.groups)),
        call.num_examples,
        size,
        tuple(RULES.items()),
        compat.setting("jax_enable_x64"),
        compat.setting("jax_default_matmul_precision"),
    )


def _content(const: Any) -> Hashable:
    """A constant that a loss closes over: its numbers where they are few, else its type."""
    shape, dtype = jnp.shape(const), str(jnp.result_type(const))
    is_known = not compat.is_traced(const) and not jnp.issubdtype(
        jnp.result_type(const), jax.dtypes.extended
    )
    if is_known and math.prod(shape) <= 1024 and getattr(const, "is_fully_addressable", True):
        return shape, dtype, jax.device_get(const).tobytes()
    return shape, dtype


# ---------------------------------------------------------------------- one program


class Tried:
    """One program on stand-ins: ours and the plain side, compiled.

    Args:
        request: what is asked.
        call: of the trace; only its types are used.
        size: examples worked on at once.
    """

    def __init__(self, request: Request, call: Call, size: int) -> None:
        self.request, self.call = request, call
        self.jaxpr, self.consts, _ = call.program
        self.measure = Measure.of(request, call.parameters.names)
        self.precision = checks.precision_of(self.jaxpr)
        variables = [var.aval for var in self.jaxpr.invars]
        count = len(call.parameters.trained)
        self.types = variables[:count], variables[count:-1]
        self.limits = stand_ins.index_limits(self.jaxpr)
        numbers = sum(math.prod(aval.shape) for aval in self.types[0])
        self.rows = min(call.num_examples, _SOME if numbers * _SOME <= _SMALL else _FEW)
        cut = size < call.num_examples
        self.size = -(-self.rows // 2) if cut else self.rows
        self._ours: Any = None
        self._plain: Any = None

    def like(self, trained: Sequence[Any], rows: Any, consts: Sequence[Any]) -> Call:
        """A call of these numbers."""

        def loss(trained: Any, row: Any) -> tuple[Any, Any]:
            inputs = [*trained, *jax.tree.leaves(row)]
            return compat.evaluated(self.jaxpr, consts, *inputs)[0], None

        parameters = replace(self.call.parameters, trained=list(trained))
        return Call(parameters, rows, rows[1].shape[0], loss)

    def ours(self, *inputs: Any) -> Any:
        """(leaves, norms) of our answer, from (trained, rows, consts, bounds, mask)."""

        def program(trained: Any, rows: Any, consts: Any, bounds: Any, mask: Any) -> Any:
            call, request = self.like(trained, rows, consts), self.request
            if request.clip is not None:
                request = replace(request, clip=replace(request.clip, bounds=bounds))
            found = answer(request, call, mask if request.kind == SUM else None, self.size)
            return found.leaves, found.norms

        if self._ours is None:
            self._ours = compat.compiled(program, inputs, _QUICKLY)
        return self._ours(*inputs)

    def plain(self, *inputs: Any) -> Any:
        """Gradient of one example, from (trained, row, consts)."""

        def program(trained: Any, row: Any, consts: Any) -> Any:
            return checks.plain_gradient(self.like(trained, _as_rows(row), consts), row)

        if self._plain is None:
            self._plain = compat.compiled(program, inputs, _QUICKLY)
        return self._plain(*inputs)

    def inputs(self, trial: stand_ins.Trial) -> tuple[Any, Any, Any]:
        """Stand-ins for (trained, rows, consts)."""
        trained, arrays = stand_ins.fill(trial, *self.types, self.rows, self.limits)
        positions = np.arange(self.rows, dtype=self.jaxpr.invars[-1].aval.dtype)
        return trained, (arrays, positions), self._stand_in_consts()

    def _stand_in_consts(self) -> list[Any]:
        """What the loss closes over: itself, or a stand-in where it is traced."""
        rng, first = np.random.default_rng(7), len(self.jaxpr.invars)
        return [
            stand_ins.array(const.shape, const.dtype, rng, limit=self.limits.get(first + i))
            if compat.is_traced(const)
            else const
            for i, const in enumerate(self.consts)
        ]


def _as_rows(row: Any) -> Any:
    """One example as (1, ...)."""
    return jax.tree.map(lambda leaf: leaf[None], row)


def _tried(request: Request, call: Call, size: int, where: str) -> Verdict:
    """Run the trials of a program."""
    numbers = sum(leaf.size for leaf in call.parameters.trained)
    if numbers > _LARGE:
        return Verdict("not checked", {}, f"{numbers} parameters are too many for stand-ins")
    if call.program.jaxpr.effects:
        return Verdict("not checked", {}, "the loss has side effects, such as callbacks")
    found: dict[str, str] = {}
    try:
        with as_if(call.num_examples), np.errstate(all="ignore"):
            tried = Tried(request, call, size)
            for trial in stand_ins.TRIALS if tried.rows > _FEW else stand_ins.TRIALS_OF_LARGE:
                found[trial.name] = _one(tried, trial, where)
            edge = _edge(tried)
            if edge is not None:
                found[edge.name] = _one(tried, edge, where)
    except exactness.ExactnessError:
        raise
    except Exception as error:  # noqa: BLE001 - what can't be tried is said by `explain`
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        return Verdict("not checked", found, reason)
    if "agrees" in found.values():
        return Verdict("passed", found)
    return Verdict("not checked", found, "no stand-in gave numbers that could be compared")


def _one(tried: Tried, trial: stand_ins.Trial, where: str) -> str:
    """What became of one trial.

    Raises:
        ExactnessError: the two sides differ by more than rounding.
    """
    trained, rows, consts = inputs = tried.inputs(trial)
    plain = [tried.plain(trained, checks.row_at(rows, k), consts) for k in range(tried.rows)]
    known = [checks.lengths(grads) for grads in plain]
    norms = [math.hypot(*lengths) for lengths in known]
    if not all(map(math.isfinite, norms)) or min(norms) < _LEAST:
        return "not usable: norms are zero or no numbers"
    measure, bounds = _measured(tried, known)
    outcomes = [
        _judged(tried, measure, sides, (*inputs, k), trial, where)
        for k, sides in _all_sides(tried, measure, (plain, known), inputs, bounds)
    ]
    if "agrees" in outcomes:
        return "agrees"
    return outcomes[0] if outcomes else "not usable: norms are too large to be squared"


Plain = tuple[list[list[Any]], list[list[float]]]  # gradients of all rows, lengths of their leaves


def _all_sides(
    tried: Tried, measure: Measure, plain: Plain, inputs: Any, bounds: Any
) -> Iterator[tuple[int, exactness.Sides]]:
    """The number of a row and its two sides; a sum is compared as a whole, and for one row alone.

    Args:
        tried: the program.
        measure: with the bounds of this trial.
        plain: the plain side of each row.
        inputs: trained, rows, consts.
        bounds: of this trial.
    """
    request, (grads, known) = tried.request, plain
    leaves, norms = tried.ours(*inputs, bounds, np.ones(tried.rows, bool))
    rows: Sequence[int] = range(tried.rows)
    if request.kind == SUM:
        yield _of_all(measure, plain, leaves, [float(norm) for norm in checks.host(norms)])
        leaves, norms = tried.ours(*inputs, bounds, np.arange(tried.rows) == 0)
        rows = (0,)
    for k in rows:
        sides = checks.sides_of(request, measure, grads[k], leaves, norms, k, known[k])
        if sides is not None:
            yield k, sides


def _of_all(
    measure: Measure, plain: Plain, leaves: list[Any], norms: list[float]
) -> tuple[int, exactness.Sides]:
    """The row with the worst norm, and both sides of the whole sum as if they were that row's."""
    grads, known = plain
    factors = [
        measure.factors(lengths) if math.isfinite(norm) else [0.0] * len(lengths)
        for lengths, norm in zip(known, norms, strict=True)
    ]
    gaps = []
    for i, leaf in enumerate(leaves):
        rest = np.asarray(checks.host(leaf), np.float64)
        for f, row in zip(factors, grads, strict=True):
            rest = rest - f[i] * np.asarray(row[i], np.float64)
        gaps.append(checks.length(rest))
    off = [abs(ours / math.hypot(*own) - 1) for ours, own in zip(norms, known, strict=True)]
    worst = max(range(len(off)), key=lambda k: off[k] if math.isfinite(off[k]) else -1)
    nothing = [0.0] * len(leaves)  # a sum may be longer than a bound; one row is looked at alone
    return worst, measure.sides(known[worst], norms[worst], gaps, nothing)


def _judged(
    tried: Tried,
    measure: Measure,
    sides: exactness.Sides,
    inputs: tuple[Any, Any, Any, int],
    trial: stand_ins.Trial,
    where: str,
) -> str:
    """Whether the two sides of one row agree, or rounding explains why they do not.

    Raises:
        ExactnessError: neither.
    """
    trained, rows, consts, k = inputs

    def moved() -> float:
        return checks.amplified(
            lambda inputs: tried.plain(*inputs, consts),
            (trained, checks.row_at(rows, k)),
            exactness.UNIT[tried.precision],
            lambda start, other: checks.moved(measure, start, other),
        )

    if exactness.is_wrong(sides, tried.precision, lambda: None, moved):
        raise exactness.failure(
            sides,
            f"what {where} would give for an example of {trial.name!r} stand-in numbers",
            ADVICE,
            "the clipping bound" if tried.request.kind == SUM else "its norm",
        )
    tolerance = exactness.TOLERANCE[tried.precision]
    return "agrees" if sides.error <= tolerance else "not usable: rounding is amplified"


def _measured(tried: Tried, known: Sequence[list[float]]) -> tuple[Measure, dict[str, Any]]:
    """The measure of a trial, with bounds at which every example is clipped in every group."""
    measure = tried.measure
    if measure.clip is None:
        return measure, {}
    bounds = {
        group: max(min(measure.of_group(lengths, group) for lengths in known) / 2, _LEAST)
        for group in sorted(set(measure.groups))
    }
    clip = replace(measure.clip, bounds=bounds)
    dtype = tried.call.parameters.dtype
    return replace(measure, clip=clip), {g: np.asarray(c, dtype) for g, c in bounds.items()}


def _edge(tried: Tried) -> stand_ins.Trial | None:
    """Cancelling rows at the largest scale whose gradients have finite norms, by bisection."""
    if tried.rows == _FEW:
        return None  # of a large model every run takes its time

    def is_finite(power: float) -> bool:
        trial = stand_ins.EDGE._replace(rows=(10.0**power,) * 2)
        trained, rows, consts = tried.inputs(trial)
        norm = math.hypot(*checks.lengths(tried.plain(trained, checks.row_at(rows, 0), consts)))
        return math.isfinite(norm) and norm < _LARGEST

    low, high = 0.0, 18.5
    if is_finite(high) or not is_finite(low):
        return None
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if is_finite(middle) else (low, middle)
    return stand_ins.EDGE._replace(rows=(10.0**low,) * 2)


_LARGEST = 1e19  # norms beyond have no square in float32, and their examples are dropped


def _in_clean_thread(function: Callable[[], Any]) -> Any:
    """The result of a function in a new thread, which has no trace, axis names or mesh."""
    settings = compat.thread_settings()
    outcome: list[tuple[Any, BaseException | None]] = []

    def body() -> None:
        try:
            with settings():
                outcome.append((function(), None))
        except BaseException as error:  # noqa: BLE001 - raised again by the thread that waits
            outcome.append((None, error))

    thread = threading.Thread(target=body, name="dualdp trial")
    thread.start()
    thread.join()
    result, error = outcome[0]
    if error is not None:
        raise error
    return result
