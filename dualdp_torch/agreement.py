# SPDX-License-Identifier: Apache-2.0
"""What the processes of one run must have in common, compared before the first step."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from dualdp.ledger import Ledger
from dualdp.plan import PrivacyPlan
from dualdp.randomness import RootKey
from dualdp.twin import Twin

from .distributed import Group, device_kind, fingerprints
from .rules.base import Tensor
from .run import claim_loaded


def agreed(
    group: Group,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    plan: PrivacyPlan,
    *,
    data: Any,
    **settings: Any,
) -> PrivacyPlan:
    """The plan of all processes, once they agree; its key is that of rank 0.

    Args:
        group: the processes.
        module: the model of this one.
        optimizer: of this one.
        plan: of this one; unless it has a seed, keys were drawn by each process for itself.
        data: what tells the data of this process from other data.
        **settings: what else must be the same.

    Raises:
        ValueError: something differs; it is named.

    Guarantees:
        What differs between processes is found before the first step.
            [test_what_differs_between_ranks_is_named]
    """
    public = json.loads(plan.to_json())
    del public["key_sha256"]
    group.same("plan", public)
    group.same("settings", {"torch": torch.__version__, **settings})
    parameters = dict(module.named_parameters())
    described = {
        name: [list(p.shape), str(p.dtype), device_kind(p.device), p.requires_grad]
        for name, p in parameters.items()
    }
    group.same("model", described)
    group.same("optimizer", _described(optimizer, module))
    whole = local(parameters)
    starts = dict(zip(whole, fingerprints(whole.values()), strict=True))
    hint = "Set the same seed before building the model, or load the same weights."
    group.same("the start of parameters", starts, hint, shown=False)
    hint = "Row i must be the same example on every process, of one data set that all have whole."
    group.same("data", data, hint, shown=False)
    secret = _secret(plan) if group.is_first else None
    root = RootKey(*group.from_first("the key", secret))
    return plan if plan.root == root else dataclasses.replace(plan, key=root)


def resumed_by_first(
    group: Group | None, plan: Mapping[str, Any], resume: Callable[[], Ledger]
) -> Ledger:
    """The ledger of a run that goes on: rank 0 resumes it, and the others get its twin.

    Args:
        group: the processes, or None.
        plan: the JSON of the run's plan.
        resume: opens key and ledger, which only rank 0 needs to have.
    """
    kept: list[Ledger] = []

    def first() -> None:
        kept.append(resume())
        claim_loaded(kept[0])

    if group is None:
        first()
        return kept[0]
    group.together("the ledger", lambda: first() if group.is_first else None)
    words = None
    if group.is_first:
        words = kept[0].to_json(), kept[0].state(), _secret(kept[0].plan)
    text, state, secret = group.from_first("the state of the ledger", words)
    if group.is_first:
        return kept[0]
    run = PrivacyPlan.from_json(json.dumps(plan), key=RootKey(*secret))
    kept.append(Twin.of(run, text, state))
    claim_loaded(kept[0])
    return kept[0]


def _secret(plan: PrivacyPlan) -> tuple[bytes, int | None]:
    """What rank 0 tells the others, and nobody else, of the key."""
    root = plan.root.require_secret()
    return root.secret, root.seed


def local(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parameters that every process holds whole, which leaves out those of FSDP."""
    return {name: p for name, p in parameters.items() if not hasattr(p, "to_local")}


def _described(optimizer: torch.optim.Optimizer, module: nn.Module) -> dict[str, Any]:
    """Class and settings of an optimizer, its parameters by name."""
    names = {id(p): name for name, p in module.named_parameters()}
    groups = [
        {
            name: [names.get(id(p)) for p in value] if name == "params" else repr(value)
            for name, value in group.items()
        }
        for group in optimizer.param_groups
    ]
    return {"class": type(optimizer).__qualname__, "groups": groups}
