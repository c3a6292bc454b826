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

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dualdp._validate import UnsupportedLayerError
from dualdp_jax import compat
from dualdp_jax.per_sample.call import Array, Call, Program, PyTree, Row
from dualdp_jax.per_sample.expressions import Derived, parameter
from dualdp_jax.per_sample.jaxpr import ParameterUse, Scope, run
from dualdp_jax.rules import Choice
from dualdp_jax.rules.arrays import weighted_sum
from dualdp_jax.rules.estimate import Estimate, of_gradients


class CapturedUse(NamedTuple):
    """Parameter use with its arrays, or with their types."""

    use: ParameterUse
    operands: tuple[Array, ...]  # data operands of the use, leading axes (n, *loops)
    cotangents: Array  # gradient of its result, leading axes (n, *loops)

    @property
    def choice(self) -> Choice:
        """Cost model's choice, from types alone; of one step where steps have own weights."""
        rule, loops = self.use.rule, (False, *self.use.loops)

        def of_step(x: Array) -> jax.ShapeDtypeStruct:
            shape = [size for i, size in enumerate(x.shape) if i >= len(loops) or not loops[i]]
            return jax.ShapeDtypeStruct(shape, x.dtype)

        if rule.choice is None:
            return Choice()
        return rule.choice(self.use.spec, *jax.tree.map(of_step, self[1:]))

    def _each(self, function: Callable[..., Any], *factors: Array) -> Any:
        """Apply a function of a rule; where steps have weights of their own, to each step.

        These steps are the leading axes of the result, the outermost loop first.
        """

        def one(operands: tuple[Array, ...], cotangents: Array) -> Any:
            return function(self.use.spec, operands, cotangents, *factors)

        own = [1 + i for i, is_stacked in enumerate(self.use.loops) if is_stacked]
        for number, axis in reversed(list(enumerate(own))):
            one = jax.vmap(one, in_axes=axis - number)
        return one(self.operands, self.cotangents)

    def grads(self) -> Array:
        """Return the per-sample gradients of the weight, (n, *own loops, *shape)."""
        return jnp.moveaxis(self._each(self.use.rule.grads), sum(self.use.loops), 0)

    def estimate(self) -> Estimate:
        """Return their norms (n,)."""
        of_rule, num_own = self.use.rule.norms, sum(self.use.loops)
        if of_rule is None:
            return of_gradients(self.grads())

        def norms(*arguments: Any) -> Estimate:
            found = of_rule(*arguments)
            found = found if isinstance(found, Estimate) else Estimate(jnp.square(found))
            return found._replace(again=None) if num_own else found

        found = self._each(norms)
        return jax.tree.map(lambda x: x.sum(range(num_own)), found) if num_own else found

    def weighted_sum(self, factors: Array) -> Array:
        """Return their sum over the examples, each times its factor (n,)."""
        if self.use.rule.weighted_sum is None:
            return weighted_sum(factors, self.grads())
        return self._each(self.use.rule.weighted_sum, factors)


class Analysis(NamedTuple):
    """Parameter uses of the loss of one example, from types alone."""

    program: Program
    uses: list[ParameterUse]  # in program order
    operands: list[tuple[Any, ...]]  # per use the types of its data operands
    kept: list[int]  # the indices of the parameters that have uses without a rule
    convolves: bool  # True if examples may have convolution kernels of their own elsewhere
    plans: dict[Hashable, Scope]  # see `Scope`

    def uses_of(self, n: int) -> list[CapturedUse]:
        """Return the uses with the types of their arrays for n examples."""

        def batch(x: Any) -> Any:
            return jax.ShapeDtypeStruct((n, *x.shape), x.dtype)

        pairs = zip(self.uses, self.operands, strict=True)
        return [CapturedUse(u, tuple(map(batch, own)), batch(u.result)) for u, own in pairs]


def analyzed(call: Call) -> Call:
    """Return the call with its traced loss, and the parameter uses found in it, cached."""
    if call.analysis is not None:
        return call
    call = call.traced()
    trained, program = call.parameters.trained, call.program
    scope = Scope(trained, trained)

    def operands(row: Row) -> list[tuple[Array, ...]]:
        _forward(call, program, scope, row)
        return scope.operands

    types = jax.eval_shape(operands, jax.tree.map(compat.type_of_row, call.rows))
    outputs = [index == 0 for index, _ in enumerate(program.jaxpr.outvars)]
    in_use = compat.inputs_in_use(program.jaxpr, outputs)
    seen = scope.wanted | scope.blocked | {i for use in scope.uses for i in use.sources}
    lost = [n for i, n in enumerate(call.parameters.names) if in_use[i] and i not in seen]
    if lost:
        raise UnsupportedLayerError(
            f"The parameters {lost} reach the loss by a way that the transform of the jaxpr did "
            "not see. Use method='vmap', and please report the model."
        )
    kept = sorted(scope.wanted)
    found = Analysis(program, scope.uses, types, kept, scope.convolves, scope.plans)
    return call._replace(analysis=found)


def capture(call: Call, rows: Row) -> tuple[Array, PyTree, list[CapturedUse], dict[int, Array]]:
    """Run forward and backward over a batch, and record the arrays that the rules need.

    Returns:
        (n,) losses; aux, stacked over the examples; the uses in program order; and by parameter
        index its per-sample gradient (n, *shape) over all uses without a rule.
    """
    trained = call.parameters.trained
    found: Analysis = analyzed(call).analysis
    zeros = [compat.varying_zeros(*use.result) for use in found.uses]
    own_zeros = {index: jnp.zeros_like(trained[index]) for index in found.kept}

    def one(row: Row) -> Any:
        def probed(probes: list[Array], own: dict[int, Array]) -> tuple[Array, Any]:
            values = [p + own[i] if i in own else p for i, p in enumerate(trained)]
            scope = Scope(trained, values, iter(probes), plans=found.plans)
            loss, aux = _forward(call, found.program, scope, row)
            return loss, (scope.operands, aux)

        loss, pull, (operands, aux) = jax.vjp(probed, zeros, own_zeros, has_aux=True)
        cotangents, kept = pull(jnp.ones_like(loss))
        return loss, aux, operands, cotangents, kept

    each = compat.mapping(lambda: found.convolves, (rows, trained))
    losses, aux, operands, cotangents, kept = each(one)(rows)
    return losses, aux, list(map(CapturedUse, found.uses, operands, cotangents)), kept


def _forward(call: Call, program: Program, scope: Scope, row: Row) -> tuple[Array, PyTree]:
    """Loss and aux of one example, whose uses the scope records."""
    parameters = [parameter(index, value) for index, value in enumerate(scope.values)]
    arguments = [*parameters, *jax.tree.leaves((call.shared, row))]
    results = run(scope, program.jaxpr, program.consts, arguments)
    plain = [x.value if isinstance(x, Derived) else scope.enter(x) for x in results[1:]]
    loss, aux = jax.tree.unflatten(program.structure, [scope.enter(results[0]), *plain])
    return loss, aux
