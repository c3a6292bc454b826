# SPDX-License-Identifier: Apache-2.0
"""Runs a case of the shared grid on torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

import dualdp_torch as backend
from tests import reference
from tests.cases.layers import Case
from tests.conftest import DEVICE

NAME = "torch"
METHODS = tuple(method for method in backend.METHODS if method != "auto")


def build(case: Case) -> tuple[nn.Module, torch.Tensor]:
    """The case's model and inputs, in the case's dtype, on the device of the tests."""
    dtype = getattr(torch, case.dtype)
    return reference.model_of(case, dtype).to(DEVICE), reference.batch_of(case, dtype).to(DEVICE)


def _numpy(found: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    return {name: value.detach().cpu().numpy() for name, value in found.items()}


def per_sample_grads(case: Case, **options: Any) -> dict[str, np.ndarray]:
    """{trained name: (n, *shape)}."""
    model, x = build(case)
    return _numpy(backend.per_sample_grads(reference.loss_fn, model, x, **options))


def per_sample_norms(case: Case, *, per_parameter: bool = False, **options: Any) -> Any:
    """(n,), or {trained name: (n,)}."""
    model, x = build(case)
    found = backend.per_sample_norms(
        reference.loss_fn, model, x, per_parameter=per_parameter, **options
    )
    return _numpy(found) if per_parameter else found.cpu().numpy()


def clipped_grad_sum(case: Case, **options: Any) -> tuple[dict[str, np.ndarray], Any, Any]:
    """({trained name: sum}, norms (n,), losses (n,))."""
    model, x = build(case)
    if options.get("mask") is not None:
        options["mask"] = torch.from_numpy(options["mask"]).to(DEVICE)
    if options.get("clipping") == "per_layer" and options.get("method") == "two_pass":
        options["method"] = "book_keeping"  # two_pass refuses per_layer; dualdp_torch tests that
    found = backend.clipped_grad_sum(reference.loss_fn, model, x, **options)
    return _numpy(found.grads), found.norms.cpu().numpy(), found.losses.cpu().numpy()
