# SPDX-License-Identifier: Apache-2.0
"""Gradients at the uses of parameters, from one forward and one backward pass over the jaxpr.

The per-example loss is traced, so no batch axis has to be followed and nothing can mix examples.
Its equations are run again, one by one. Where a weight meets data in a primitive that has a rule,
a zero probe is added to the result and the data operand is kept: the gradient of the probe and the
operand are all that the rule needs. Everywhere else a parameter is replaced by itself plus a zero
probe of its own shape, whose gradient is the per-sample gradient of all these uses together. Then
the pull-back to the probes is taken under `vmap`; no gradient of a weight is ever computed.

Source: Bu et al. 2023 (book-keeping); Rochette et al. 2019; here for any function of jax.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dualdp_jax import compat
from dualdp_jax.call import Call, Row
from dualdp_jax.derived import Derived, parameter
from dualdp_jax.interpret import Scope, Use, run


class Capture(NamedTuple):
    """What one pass over a batch leaves behind.

    Attributes:
        losses: (n,).
        aux: stacked over the examples, or None.
        uses: the places where weights meet data, in order.
        operands: their data operands, leading axes (n, *loops).
        cotangents: gradients of their results, leading axes (n, *loops).
        kept: parameter index to per-sample gradient, (n, *shape), of all its other uses.
        convolves: whether, beside the uses, examples may have convolution kernels of their own.
    """

    losses: Any
    aux: Any
    uses: list[Use]
    operands: list[tuple[Any, ...]]
    cotangents: list[Any]
    kept: dict[int, Any]
    convolves: bool


def mapping(
    convolves: Callable[[], bool], arrays: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """How a function of one example becomes one of all: `jax.vmap`, but where that is wrong.

    Convolutions with a kernel for each example become one with groups of the batch, of which XLA's
    partitioner loses most where arrays are spread over devices (found in jax 0.10.2; a test watches
    it). Where they may be, such examples are worked on one after the other; so they are where an
    operation has no rule for a batch (`jax.lax.ragged_dot`).

    Args:
        convolves: () -> whether examples have kernels, or gradients of kernels, of their own.
        arrays: the rows and the parameters.
    """
    if compat.may_span_devices(arrays) and convolves():
        return one_by_one
    return all_at_once


def all_at_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of one example as one of all: by `jax.vmap` if it can."""

    def each(rows: Any) -> Any:
        try:
            return jax.vmap(function)(rows)
        except NotImplementedError:  # by jax, for an operation that it knows no batches of
            return one_by_one(function)(rows)

    return each


def one_by_one(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of one example as one of all, one after the other."""
    return lambda rows: jax.lax.map(function, rows)


def capture(call: Call, rows: Row) -> Capture:
    """Run forward and backward over a batch, and take down what the rules need.

    Args:
        call: the loss in normal form.
        rows: (n, ...) leaves, n >= 1.

    Raises:
        RuntimeError: a parameter reaches the loss by a way that was not seen.
    """
    trained = call.parameters.trained
    jaxpr, consts, structure = call.program

    def forward(scope: Scope, row: Row) -> tuple[Any, Any]:
        slots = [parameter(index, value) for index, value in enumerate(scope.values)]
        results = run(scope, jaxpr, consts, [*slots, *jax.tree.leaves(row)])
        plain = [x.value if isinstance(x, Derived) else scope.enter(x) for x in results[1:]]
        return jax.tree.unflatten(structure, [scope.enter(results[0]), *plain])

    plan = Scope(trained, trained)
    jax.eval_shape(lambda row: forward(plan, row), jax.tree.map(compat.type_of_row, rows))
    _check_all_seen(call, jaxpr, plan)
    wanted = sorted(plan.wanted)
    zeros = [compat.vary(jnp.zeros(p.shape, p.dtype), p.axes) for p in plan.results]
    own_zeros = {index: jnp.zeros_like(trained[index]) for index in wanted}

    def one(row: Row) -> Any:
        def probed(probes: list[Any], own: dict[int, Any]) -> tuple[Any, Any]:
            values = [p + own[i] if i in own else p for i, p in enumerate(trained)]
            scope = Scope(trained, values, probes, plans=plan.plans)
            loss, aux = forward(scope, row)
            return loss, (scope.operands, aux)

        loss, pull, (operands, aux) = jax.vjp(probed, zeros, own_zeros, has_aux=True)
        cotangents, kept = pull(jnp.ones_like(loss))
        return loss, aux, operands, cotangents, kept

    each = mapping(lambda: plan.convolves, (rows, trained))
    losses, aux, operands, cotangents, kept = each(one)(rows)
    return Capture(losses, aux, plan.uses, operands, cotangents, kept, plan.convolves)


def _check_all_seen(call: Call, jaxpr: Any, plan: Scope) -> None:
    """Every parameter was seen, or the loss provably does not depend on it."""
    outputs = [index == 0 for index, _ in enumerate(jaxpr.outvars)]
    in_use = compat.inputs_in_use(jaxpr, outputs)
    seen = plan.wanted | plan.blocked | {i for use in plan.uses for i in use.sources}
    lost = [n for i, n in enumerate(call.parameters.names) if in_use[i] and i not in seen]
    if lost:
        raise RuntimeError(
            f"The parameters {lost} reach the loss by a way that the transform of the jaxpr did "
            "not see. Use method='vmap', and please report the model."
        )
