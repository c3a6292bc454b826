# SPDX-License-Identifier: Apache-2.0
"""A run that is killed after its checkpoint, and resumed: what was released stays accounted.

The second half is trained twice, with other batches and other noise, so the ledger beside the
checkpoint has all releases of both.
"""

import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

import dualdp
import dualdp.torch as dpt

STEPS = 6 if "--toy" in sys.argv else 100
DELTA = 1e-5


def parts():
    """Model, optimizer and data, as at the start of every process."""
    torch.manual_seed(0)
    x = torch.randn(1000, 8)
    data = torch.utils.data.TensorDataset(x, x.sum(1).sin())
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return model, optimizer, torch.utils.data.DataLoader(data, batch_size=100)


def train(model, optimizer, loader, after_step=lambda: None):
    for x, y in loader.remaining():
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x)[:, 0], y).backward()
        optimizer.step()
        after_step()


def main():
    path = Path(tempfile.mkdtemp()) / "run.safetensors"
    plan = dualdp.PrivacyPlan(
        num_examples=1000,
        expected_batch_size=100,
        num_steps=STEPS,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        delta=DELTA,
    )
    model, optimizer, loader = parts()
    engine = dpt.PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=loader, plan=plan
    )

    def save():
        if engine.ledger.position == STEPS // 2:
            dpt.save_checkpoint(path, model=model, optimizer=optimizer, engine=engine)

    train(model, optimizer, loader, save)
    engine.detach()  # the second half is forgotten, as if the machine had gone down

    resumed, optimizer, loader = parts()
    engine = dpt.load_checkpoint(path, model=resumed, optimizer=optimizer)
    resumed, optimizer, loader = engine.resume(data_loader=loader)
    train(resumed, optimizer, loader)

    releases, epsilon = len(engine.ledger), engine.get_epsilon(delta=DELTA)
    print(f"{STEPS} steps of {releases} releases, epsilon {epsilon:.2f}")
    assert releases == STEPS + STEPS // 2


if __name__ == "__main__":
    main()
