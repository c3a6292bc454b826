# SPDX-License-Identifier: Apache-2.0
"""Runs a jaxpr on data and on values derived from parameters, and takes down where they meet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dualdp_jax import compat
from dualdp_jax.derived import (
    Derived,
    Operation,
    constant,
    derive,
    evaluate,
    parameter,
    pull_back,
)
from dualdp_jax.rules import RULES, Rule, Spec

CONVOLUTION = "conv_general_dilated"
Pull = Callable[[Sequence[Any], Any], dict[int, Any]]


@dataclass(frozen=True)
class Use:
    """One place where a weight meets data.

    Attributes:
        primitive: its name.
        rule: what is known about the primitive.
        spec: the primitive's parameters, and the operand that the weight is.
        sources: indices of the parameters that the weight is made of.
        is_rearrangement: the weight holds the numbers of one parameter, in another order.
        pull: (parameters, gradient of the operand) to gradients of the parameters.
        order: see `Derived`.
    """

    primitive: str
    rule: Rule
    spec: Spec
    sources: frozenset[int]
    is_rearrangement: bool
    pull: Pull
    order: tuple[int, ...] | None = None


class Result(NamedTuple):
    """What a use gives.

    Attributes:
        shape: of the array.
        dtype: of the array.
        axes: of a `shard_map`, over which it varies.
    """

    shape: tuple[int, ...]
    dtype: Any
    axes: frozenset[str]


class Waiting(NamedTuple):
    """A weight that meets data, not run until something reads the result.

    Attributes:
        eqn: the equation.
        inputs: its operands.
        position: which of them is the weight.
        summed: axes of the result that are summed away at once, for rules that gain by it.
    """

    eqn: Any
    inputs: list[Any]
    position: int
    summed: tuple[int, ...] = ()


@dataclass
class Scope:
    """The run of one jaxpr (and what is inlined into it): the whole loss, or the body of a loop.

    Attributes:
        values: the parameters of this scope.
        probed: the same plus their probes.
        probes: zeros to be added at the uses, in order; None while the results are found out.
        uses: what was found, in order.
        operands: the data operands kept at each use.
        results: what each use gives.
        wanted: parameters that are used outside the rules.
        blocked: parameters that reach a place where no gradient passes.
        convolves: whether, beside the uses, examples may have convolution kernels of their own.
        plans: what a first run over the body of a loop has found, by equation.
    """

    values: list[Any]
    probed: list[Any]
    probes: list[Any] | None = None
    uses: list[Use] = field(default_factory=list)
    operands: list[tuple[Any, ...]] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)
    wanted: set[int] = field(default_factory=set)
    blocked: set[int] = field(default_factory=set)
    convolves: bool = False
    plans: dict[Any, Scope] = field(default_factory=dict)
    memo: dict[Operation, list[Any]] = field(default_factory=dict)

    def enter(self, item: Any) -> Any:
        """A value for ordinary computation: parameters carry their own probe from here on."""
        if isinstance(item, Waiting):
            return _use(self, item)
        if isinstance(item, Derived):
            self.wanted |= item.sources
            return evaluate(item, self.probed, self.memo)
        return item

    def take_probes(self, count: int) -> list[Any] | None:
        """The probes of the next uses."""
        if self.probes is None:
            return None
        taken, self.probes = self.probes[:count], self.probes[count:]
        return taken


def run(scope: Scope, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """Run a jaxpr on data and `Derived` values; the results are of these kinds too."""
    env: dict[Any, Any] = {}
    env |= zip(jaxpr.constvars, map(constant, consts), strict=True)
    env |= zip(jaxpr.invars, args, strict=True)
    read = lambda v: constant(v.val) if isinstance(v, compat.Literal) else env[v]  # noqa: E731
    for eqn in jaxpr.eqns:
        results = _step(scope, eqn, [read(v) for v in eqn.invars])
        env |= zip(eqn.outvars, results, strict=True)
        for var, item in zip(eqn.outvars, results, strict=True):
            if isinstance(item, Waiting) and _num_readers(jaxpr, var) > 1:
                env[var] = scope.enter(item)
    return [read(v) for v in jaxpr.outvars]


def _num_readers(jaxpr: Any, var: Any) -> int:
    """How often a variable is an operand or a result."""
    operands = [v for eqn in jaxpr.eqns for v in eqn.invars]
    return sum(v is var for v in [*operands, *jaxpr.outvars])


def _is_weight(item: Any) -> bool:
    return isinstance(item, Derived) and bool(item.sources)


def _step(scope: Scope, eqn: Any, inputs: list[Any]) -> list[Any]:
    """The results of one equation."""
    name = eqn.primitive.name
    holds_weight = any(map(_is_weight, inputs))
    is_waiting = any(isinstance(item, Waiting) for item in inputs)
    convolves = CONVOLUTION in compat.primitives_of(eqn)
    if (holds_weight or is_waiting or convolves) and name in compat.WRAPPERS:
        jaxpr, consts = compat.open_jaxpr(eqn.params[compat.WRAPPERS[name]])
        return run(scope, jaxpr, consts, inputs)
    is_derived = all(isinstance(item, Derived) for item in inputs)
    # A custom backward may be no linear map: it must see the whole cotangent, and not its parts.
    if is_derived and not (holds_weight and compat.has_own_backward(eqn)):
        return _derived(scope, eqn, inputs)
    if holds_weight and name == "scan":
        return _scan(scope, eqn, inputs)
    if is_waiting and name == "reduce_sum" and not inputs[0].summed:
        return [_use(scope, inputs[0]._replace(summed=tuple(eqn.params["axes"])))]
    position = _rule_position(eqn, inputs) if holds_weight else None
    if position is not None:
        found = Waiting(eqn, inputs, position)
        return [found if RULES[name].takes_sums else _use(scope, found)]
    shares_kernel = name == CONVOLUTION and isinstance(inputs[1], Derived) and not holds_weight
    scope.convolves |= convolves and not is_derived and not shares_kernel
    return compat.bind(eqn, *(scope.enter(item) for item in inputs))


def _derived(scope: Scope, eqn: Any, inputs: list[Derived]) -> list[Any]:
    """Results that depend on parameters and constants; plain values where no gradient passes."""
    results: list[Any] = derive(eqn, inputs)
    for position, result in enumerate(results):
        passes = jnp.issubdtype(result.value.dtype, jnp.inexact)
        if result.sources and not (passes and eqn.primitive.name != "stop_gradient"):
            scope.blocked |= result.sources
            results[position] = result.value
    return results


def _rule_position(eqn: Any, inputs: list[Any]) -> int | None:
    """Which operand is the weight of a rule that accepts this equation, else None."""
    rule = RULES.get(eqn.primitive.name)
    weights = [i for i, item in enumerate(inputs) if _is_weight(item)]
    if rule is None or len(weights) != 1 or len(eqn.outvars) != 1:
        return None
    is_float = jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.floating)
    shapes = [var.aval for var in eqn.invars]
    return weights[0] if is_float and rule.accepts(eqn.params, weights[0], shapes) else None


def _use(scope: Scope, found: Waiting) -> Any:
    """Run an equation that has a rule; record the use and add its probe."""
    eqn, inputs, position, summed = found
    weight: Derived = inputs[position]
    others = tuple(scope.enter(item) for i, item in enumerate(inputs) if i != position)
    values = [*others[:position], weight.value, *others[position:]]
    (result,) = compat.bind(eqn, *values)
    result = result.sum(summed) if summed else result
    scope.uses.append(
        Use(
            primitive=eqn.primitive.name,
            rule=RULES[eqn.primitive.name],
            spec=Spec(eqn.params, position, weight.value.shape, weight.value.dtype, (), summed),
            sources=weight.sources,
            is_rearrangement=weight.undo is not None,
            pull=lambda values, cotangent: pull_back(weight, values, cotangent),
            order=weight.order,
        )
    )
    scope.operands.append(others)
    scope.results.append(Result(result.shape, result.dtype, compat.varying_axes(result)))
    probe = scope.take_probes(1)
    return result if probe is None else result + probe[0]


class Loop(NamedTuple):
    """A scan, its inputs sorted.

    Attributes:
        eqn: the equation.
        kinds: of each input, what it is; with the equation, the name of its plan.
        given: values of the inner scope: its constants that are no data, and scanned weights.
        is_stacked: of each of them, whether it is scanned, one slice per step.
        body: (inner scope, carry, slices) to (carry, outputs).
        carry: where it starts.
        scanned: the other scanned inputs.
    """

    eqn: Any
    kinds: tuple[str, ...]
    given: list[Derived]
    is_stacked: list[bool]
    body: Callable[[Scope, Any, Any], tuple[list[Any], list[Any]]]
    carry: list[Any]
    scanned: list[Any]


def _kind(item: Any) -> str:
    """What an input of a loop is; a run over its body depends on nothing else."""
    if _is_weight(item):
        return "weight"
    return "constant" if isinstance(item, Derived) else "data"


def _loop(scope: Scope, eqn: Any, inputs: list[Any]) -> Loop:
    """Sort the inputs of a scan."""
    num_consts, num_carry = compat.scan_sizes(eqn)
    inputs = [scope.enter(item) if isinstance(item, Waiting) else item for item in inputs]
    consts, xs = inputs[:num_consts], inputs[num_consts + num_carry :]
    carry = [scope.enter(item) for item in inputs[num_consts : num_consts + num_carry]]
    fixed = [item for item in consts if isinstance(item, Derived)]
    stacked = [item for item in xs if _is_weight(item)]
    jaxpr, closed = compat.open_jaxpr(eqn.params["jaxpr"])

    def body(inner: Scope, carry: Any, slices: Any) -> tuple[list[Any], list[Any]]:
        slots = (
            parameter(i, value) if _is_weight(item) else constant(value, i)
            for i, (item, value) in enumerate(zip(fixed + stacked, inner.values, strict=True))
        )
        items = iter(slices)
        args = [next(slots) if isinstance(item, Derived) else item for item in consts]
        args += carry
        args += [next(slots) if _is_weight(item) else next(items) for item in xs]
        results = [inner.enter(item) for item in run(inner, jaxpr, closed, args)]
        return results[:num_carry], results[num_carry:]

    scanned = [scope.enter(item) for item in xs if not _is_weight(item)]
    flags = [False] * len(fixed) + [True] * len(stacked)
    return Loop(eqn, tuple(map(_kind, inputs)), fixed + stacked, flags, body, carry, scanned)


def _plan(scope: Scope, loop: Loop) -> Scope:
    """What one step of the body holds, found from types alone."""
    key = (id(loop.eqn), loop.kinds)
    if key not in scope.plans:
        values = [item.value for item in loop.given]
        found: list[Scope] = []

        def one(values: Any, carry: Any, slices: Any) -> Any:
            inner = Scope(list(values), list(values), plans=scope.plans)
            found.append(inner)
            return loop.body(inner, carry, slices)

        kinds = [compat.type_of_row if stacked else compat.type_of for stacked in loop.is_stacked]
        jax.eval_shape(
            one,
            [kind(value) for kind, value in zip(kinds, values, strict=True)],
            [compat.type_of(value) for value in loop.carry],
            [compat.type_of_row(value) for value in loop.scanned],
        )
        scope.plans[key] = found[-1]
    return scope.plans[key]


def _scan(scope: Scope, eqn: Any, inputs: list[Any]) -> list[Any]:
    """Run a scan that holds parameters: its uses come out stacked over the steps."""
    loop, length = _loop(scope, eqn, inputs), eqn.params["length"]
    plan = _plan(scope, loop)
    raw = [item.value for item in loop.given]
    probed = [
        scope.enter(item) if index in plan.wanted else item.value
        for index, item in enumerate(loop.given)
    ]
    scope.blocked |= {i for j in plan.blocked for i in loop.given[j].sources}
    scope.convolves |= plan.convolves
    probes = scope.take_probes(len(plan.uses))
    pick = lambda values, flag: [  # noqa: E731
        v for v, stacked in zip(values, loop.is_stacked, strict=True) if stacked == flag
    ]

    def merge(slices: Any, whole: list[Any]) -> list[Any]:
        stacked, fixed = iter(slices), iter(pick(whole, False))
        return [next(stacked) if flag else next(fixed) for flag in loop.is_stacked]

    def step(carry: Any, slices: Any) -> Any:
        items, raw_slices, probed_slices, zeros = slices
        inner = Scope(
            merge(raw_slices, raw), merge(probed_slices, probed), zeros, plans=scope.plans
        )
        carry, outputs = loop.body(inner, carry, items)
        return carry, (outputs, inner.operands)

    xs = (loop.scanned, pick(raw, True), pick(probed, True), probes)
    options = {name: eqn.params[name] for name in ("reverse", "unroll") if name in eqn.params}
    carry, (outputs, operands) = jax.lax.scan(step, loop.carry, xs, length=length, **options)
    scope.uses += [_lifted(use, loop) for use in plan.uses]
    scope.operands += operands
    scope.results += [found._replace(shape=(length, *found.shape)) for found in plan.results]
    return [*carry, *outputs]


def _lifted(use: Use, loop: Loop) -> Use:
    """The use as seen from outside the loop, with the steps as a leading axis."""
    is_stacked = any(loop.is_stacked[index] for index in use.sources)
    axes = [0 if stacked else None for stacked in loop.is_stacked]

    def pull(values: Sequence[Any], cotangent: Any) -> dict[int, Any]:
        memo: dict[Operation, list[Any]] = {}
        inner = [evaluate(item, values, memo) for item in loop.given]
        if is_stacked:
            parts = jax.vmap(use.pull, in_axes=(axes, 0))(inner, cotangent)
            parts = {j: p if loop.is_stacked[j] else p.sum(0) for j, p in parts.items()}
        else:
            parts = use.pull(inner, cotangent)
        total: dict[int, Any] = {}
        for j, part in parts.items():
            for i, grad in pull_back(loop.given[j], values, part).items():
                total[i] = total[i] + grad if i in total else grad
        return total

    outer = [loop.given[index] for index in sorted(use.sources)]
    return replace(
        use,
        spec=use.spec._replace(loops=(is_stacked, *use.spec.loops)),
        sources=frozenset().union(*(weight.sources for weight in outer)),
        is_rearrangement=use.is_rearrangement and all(w.undo is not None for w in outer),
        pull=pull,
    )
