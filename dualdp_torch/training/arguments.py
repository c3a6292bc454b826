# SPDX-License-Identifier: Apache-2.0
"""Plan and settings from the arguments of `make_private`, which may use Opacus' names.

Several processes compare them, their models and their data before the first step.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Mapping, Sized
from dataclasses import asdict, dataclass
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

from dualdp import _validate, adam, exactness
from dualdp.plan import arguments
from dualdp.plan.plan import PrivacyPlan
from dualdp.randomness import SegmentBits, fresh_bits
from dualdp_torch.parallel.fsdp import check_sharded, is_sharded
from dualdp_torch.parallel.process_group import Group, as_integers, fingerprints
from dualdp_torch.per_sample.call import METHODS
from dualdp_torch.per_sample.checks.twin import REDUCTIONS
from dualdp_torch.per_sample.clip import clipping_bounds, refuse_two_pass
from dualdp_torch.per_sample.model_checks import refuse_mixing_modules, require_module
from dualdp_torch.per_sample.parameter_use import trainable_parameters
from dualdp_torch.per_sample.random_state import untouched_generators
from dualdp_torch.training.adam_bc import AdamBC
from dualdp_torch.training.loader import Data

#: Our methods for per-sample gradients and Opacus' names for them -> our method.
GRAD_SAMPLE_MODES = {
    **{method: method for method in METHODS},
    "hooks": "materialize",
    "ew": "materialize",
    "functorch": "vmap",
    "ghost": "two_pass",
}
_ROWS = 16  # rows of the data that processes compare
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
    "target_unclipped_quantile": (None, _ADAPTIVE),
    "clipbound_learning_rate": (None, _ADAPTIVE),
    "max_clipbound": (None, _ADAPTIVE),
    "min_clipbound": (None, _ADAPTIVE),
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
    found = _translated(given)
    if plan is None:
        size = data.batch_size
        expected = min(size, data.num_units) if data.users is None else size
        found.setdefault("expected_batch_size", expected)
    steps = data.most_steps
    if found.get("epochs") is not None and found.get("num_steps") is None and steps is not None:
        found["num_steps"] = steps * _validate.integer("epochs", found.pop("epochs"), minimum=1)
    also = {"poisson_sampling", *(name for name, (ours, _) in _OPACUS.items() if ours is not None)}
    own = inspect.signature(method).parameters.values()
    also |= {p.name for p in own if p.kind != p.VAR_KEYWORD}
    return arguments.plan_of(
        plan, found, num_examples=data.num_units, method=name, also=also, **options
    )


def agreed(
    group: Group,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Data,
    plan: PrivacyPlan,
    settings: RunSettings,
    noise_layout: object,
) -> SegmentBits:
    """Return the bits of batches of a segment that begins, the same on all processes.

    Guarantees:
        What differs between processes is found before the first step.
            [test_what_differs_between_ranks_is_named]
    """
    if group.size == 1:
        return SegmentBits(plan.seed)
    parameters = dict(module.named_parameters())
    names = {id(p): name for name, p in parameters.items()}
    groups = [
        {k: [names.get(id(p)) for p in v] if k == "params" else repr(v) for k, v in each.items()}
        for each in optimizer.param_groups
    ]
    group.require_same("plan", json.loads(plan.to_json()))
    compared = {"steps in a pass": len(data.loader), "noise_layout": repr(noise_layout)}
    group.require_same("settings", {"torch": torch.__version__, **asdict(settings), **compared})
    group.require_same("model", {name: _described(p) for name, p in parameters.items()})
    kind = type(optimizer).__qualname__
    group.require_same("optimizer", {"class": kind, "groups": groups})
    whole = {name: p for name, p in parameters.items() if not is_sharded(p)}
    starts = dict(zip(whole, fingerprints(whole.values()), strict=True))
    hint = "Set the same seed before building the model, or load the same weights."
    group.require_same("the start of parameters", starts, hint, shown=False)
    secret, chosen = group.word(
        "the first words", lambda: (SegmentBits(plan.seed).secret, fresh_bits(8 * _ROWS))
    )
    hint = "Row i must be the same example on every process, of one data set that all have whole."
    group.require_same("data", _some_rows(data.loader.dataset, chosen), hint, shown=False)
    arrays = None if data.users is None else _digest([data.users.starts, data.users.order])
    hint = "Give all of them the same users=, one id for each row of the whole data."
    group.require_same("users", arrays, hint, shown=False)
    return SegmentBits(plan.seed, secret)


def _described(p: torch.Tensor) -> list[Any]:
    """Shape, dtype and device of a parameter, on which a generator's numbers depend."""
    device = torch.cuda.get_device_name(p.device) if p.is_cuda else str(p.device)
    return [list(p.shape), str(p.dtype), device, p.requires_grad]


def _some_rows(dataset: Any, chosen: bytes) -> dict[str, Any]:
    """Length of a data set and digests of a few rows, which tell another order of its rows.

    A row that differs between two fetches (an augmentation), or that can't be fetched here, is
    None.
    """
    assert isinstance(dataset, Sized)  # as `check_loader` has made sure
    rows = np.frombuffer(chosen, np.uint64) % np.uint64(max(1, len(dataset)))
    with untouched_generators():
        pairs = [[_fetched(dataset, int(row)) for _ in range(2)] for row in rows[: len(dataset)]]
    found = [first if first == second else None for first, second in pairs]
    return {"class": type(dataset).__qualname__, "examples": len(dataset), "rows": found}


def _fetched(dataset: Any, row: int) -> str | None:
    try:
        return _digest(dataset[row])
    except Exception:  # noqa: BLE001 - a data set may open its files in workers only
        return None


def _digest(value: Any) -> str:
    """SHA-256 of plain data, arrays and tensors in nested containers."""
    leaves, spec = pytree.tree_flatten(value)
    state = hashlib.sha256(repr(spec).encode())
    for leaf in leaves:
        state.update(repr([getattr(leaf, name, None) for name in ("shape", "dtype")]).encode())
        if torch.is_tensor(leaf):
            leaf = as_integers(leaf.detach().cpu().contiguous().reshape(-1)).numpy()
        elif isinstance(leaf, str | PurePath):  # a file's folder may differ between machines
            leaf = PurePath(leaf).parts[-2:]
        if hasattr(leaf, "tobytes"):  # an array, a NumPy scalar, an image
            state.update(leaf.tobytes())
        else:
            is_plain = isinstance(leaf, tuple | bytes | int | float | None)
            state.update(repr(leaf if is_plain else type(leaf)).encode())
    return state.hexdigest()
