# SPDX-License-Identifier: Apache-2.0
"""Report of how `clipped_grad_sum` treats a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from dualdp_jax import compat
from dualdp_jax.per_sample.call import Options, PyTree, build
from dualdp_jax.per_sample.gradients import Gradients, captured, keeps
from dualdp_jax.per_sample.methods import RULED, check_method, way_of


@compat.promoting
def explain(
    loss_fn: Callable[..., Any],
    what: PyTree,
    *batch: PyTree,
    method: str = "auto",
    has_aux: bool = False,
    **options: Any,
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
    given = Options(method=method, has_aux=has_aux, **options)
    check_method(method)
    call = build(loss_fn, what, batch, given)
    if call.num_examples == 0:
        raise ValueError("The batch has no examples. Expected at least one, for its shapes.")
    seen: list[Gradients] = []
    jax.eval_shape(lambda rows: seen.append(captured("book_keeping", call, rows)), call.rows)
    (found,), names = seen, call.parameters.names
    users = {id(use): len(group) for group in found.uses.values() for use in group}
    way, by = way_of(call, call.num_examples), method if method in RULED else "auto"
    uses = [
        {
            "parameters": [names[index] for index in sorted(use.use.sources)],
            "primitive": use.use.primitive,
            "form": {0: "gradients", 1: use.choice.form}.get(users.get(id(use), 0), "pairs"),
            "keeps": keeps(by, use) or id(use) not in users,
        }
        for use in found.captured
    ]
    return {
        "method": method,
        "way": way if way in ("vmap", "loop") else "uses",
        "uses": uses,
        "instantiated": [names[index] for index in sorted(call.program.analysis.wanted)],
    }
