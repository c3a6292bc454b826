# SPDX-License-Identifier: Apache-2.0
"""Modules that can't be trained privately, with the reason and a fix; and Opacus' names for it."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from dualdp import _validate
from dualdp._validate import UnsupportedLayerError

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_CHANNELS_OF_VECTORS, _CHANNELS_OF_MAPS = 8, 2  # least number per group
_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
#: Modules of dynamic quantisation, by the names of torch's modules.
_DYNAMIC = ("torch.ao.nn.quantized.dynamic", "torch.ao.nn.intrinsic.quantized.dynamic")

OF_ONE_SIZE = (
    "The model takes batches of one size only ({error}). Private batches vary in size, and "
    "examples are looked at in smaller ones. Expected a forward of any number of rows: make "
    "states, masks and targets there, with the size of its input (len(x))."
)


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


def fix(model: nn.Module, *, num_groups: int = 32) -> nn.Module:
    """Return a copy of the model that can be trained privately.

    Batch norm becomes group norm over the same channels, with its scale and shift and without its
    running statistics; instance norm loses its running statistics; embeddings lose
    `scale_grad_by_freq` and `max_norm`. Outputs change where they depended on the batch.

    Args:
        model: module; it is not changed.
        num_groups: int, groups of each group norm, lowered to the largest divisor of its channels
            that leaves two channels per group (eight for `BatchNorm1d`).

    Returns:
        A new model with the same weights.

    Raises:
        UnsupportedLayerError: a module that can't be replaced, by its path; a batch norm of
            vectors of one number.
        TypeError, ValueError: a wrong argument.
    """
    _validate.integer("num_groups", num_groups, minimum=1)
    require_module("model", model)
    fixed = copy.deepcopy(model)
    for finding in module_findings(fixed):
        replaced = _replacement(finding, fixed.get_submodule(finding.path), num_groups)
        fixed = _put(fixed, finding.path, replaced)
    return fixed


def _replacement(finding: Finding, module: Any, num_groups: int) -> Any:
    if type(module) in _BATCH_NORMS:
        return _group_norm(module, num_groups)
    if isinstance(module, _BATCH_NORMS) and _is_followed_by_children(module):
        parts = _group_norm(module, num_groups), *module.children()
        return nn.Sequential(*parts) if len(parts) > 1 else parts[0]
    if type(module) in _INSTANCE_NORMS:
        module.track_running_stats = False
        module.running_mean = module.running_var = module.num_batches_tracked = None
        return module
    if type(module) in (nn.Embedding, nn.EmbeddingBag):
        module.scale_grad_by_freq, module.max_norm = False, None
        return module
    raise UnsupportedLayerError(f"{finding} This class can't be replaced by itself: do it by hand.")


def _is_followed_by_children(module: Any) -> bool:
    """True if a subclass of batch norm computes batch norm followed by its child modules in order.

    Tested by running it in eval mode on random numbers.
    """
    other = copy.deepcopy(module).float().cpu().eval()
    if other.running_mean is None:
        return False
    axes = next((k for k, kind in enumerate(_BATCH_NORMS[:3], 1) if isinstance(other, kind)), 2)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, other.num_features, *(4,) * axes, generator=generator)
    statistics = other.running_mean, other.running_var
    with torch.no_grad():
        expected = F.batch_norm(x, *statistics, other.weight, other.bias, eps=other.eps)
        for child in other.children():
            expected = child(expected)
        return torch.allclose(other(x), expected)


def _group_norm(module: Any, num_groups: int) -> nn.GroupNorm:
    channels = module.num_features
    if isinstance(module, nn.BatchNorm1d) and channels == 1:
        raise UnsupportedLayerError("BatchNorm1d(1) would be a constant. Expected nn.Identity().")
    # Vectors and maps of one pixel have one value per channel: small groups would cancel it.
    least = _CHANNELS_OF_VECTORS if isinstance(module, nn.BatchNorm1d) else _CHANNELS_OF_MAPS
    most = max(1, channels // least)
    groups = max(k for k in range(1, min(num_groups, most) + 1) if channels % k == 0)
    reference = next((t for t in (module.weight, module.running_mean) if t is not None), None)
    norm = nn.GroupNorm(groups, channels, module.eps, module.affine)
    norm = norm.to(reference) if reference is not None else norm
    norm.train(module.training)
    if module.affine:
        with torch.no_grad():
            norm.weight.copy_(module.weight)
            norm.bias.copy_(module.bias)
        norm.weight.requires_grad_(module.weight.requires_grad)
        norm.bias.requires_grad_(module.bias.requires_grad)
    return norm


def _put(model: nn.Module, path: str, module: nn.Module) -> nn.Module:
    """Replace the module at the path, under all its names, and return the model."""
    if not path:
        return module
    old = model.get_submodule(path)
    for parent in model.modules():
        for name, child in list(parent._modules.items()):  # each name of a shared module
            if child is old:
                parent._modules[name] = module
    return model


class ModuleValidator:
    """Opacus' names for `validate` and `fix`."""

    @staticmethod
    def validate(module: nn.Module, *, strict: bool = False) -> list[UnsupportedLayerError]:
        """Return the problems of a module as errors; with `strict` raise the first one."""
        found = [UnsupportedLayerError(str(finding)) for finding in module_findings(module)]
        if strict and found:
            raise found[0]
        return found

    @staticmethod
    def is_valid(module: nn.Module) -> bool:
        """True if there are no findings."""
        return not module_findings(module)

    @staticmethod
    def fix(module: nn.Module, **options: Any) -> nn.Module:
        """Return `dualdp.torch.fix` of the module."""
        return fix(module, **options)

    @staticmethod
    def fix_and_validate(module: nn.Module, **options: Any) -> nn.Module:
        """Return `fix` of the module, checked to have no findings left."""
        fixed = fix(module, **options)
        refuse_mixing_modules(fixed)
        return fixed
