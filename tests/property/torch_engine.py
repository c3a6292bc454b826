# SPDX-License-Identifier: Apache-2.0
"""Steps of the PyTorch engine in float64, without noise, for properties of what it adds up."""

from __future__ import annotations

import copy
import pathlib
from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dualdp
import dualdp_torch as dpt
from dualdp import PrivacyPlan
from dualdp.plan.clipping import MARGIN

Sums = dict[str, torch.Tensor]
Criterion = Callable[..., torch.Tensor]
_PACKAGES = tuple(pathlib.Path(package.__file__).parent for package in (dualdp, dpt))


def is_refusal(error: BaseException) -> bool:
    """Whether an error was raised by the library's own words, and not deep in torch."""
    frames = error.__traceback__
    while frames is not None and frames.tb_next is not None:
        frames = frames.tb_next
    if frames is None:
        return False
    raised_in = pathlib.Path(frames.tb_frame.f_code.co_filename)
    return any(raised_in.is_relative_to(package) for package in _PACKAGES)


def clipped_sum(
    model: nn.Module,
    criterion: Criterion,
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
    model: nn.Module, criterion: Criterion, data: tuple[torch.Tensor, ...], *, bound: float
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


class _Listening(nn.Module):
    """The model, whose outputs and inputs are kept."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.inputs, self.outputs = x, self.model(x)
        self.outputs.retain_grad()
        return self.outputs


def rows_believed(
    model: nn.Module, criterion: Criterion, data: tuple[torch.Tensor, ...], reduction: str
) -> list[list[torch.Tensor]]:
    """Return each row's gradient, made of the gradients that its outputs received alone.

    An engine that does not look at the criterion clips these. A mean is undone by the number of
    rows.
    """
    listening = _Listening(model)
    parameters = list(model.parameters())
    criterion(listening, *data).backward(inputs=[listening.outputs])
    n = len(data[0])
    heard = listening.outputs.grad * (n if reduction == "mean" else 1)
    return [
        list(
            torch.autograd.grad(
                (model(listening.inputs[k : k + 1]) * heard[k : k + 1]).sum(), parameters
            )
        )
        for k in range(n)
    ]


def median_norm(rows: Iterable[list[torch.Tensor]]) -> float:
    """The median of the norms of rows' gradients."""
    norms = [torch.stack([g.square().sum() for g in grads]).sum().sqrt() for grads in rows]
    return float(torch.stack(norms).median())


def distance(one: Sums, other: Sums) -> float:
    """L2 distance of two sums."""
    assert one.keys() == other.keys()
    return float(sum((one[name] - other[name]).square().sum() for name in one)) ** 0.5
