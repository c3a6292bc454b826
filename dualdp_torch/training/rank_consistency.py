# SPDX-License-Identifier: Apache-2.0
"""Comparison of the settings, models and data of all processes, before the first step."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from dualdp.ledger.follower import secret_of
from dualdp.plan.plan import PrivacyPlan
from dualdp.plan.units.rows import UserRows, rows_digest
from dualdp.randomness import RootKey
from dualdp_torch.parallel.process_group import Group, device_kind, fingerprints
from dualdp_torch.parallel.tensor_parallel import cut_of, is_whole, local_of
from dualdp_torch.training.arguments import RunSettings
from dualdp_torch.training.dataset_digest import described


def agreed(
    group: Group | None,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader[Any],
    plan: PrivacyPlan,
    settings: RunSettings,
    noise_layout: Any,
    users: UserRows | None,
) -> tuple[PrivacyPlan, str | None]:
    """Return the plan that all processes use, and the keyed digest of the rows of each user.

    Without a seed, the plan of each process has a key of its own; all use that of rank 0.

    Guarantees:
        What differs between processes is found before the first step.
            [test_what_differs_between_ranks_is_named]
    """
    if group is None:
        return plan, rows_digest(plan, users)
    public = json.loads(plan.to_json())
    del public["key_sha256"]
    group.require_same("plan", public)
    compared = {
        "torch": torch.__version__,
        **asdict(settings),
        "steps in a pass": len(loader),
        "noise_layout": repr(noise_layout),
    }
    group.require_same("settings", compared)
    parameters = dict(module.named_parameters())
    layout = {
        name: [list(p.shape), str(p.dtype), device_kind(p.device), p.requires_grad, cut_of(p)]
        for name, p in parameters.items()
    }
    group.require_same("model", layout)
    group.require_same("optimizer", _described(optimizer, module))
    whole = {name: local_of(p) for name, p in parameters.items() if is_whole(p)}
    starts = dict(zip(whole, fingerprints(whole.values()), strict=True))
    hint = "Set the same seed before building the model, or load the same weights."
    group.require_same("the start of parameters", starts, hint, shown=False)
    hint = "Row i must be the same example on every process, of one data set that all have whole."
    data = described(loader.dataset)
    group.require_same("data", data, hint, shown=False)
    secret = secret_of(plan) if group.is_first else None
    root = RootKey(*group.broadcast("the key", secret))
    plan = plan if plan.root == root else replace(plan, key=root)
    digest = rows_digest(plan, users)
    hint = "Give all of them the same users=, one id for each row of the whole data."
    group.require_same("users", digest, hint, shown=False)
    return plan, digest


def _described(optimizer: torch.optim.Optimizer, module: nn.Module) -> dict[str, Any]:
    """Class and settings of an optimizer, with its parameters by name."""
    names = {id(p): name for name, p in module.named_parameters()}
    groups = [
        {
            name: [names.get(id(p)) for p in value] if name == "params" else repr(value)
            for name, value in group.items()
        }
        for group in optimizer.param_groups
    ]
    return {"class": type(optimizer).__qualname__, "groups": groups}
