# SPDX-License-Identifier: Apache-2.0
"""One batch through a model before training: what no list of modules can know."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from dualdp import UnsupportedLayerError

from .batch import Batch, check_losses
from .proof import prove
from .random_state import untouched_generators
from .uses import trainable_parameters
from .validate import Finding


def dry_run(model: nn.Module, loss_fn: Callable[..., Any], batch: tuple[Any, ...]) -> list[Finding]:
    """Findings about mixing, buffers and parameters without a gradient; see `validate`."""
    examples, parameters = Batch(batch), trainable_parameters(model)
    if examples.n < 2:
        raise ValueError(
            f"The batch holds {examples.n} examples. Expected at least two, so that it can be seen "
            "whether they mix."
        )
    try:
        proof = prove(model, loss_fn, examples, parameters)
    except UnsupportedLayerError as error:
        reason, _, what_to_do = str(error).partition(". ")
        return [Finding("", type(model).__name__, reason, what_to_do)]
    if proof is None:
        raise ValueError(
            "Fewer than two losses of the batch are finite. Expected a batch to train on."
        )
    with untouched_generators(model):
        losses = check_losses(loss_fn(model, *examples.arguments()), examples.n)
    values = list(parameters.values())
    grads = torch.autograd.grad(losses.sum(), values, allow_unused=True)
    return [
        Finding(
            name,
            "Parameter",
            "no example of the batch reaches it, so that it would be trained on noise alone",
            "Freeze it (requires_grad_(False)), or use it in forward.",
        )
        for name, grad in zip(parameters, grads, strict=True)
        if grad is None or not bool(grad.any())
    ]
