# SPDX-License-Identifier: Apache-2.0
"""Evaluation of a jaxpr on data and on values derived from parameters, recording parameter uses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dualdp_jax import compat
from dualdp_jax.per_sample.expressions import (
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
class ParameterUse:
    """Equation in which a weight (a value derived from parameters) meets data."""

    primitive: str  # name of the equation's primitive
    rule: Rule
    spec: Spec  # `Spec` with the equation's parameters and the position of the weight
    sources: frozenset[int]  # indices of the parameters that the weight is computed from
    is_rearrangement: bool  # True if the weight has the numbers of one parameter, in any order
    pull: Pull  # callable (parameters, gradient of the operand) -> gradients by parameter index
    order: tuple[int, ...] | None = None  # axes of the parameter, see `Derived`


class ResultType(NamedTuple):
    """Type of the result of a use."""

    shape: tuple[int, ...]
    dtype: Any
    axes: frozenset[str]  # `shard_map` axes over which the array varies


class DeferredUse(NamedTuple):
    """Use that is evaluated only when another equation reads its result."""

    eqn: Any  # equation of the use
    inputs: list[Any]
    position: int  # index of the weight among the operands
    #: axes of the result that are summed at once, for rules with `takes_sums`.
    summed: tuple[int, ...] = ()


@dataclass
class Scope:
    """State of one jaxpr evaluation: the whole loss (with inlined calls), or the body of a loop."""

    values: list[Any]  # the parameters of this scope
    probed: list[Any]  # the same values plus their probes
    #: zeros to add at the uses, in order; None while the uses are collected.
    probes: list[Any] | None = None
    uses: list[ParameterUse] = field(default_factory=list)  # `ParameterUse`, in program order
    operands: list[tuple[Any, ...]] = field(default_factory=list)  # per use its data operands
    results: list[ResultType] = field(default_factory=list)  # per use the type of its result
    wanted: set[int] = field(default_factory=set)  # parameters with uses that have no rule
    #: parameters that reach an operation without gradient.
    blocked: set[int] = field(default_factory=set)
    convolves: bool = False  # True if examples may have convolution kernels of their own elsewhere
    #: mapping from loop equation to the scope of a shape-only run of its body.
    plans: dict[Any, Scope] = field(default_factory=dict)
    #: mapping from operation to its results for `probed`.
    memo: dict[Operation, list[Any]] = field(default_factory=dict)

    def enter(self, item: Any) -> Any:
        """Return a plain value for ordinary computation; a parameter gets its own probe."""
        if isinstance(item, DeferredUse):
            return _record_use(self, item)
        if isinstance(item, Derived):
            self.wanted |= item.sources
            return evaluate(item, self.probed, self.memo)
        return item

    def take_probes(self, count: int) -> list[Any] | None:
        """Take the probes of the next `count` uses; None while the uses are collected."""
        if self.probes is None:
            return None
        taken, self.probes = self.probes[:count], self.probes[count:]
        return taken


def run(scope: Scope, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """Evaluate a jaxpr on data and `Derived` values; the results are of these kinds too."""
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, map(constant, consts), strict=True))
    env |= zip(jaxpr.invars, args, strict=True)
    read = lambda v: constant(v.val) if isinstance(v, compat.Literal) else env[v]  # noqa: E731
    for eqn in jaxpr.eqns:
        results = _step(scope, eqn, [read(v) for v in eqn.invars])
        env |= zip(eqn.outvars, results, strict=True)
        for var, item in zip(eqn.outvars, results, strict=True):
            if isinstance(item, DeferredUse) and _num_readers(jaxpr, var) > 1:
                env[var] = scope.enter(item)
    return [read(v) for v in jaxpr.outvars]


def _num_readers(jaxpr: Any, var: Any) -> int:
    """Number of occurrences of a variable as an operand or a result."""
    operands = [v for eqn in jaxpr.eqns for v in eqn.invars]
    return sum(v is var for v in [*operands, *jaxpr.outvars])


def _is_weight(item: Any) -> bool:
    return isinstance(item, Derived) and bool(item.sources)


def _step(scope: Scope, eqn: Any, inputs: list[Any]) -> list[Any]:
    name = eqn.primitive.name
    holds_weight = any(map(_is_weight, inputs))
    is_deferred = any(isinstance(item, DeferredUse) for item in inputs)
    convolves = CONVOLUTION in compat.primitives_of(eqn)
    if (holds_weight or is_deferred or convolves) and name in compat.WRAPPERS:
        jaxpr, consts = compat.open_jaxpr(eqn.params[compat.WRAPPERS[name]])
        return run(scope, jaxpr, consts, inputs)
    is_derived = all(isinstance(item, Derived) for item in inputs)
    # A custom backward may be no linear map: it must get the whole cotangent, not summands.
    if is_derived and not (holds_weight and compat.has_own_backward(eqn)):
        return _derived(scope, eqn, inputs)
    if holds_weight and name == "scan":
        return _scan(scope, eqn, inputs)
    if is_deferred and name == "reduce_sum" and not inputs[0].summed:
        return [_record_use(scope, inputs[0]._replace(summed=tuple(eqn.params["axes"])))]
    position = _rule_position(eqn, inputs) if holds_weight else None
    if position is not None:
        found = DeferredUse(eqn, inputs, position)
        return [found if RULES[name].takes_sums else _record_use(scope, found)]
    shares_kernel = name == CONVOLUTION and isinstance(inputs[1], Derived) and not holds_weight
    scope.convolves |= convolves and not is_derived and not shares_kernel
    return compat.bind(eqn, *(scope.enter(item) for item in inputs))


def _derived(scope: Scope, eqn: Any, inputs: list[Derived]) -> list[Any]:
    """Results derived from parameters and constants; plain values where no gradient passes."""
    results: list[Any] = derive(eqn, inputs)
    for position, result in enumerate(results):
        passes = jnp.issubdtype(result.value.dtype, jnp.inexact)
        if result.sources and not (passes and eqn.primitive.name != "stop_gradient"):
            scope.blocked |= result.sources
            results[position] = result.value
    return results


def _rule_position(eqn: Any, inputs: list[Any]) -> int | None:
    """Position of the weight if a rule accepts this equation, else None."""
    rule = RULES.get(eqn.primitive.name)
    weights = [i for i, item in enumerate(inputs) if _is_weight(item)]
    if rule is None or len(weights) != 1 or len(eqn.outvars) != 1:
        return None
    is_float = jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.floating)
    shapes = [var.aval for var in eqn.invars]
    return weights[0] if is_float and rule.accepts(eqn.params, weights[0], shapes) else None


def _record_use(scope: Scope, found: DeferredUse) -> Any:
    """Evaluate an equation that has a rule, record the use, and add its probe."""
    eqn, inputs, position, summed = found
    weight: Derived = inputs[position]
    others = tuple(scope.enter(item) for i, item in enumerate(inputs) if i != position)
    values = [*others[:position], weight.value, *others[position:]]
    (result,) = compat.bind(eqn, *values)
    result = result.sum(summed) if summed else result
    scope.uses.append(
        ParameterUse(
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
    scope.results.append(ResultType(result.shape, result.dtype, compat.varying_axes(result)))
    probe = scope.take_probes(1)
    return result if probe is None else result + probe[0]


class Loop(NamedTuple):
    """Scan equation with its inputs sorted into parameters, constants and data."""

    #: `Derived`, the scan's constants that are not data, and its scanned weights.
    given: list[Derived]
    is_stacked: list[bool]  # bools, per value of `given` True if it is scanned
    #: callable (inner scope, carry, slices) -> (carry, outputs) of one step.
    body: Callable[[Scope, Any, Any], tuple[list[Any], list[Any]]]
    carry: list[Any]  # initial values
    scanned: list[Any]  # the other scanned inputs
    plan: Scope  # `Scope` of one step, from types alone


def _loop(scope: Scope, eqn: Any, inputs: list[Any]) -> Loop:
    """Sort the inputs of a scan, and find the uses in its body."""
    num_consts, num_carry = compat.scan_sizes(eqn)
    inputs = [scope.enter(item) if isinstance(item, DeferredUse) else item for item in inputs]
    consts, xs = inputs[:num_consts], inputs[num_consts + num_carry :]
    carry = [scope.enter(item) for item in inputs[num_consts : num_consts + num_carry]]
    fixed = [item for item in consts if isinstance(item, Derived)]
    stacked = [item for item in xs if _is_weight(item)]
    jaxpr, closed = compat.open_jaxpr(eqn.params["jaxpr"])

    def body(inner: Scope, carry: Any, slices: Any) -> tuple[list[Any], list[Any]]:
        given = (
            parameter(i, value) if _is_weight(item) else constant(value, i)
            for i, (item, value) in enumerate(zip(fixed + stacked, inner.values, strict=True))
        )
        items = iter(slices)
        args = [next(given) if isinstance(item, Derived) else item for item in consts]
        args += carry
        args += [next(given) if _is_weight(item) else next(items) for item in xs]
        results = [inner.enter(item) for item in run(inner, jaxpr, closed, args)]
        return results[:num_carry], results[num_carry:]

    scanned = [scope.enter(item) for item in xs if not _is_weight(item)]
    is_stacked = [False] * len(fixed) + [True] * len(stacked)

    def plan() -> Scope:
        found: list[Scope] = []

        def one(values: Any, carry: Any, slices: Any) -> Any:
            found.append(Scope(list(values), list(values), plans=scope.plans))
            return body(found[-1], carry, slices)

        pairs = zip(fixed + stacked, is_stacked, strict=True)
        types = [
            compat.type_of_row(item.value) if flag else compat.type_of(item.value)
            for item, flag in pairs
        ]
        slices = [compat.type_of_row(value) for value in scanned]
        jax.eval_shape(one, types, [compat.type_of(value) for value in carry], slices)
        return found[-1]

    # The uses in the body depend on nothing else.
    kinds = tuple("weight" if _is_weight(i) else isinstance(i, Derived) for i in inputs)
    key = (id(eqn), kinds)
    if key not in scope.plans:
        scope.plans[key] = plan()
    return Loop(fixed + stacked, is_stacked, body, carry, scanned, scope.plans[key])


def _scan(scope: Scope, eqn: Any, inputs: list[Any]) -> list[Any]:
    """Evaluate a scan that uses parameters; arrays of its uses are stacked over the steps."""
    loop, length = _loop(scope, eqn, inputs), eqn.params["length"]
    plan = loop.plan
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
        values, with_probes = merge(raw_slices, raw), merge(probed_slices, probed)
        inner = Scope(values, with_probes, zeros, plans=scope.plans)
        carry, outputs = loop.body(inner, carry, items)
        return carry, (outputs, inner.operands)

    xs = (loop.scanned, pick(raw, True), pick(probed, True), probes)
    options = {name: eqn.params[name] for name in ("reverse", "unroll") if name in eqn.params}
    carry, (outputs, operands) = jax.lax.scan(step, loop.carry, xs, length=length, **options)
    scope.uses += [_lifted(use, loop) for use in plan.uses]
    scope.operands += operands
    scope.results += [found._replace(shape=(length, *found.shape)) for found in plan.results]
    return [*carry, *outputs]


def _lifted(use: ParameterUse, loop: Loop) -> ParameterUse:
    """Use in a loop body seen from outside the loop, with the steps as a leading axis."""
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
