# SPDX-License-Identifier: Apache-2.0
"""Exponential moving average of the parameters, for evaluation.

It is computed from released parameters, so it costs no privacy.

Source: De et al. 2022, section 3.3 (parameter averaging).
"""

from __future__ import annotations

import copy
import weakref
from typing import Any

import torch
from torch import nn

from dualdp import _validate
from dualdp_torch.rules.base import Tensor, is_narrow

#: Names of the average and of the number of updates in it, in the optimizer's state.
AVERAGE, UPDATES = "ema", "ema_updates"
_averaging: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def with_ema(optimizer: torch.optim.Optimizer, decay: float = 0.999) -> torch.optim.Optimizer:
    """Let an optimizer average the parameters it makes; `engine.ema` returns the averaged model.

    After update t = 0, 1, ... the average is d * average + (1 - d) * parameters with
    d = min(decay, (1 + t) / (10 + t)), from the first parameters on. It is part of the optimizer's
    state, and of checkpoints. A parameter without gradient is not updated, nor is its average.

    Args:
        optimizer: optimizer of float32 or float64 parameters; before `load_checkpoint`, too.
        decay: number in [0, 1).

    Returns:
        The same optimizer.

    Raises:
        TypeError: no optimizer.
        ValueError: decay is no such number, parameters below float32, or an average is kept.

    >>> p = nn.Parameter(torch.tensor([1.0]))
    >>> optimizer = with_ema(torch.optim.SGD([p], lr=1.0), decay=0.5)
    >>> p.grad = torch.tensor([1.0])
    >>> optimizer.step()
    >>> p.item(), round(optimizer.state[p]["ema"].item(), 3)  # d = 1 / 10
    (0.0, 0.1)
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer is {_validate.kind(optimizer)}. Expected one of torch.")
    decay = _validate.probability("decay", decay)
    if decay == 1:
        raise ValueError("decay=1 would keep the first parameters. Expected a number in [0, 1).")
    _require_wide(optimizer)
    if optimizer in _averaging:
        raise ValueError("The optimizer keeps an average already. Expected with_ema once.")
    first: dict[Tensor, Tensor] = {}

    def before(optimizer: Any, *_: Any) -> None:
        _require_wide(optimizer)
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p not in first and AVERAGE not in optimizer.state.get(p, {}):
                    first[p] = p.detach().clone()

    @torch.no_grad()
    def after(optimizer: Any, *_: Any) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is None:  # as within a logical batch
                    continue
                state = optimizer.state[p]
                average = state.setdefault(AVERAGE, first.pop(p, None))
                updates = int(state.setdefault(UPDATES, 0))  # a tensor from the other stack
                factor = min(decay, (1 + updates) / (10 + updates))
                average.lerp_(p.detach(), 1 - factor)
                state[UPDATES] = updates + 1

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
    _averaging.add(optimizer)
    return optimizer


def _require_wide(optimizer: torch.optim.Optimizer) -> None:
    if is_narrow(p for group in optimizer.param_groups for p in group["params"]):
        raise ValueError(
            "The optimizer holds parameters below float32, whose average would be rounded away. "
            "Expected float32 or float64 parameters (with autocast for the forward)."
        )


def averaged(model: nn.Module, optimizer: torch.optim.Optimizer) -> nn.Module:
    """Return a copy of a model with the averages of its trained parameters, in eval mode."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if optimizer not in _averaging or any(
        AVERAGE not in optimizer.state.get(p, {}) for p in trained.values()
    ):
        raise ValueError(
            "The optimizer has no average of every trained parameter. Expected with_ema(optimizer, "
            "decay=0.999) before make_private or load_checkpoint, and a step since."
        )
    found = copy.deepcopy(model).eval()
    with torch.no_grad():
        for name, p in found.named_parameters():
            if name in trained:
                p.copy_(optimizer.state[trained[name]][AVERAGE])
    return found
