# SPDX-License-Identifier: Apache-2.0
"""Adapter with which `dualdp.testing` audits `PrivacyEngine` on a model of the user's."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dualdp.audit import protocol
from dualdp.audit.protocol import CANARY_FACTOR, LOSS_FACTOR, Event, Release, events_of
from dualdp.plan.plan import PrivacyPlan
from dualdp_torch.rules.base import Tensor
from dualdp_torch.training.engine import PrivacyEngine


class WithCanaries(nn.Module):
    """Model with a vector of canaries, whose outputs are the losses of the examples.

    `scale` is the slope of an example's loss along its canary, in gradient units.
    """

    def __init__(
        self, model: nn.Module, loss_fn: Callable[..., Tensor], num_canaries: int, scale: float
    ) -> None:
        super().__init__()
        self.model, self._loss_fn, self._scale = model, loss_fn, scale
        self.canaries = nn.Parameter(torch.zeros(num_canaries, 1))

    def forward(self, *batch: Tensor) -> Tensor:
        """(*batch, row) -> (n,) losses."""
        own = self._loss_fn(self.model, *batch[:-1])
        moved = nn.functional.embedding(batch[-1], self.canaries)[:, 0]
        return LOSS_FACTOR * own + self._scale * moved.to(own.dtype)


class WithFactors(nn.Module):
    """Model whose examples' losses are multiplied by factors that come with the batch."""

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Tensor]) -> None:
        super().__init__()
        self.model, self._loss_fn = model, loss_fn

    def forward(self, *batch: Tensor) -> Tensor:
        """(*batch, factor) -> (n,) losses."""
        return self._loss_fn(self.model, *batch[:-1]) * batch[-1]


class EngineStep:
    """`dualdp.testing.PrivateStep` of `PrivacyEngine`, on a model and data of the user's.

    Args:
        model: model that is copied for every run.
        loss_fn: function of (model, *batch) that returns (n,) losses.
        data: sequence of tensors, examples on axis 0.
        plan: `PrivacyPlan`, whose noise_multiplier, max_grad_norm, sampler, clipping (flat or
            automatic), noise and physical_batch_size are tested, at the values of step 0.
        grad_sample_mode: "auto" or another mode of `make_private`.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Tensor],
        data: Sequence[Tensor],
        plan: PrivacyPlan,
        *,
        grad_sample_mode: str = "auto",
    ) -> None:
        self.model, self.loss_fn, self.data, self.plan = model, loss_fn, tuple(data), plan
        self.claims = protocol.claims_of(plan)
        self.num_examples = len(self.data[0])
        self._mode = grad_sample_mode
        self._engine: PrivacyEngine | None = None

    def plan_of(
        self, make: Callable[..., PrivacyPlan] = protocol.of_run, **sizes: Any
    ) -> PrivacyPlan:
        """Return the plan of one test run."""
        return make(self.plan, **sizes)

    def clipped_sum(self, rows: Sequence[int], factors: Sequence[float]) -> Any:
        """Return the sum of a step without noise in which all rows take part, see `PrivateStep`."""
        module = WithFactors(copy.deepcopy(self.model), self.loss_fn)
        index = torch.tensor(list(rows))
        scale = torch.tensor(list(factors), dtype=next(module.parameters()).dtype)
        plan = self.plan_of(protocol.of_sum, num_rows=len(rows), num_steps=1)
        data = [part[index] for part in self.data]
        for _ in self._run(module, [*data, scale], plan):
            pass
        parameters = [p for p in module.model.parameters() if p.requires_grad]
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        return torch.cat([g.flatten().double() for g in grads]).numpy() * len(rows)

    def releases(
        self,
        num_steps: int,
        *,
        rows: Any,
        num_canaries: int,
        expected_batch_size: float,
        seed: int | None,
    ) -> Iterator[Release]:
        """Yield the releases of a run on data with canaries, see `PrivateStep`."""
        scale = CANARY_FACTOR * self.claims.max_grad_norm
        module = WithCanaries(copy.deepcopy(self.model), self.loss_fn, num_canaries, scale)
        index = torch.arange(len(rows)) % self.num_examples
        data = [*(part[index] for part in self.data), torch.as_tensor(np.asarray(rows))]
        plan = self.plan_of(
            num_examples=len(rows),
            expected_batch_size=expected_batch_size,
            num_steps=num_steps,
            seed=seed,
        )
        leaves = [p for p in module.model.parameters() if p.requires_grad]
        for drawn in self._run(module, data, plan):
            noisy = [
                torch.zeros_like(p) if p.grad is None else p.grad * expected_batch_size
                for p in (module.canaries, *leaves)
            ]
            sums = [value.detach().cpu().numpy() for value in noisy]
            yield Release(sums[0], sums[1:], drawn)

    def events(self) -> list[Event]:
        """Return the accountant's events of the last run, see `PrivateStep`."""
        return events_of(self._engine.accountant.history if self._engine else ())

    def _run(
        self, module: nn.Module, data: Sequence[Tensor], plan: PrivacyPlan
    ) -> Iterator[NDArray[np.int64]]:
        """Train with learning rate 0; yields the rows of each release, which lies in `p.grad`."""
        optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
        self._engine = engine = PrivacyEngine()
        _, _, loader = engine.make_private(
            module=module,
            optimizer=optimizer,
            data_loader=DataLoader(TensorDataset(*data), batch_size=1),
            loss_reduction="sum",
            plan=plan,
            grad_sample_mode=self._mode,
        )
        rows: list[int] = []
        for draw, batch in loader.remaining().with_draws():
            optimizer.zero_grad()
            module(*batch).sum().backward()
            optimizer.step()
            rows += np.array(draw.indices)[draw.mask.numpy()].tolist()
            if draw.is_last:
                yield np.array(rows, np.int64)
                rows = []
        engine.detach()


def small_step(plan: PrivacyPlan) -> EngineStep:
    """Return a step on a small classifier and random data, for `dualdp audit`."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(256, 16, generator=generator)
    y = torch.randint(0, 4, (256,), generator=generator)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))

    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(x), y, reduction="none")

    return EngineStep(model, loss_fn, (x, y), plan)
