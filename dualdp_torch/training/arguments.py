# SPDX-License-Identifier: Apache-2.0
"""Plan and settings from the arguments of `make_private`, which may use Opacus' names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader

from dualdp import _validate, adam, exactness
from dualdp.plan import arguments
from dualdp.plan.plan import PrivacyPlan
from dualdp.plan.units import UserRows, rows_of_data
from dualdp_torch.parallel.fsdp import check_sharded
from dualdp_torch.per_sample.checks.twin import REDUCTIONS
from dualdp_torch.per_sample.clip import clipping_bounds, refuse_two_pass
from dualdp_torch.per_sample.model_checks import refuse_mixing_modules, require_module
from dualdp_torch.per_sample.parameter_use import trainable_parameters
from dualdp_torch.per_sample.recorder import RECORDED
from dualdp_torch.training.adam_bc import AdamBC
from dualdp_torch.training.items import Augment, Views
from dualdp_torch.training.loader import (
    PlannedLoader,
    check_loader,
    expected_batch_size,
    most_steps,
)

#: Our methods for per-sample gradients and Opacus' names for them -> our method.
GRAD_SAMPLE_MODES = {
    **{method: method for method in RECORDED},
    "hooks": "materialize",
    "ew": "materialize",
    "functorch": "vmap",
    "ghost": "two_pass",
}
_ADAPTIVE = "Expected dualdp.schedules.AdaptiveNorm as max_grad_norm"
#: Further arguments of Opacus' make_private: the value that means what happens here, or None, and
#: what to do about another one.
_OPACUS: dict[str, tuple[bool | None, str]] = {
    "batch_first": (True, "Expected it left out: the batch axis is found by itself"),
    "criterion": (None, "Expected it left out: the criterion stays in your loop"),
    "noise_generator": (
        None,
        "Expected it left out: noise comes from the operating system, and seed= fixes it for tests",
    ),
    "wrap_model": (False, "Expected it left out: never wrapped; engine.detach() cleans up"),
    "rand_on_empty": (False, "Expected it left out: an empty draw comes as one masked example"),
    **dict.fromkeys(
        ("target_unclipped_quantile", "clipbound_learning_rate", "max_clipbound", "min_clipbound"),
        (None, _ADAPTIVE),
    ),
    "unclipped_num_std": (None, _ADAPTIVE),
}


@dataclass
class RunSettings:
    """Settings of a run in addition to its plan and ledger, all of them plain data."""

    loss_reduction: str  # "mean" or "sum"
    grad_sample_mode: str  # one of `GRAD_SAMPLE_MODES`
    has_target: bool = False  # True if the user named the plan's delta
    pass_end: int = 0  # step that ends the pass which a checkpoint interrupted
    checks: float = exactness.RATE  # share of steps at which examples are checked; 0 is off
    views: int = 1  # number of views of each example, which are so many rows of a batch


def check_kinds(module: Any, optimizer: Any, name: str = "module") -> None:
    """Refuse what is no module or no optimizer of torch; `name` is the user's for the module."""
    require_module(name, module)
    if isinstance(module, torch.jit.RecursiveScriptModule):
        raise TypeError(
            f"{name} was made by torch.jit.script, and takes no hooks. Expected "
            "nn.Sequential(it), or the module before it was scripted."
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"optimizer is {_validate.kind(optimizer)}. Expected one of torch, such as "
            "torch.optim.SGD(model.parameters(), lr=0.1); for several, such as Muon and AdamW, a "
            "subclass of torch.optim.Optimizer that holds all parameters and steps each of them."
        )


def check(
    module: nn.Module, optimizer: torch.optim.Optimizer, plan: PrivacyPlan, settings: RunSettings
) -> None:
    """Refuse a model, optimizer or plan that cannot be trained privately; changes nothing."""
    _validate.choice("loss_reduction", settings.loss_reduction, REDUCTIONS)
    _validate.choice("grad_sample_mode", settings.grad_sample_mode, GRAD_SAMPLE_MODES)
    if isinstance(optimizer, torch.optim.LBFGS) or hasattr(optimizer, "first_step"):  # as of SAM
        raise ValueError(
            f"optimizer is {type(optimizer).__name__}, which evaluates its closure several times a "
            "step, and each gradient would be a release of its own. Expected one gradient a step, "
            "as SGD and Adam need; they take a closure, too."
        )
    if isinstance(optimizer, AdamBC):
        adam.require_independent(plan)
    refuse_mixing_modules(module)
    trained = trainable_parameters(module)
    if not trained:
        raise ValueError(
            "The model has no trainable parameter. Expected at least one with requires_grad."
        )
    check_holds(optimizer, trained)
    method = GRAD_SAMPLE_MODES[settings.grad_sample_mode]
    check_sharded(module, method)
    clipping_bounds(trained, plan.clipping, plan.clipping_bounds(plan.max_grad_norm_at(0)))
    refuse_two_pass(method, plan.clipping)


def check_holds(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
    """Refuse an optimizer whose trainable parameters are not exactly the clipped ones."""
    held = [p for group in optimizer.param_groups for p in group["params"]]
    ours, theirs = set(map(id, parameters.values())), set(map(id, held))
    if ours == theirs:
        return
    missing = [n for n, p in parameters.items() if id(p) not in theirs]
    if missing:
        raise ValueError(
            f"The optimizer does not hold the trainable parameters {missing}. Give it all of "
            "model.parameters() after the last change of the model (fix makes new parameters), or "
            "freeze them (requires_grad_(False)). One that takes matrices only, such as Muon, goes "
            "beside another in a subclass of torch.optim.Optimizer that steps both."
        )
    strange = [tuple(p.shape) for p in held if id(p) not in ours and p.requires_grad]
    if strange:
        raise ValueError(
            f"The optimizer holds parameters of shapes {strange} that are not trainable parameters "
            "of the model. Give them an optimizer of their own."
        )


def _translated(given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a plan, with those of Opacus translated; contradictions are refused."""
    found = {name: value for name, value in given.items() if value is not None}
    if found.get("clipping") == "adaptive":
        raise ValueError(f"clipping='adaptive' is not supported. {_ADAPTIVE}.")
    for name, (ours, way_out) in _OPACUS.items():
        if name in found and found.pop(name) != ours:
            raise ValueError(f"{name}={given[name]!r} is not supported. {way_out}.")
    poisson = found.pop("poisson_sampling", None)
    if poisson is None:
        return found
    if "sampler" in found:
        raise ValueError(
            "poisson_sampling and sampler came together. Expected sampler alone; "
            "poisson_sampling=False is sampler='shuffle'."
        )
    return found | {"sampler": "poisson" if poisson else "shuffle"}


class Data(NamedTuple):
    """Checked data of a run: the user's loader, views of each example, and rows of each user."""

    loader: DataLoader[Any]
    views: Views
    users: UserRows | None

    @classmethod
    def of(cls, loader: DataLoader[Any], views: int, augment: Augment | None, users: Any) -> Data:
        """Return the data of the arguments of `make_private`; `users` is None for examples."""
        if isinstance(loader, PlannedLoader):  # a cell that names it `loader` was run again
            loader = loader.source
        check_loader(loader)
        seen = Views(views, augment)
        if users is not None and augment is not None:
            raise ValueError(
                "users and views= or augment= came together, and a unit is the rows of a user or "
                "the views of a row. Expected one of the two; the data set may augment its rows."
            )
        return cls(loader, seen, rows_of_data(users, len(loader.dataset)))  # type: ignore[arg-type]


def plan_of(
    data: Data,
    plan: PrivacyPlan | None,
    given: Mapping[str, Any],
    name: str,
    method: Callable[..., Any],
    options: Mapping[str, Any],
) -> PrivacyPlan:
    """Return the given plan, or one made from the arguments of a method and the loader's sizes.

    The loader's batch size is the default expected batch size; arguments that are None were not
    passed. With users both count users. `method` has the further arguments that errors name, and
    `options` are those of `dualdp.plan.arguments.plan_of`.
    """
    found, (loader, _, users) = _translated(given), data
    size: int = len(loader.dataset) if users is None else users.num_users  # type: ignore[arg-type]
    if plan is None:
        expected = expected_batch_size(loader)
        found.setdefault("expected_batch_size", min(expected, size) if users is None else expected)
    if found.get("epochs") is not None and found.get("num_steps") is None and loader.drop_last:
        epochs = _validate.integer("epochs", found.pop("epochs"), minimum=1)
        found["num_steps"] = epochs * (most_steps(loader, users) or 0)
    also = {"poisson_sampling", *(name for name, (ours, _) in _OPACUS.items() if ours is not None)}
    own = inspect.signature(method).parameters.values()
    also |= {p.name for p in own if p.kind != p.VAR_KEYWORD}
    return arguments.plan_of(plan, found, num_examples=size, method=name, also=also, **options)
