# SPDX-License-Identifier: Apache-2.0
"""Validation of a model for private training: findings with location, reason and fix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dualdp_jax import compat
from dualdp_jax.per_sample.call import Array, Call, Options, PyTree, Row, build


@dataclass(frozen=True)
class Finding:
    """Obstacle to private training.

    Attributes:
        path: str, path in the model, or "loss_fn".
        kind: str, dtype of the parameter, or class of the error.
        reason: str, description of the obstacle.
        fix: str, advice.
    """

    path: str
    kind: str
    reason: str
    fix: str

    def __str__(self) -> str:
        return f"{self.kind} ({self.path!r}): {self.reason}. {self.fix}"


@compat.promoting
def validate(
    loss_fn: Callable[..., PyTree], what: PyTree, *batch: PyTree, **options: Any
) -> list[Finding]:
    """Dry run of a loss on a batch: nothing is released, nothing is compiled.

    The arguments are those of `per_sample_grads`; a batch of one example is enough.

    Returns:
        List with what the per-sample calls refuse: a leaf that can't be trained, a variable that
        one example would change for the next, a loss that is no scalar of one example; else with
        each trained parameter that gets no gradient; empty if there is none.
    """
    given = Options(**options)
    try:
        call = build(loss_fn, what, batch, given)
        unused = _without_gradient(call)
    except (TypeError, ValueError) as error:
        reason, _, fix = str(error).partition(". ")
        return [Finding("loss_fn", type(error).__name__, reason, fix)]
    return [
        Finding(
            call.parameters.names[k],
            str(call.parameters.trained[k].dtype),
            "it gets no gradient, so training would only add noise to it",
            "Freeze it by trainable=, take it out, or let loss_fn use it.",
        )
        for k in unused
    ]


def _without_gradient(call: Call) -> list[int]:
    """Numbers of the trained leaves whose gradient is zero whatever the numbers are.

    Judged on the program, not on its values: a gradient that is zero at the start depends on them
    and counts, such as that of one factor of a product whose other factor is zero.
    """
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), call.rows)

    def grads(trained: list[Array], row: Row) -> list[Array]:
        return list(jax.grad(lambda p: call.loss(p, row)[0])(trained))

    closed, _ = compat.trace(grads, call.parameters.trained, shapes)
    numbers = range(len(closed.jaxpr.outvars))
    used = [compat.inputs_in_use(closed.jaxpr, [i == k for i in numbers]) for k in numbers]
    constant = [k for k in numbers if not any(used[k])]
    if constant:
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        values = grads(call.parameters.trained, zeros)
        constant = [k for k in constant if not np.any(np.asarray(values[k]))]
    return constant
