# SPDX-License-Identifier: Apache-2.0
"""Comparison of the settings, models and data of all processes, before the first step."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sized
from dataclasses import asdict
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

from dualdp.plan.plan import PrivacyPlan
from dualdp.randomness import SegmentBits, fresh_bits
from dualdp_torch.parallel.fsdp import is_sharded
from dualdp_torch.parallel.process_group import Group, as_integers, fingerprints
from dualdp_torch.per_sample.random_state import untouched_generators
from dualdp_torch.training.arguments import RunSettings
from dualdp_torch.training.loader import Data

_ROWS = 16  # rows of the data that are compared


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
