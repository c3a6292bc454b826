# SPDX-License-Identifier: Apache-2.0
"""Names that `per_sample` still imports: no model is cut by `parallelize_module` any more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from dualdp_torch.parallel.fsdp import check_sharded
from dualdp_torch.parallel.fsdp import local_of as local_of
from dualdp_torch.rules.base import Tensor, lengths

Result = TypeVar("Result")
_LEAST_LENGTH = 1e-15


class TensorParallel:
    """Pieces of a tensor parallel model, of which there is none."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)

    @classmethod
    def of(cls, module: nn.Module) -> TensorParallel | None:
        """Return None."""
        return None


def split_of(module: nn.Module, method: str) -> TensorParallel | None:
    """Return None; refuse a tensor parallel model."""
    check_sharded(module, "auto")
    return None


def on_all_alike(model: nn.Module, found: Result, error: Callable[[Result], float]) -> Result:
    """Return what was found."""
    return found


def length(tensor: Tensor) -> float:
    """Return the L2 norm of a tensor."""
    local = local_of(tensor)
    found = float(lengths(local[None]).double())
    if not _LEAST_LENGTH < found < 1 / _LEAST_LENGTH:  # float32 squares under- or overflow
        found = float(torch.linalg.vector_norm(local, dtype=torch.float64))
    return found
