# SPDX-License-Identifier: Apache-2.0
"""A call of a model described before it is used: how each parameter is treated, and its check."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from dualdp import _validate
from dualdp.exactness import ExactnessError

from .call import METHODS, Call
from .gradients import Captured
from .per_sample import clipped_grad_sum


def explain(
    loss_fn: Callable[..., Any],
    model: nn.Module,
    *batch: Any,
    method: str = "auto",
    clipping: str = "flat",
    has_aux: bool = False,
    check: str = "first",
) -> dict[str, Any]:
    """Return how `clipped_grad_sum` treats a model, as plain data that can be written to a record.

    Args:
        loss_fn: as for `clipped_grad_sum`.
        model: as for `clipped_grad_sum`; it is run, and left as it is.
        *batch: as for `clipped_grad_sum`, at least two examples.
        method: as for `clipped_grad_sum`.
        clipping: as for `clipped_grad_sum`.
        has_aux: as for `clipped_grad_sum`.
        check: "first" compares the call with the definition, as a first call does; "off" does not.

    Returns:
        `{"method", "way", "reason", "uses", "instantiated", "check"}`. "way" is "uses" where each
        use of a parameter is treated for itself, or "vmap" or "loop" where the model is
        differentiated as a whole; "reason" says why, where the method did not ask for it. Each of
        "uses" has the "parameters", the "function" that was called, the "form" of its norms
        ("products" of inputs and output gradients, or "gradients"), and "keeps", whether
        per-sample gradients are kept for the sum. Parameters under "instantiated" have their
        per-sample gradients formed. "check" has a "status" ("passed", "failed", "not checked",
        "off") and a "reason" where it did not pass.

    Raises:
        UnsupportedLayerError: the losses depend on other examples.
        ValueError: fewer than two examples.

    >>> import torch
    >>> model = torch.nn.Linear(3, 2)
    >>> loss = lambda model, x: model(x).square().sum(1)
    >>> found = explain(loss, model, torch.ones(4, 3))
    >>> [(use["parameters"], use["form"]) for use in found["uses"]]
    [(['weight'], 'products'), (['bias'], 'gradients')]
    >>> found["check"]["status"]
    'passed'
    """
    _validate.choice("check", check, ("first", "off"))
    call = Call.checked(loss_fn, model, batch, method, has_aux, None, None)
    if call.batch.n < 2:
        raise ValueError(
            f"The batch holds {call.batch.n} examples. Expected at least two: one alone goes "
            "through the loop."
        )
    with call.unchanged():
        gradients, _, _ = call.gradients()
        uses = gradients.describe() if isinstance(gradients, Captured) else []
    way = "uses" if isinstance(gradients, Captured) else "loop" if method == "loop" else "vmap"
    return {
        "method": method,
        "way": way,
        "reason": None if way == "uses" or method == way else call.problem,
        "uses": uses,
        "instantiated": sorted(
            {n for use in uses if use["form"] == "gradients" for n in use["parameters"]}
        ),
        "check": {"status": "off"}
        if check == "off"
        else _checked(loss_fn, model, batch, method, clipping, has_aux),
    }


def _checked(
    loss_fn: Callable[..., Any],
    model: nn.Module,
    batch: tuple[Any, ...],
    method: str,
    clipping: str,
    has_aux: bool,
) -> dict[str, Any]:
    """The outcome of the check of such a call, at the bound that its median norm is."""
    if METHODS[method] is None and method == "loop":
        return {"status": "not checked", "reason": "the loop is the definition"}
    try:
        norms = clipped_grad_sum(
            *(loss_fn, model, *batch),
            max_grad_norm=1.0,
            method=method,
            clipping=clipping,
            has_aux=has_aux,
            check="always",
        ).norms
    except ExactnessError as error:
        return {"status": "failed", "reason": str(error)}
    if not bool(norms.isfinite().any()):
        return {"status": "not checked", "reason": "no norm of the batch is finite"}
    return {"status": "passed"}
