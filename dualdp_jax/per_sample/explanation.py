# SPDX-License-Identifier: Apache-2.0
"""Report of how `clipped_grad_sum` treats a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dualdp_jax import compat
from dualdp_jax.per_sample import norms
from dualdp_jax.per_sample.call import Options, build
from dualdp_jax.per_sample.capture import analyzed
from dualdp_jax.per_sample.methods import BY_COST, METHODS, check_method, is_small


@compat.promoting
def explain(
    loss_fn: Callable[..., Any],
    what: Any,
    *batch: Any,
    method: str = "auto",
    has_aux: bool = False,
    key: Any = None,
    trainable: Any = None,
    keep_batch_dim: bool = False,
    rows_per_unit: int | None = None,
    row_weights: Any = None,
) -> dict[str, Any]:
    """Return how `clipped_grad_sum` treats a model, as plain data that can be saved.

    The choices of "auto" depend on shapes, dtypes and this library's version; nothing is timed, so
    every process and a resumed run choose alike.

    The arguments are those of `clipped_grad_sum`, with a batch of the physical batch size.

    Returns:
        `{"method", "way", "uses", "instantiated"}`. "way" is "vmap" or "loop" for a model
        that is differentiated as a whole, else "uses". "uses" lists each parameter use with its
        "parameters", "primitive", "form" of the norm, and "keeps": True if its per-sample
        gradients are kept. Parameters under "instantiated" have uses without a rule, so their
        gradients are formed.

    Raises:
        ValueError: the batch has no examples.

    >>> import jax.numpy as jnp
    >>> loss = lambda p, x: jnp.sum(x @ p["w"] + p["b"])
    >>> params = {"w": jnp.ones((900, 500)), "b": jnp.ones(500)}
    >>> found = explain(loss, params, jnp.ones((8, 900)))
    >>> found["uses"][0]["primitive"], found["uses"][0]["form"], found["instantiated"]
    ('dot_general', 'lengths', ['b'])
    """
    options = Options(has_aux, key, trainable, keep_batch_dim, rows_per_unit, row_weights)
    call = build(loss_fn, what, batch, options)
    if call.num_examples == 0:
        raise ValueError("The batch has no examples. Expected at least one, for its shapes.")
    check_method(method)
    call = analyzed(call)
    taken, names = call.analysis.uses_of(call.num_examples), call.parameters.names
    unformed = norms.unformed_uses(taken, call.analysis.kept)
    users = {number: len(group) for group in unformed.values() for number in group}
    keeps = METHODS.get(method, BY_COST).keeps
    uses = [
        {
            "parameters": [names[index] for index in sorted(captured.use.sources)],
            "primitive": captured.use.primitive,
            "form": {0: "gradients", 1: captured.choice.form}.get(users.get(number, 0), "pairs"),
            "keeps": keeps(captured) or number not in users,
        }
        for number, captured in enumerate(taken)
    ]
    way = method if method in ("vmap", "loop") else "uses"
    if method == "auto" and is_small(call, call.num_examples):
        way = "vmap"
    return {
        "method": method,
        "way": way,
        "uses": uses,
        "instantiated": [names[index] for index in call.analysis.kept],
    }
