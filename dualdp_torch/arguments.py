# SPDX-License-Identifier: Apache-2.0
"""From the words of `make_private` to a plan; Opacus' words have their meaning or are refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from dualdp import _validate, exactness, run_arguments
from dualdp.plan import PrivacyPlan

from .clip import clipping_bounds, refuse_two_pass
from .criterion_check import REDUCTIONS
from .data import check_loader, expected_batch_size
from .optimizer import check_holds
from .recorder import RECORDED
from .sharded import check_sharded
from .validate import refuse_mixing_modules

#: Opacus' words for ways to per-sample gradients, and ours.
GRAD_SAMPLE_MODES = {
    **{method: method for method in RECORDED},
    "hooks": "materialize",
    "ew": "materialize",
    "functorch": "vmap",
    "ghost": "two_pass",
}
#: Arguments of Opacus' make_private: the value that means nothing here, and what to do else.
_OPACUS = {
    "batch_first": (True, "where the examples lie inside the model is found by itself"),
    "criterion": (None, "the criterion stays in your loop"),
    "noise_generator": (None, "noise has its own key; pass seed= or plan= for a fixed one"),
}


@dataclass
class Settings:
    """What a run needs beside its plan and ledger, all of it plain data.

    Attributes:
        loss_reduction: "mean" or "sum".
        grad_sample_mode: one of `GRAD_SAMPLE_MODES`.
        whole: one pass of the loader is all of the plan.
        has_target: the plan's delta is one that the user named.
        pass_end: step that ends the pass which a checkpoint interrupted.
        choices: how each layer's norm was computed, see `dualdp_torch.choices`; a resume goes the
            same ways, whatever the cost model of its version says.
        checks: share of steps at which examples are checked; 0 is off.
    """

    loss_reduction: str
    grad_sample_mode: str
    whole: bool = False
    has_target: bool = False
    pass_end: int = 0
    choices: dict[str, str] = field(default_factory=dict)
    checks: float = exactness.RATE


def check(
    module: nn.Module, optimizer: torch.optim.Optimizer, plan: PrivacyPlan, settings: Settings
) -> None:
    """Refuse what can't be trained privately, before anything is changed."""
    _validate.choice("loss_reduction", settings.loss_reduction, REDUCTIONS)
    _validate.choice("grad_sample_mode", settings.grad_sample_mode, GRAD_SAMPLE_MODES)
    if not isinstance(module, nn.Module):
        raise TypeError(f"module is a {type(module).__name__}. Expected a torch.nn.Module.")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer is a {type(optimizer).__name__}. Expected a torch one.")
    refuse_mixing_modules(module)
    trained = {n: p for n, p in module.named_parameters() if p.requires_grad}
    check_holds(optimizer, trained)
    check_sharded(module, GRAD_SAMPLE_MODES[settings.grad_sample_mode])
    clipping_bounds(trained, plan.clipping, plan.clipping_bounds(plan.max_grad_norm_at(0)))
    refuse_two_pass(GRAD_SAMPLE_MODES[settings.grad_sample_mode], plan.clipping)


def _translated(given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a plan; Opacus' words in ours.

    Raises:
        ValueError: a word of Opacus' that has another value than its default, or contradicts
            another argument.
    """
    found = {name: value for name, value in given.items() if value is not None}
    for name, (neutral, why) in _OPACUS.items():
        if name in found and found.pop(name) != neutral:
            raise ValueError(f"{name}={given[name]!r} is not supported: {why}.")
    poisson = found.pop("poisson_sampling", None)
    if poisson is not None and "sampler" in found:
        raise ValueError(
            "poisson_sampling and sampler came together. Expected sampler alone; "
            "poisson_sampling=False is sampler='shuffle'."
        )
    if poisson is not None:
        found["sampler"] = "poisson" if poisson else "shuffle"
    return found


def plan_of(
    loader: DataLoader[Any], plan: PrivacyPlan | None, given: Mapping[str, Any], **options: Any
) -> PrivacyPlan:
    """The plan, or one made of a loader's sizes and the arguments that were given.

    Args:
        loader: the user's; its batch size is the expected batch size, unless one was given.
        plan: the user's, or None.
        given: arguments of `make_private`; None where none came.
        **options: of `dualdp.run_arguments.plan_of`.

    Raises:
        TypeError, ValueError: as there.
    """
    check_loader(loader)
    if plan is not None and given.get("poisson_sampling") is not None:
        raise ValueError(
            "poisson_sampling came together with plan=, which holds a sampler. Expected one of the "
            "two."
        )
    found = _translated(given)
    size = len(loader.dataset)  # type: ignore[arg-type]
    if plan is None:
        found.setdefault("expected_batch_size", min(expected_batch_size(loader), size))
    if found.get("epochs") is not None and found.get("num_steps") is None and loader.drop_last:
        epochs = _validate.integer("epochs", found.pop("epochs"), minimum=1)
        found["num_steps"] = epochs * len(loader)  # passes that leave the last batch out
    return run_arguments.plan_of(plan, found, num_examples=size, **options)
