# SPDX-License-Identifier: Apache-2.0
"""Operands and output gradients at each parameter use, from one forward and one backward pass.

The single-example loss is traced, so no batch axis has to be followed and nothing can mix examples.
Its equations are evaluated one by one. Where a weight meets data in a primitive that has a rule, a
zero probe is added to the result and the data operand is kept: the gradient of the probe and the
operand are all that the rule needs. Everywhere else a parameter is replaced by itself plus a zero
probe of its own shape, whose gradient is the per-sample gradient summed over those other uses. The
pull-back to the probes is taken under `vmap`; no gradient of a weight is computed.

Source: Bu et al. 2023 (book-keeping); Rochette et al. 2019; here for any function of jax.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dualdp_jax import compat
from dualdp_jax.per_sample.call import Call, Program, Row, traced
from dualdp_jax.per_sample.expressions import Derived, parameter
from dualdp_jax.per_sample.jaxpr import ParameterUse, ResultType, Scope, run
from dualdp_jax.rules import Choice
from dualdp_jax.rules.arrays import weighted_sum
from dualdp_jax.rules.estimate import Estimate, of_gradients


class CapturedUse(NamedTuple):
    """Parameter use with its arrays, or with their types."""

    use: ParameterUse
    operands: tuple[Any, ...]  # data operands of the use, leading axes (n, *loops)
    cotangents: Any  # gradient of its result, leading axes (n, *loops)

    @property
    def choice(self) -> Choice:
        """Cost model's choice, from types alone."""
        choose, arguments = self.use.rule.choice, (self.use.spec, self.operands, self.cotangents)
        return Choice() if choose is None else choose(*arguments)

    def grads(self) -> Any:
        """Return the per-sample gradients of the weight, (n, *own loops, *shape)."""
        return self.use.rule.grads(self.use.spec, self.operands, self.cotangents)

    def estimate(self) -> Estimate:
        """Return their norms (n,)."""
        if self.use.rule.norms is None:
            return of_gradients(self.grads())
        found = self.use.rule.norms(self.use.spec, self.operands, self.cotangents)
        return found if isinstance(found, Estimate) else Estimate(jnp.square(found))

    def weighted_sum(self, factors: Any) -> Any:
        """Return their sum over the examples, each times its factor (n,)."""
        if self.use.rule.weighted_sum is None:
            return weighted_sum(factors, self.grads())
        return self.use.rule.weighted_sum(self.use.spec, self.operands, self.cotangents, factors)


class Capture(NamedTuple):
    """Parameter uses of a batch, with the arrays that their rules need."""

    losses: Any  # (n,)
    aux: Any  # pytree of (n, ...), stacked over the examples, or None
    uses: list[CapturedUse]  # in program order
    #: mapping from parameter index to its per-sample gradient (n, *shape) over all uses without
    #: a rule.
    kept: dict[int, Any]
    convolves: bool  # True if examples may have convolution kernels of their own elsewhere


class Analysis(NamedTuple):
    """Parameter uses of the loss of one example, from types alone."""

    program: Program
    uses: list[ParameterUse]  # in program order
    operands: list[tuple[Any, ...]]  # per use the types of its data operands
    results: list[ResultType]  # per use the type of its result
    kept: list[int]  # the indices of the parameters that have uses without a rule
    convolves: bool  # see `Capture`
    plans: dict[Any, Scope]  # see `Scope`

    def uses_of(self, n: int) -> list[CapturedUse]:
        """Return the uses with the types of their arrays for n examples."""
        batch = lambda x: jax.ShapeDtypeStruct((n, *x.shape), x.dtype)  # noqa: E731
        return [
            CapturedUse(use, tuple(map(batch, operands)), batch(result))
            for use, operands, result in zip(self.uses, self.operands, self.results, strict=True)
        ]


def analyze(call: Call) -> Analysis:
    """Find the parameter uses of a call's loss."""
    trained, program = call.parameters.trained, call.program
    scope = Scope(trained, trained)

    def operands(row: Row) -> list[tuple[Any, ...]]:
        _forward(call, program, scope, row)
        return scope.operands

    types = jax.eval_shape(operands, jax.tree.map(compat.type_of_row, call.rows))
    outputs = [index == 0 for index, _ in enumerate(program.jaxpr.outvars)]
    in_use = compat.inputs_in_use(program.jaxpr, outputs)
    seen = scope.wanted | scope.blocked | {i for use in scope.uses for i in use.sources}
    lost = [n for i, n in enumerate(call.parameters.names) if in_use[i] and i not in seen]
    if lost:
        raise RuntimeError(
            f"The parameters {lost} reach the loss by a way that the transform of the jaxpr did "
            "not see. Use method='vmap', and please report the model."
        )
    kept = sorted(scope.wanted)
    return Analysis(program, scope.uses, types, scope.results, kept, scope.convolves, scope.plans)


def analyzed(call: Call) -> Call:
    """Return the call with its traced loss and its analysis cached."""
    if call.analysis is not None:
        return call
    call = traced(call)
    return call._replace(analysis=analyze(call))


def capture(call: Call, rows: Row) -> Capture:
    """Run forward and backward over a batch, and record the arrays that the rules need."""
    trained = call.parameters.trained
    found: Analysis = analyzed(call).analysis
    zeros = [compat.varying_zeros(*result) for result in found.results]
    own_zeros = {index: jnp.zeros_like(trained[index]) for index in found.kept}

    def one(row: Row) -> Any:
        def probed(probes: list[Any], own: dict[int, Any]) -> tuple[Any, Any]:
            values = [p + own[i] if i in own else p for i, p in enumerate(trained)]
            scope = Scope(trained, values, probes, plans=found.plans)
            loss, aux = _forward(call, found.program, scope, row)
            return loss, (scope.operands, aux)

        loss, pull, (operands, aux) = jax.vjp(probed, zeros, own_zeros, has_aux=True)
        cotangents, kept = pull(jnp.ones_like(loss))
        return loss, aux, operands, cotangents, kept

    each = compat.mapping(lambda: found.convolves, (rows, trained))
    losses, aux, operands, cotangents, kept = each(one)(rows)
    uses = list(map(CapturedUse, found.uses, operands, cotangents))
    return Capture(losses, aux, uses, kept, found.convolves)


def _forward(call: Call, program: Program, scope: Scope, row: Row) -> tuple[Any, Any]:
    """Loss and aux of one example, whose uses the scope records."""
    parameters = [parameter(index, value) for index, value in enumerate(scope.values)]
    arguments = [*parameters, *jax.tree.leaves((call.shared, row))]
    results = run(scope, program.jaxpr, program.consts, arguments)
    plain = [x.value if isinstance(x, Derived) else scope.enter(x) for x in results[1:]]
    loss, aux = jax.tree.unflatten(program.structure, [scope.enter(results[0]), *plain])
    return loss, aux
