# SPDX-License-Identifier: Apache-2.0
"""Seeded runs end where they ended when the fixture was made: batches, noise and clipping."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dualdp
import dualdp.torch as dpt

FIXTURE = Path(__file__).parents[2] / "fixtures" / "trajectory_torch.json"
#: Relative tolerance of the parameters at the end, against the largest of each.
TOLERANCE = {"float32": 1e-6, "float64": 1e-12}
_COMMON = {
    **{"num_examples": 48, "expected_batch_size": 8, "num_steps": 12, "seed": 7},
    **{"noise_multiplier": 0.8, "max_grad_norm": 0.5, "delta": 1e-5},
}
PLANS = {
    "fast": {},
    "portable": {"noise": "portable", "physical_batch_size": 3},
    "window": {"sampler": "fixed_order", "correlation": dualdp.correlated.window([1.0, -0.5, 0.1])},
    "band": {
        **{"sampler": "cyclic_poisson", "min_separation": 3},
        "correlation": dualdp.correlated.band([1.0, 0.5, 0.2]),
    },
    "blt": {
        **{"sampler": "fixed_order", "noise": "portable"},
        "correlation": dualdp.correlated.blt(decays=[0.9, 0.3], scales=[0.2, 0.1]),
    },
    "adaptive": {
        "max_grad_norm": dualdp.schedules.AdaptiveNorm(
            initial=0.5, quantile=0.5, learning_rate=0.2, count_noise_multiplier=4.0
        )
    },
}


def trajectory(plan: str, dtype: str) -> dict[str, list[float]]:
    """Return the parameters of a smooth model after the 12 steps of a seeded plan."""
    random = np.random.default_rng(0)
    data = [
        torch.tensor(random.normal(size=(48, size)), dtype=getattr(torch, dtype)) for size in (5, 2)
    ]
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 2)).to(data[0].dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.tensor(random.normal(size=p.shape) / 3))
    model, optimizer, loader = dpt.PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5),
        data_loader=DataLoader(TensorDataset(*data), batch_size=8),
        plan=dualdp.PrivacyPlan(**{**_COMMON, **PLANS[plan]}),
    )
    for x, y in loader.remaining():
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return {name: p.flatten().tolist() for name, p in model.named_parameters()}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("plan", PLANS)
def test_seeded_runs_end_where_they_ended(plan, dtype):
    expected = json.loads(FIXTURE.read_text())[plan][dtype]
    found = trajectory(plan, dtype)
    assert found.keys() == expected.keys()
    for name, values in found.items():
        gap = np.abs(np.subtract(values, expected[name])).max()
        assert gap <= TOLERANCE[dtype] * np.abs(expected[name]).max(), (name, gap)


if __name__ == "__main__":  # writes the fixture anew
    ends = {plan: {dtype: trajectory(plan, dtype) for dtype in TOLERANCE} for plan in PLANS}
    FIXTURE.write_text(json.dumps(ends) + "\n")
