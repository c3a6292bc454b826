# SPDX-License-Identifier: Apache-2.0
"""Description of a call of `clipped_grad_sum`: the treatment of each parameter, and the check."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from dualdp import _validate
from dualdp.exactness import ExactnessError
from dualdp_torch.parallel.fsdp import refuse_tensor_parallel
from dualdp_torch.per_sample.api import clipped_grad_sum
from dualdp_torch.per_sample.call import Call, Options, unchanged
from dualdp_torch.per_sample.gradients import Formed
from dualdp_torch.per_sample.model_checks import require_module


def explain(
    loss_fn: Callable[..., Any],
    model: nn.Module,
    *batch: Any,
    method: str = "auto",
    clipping: str = "flat",
    has_aux: bool = False,
    check: str = "first",
) -> dict[str, Any]:
    """Return the method and norms that `clipped_grad_sum` uses for a model, and its check, as data.

    Arguments are those of `clipped_grad_sum`, with at least two examples. The model is run, and
    left as it was. check="first" compares the call with plain autograd, as a first call does.

    Returns:
        Dict with keys "method", "way", "reason", "uses", "instantiated" and "check". "way" is
        "uses" if parameter uses are captured, else "vmap" or "loop"; "reason" is None, or the
        problem that led to vmap. Each entry of "uses" has the "parameters", the called "function",
        the "form" of its norms ("products" of inputs and output gradients, or "gradients"), and
        "keeps", True if per-sample gradients are kept for the sum. "instantiated" lists parameters
        whose per-sample gradients are formed. "check" has a "status" ("passed", "failed",
        "not checked", "off") and a "reason" for "failed" and "not checked".

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
    require_module("The model", model)
    refuse_tensor_parallel(model, "explain", "call it before parallelize_module")
    call = Call.of(loss_fn, model, batch, Options(method, has_aux=has_aux, check="off"))
    if call.batch.n < 2:
        raise ValueError(
            f"The batch holds {call.batch.n} examples. Expected at least two: one alone goes "
            "through the loop."
        )
    with unchanged(model):
        gradients, _, _ = call.gradients()
        runs_examples = isinstance(gradients, Formed)
        uses = [] if runs_examples else gradients.describe()
    way = "uses" if not runs_examples else "loop" if method == "loop" else "vmap"
    reason = None if way == "uses" or method == way else call.cache.problem
    status: dict[str, Any] = {"status": "off"}
    if check == "first" and method == "loop":
        status = {"status": "not checked", "reason": "the loop is the definition"}
    elif check == "first":
        options: dict[str, Any] = {"method": method, "clipping": clipping, "has_aux": has_aux}
        options |= {"max_grad_norm": 1.0, "check": "always"}
        try:
            norms = clipped_grad_sum(loss_fn, model, *batch, **options).norms
            status = {"status": "passed"}
            if not bool(norms.isfinite().any()):
                status = {"status": "not checked", "reason": "no norm of the batch is finite"}
        except ExactnessError as error:
            status = {"status": "failed", "reason": str(error)}
    return {
        "method": method,
        "way": way,
        "reason": reason,
        "uses": uses,
        "instantiated": sorted(
            {n for use in uses if use["form"] == "gradients" for n in use["parameters"]}
        ),
        "check": status,
    }
