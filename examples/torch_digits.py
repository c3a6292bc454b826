# SPDX-License-Identifier: Apache-2.0
"""Handwritten digits in PyTorch: from a target epsilon to the accuracy it buys, with a log.

`dualdp plot digits.csv` draws what is logged. The columns called unprotected_* are computed from
the private data and are not covered by epsilon.
"""

import sys
import tempfile
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn

import dualdp.torch as dpt
from dualdp.log import RunLog

EPOCHS = 1 if "--toy" in sys.argv else 20
TARGET_EPSILON, TARGET_DELTA = 8.0, 1e-4
BATCH_SIZE, MAX_GRAD_NORM, LEARNING_RATE = 128, 1.0, 0.5


def main():
    images, labels = map(torch.as_tensor, load_digits(return_X_y=True))
    images = (images.reshape(-1, 1, 8, 8) / 16).float()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, test = order[:1500], order[1500:]
    data = torch.utils.data.TensorDataset(images[train], labels[train])

    model = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.Tanh(), nn.AvgPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.Tanh(), nn.AvgPool2d(2)),
        *(nn.Flatten(), nn.Linear(128, 10)),
    )
    engine = dpt.PrivacyEngine()
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.5),
        data_loader=torch.utils.data.DataLoader(data, batch_size=BATCH_SIZE),
        max_grad_norm=MAX_GRAD_NORM,
        target_epsilon=TARGET_EPSILON,
        target_delta=TARGET_DELTA,
        epochs=EPOCHS,
    )
    path = Path(tempfile.mkdtemp()) / "digits.csv"
    with RunLog(path, engine.ledger) as log:
        for _ in range(EPOCHS):
            for inputs, targets in loader:
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(inputs), targets)
                loss.backward()
                optimizer.step()

                clipped = (engine.stages().unprotected_norms > MAX_GRAD_NORM).float().mean()
                with torch.no_grad():
                    accuracy = (model(images[test]).argmax(1) == labels[test]).float().mean()
                log.write(accuracy=accuracy, unprotected_loss=loss, unprotected_clipped=clipped)

    epsilon = engine.get_epsilon(delta=TARGET_DELTA)
    print(f"log {path}")
    print(f"accuracy {accuracy:.1%} at epsilon {epsilon:.2f}, delta {TARGET_DELTA}")


if __name__ == "__main__":
    main()
