# SPDX-License-Identifier: Apache-2.0
"""Evaluation of a jaxpr on data and on values derived from parameters, recording parameter uses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np

from dualdp_jax import compat
from dualdp_jax.per_sample.expressions import (
    Derived,
    Memo,
    constant,
    derive,
    evaluate,
    parameter,
    pull_back,
)
from dualdp_jax.rules import RULES, Rule, Spec

CONVOLUTION = "conv_general_dilated"
Array = jax.Array


class ResultType(NamedTuple):
    """Type of the result of a use."""

    shape: tuple[int, ...]
    dtype: np.dtype
    axes: frozenset[str]  # `shard_map` axes over which the array varies


@dataclass(frozen=True)
class ParameterUse:
    """Equation in which a weight (a value derived from parameters) meets data.

    Attributes:
        primitive: name of the equation's primitive.
        spec: `Spec` with the equation's parameters and the position of the weight.
        result: type of the result.
        loops: per loop around the use, outermost first, True if the weight differs at every step.
        sources: indices of the parameters that the weight is computed from.
        is_rearrangement: True if the weight has the numbers of one parameter, in any order.
        order: axes of the parameter, see `Derived`.
        pull: callable (parameters, gradient of the operand) -> gradients by parameter index.
    """

    primitive: str
    spec: Spec
    result: ResultType
    loops: tuple[bool, ...]
    sources: frozenset[int]
    is_rearrangement: bool
    order: tuple[int, ...] | None
    pull: Callable[[Sequence[Array], Array], dict[int, Array]]

    @property
    def rule(self) -> Rule:
        """Rule of the primitive."""
        return RULES[self.primitive]


class DeferredUse(NamedTuple):
    """Use that is evaluated only when another equation reads its result."""

    eqn: compat.Equation  # equation of the use
    inputs: list[Item]
    position: int  # index of the weight among the operands
    #: axes of the result that are summed at once, for rules with `takes_sums`.
    summed: tuple[int, ...] = ()


#: Value in an evaluation: data, derived from parameters, or a use whose result nothing has read.
Item = Array | Derived | DeferredUse


@dataclass
class Scope:
    """State of one jaxpr evaluation: the whole loss (with inlined calls), or the body of a loop."""

    values: list[Array]  # the parameters of this scope, plus their probes
    #: zeros to add at the uses, in order; None while the uses are collected.
    probes: Iterator[Array] | None = None
    uses: list[ParameterUse] = field(default_factory=list)  # `ParameterUse`, in program order
    operands: list[tuple[Array, ...]] = field(default_factory=list)  # per use its data operands
    wanted: set[int] = field(default_factory=set)  # parameters with uses that have no rule
    convolves: bool = False  # True if examples may have convolution kernels of their own elsewhere
    #: mapping from loop equation to the scope in which the uses in its body were collected.
    plans: dict[Any, Scope] = field(default_factory=dict)

    def enter(self, item: Item) -> Array:
        """Return a plain value for ordinary computation; a parameter gets its own probe."""
        if isinstance(item, DeferredUse):
            return _record_use(self, item)
        if isinstance(item, Derived):
            self.wanted |= item.sources
            return item.value
        return item


def run(
    scope: Scope, jaxpr: compat.Jaxpr, consts: Sequence[Array], args: Sequence[Item]
) -> list[Item]:
    """Evaluate a jaxpr on data and `Derived` values; the results are of these kinds too."""
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, map(constant, consts), strict=True))
    env |= zip(jaxpr.invars, args, strict=True)
    read_at = [v for eqn in jaxpr.eqns for v in eqn.invars] + list(jaxpr.outvars)
    num_readers = Counter(v for v in read_at if not isinstance(v, compat.Literal))

    def read(var: Any) -> Item:
        return constant(var.val) if isinstance(var, compat.Literal) else env[var]

    for eqn in jaxpr.eqns:
        results = _step(scope, eqn, [read(v) for v in eqn.invars])
        env |= zip(eqn.outvars, results, strict=True)
        for var, item in zip(eqn.outvars, results, strict=True):
            if isinstance(item, DeferredUse) and num_readers[var] > 1:
                env[var] = scope.enter(item)
    return [read(v) for v in jaxpr.outvars]


def _is_weight(item: Item) -> TypeGuard[Derived]:
    return isinstance(item, Derived) and bool(item.sources)


def _step(scope: Scope, eqn: compat.Equation, inputs: list[Item]) -> list[Item]:
    name = eqn.primitive.name
    holds_weight = any(map(_is_weight, inputs))
    is_deferred = any(isinstance(item, DeferredUse) for item in inputs)
    convolves = CONVOLUTION in compat.primitives_of(eqn)
    if (holds_weight or is_deferred or convolves) and name in compat.WRAPPERS:
        jaxpr, consts = compat.open_jaxpr(eqn.params[compat.WRAPPERS[name]])
        return run(scope, jaxpr, consts, inputs)
    derived = [item for item in inputs if isinstance(item, Derived)]
    is_derived = len(derived) == len(inputs)
    # A custom backward may be no linear map: it must get the whole cotangent, not summands.
    if is_derived and not (holds_weight and compat.has_own_backward(eqn)):
        return _derived(eqn, derived)
    if holds_weight and name == "scan":
        return _scan(scope, eqn, inputs)
    first = inputs[0] if inputs else None
    if isinstance(first, DeferredUse) and name == "reduce_sum" and not first.summed:
        return [_record_use(scope, first._replace(summed=tuple(eqn.params["axes"])))]
    position = _rule_position(eqn, inputs) if holds_weight else None
    if position is not None:
        found = DeferredUse(eqn, inputs, position)
        return [found if RULES[name].takes_sums else _record_use(scope, found)]
    shares_kernel = name == CONVOLUTION and isinstance(inputs[1], Derived) and not holds_weight
    scope.convolves |= convolves and not is_derived and not shares_kernel
    return compat.bind(eqn, *(scope.enter(item) for item in inputs))


def _derived(eqn: compat.Equation, inputs: list[Derived]) -> list[Item]:
    """Results derived from parameters and constants; plain values where no gradient passes."""
    results: list[Any] = derive(eqn, inputs)
    for position, result in enumerate(results):
        passes = jnp.issubdtype(result.value.dtype, jnp.inexact)
        if result.sources and not (passes and eqn.primitive.name != "stop_gradient"):
            results[position] = result.value
    return results


def _rule_position(eqn: Any, inputs: list[Item]) -> int | None:
    """Position of the weight if a rule accepts this equation, else None.

    A weight of size 0 needs none.
    """
    rule = RULES.get(eqn.primitive.name)
    weights = [i for i, item in enumerate(inputs) if _is_weight(item)]
    if rule is None or len(weights) != 1 or len(eqn.outvars) != 1:
        return None
    is_float = jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.floating)
    shapes = [var.aval for var in eqn.invars]
    is_usual = is_float and shapes[weights[0]].size > 0
    return weights[0] if is_usual and rule.accepts(eqn.params, weights[0], shapes) else None


def _record_use(scope: Scope, found: DeferredUse) -> Array:
    """Evaluate an equation that has a rule, record the use, and add its probe."""
    eqn, inputs, position, summed = found
    weight = inputs[position]
    assert isinstance(weight, Derived)
    others = tuple(scope.enter(item) for i, item in enumerate(inputs) if i != position)
    fixed = jax.lax.stop_gradient(weight.value)  # the parameter's own probe is not for this use
    (result,) = compat.bind(eqn, *others[:position], fixed, *others[position:])
    result = result.sum(summed) if summed else result
    scope.uses.append(
        ParameterUse(
            primitive=eqn.primitive.name,
            spec=Spec(eqn.params, position, weight.value.shape, weight.value.dtype, 0, summed),
            result=ResultType(result.shape, result.dtype, compat.varying_axes(result)),
            loops=(),
            sources=weight.sources,
            is_rearrangement=weight.undo is not None,
            order=weight.order,
            pull=partial(pull_back, weight),
        )
    )
    scope.operands.append(others)
    return result if scope.probes is None else result + next(scope.probes)


def _scan(scope: Scope, eqn: compat.Equation, inputs: list[Item]) -> list[Item]:
    """Evaluate a scan that uses parameters; arrays of its uses are stacked over the steps.

    The parameters of its body are the scan's constants that are not data, and its scanned weights.
    """
    num_consts, num_carry = compat.scan_sizes(eqn)
    inputs = [scope.enter(item) if isinstance(item, DeferredUse) else item for item in inputs]
    consts, xs = inputs[:num_consts], inputs[num_consts + num_carry :]
    carry = [scope.enter(item) for item in inputs[num_consts : num_consts + num_carry]]
    fixed = [item for item in consts if isinstance(item, Derived)]
    given, num_fixed = fixed + [item for item in xs if _is_weight(item)], len(fixed)
    scanned = [scope.enter(item) for item in xs if not _is_weight(item)]
    jaxpr, closed = compat.open_jaxpr(eqn.params["jaxpr"])
    scopes: list[Scope] = []

    def step(carry: list[Array], slices: Any) -> tuple[list[Array], Any]:
        items, weights, zeros = slices
        probes = None if zeros is None else iter(zeros)
        inner = Scope([*values[:num_fixed], *weights], probes, plans=scope.plans)
        scopes.append(inner)
        own = (
            parameter(i, value) if _is_weight(item) else constant(value, i)
            for i, (item, value) in enumerate(zip(given, inner.values, strict=True))
        )
        rest = iter(items)
        args = [next(own) if isinstance(item, Derived) else item for item in consts] + carry
        args += [next(own) if _is_weight(item) else next(rest) for item in xs]
        results = [inner.enter(item) for item in run(inner, jaxpr, closed, args)]
        return results[:num_carry], (results[num_carry:], inner.operands)

    # The uses in the body depend on nothing else.
    key = id(eqn), tuple("weight" if _is_weight(i) else isinstance(i, Derived) for i in inputs)
    values, zeros = [item.value for item in given], None
    if scope.probes is not None:  # the uses were collected before
        plan = scope.plans[key]
        for i in set(range(len(given))) - plan.wanted:
            values[i] = jax.lax.stop_gradient(values[i])
        zeros = list(islice(scope.probes, len(plan.uses)))
    xs_of_steps = scanned, values[num_fixed:], zeros
    options = {name: eqn.params[name] for name in ("reverse", "unroll") if name in eqn.params}
    length = eqn.params["length"]
    carry, (outputs, operands) = jax.lax.scan(step, carry, xs_of_steps, length=length, **options)
    plan = scope.plans.setdefault(key, scopes[-1])
    scope.wanted |= {i for j in plan.wanted for i in given[j].sources}
    scope.convolves |= plan.convolves
    scope.uses += [_lifted(use, given, num_fixed, length) for use in plan.uses]
    scope.operands += operands
    return [*carry, *outputs]


def _lifted(use: ParameterUse, given: list[Derived], num_fixed: int, length: int) -> ParameterUse:
    """Use in a loop body seen from outside the loop, with the steps as a leading axis.

    `given` are the parameters of the body, of which those after the first `num_fixed` are scanned.
    """
    is_stacked = any(index >= num_fixed for index in use.sources)
    axes = [None] * num_fixed + [0] * (len(given) - num_fixed)

    def pull(values: Sequence[Array], cotangent: Array) -> dict[int, Array]:
        memo: Memo = {}
        inner = [evaluate(item, values, memo) for item in given]
        if is_stacked:
            parts = jax.vmap(use.pull, in_axes=(axes, 0))(inner, cotangent)
            parts = {j: p.sum(0) if j < num_fixed else p for j, p in parts.items()}
        else:
            parts = use.pull(inner, cotangent)
        total: dict[int, Array] = {}
        for j, part in parts.items():
            for i, grad in pull_back(given[j], values, part).items():
                total[i] = total[i] + grad if i in total else grad
        return total

    outer = [given[index] for index in sorted(use.sources)]
    return replace(
        use,
        spec=use.spec if is_stacked else use.spec._replace(loops=use.spec.loops + 1),
        result=use.result._replace(shape=(length, *use.result.shape)),
        loops=(is_stacked, *use.loops),
        sources=frozenset().union(*(weight.sources for weight in outer)),
        is_rearrangement=use.is_rearrangement and all(w.undo is not None for w in outer),
        pull=pull,
    )
