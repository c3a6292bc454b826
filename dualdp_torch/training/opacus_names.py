# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501
"""Names of Opacus, and what stands for each here. A name that does not exist answers with its row."""

from __future__ import annotations

import dis
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch

from dualdp.plan.plan import PrivacyPlan

_PLANNED = ("noise_multiplier", "max_grad_norm", "expected_batch_size")
#: Part of docs/from_opacus.md.
TABLES = """\
## The engine

| Opacus | dualdp | what is different |
|---|---|---|
| `PrivacyEngine` | `dpt.PrivacyEngine` | `accountant="prv"` means "pld"; "gdp" is refused |
| `PrivacyEngine.make_private` | `dpt.PrivacyEngine.make_private` | always three values; the module is not wrapped |
| `PrivacyEngine.make_private_with_epsilon` | `dpt.PrivacyEngine.make_private_with_epsilon` | never misses the target |
| `PrivacyEngine.get_epsilon` | `dpt.PrivacyEngine.get_epsilon` | an upper bound |
| `PrivacyEngine.save_checkpoint` | `dpt.save_checkpoint` | a function; one safetensors file, the ledger beside it |
| `PrivacyEngine.load_checkpoint` | `dpt.load_checkpoint` | a function; steps that run again are further releases |
| `PrivacyEngine.validate`, `PrivacyEngine.is_compatible` | `dpt.validate` | a function; returns what it found |
| `PrivacyEngine.get_compatible_module` | `dpt.fix` | a function |
| `PrivacyEngine.attach`, `PrivacyEngine.get_privacy_spent` (before 1.0) | `dpt.PrivacyEngine.make_private` | takes model, optimizer and loader |

## Its arguments

| Opacus | dualdp | what is different |
|---|---|---|
| `criterion=` | - | the criterion stays in your loop, with "ghost" too |
| `poisson_sampling=False` | `dualdp.PrivacyPlan` | means `sampler="shuffle"`, accounted without amplification |
| `grad_sample_mode="hooks"`, `"ew"`, `"functorch"`, `"ghost"` | the same words | "materialize", "materialize", "vmap", "two_pass"; leave it out for "auto" |
| `clipping="per_layer"` with a list | `dualdp.PrivacyPlan` | one number, or a mapping from module to bound: a module is one group, in Opacus each parameter is |
| `clipping="adaptive"`, `target_unclipped_quantile=`, `clipbound_learning_rate=`, `max_clipbound=`, `min_clipbound=`, `unclipped_num_std=` | `dualdp.schedules.AdaptiveNorm` | as max_grad_norm; the noisy count is accounted |
| `batch_first=` | - | found by itself |
| `noise_generator=` | - | noise comes from the operating system; seed= fixes it, for tests |
| `wrap_model=` | - | never wrapped; `engine.detach()` cleans up |
| `rand_on_empty=` | - | an empty draw comes as one masked example |
| `secure_mode=True` | `dpt.PrivacyEngine` | needs the extra `[secure]`; noise lies on a public grid |

## Around it

| Opacus | dualdp | what is different |
|---|---|---|
| `ModuleValidator` | `dpt.ModuleValidator` | also `dpt.validate` and `dpt.fix` |
| `register_module_validator`, `register_module_fixer` | `dpt.fix` | replace the module yourself before make_private |
| `BatchMemoryManager` | `dpt.BatchMemoryManager` | `len` of its loader is true |
| `wrap_data_loader`, `BatchSplittingSampler`, `DPOptimizer.signal_skip_step` | `dpt.BatchMemoryManager` | or `max_physical_batch_size=` of make_private |
| `GradSampleModule`, `GradSampleHooks`, `GradSampleModuleNoOp`, `prepare_module` | `dpt.per_sample_grads` | a function; around your own loop `dpt.record_per_sample` |
| `GradSampleModuleFastGradientClipping`, `DPLossFastGradientClipping` | `dpt.clipped_grad_sum` | `method="two_pass"`; for losses of shape (n,) |
| `GradSampleModuleExpandedWeights` | `dpt.per_sample_grads` | `method="materialize"`; any `nn.Module` |
| `register_grad_sampler`, `register_norm_sampler` | `dpt.register_rule` | rules belong to functions, not to classes |
| `DPOptimizer`, `DistributedDPOptimizer`, `DPPerLayerOptimizer`, `AdaClipDPOptimizer`, `DPOptimizerFastGradientClipping` | `torch.optim.Optimizer` | your own optimizer, with its schedulers and hooks |
| `DPOptimizer.noise_multiplier`, `DPOptimizer.max_grad_norm`, `DPOptimizer.expected_batch_size` | `dpt.PrivacyEngine.plan` | a value that changes is a schedule or a callable of the step, given before the run |
| `DPOptimizer.attach_step_hook` | `torch.optim.Optimizer.register_step_post_hook` | the ledger keeps the account |
| `DPDataLoader` | `dpt.PlannedLoader` | make_private makes it; a sampler of your own is refused |
| `DPDataLoader.sample_rate`, `DPDataLoader.batch_size`, `DPDataLoader.batch_sampler` | `dpt.PrivacyEngine.plan` | `plan.sample_rate`, `plan.expected_batch_size` |
| `UniformWithReplacementSampler`, `DistributedUniformWithReplacementSampler` | `dualdp.PrivacyPlan.batch_indices` | with a seed; else the loader draws the batches |
| `DifferentiallyPrivateDistributedDataParallel` | `torch.nn.parallel.DistributedDataParallel` | or none ([several devices](distributed.md)) |
| `DPLSTM` | `torch.nn.LSTM` | as it is |
| `DPGRU` | `torch.nn.GRU` | as it is |
| `DPRNN` | `torch.nn.RNN` | as it is |
| `DPMultiheadAttention` | `torch.nn.MultiheadAttention` | as it is |
| `ExponentialNoise` | `dualdp.schedules.Exponential` | as noise_multiplier |
| `StepNoise` | `dualdp.schedules.Step` | as noise_multiplier |
| `LambdaNoise` | `dualdp.PrivacyPlan` | any callable of the step as noise_multiplier |
| `ExponentialGradClip` | `dualdp.schedules.Exponential` | as max_grad_norm |
| `StepGradClip` | `dualdp.schedules.Step` | as max_grad_norm |
| `LambdaGradClip` | `dualdp.PrivacyPlan` | any callable of the step as max_grad_norm |
| `opacus.utils`, `opacus.validators`, `opacus.layers`, `opacus.grad_sample`, `opacus.optimizers`, `opacus.schedulers`, `opacus.data_loader`, `opacus.distributed` | `dualdp.torch` | one module, as in `from dualdp.torch import BatchMemoryManager` |
| `opacus.lightning` | `dualdp_torch.lightning` | a callback of Lightning's Trainer |

## Accounting

| Opacus | dualdp | what is different |
|---|---|---|
| `create_accountant` | `dualdp.accountants.create` |  |
| `RDPAccountant` | `dualdp.accountants.create` | `"rdp"` |
| `PRVAccountant` | `dualdp.accountants.create` | `"pld"`: a certified bound |
| `GaussianAccountant` | `dualdp.accountants.create` | `accountants.gdp_epsilon` gives its number, which bounds nothing |
| `register_accountant` | `dualdp.accountants.register` |  |
| `opacus.accountants` | `dualdp.accountants` |  |
| `get_noise_multiplier` | `dualdp.get_noise_multiplier` | `num_steps` instead of epochs |
"""
_ROWS = {
    name: (ours, different)
    for theirs, ours, different in re.findall(r"^\| (`.*) \| (.*) \| (.*) \|$", TABLES, re.M)
    for name in re.findall(r"`([\w.]+=?)", theirs)
}


def advice(name: str) -> str:
    """Return what stands here for a name of Opacus, as the second sentence of an error.

    >>> advice("DPLSTM")
    'Expected torch.nn.LSTM: as it is. More: docs/from_opacus.md.'
    """
    ours, different = _ROWS[name]
    expected = "it left out" if ours == "-" else ours
    text = f"Expected {expected}{': ' * bool(different)}{different}. More: docs/from_opacus.md."
    return re.sub(r"\[(.*?)\]\(.*?\)", r"\1", text).replace("`", "")


def missing_in(owner: str, theirs: str) -> Callable[[Any, str], NoReturn]:
    """Return the `__getattr__` of our class `owner`, which stands for `theirs` of Opacus."""

    def __getattr__(self: Any, name: str) -> NoReturn:
        key = f"{theirs}.{name}"
        known = f". {advice(key)}" if key in _ROWS else ""
        raise AttributeError(
            f"{owner!r} object has no attribute {name!r}{known}", name=name, obj=self
        )

    return __getattr__


def missing_from(module: str) -> Callable[[str], NoReturn]:
    """Return the `__getattr__` of the module with this name.

    `from module import name` hides the text of an AttributeError, so it gets an ImportError.
    """

    def __getattr__(name: str) -> NoReturn:
        key = next((key for key in (name, f"opacus.{name}") if key in _ROWS), None)
        known = f". {advice(key)}" if key else ""
        message = f"module {module!r} has no attribute {name!r}{known}"
        caller = sys._getframe(1)
        is_import = caller.f_code.co_code[caller.f_lasti] == dis.opmap["IMPORT_FROM"]
        if known and is_import:
            raise ImportError(message, name=module)
        raise AttributeError(message, name=name, obj=sys.modules[module])

    return __getattr__


def optimizer_values(optimizer: torch.optim.Optimizer, plan: PrivacyPlan) -> dict[str, Any]:
    """Return what Opacus' optimizer has and the user's lacks: settings of the plan, refusals."""
    refused = ("signal_skip_step", "attach_step_hook")
    values = {name: getattr(plan, name) for name in _PLANNED} | {n: _refusal(n) for n in refused}
    return {name: value for name, value in values.items() if not hasattr(optimizer, name)}


def refuse_changed(optimizer: torch.optim.Optimizer, values: Mapping[str, Any]) -> None:
    """Refuse a setting that the user changed on the optimizer: the run would not follow it."""
    for name, value in values.items():
        came = vars(optimizer).get(name)
        if came is not value:
            raise ValueError(
                f"optimizer.{name} became {came!r}, but the plan has {value!r}. "
                f"{advice(f'DPOptimizer.{name}')}"
            )


def _refusal(name: str) -> Callable[..., NoReturn]:
    """Method of Opacus' optimizer that has no meaning here."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise AttributeError(f"The optimizer has no {name}. {advice(f'DPOptimizer.{name}')}")

    return refuse
