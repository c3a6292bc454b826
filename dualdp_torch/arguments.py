# SPDX-License-Identifier: Apache-2.0
"""From the words of `make_private` to a plan; Opacus' words have their meaning or are refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from dualdp import _validate, exactness
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
_DELTA = 1e-5  # of a plan built without a target; `get_epsilon` asks for its own

#: Arguments that become a field of the plan, and its name there.
_FIELDS = {
    **{name: name for name in ("noise_multiplier", "max_grad_norm", "clipping", "target_epsilon")},
    **{"target_delta": "delta", "on_budget": "on_budget", "poisson_sampling": "poisson_sampling"},
    "max_physical_batch_size": "physical_batch_size",
}
#: Arguments of Opacus' make_private: the value that means nothing here, and what to do else.
_OPACUS = {
    "batch_first": (True, "where the examples lie inside the model is found by itself"),
    "criterion": (None, "the criterion stays in your loop"),
    "noise_generator": (None, "noise has its own key; pass plan= with seed= for a fixed one"),
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


def _fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """The plan's fields that were given; what means nothing here is dropped.

    Raises:
        TypeError: an argument that nobody knows.
        ValueError: one of Opacus' that has another value than its default.
    """
    for name in given.keys() - _FIELDS:
        if name not in _OPACUS:
            raise TypeError(
                f"make_private has no argument {name!r}. Known from Opacus: {sorted(_OPACUS)}."
            )
        neutral, why = _OPACUS[name]
        if given[name] != neutral:
            raise ValueError(f"{name}={given[name]!r} is not supported: {why}.")
    return {_FIELDS[name]: given[name] for name in _FIELDS if given.get(name) is not None}


def only_plan(plan: PrivacyPlan, given: Mapping[str, Any], noise: str) -> None:
    """Refuse arguments that the plan holds.

    Raises:
        TypeError: no plan.
        ValueError: such an argument came too, or secure noise was asked for and the plan has none.
    """
    if not isinstance(plan, PrivacyPlan):
        raise TypeError(f"plan is a {type(plan).__name__}. Expected a dualdp.PrivacyPlan.")
    twice = [name for name in _FIELDS if _FIELDS[name] in _fields(given)]
    if twice:
        raise ValueError(
            f"{', '.join(twice)} came together with plan=, which holds them. Expected one of the "
            "two."
        )
    if noise == "secure" != plan.noise:
        raise ValueError(
            f"secure_mode=True with a plan whose noise={plan.noise!r}. Expected a plan with "
            "noise='secure'."
        )


def plan_of(loader: DataLoader[Any], given: Mapping[str, Any], **common: Any) -> PrivacyPlan:
    """A plan from a loader's sizes and the arguments that were given.

    Args:
        loader: the user's; its batch size becomes the expected batch size.
        given: arguments of `make_private`; None where the plan's own default holds.
        **common: further fields of the plan; with num_steps the noise multiplier is calibrated.

    Raises:
        TypeError, ValueError: an unknown argument, or no noise multiplier or bound.
    """
    fields = _fields(given)
    calibrates = "num_steps" in common
    for name in ("max_grad_norm",) if calibrates else ("noise_multiplier", "max_grad_norm"):
        if name not in fields:
            raise ValueError(f"{name} is missing. Expected a number, or plan=.")
    check_loader(loader)
    if not fields.pop("poisson_sampling", True):
        fields["sampler"] = "shuffle"
    size = len(loader.dataset)  # type: ignore[arg-type]
    fields |= {
        "num_examples": size,
        "expected_batch_size": min(expected_batch_size(loader), size),
        "delta": fields.get("delta", _DELTA),
        **common,
    }
    return PrivacyPlan.calibrate(**fields) if calibrates else PrivacyPlan(num_steps=None, **fields)


def steps_of(loader: DataLoader[Any], epochs: int | None, num_steps: int | None) -> dict[str, int]:
    """{"num_steps": ...} from epochs of a loader or from the number itself.

    Raises:
        ValueError: both or none.
    """
    check_loader(loader)
    if (epochs is None) == (num_steps is None):
        raise ValueError(
            f"epochs={epochs} and num_steps={num_steps}. Expected one of the two: how long the run "
            "will be."
        )
    if num_steps is not None:
        return {"num_steps": _validate.integer("num_steps", num_steps, minimum=1)}
    return {"num_steps": _validate.integer("epochs", epochs, minimum=1) * len(loader)}
