# SPDX-License-Identifier: Apache-2.0
"""Loss of one example as a program, with operands and output gradients at each parameter use.

The loss is traced for one example, so no batch axis has to be followed and nothing can mix
examples; every method and check runs this program. To find the uses its equations are evaluated one
by one. Where a weight meets data in a primitive that has a rule, a zero probe is added to the
result and the data operand is kept: the gradient of the probe and the operand are all that the rule
needs. Everywhere else a parameter is replaced by itself plus a zero probe of its own shape, whose
gradient is the per-sample gradient summed over those other uses. The pull-back to the probes is
taken under `vmap`; no gradient of a weight is computed.

Source: Bu et al. 2023 (book-keeping); Rochette et al. 2019; here for any function of jax.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dualdp_jax import compat
from dualdp_jax.per_sample.expressions import Derived, parameter
from dualdp_jax.per_sample.jaxpr import CONVOLUTION, ParameterUse, Scope, run
from dualdp_jax.per_sample.units import Array, Loss, PyTree, Row
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
            return found if isinstance(found, Estimate) else Estimate(jnp.square(found))

        found = self._each(norms)
        return jax.tree.map(lambda x: x.sum(range(num_own)), found) if num_own else found

    def weighted_sum(self, factors: Array) -> Array:
        """Return their sum over the examples, each times its factor (n,)."""
        if self.use.rule.weighted_sum is None:
            return weighted_sum(factors, self.grads())
        return self._each(self.use.rule.weighted_sum, factors)


@dataclass(eq=False)
class Program:
    """Traced loss of one example."""

    #: open jaxpr over (trained leaves, shared arrays, row); its first result is the loss, the
    #: rest is aux.
    jaxpr: compat.Jaxpr
    consts: Sequence[Array]  # arrays that the loss closes over
    structure: jax.tree_util.PyTreeDef  # of (loss, aux)
    inputs: tuple[PyTree, PyTree, PyTree]  # types of trained leaves, shared arrays and row

    @classmethod
    def of(cls, loss: Loss, trained: Sequence[Array], shared: PyTree, rows: Row) -> Program:
        """Trace the loss of one of these rows (n, ...)."""
        row = jax.tree.map(compat.type_of_row, rows)
        inputs = jax.eval_shape(lambda *arrays: arrays, trained, shared, row)
        closed, structure = compat.trace(loss, trained, shared, row)
        return cls(*compat.open_jaxpr(closed), structure, inputs)

    def __call__(self, trained: Sequence[Array], shared: PyTree, row: Row) -> tuple[Array, PyTree]:
        """Return (loss (), aux) of one example; the loss function is not called again."""
        inputs = jax.tree.leaves((trained, shared, row))
        results = compat.evaluated(self.jaxpr, self.consts, *inputs)
        loss, aux = jax.tree.unflatten(self.structure, results)
        return loss, aux

    @cached_property
    def analysis(self) -> Scope:
        """Scope in which the parameter uses of the loss were collected, from types alone."""
        scopes: list[Scope] = []

        def collect(trained: list[Array], shared: PyTree, row: Row) -> Array:
            scopes.append(Scope(trained))
            return self._run(scopes[0], shared, row)[0]

        jax.eval_shape(collect, *self.inputs)
        return scopes[0]

    def mapping(self, arrays: PyTree, *, of_kernels: bool = False) -> compat.Map:
        """Return the map from a function of one example to one of all, see `compat.mapping`.

        With `of_kernels` that function gives gradients of kernels.
        """

        def convolves() -> bool:
            uses = self.analysis.uses if of_kernels else ()
            return self.analysis.convolves or any(use.primitive == CONVOLUTION for use in uses)

        return compat.mapping(convolves, arrays)

    def capture(
        self, trained: list[Array], shared: PyTree, rows: Row
    ) -> tuple[Array, PyTree, list[CapturedUse], dict[int, Array]]:
        """Run forward and backward over a batch, and record the arrays that the rules need.

        Returns:
            (n,) losses; aux, stacked over the examples; the uses in program order; and by parameter
            index its per-sample gradient (n, *shape) over all uses without a rule.
        """
        found = self.analysis
        zeros = [compat.varying_zeros(*use.result) for use in found.uses]
        own_zeros = {index: jnp.zeros_like(trained[index]) for index in sorted(found.wanted)}

        def one(row: Row) -> Any:
            def probed(probes: list[Array], own: dict[int, Array]) -> tuple[Array, Any]:
                values = [p + own[i] if i in own else p for i, p in enumerate(trained)]
                scope = Scope(values, iter(probes), plans=found.plans)
                loss, aux = self._run(scope, shared, row)
                return loss, (scope.operands, aux)

            loss, pull, (operands, aux) = jax.vjp(probed, zeros, own_zeros, has_aux=True)
            cotangents, kept = pull(jnp.ones_like(loss))
            return loss, aux, operands, cotangents, kept

        each = self.mapping((rows, trained))
        losses, aux, operands, cotangents, kept = each(one)(rows)
        return losses, aux, list(map(CapturedUse, found.uses, operands, cotangents)), kept

    def _run(self, scope: Scope, shared: PyTree, row: Row) -> tuple[Array, PyTree]:
        """Loss and aux of one example, whose uses the scope records."""
        parameters = [parameter(index, value) for index, value in enumerate(scope.values)]
        arguments = [*parameters, *jax.tree.leaves((shared, row))]
        first, *rest = run(scope, self.jaxpr, self.consts, arguments)
        plain = [x.value if isinstance(x, Derived) else scope.enter(x) for x in rest]
        loss, aux = jax.tree.unflatten(self.structure, [scope.enter(first), *plain])
        return loss, aux
