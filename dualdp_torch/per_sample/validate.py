# SPDX-License-Identifier: Apache-2.0
"""Search for parts of a model that can't be trained privately, by its modules and by one batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from dualdp import _validate
from dualdp._validate import UnsupportedLayerError
from dualdp.exactness import ExactnessError
from dualdp_torch.parallel.fsdp import refuse_tensor_parallel
from dualdp_torch.per_sample.api import per_sample_norms
from dualdp_torch.per_sample.batch import Batch
from dualdp_torch.per_sample.model_checks import Finding, module_findings, require_module
from dualdp_torch.per_sample.random_state import on_copies, untouched_generators


def validate(
    model: nn.Module, *, loss_fn: Callable[..., Any] | None = None, batch: tuple[Any, ...] = ()
) -> list[Finding]:
    """Return the parts of a model that can't be trained privately.

    Without `loss_fn` only the modules are inspected. With it the model is run on the batch, too, to
    find losses that depend on other examples, buffers that change, and parameters that get no
    gradient; the model is left as it was.

    Args:
        model: module to validate.
        loss_fn: callable, `loss_fn(model, *batch)` -> (n,) losses, one per example.
        batch: tuple of its further arguments, at least two examples.

    Returns:
        List of findings, each with a path and a fix; empty when there is none.

    Raises:
        TypeError: the model is tensor parallel.
        ValueError: a batch without two examples whose losses are finite.
    """
    require_module("model", model)
    refuse_tensor_parallel(model, "validate", "call it before parallelize_module")
    findings = module_findings(model)
    if loss_fn is None or findings or not any(p.requires_grad for p in model.parameters()):
        return findings
    _validate.takes("loss_fn", loss_fn, "(model, *batch)", model, *batch)
    examples = Batch(batch)
    if examples.n < 2:
        raise ValueError(
            f"The batch holds {examples.n} examples. Expected at least two, so that it can be seen "
            "whether they mix."
        )
    try:
        with untouched_generators(model), on_copies(model):
            found = per_sample_norms(loss_fn, model, *batch, per_parameter=True, check="always")
    except (UnsupportedLayerError, ExactnessError) as error:
        reason, _, what_to_do = str(error).partition(". ")
        return [Finding("", type(model).__name__, reason, what_to_do)]
    finite = torch.stack([*found.values()]).isfinite().all(0)
    if int(finite.sum()) < 2:
        raise ValueError(
            "Fewer than two losses of the batch are finite. Expected a batch to train on."
        )
    return [
        Finding(
            name,
            "Parameter",
            "no example of the batch reaches it, so that it would be trained on noise alone",
            "Freeze it (requires_grad_(False)), or use it in forward.",
        )
        for name, norms in found.items()
        if not bool(norms[finite].any())
    ]
