# SPDX-License-Identifier: Apache-2.0
"""Steps of the PyTorch engine in float64, without noise, for properties of what it adds up."""

from __future__ import annotations

import copy
import pathlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dualdp_torch as dpt
from dualdp import PrivacyPlan
from dualdp.clipping import MARGIN

Sums = dict[str, torch.Tensor]
_PACKAGES = ("dualdp", "dualdp_torch")


def is_refusal(error: BaseException) -> bool:
    """Whether an error was raised by the library's own words, and not deep in torch."""
    frames = error.__traceback__
    while frames is not None and frames.tb_next is not None:
        frames = frames.tb_next
    if frames is None:
        return False
    return pathlib.Path(frames.tb_frame.f_code.co_filename).parent.name in _PACKAGES


def clipped_sum(
    model: nn.Module,
    criterion: Callable[..., torch.Tensor],
    data: tuple[torch.Tensor, ...],
    *,
    bound: float,
    reduction: str,
) -> Sums:
    """Name -> clipped sum of a step whose batch is all of the data; the model stays as it is.

    Raises:
        ValueError, RuntimeError, TypeError: the library refuses it.
    """
    n = len(data[0])
    plan = PrivacyPlan(
        num_examples=n, expected_batch_size=n, num_steps=1, noise_multiplier=0.0,
        max_grad_norm=bound, delta=1e-5, sampler="shuffle", accountant="rdp", seed=3,
    )  # fmt: skip
    model, engine = copy.deepcopy(model), dpt.PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(*data), batch_size=n),
        plan=plan,
        loss_reduction=reduction,
    )
    try:
        for batch in loader:
            criterion(model, *batch).backward()
            optimizer.step()
        return engine.stages().unprotected_sum
    finally:
        engine.detach()


def expected_sum(
    model: nn.Module,
    criterion: Callable[..., torch.Tensor],
    data: tuple[torch.Tensor, ...],
    *,
    bound: float,
) -> Sums:
    """The same by the definition: plain autograd of the criterion on each row alone."""
    named = dict(model.named_parameters())
    total = {name: torch.zeros_like(p) for name, p in named.items()}
    for k in range(len(data[0])):
        loss = criterion(model, *(part[k : k + 1] for part in data))
        grads = torch.autograd.grad(loss, list(named.values()))
        norm = torch.stack([g.square().sum() for g in grads]).sum().sqrt()
        factor = (bound / (1 + MARGIN["float64"]) / norm).clamp(max=1.0)
        for name, g in zip(named, grads, strict=True):
            total[name] += factor * g
    return total


def distance(one: Sums, other: Sums) -> float:
    """L2 distance of two sums."""
    assert one.keys() == other.keys()
    return float(sum((one[name] - other[name]).square().sum() for name in one)) ** 0.5


def plain_gradient(
    model: nn.Module, criterion: Callable[..., torch.Tensor], data: tuple[Any, ...]
) -> list[torch.Tensor]:
    """What a loop without privacy gets."""
    loss = criterion(model, *data)
    return list(torch.autograd.grad(loss, list(model.parameters())))
