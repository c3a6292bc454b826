# SPDX-License-Identifier: Apache-2.0
"""PyTorch side of the experiment; `jax_side.py` mirrors it line by line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import dualdp.torch as dpt
from dualdp import Ledger, PrivacyPlan
from dualdp.porting.parameter_map import ParameterMap
from dualdp_tools.compare import digits
from dualdp_tools.compare.options import ExperimentOptions


class MLP(nn.Module):
    """Network 64 - 64 - 10."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(64, 64)
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(n, 8, 8) -> (n, 10) logits."""
        return self.head(torch.tanh(self.hidden(x.flatten(1))))


class CNN(nn.Module):
    """Two convolutions with average pooling (kinks would amplify rounding) and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.head = nn.Linear(32 * 2 * 2, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(n, 8, 8) -> (n, 10) logits."""
        x = F.avg_pool2d(torch.tanh(self.conv1(x[:, None])), 2)  # (n, 16, 4, 4)
        x = F.avg_pool2d(torch.tanh(self.conv2(x)), 2)  # (n, 32, 2, 2)
        return self.head(x.flatten(1))


MODELS = {"mlp": MLP, "cnn": CNN}


def loss_fn(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return (n,) losses, one per example."""
    return F.cross_entropy(model(x), y, reduction="none")


class TorchRun:
    """Model, data and optimizer of one run."""

    name = "torch"
    layout: Sequence[ParameterMap]  # the matched parameters of the JAX run, for the same noise

    def __init__(self, settings: ExperimentOptions) -> None:
        train, held_out = digits.load()
        dtype = getattr(torch, settings.dtype)
        with torch.random.fork_rng():
            torch.manual_seed(settings.seed)  # initial weights are public
            model = MODELS[settings.model]()
        self.model = model.to(dtype)
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), lr=settings.learning_rate, momentum=settings.momentum
        )
        self.train = torch.as_tensor(train.x).to(dtype), torch.as_tensor(train.y)
        self.held_out = torch.as_tensor(held_out.x).to(dtype)

    def follow(self, plan: PrivacyPlan) -> None:
        """Start a private run with this plan."""
        self.plan, self.ledger = plan, Ledger(plan)

    def private_step(self, step: int) -> None:
        """Take one step of DP-SGD (Abadi et al. 2016, Algorithm 1)."""
        rows = torch.as_tensor(self.plan.batch_indices(step))
        batch = (array[rows] for array in self.train)
        bound, physical = self.ledger.max_grad_norm, self.plan.physical_batch_size
        total = dpt.clipped_grad_sum(
            loss_fn, self.model, *batch, max_grad_norm=bound, physical_batch_size=physical
        )
        self.ledger.record(step)
        grads = dpt.noisy_mean(total.grads, self.plan, step, layout=self.layout)
        for name, parameter in self.model.named_parameters():
            parameter.grad = grads[name]
        self.optimizer.step()

    def plain_step(self, step: int) -> None:
        """Take the same step without privacy, for timing."""
        rows = torch.as_tensor(self.plan.batch_indices(step))
        self.optimizer.zero_grad()
        loss_fn(self.model, *(array[rows] for array in self.train)).mean().backward()
        self.optimizer.step()

    def per_sample_grads(self, rows: slice) -> dict[str, np.ndarray[Any, Any]]:
        """Return name -> (n, *shape), for a slice of the training examples."""
        grads = dpt.per_sample_grads(loss_fn, self.model, *(array[rows] for array in self.train))
        return {name: grad.cpu().numpy() for name, grad in grads.items()}

    def parameters(self) -> dict[str, np.ndarray[Any, Any]]:
        """Return name -> array."""
        return dpt.weights.to_numpy(self.model)

    def momentum(self) -> dict[str, np.ndarray[Any, Any]]:
        """Return name -> array of the optimizer's momentum."""
        held = {n: self.optimizer.state[p] for n, p in self.model.named_parameters()}
        return {name: state["momentum_buffer"].numpy().copy() for name, state in held.items()}

    def logits(self) -> np.ndarray[Any, Any]:
        """Return (n, classes) of the held-out digits."""
        with torch.no_grad():
            return self.model(self.held_out).numpy()
