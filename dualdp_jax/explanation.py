# SPDX-License-Identifier: Apache-2.0
"""What a call does with a model, and what its check found, told to people."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dualdp import _validate
from dualdp.exactness import ExactnessError
from dualdp_jax import bounds, ghost, trials
from dualdp_jax.call import Call, build, traced
from dualdp_jax.choices import is_small, survey
from dualdp_jax.methods import choose
from dualdp_jax.request import SUM, Request


def explain(
    loss_fn: Callable[..., Any],
    what: Any,
    *batch: Any,
    method: str = "auto",
    clipping: str = "flat",
    has_aux: bool = False,
    key: Any = None,
    trainable: Any = None,
    check: str = "first",
) -> dict[str, Any]:
    """What `clipped_grad_sum` does with a model, as plain data that can be written to a record.

    What "auto" does depends on shapes, dtypes and this library's version; nothing is timed, so that
    every process and a resumed run decide alike.

    Args:
        loss_fn: as for `clipped_grad_sum`.
        what: as for `clipped_grad_sum`.
        *batch: as for `clipped_grad_sum`, of the physical batch size.
        method: as for `clipped_grad_sum`.
        clipping: as for `clipped_grad_sum`.
        has_aux: as for `clipped_grad_sum`.
        key: as for `clipped_grad_sum`.
        trainable: as for `clipped_grad_sum`.
        check: "first" says what came of the check that such a call makes while it is traced by
            `jit`, which is made here if it was not before; "off" leaves it out, so that nothing is
            computed.

    Returns:
        `{"method", "way", "uses", "instantiated", "check"}`. "way" is "vmap" or "loop" for a model
        that is differentiated as a whole, or "uses": each use of a parameter for itself, with
        "parameters", "primitive", "form" of its norm, and whether its per-sample gradients are
        kept. Parameters under "instantiated" have uses without a rule, so that all their gradients
        are formed. "check" has a "status" ("passed", "failed", "not checked" or "off"), the
        "reason" where it did not pass, and under "trials" what came of each kind of stand-ins.

    Raises:
        ValueError: the batch has no examples.

    >>> import jax.numpy as jnp
    >>> loss = lambda p, x: jnp.sum(x @ p["w"] + p["b"])
    >>> params = {"w": jnp.ones((900, 500)), "b": jnp.ones(500)}
    >>> found = explain(loss, params, jnp.ones((8, 900)))
    >>> found["uses"][0]["primitive"], found["uses"][0]["form"], found["instantiated"]
    ('dot_general', 'lengths', ['b'])
    >>> found["check"]["status"]
    'passed'
    """
    _validate.choice("check", check, ("first", "off"))
    call = build(loss_fn, what, batch, has_aux=has_aux, key=key, trainable=trainable)
    if call.num_examples == 0:
        raise ValueError("The batch has no examples. Expected at least one, for its shapes.")
    call, chosen = traced(call), choose(method)
    taken, choices = survey(call, call.rows)
    names = call.parameters.names
    users = {number: len(group) for group in ghost.users(taken).values() for number in group}
    keeps = chosen.keeps or ghost.always
    uses = [
        {
            "parameters": [names[index] for index in sorted(use.sources)],
            "primitive": use.primitive,
            "form": {0: "gradients", 1: choice.form}.get(users.get(number, 0), "pairs"),
            "keeps": keeps(use, operands, cotangents) or number not in users,
        }
        for number, (use, operands, cotangents, choice) in enumerate(
            zip(taken.uses, taken.operands, taken.cotangents, choices, strict=True)
        )
    ]
    return {
        "method": method,
        "way": _way(call, method),
        "uses": uses,
        "instantiated": [names[index] for index in sorted(taken.kept)],
        "check": {"status": "off"} if check == "off" else _checked(call, method, clipping),
    }


def _way(call: Call, method: str) -> str:
    """How the examples are differentiated."""
    if method in ("vmap", "loop"):
        return method
    return "vmap" if method == "auto" and is_small(call, call.rows) else "uses"


def _checked(call: Call, method: str, clipping: str) -> dict[str, Any]:
    """What came of the check of such a call."""
    request = Request(SUM, method, bounds.clipper(call.parameters, clipping, 1.0))
    try:
        found = trials.examine(request, call, call.num_examples, "clipped_grad_sum")
    except ExactnessError as error:
        return {"status": "failed", "reason": str(error), "trials": {}}
    return found._asdict()
