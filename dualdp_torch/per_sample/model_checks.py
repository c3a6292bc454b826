# SPDX-License-Identifier: Apache-2.0
"""Modules that can't be trained privately, with the reason and a fix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from dualdp import _validate
from dualdp._validate import UnsupportedLayerError

#: Modules of dynamic quantisation, by the names of torch's modules.
_DYNAMIC = ("torch.ao.nn.quantized.dynamic", "torch.ao.nn.intrinsic.quantized.dynamic")


@dataclass(frozen=True)
class Finding:
    """One module that mixes examples, or one parameter that no example reaches.

    Attributes:
        path: str, path in the model; empty for the model itself.
        kind: str, name of its class.
        reason: str, the problem.
        fix: str, the remedy.
    """

    path: str
    kind: str
    reason: str
    fix: str

    def __str__(self) -> str:
        if self.kind == "Parameter":
            return f"Parameter {self.path!r}: {self.reason}. {self.fix}"
        return f"No rule for {self.kind} (layer {self.path!r}): {self.reason}. {self.fix}"


def require_module(name: str, model: Any) -> None:
    """Refuse what is no torch module."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"{name} is {_validate.kind(model)}. Expected a torch.nn.Module.")


def _problem_of(module: nn.Module) -> tuple[str, str] | None:
    """Return the reason why a module can't be trained privately and the fix, or None."""
    if isinstance(module, _BatchNorm):
        reason = "it mixes examples, so no per-sample gradient exists"
        fix = "Replace it by GroupNorm; model = dualdp.torch.fix(model) does, before its optimizer."
        return reason, fix
    if isinstance(module, _InstanceNorm) and module.track_running_stats:
        reason = "its running statistics mix the examples of every batch"
        return reason, "Build it with track_running_stats=False."
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        if module.scale_grad_by_freq:
            reason = "scale_grad_by_freq divides by how often an id occurs in the whole batch"
            return reason, "Build it with scale_grad_by_freq=False."
        if module.max_norm is not None:
            reason = "max_norm renormalises the rows that the batch uses, without noise"
            return reason, "Build it with max_norm=None."
    if any(cls.__module__.startswith(_DYNAMIC) for cls in type(module).__mro__):
        reason = "it rounds activations to a scale that is made of the whole batch"
        return reason, "Quantise the weights alone, or keep a frozen base in bfloat16."
    return None


def module_findings(model: nn.Module) -> list[Finding]:
    """Return findings about the modules of a model, in their order."""
    return [
        Finding(path, module._get_name(), *problem)
        for path, module in model.named_modules()
        if (problem := _problem_of(module))
    ]


def refuse_mixing_modules(model: nn.Module) -> None:
    """Refuse a model that `module_findings` objects to, except for batch norm in eval mode."""
    modules = dict(model.named_modules())
    for finding in module_findings(model):
        module = modules[finding.path]
        frozen = isinstance(module, _BatchNorm) and module.running_mean is not None
        if not (frozen and not module.training):
            raise UnsupportedLayerError(str(finding))
