# SPDX-License-Identifier: Apache-2.0
"""Which modules of a model can't be trained privately, where they are, and what to use instead."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from dualdp import UnsupportedLayerError


@dataclass(frozen=True)
class Finding:
    """One module that mixes examples.

    Attributes:
        path: where it is in the model.
        kind: its class.
        reason: what is wrong.
        fix: what to do.
    """

    path: str
    kind: str
    reason: str
    fix: str

    def __str__(self) -> str:
        return f"No rule for {self.kind} (layer {self.path!r}): {self.reason}. {self.fix}"


def _examine(path: str, module: nn.Module) -> Finding | None:
    """What is wrong with one module, if anything."""
    kind = type(module).__name__
    if isinstance(module, _BatchNorm):
        return Finding(
            path,
            kind,
            "it mixes examples, so no per-sample gradient exists",
            "Replace it by GroupNorm.",
        )
    if isinstance(module, _InstanceNorm) and module.track_running_stats:
        return Finding(
            path,
            kind,
            "its running statistics mix the examples of every batch",
            "Build it with track_running_stats=False.",
        )
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        if module.scale_grad_by_freq:
            reason = "scale_grad_by_freq divides by how often an id occurs in the whole batch"
            return Finding(path, kind, reason, "Build it with scale_grad_by_freq=False.")
        if module.max_norm is not None:
            reason = "max_norm renormalises the rows that the batch uses, without noise"
            return Finding(path, kind, reason, "Build it with max_norm=None.")
    return None


def validate(model: nn.Module) -> list[Finding]:
    """Modules of a model that have no per-sample gradient.

    Args:
        model: the model.

    Returns:
        One finding per such module, with its path and what to do; empty when there is none.
    """
    found = [_examine(path, module) for path, module in model.named_modules()]
    return [finding for finding in found if finding]


def refuse_mixing_modules(model: nn.Module) -> None:
    """Refuse a model that `validate` finds fault with, batch norm in eval mode apart.

    Raises:
        UnsupportedLayerError: the first finding.
    """
    modules = dict(model.named_modules())
    for finding in validate(model):
        module = modules[finding.path]
        frozen = isinstance(module, _BatchNorm) and module.running_mean is not None
        if not (frozen and not module.training):
            raise UnsupportedLayerError(str(finding))
