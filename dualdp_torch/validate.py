# SPDX-License-Identifier: Apache-2.0
"""What of a model can't be trained privately, where it is, and what to use instead."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from dualdp import UnsupportedLayerError


@dataclass(frozen=True)
class Finding:
    """One module that mixes examples, or one parameter that no example reaches.

    Attributes:
        path: where it is in the model; empty for the model itself.
        kind: its class.
        reason: what is wrong.
        fix: what to do.
    """

    path: str
    kind: str
    reason: str
    fix: str

    def __str__(self) -> str:
        if self.kind == "Parameter":
            return f"Parameter {self.path!r}: {self.reason}. {self.fix}"
        return f"No rule for {self.kind} (layer {self.path!r}): {self.reason}. {self.fix}"


def _examine(path: str, module: nn.Module) -> Finding | None:
    """What is wrong with one module, if anything."""
    kind = type(module).__name__
    if isinstance(module, _BatchNorm):
        return Finding(
            path,
            kind,
            "it mixes examples, so no per-sample gradient exists",
            "Replace it by GroupNorm; fix(model) does.",
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


def validate(
    model: nn.Module, *, loss_fn: Callable[..., Any] | None = None, batch: tuple[Any, ...] = ()
) -> list[Finding]:
    """What of a model can't be trained privately.

    Without `loss_fn` only the modules are looked at. With it the model is run on the batch, left as
    it was, and three more things are found, which no list of modules can know: losses that depend
    on other examples, buffers that change, and parameters that get no gradient.

    Args:
        model: the model.
        loss_fn: `loss_fn(model, *batch)` -> (n,) losses, one per example.
        batch: its further arguments, at least two examples.

    Returns:
        One finding each, with its path and what to do; empty when there is none.

    Raises:
        ValueError: a batch without two examples whose losses are finite.
    """
    found = [_examine(path, module) for path, module in model.named_modules()]
    findings = [finding for finding in found if finding]
    if loss_fn is None or findings:
        return findings
    from .dry_run import dry_run  # which stands on what refuses the modules above

    return dry_run(model, loss_fn, batch)


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
