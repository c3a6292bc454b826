# SPDX-License-Identifier: Apache-2.0
"""A residual network that was written with BatchNorm: found, replaced by GroupNorm, trained."""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn

import dualdp.torch as dpt

EPOCHS = 1 if "--toy" in sys.argv else 10
TARGET_EPSILON, TARGET_DELTA = 8.0, 1e-4
BATCH_SIZE, PHYSICAL_BATCH_SIZE, MAX_GRAD_NORM, LEARNING_RATE = 256, 64, 1.0, 2e-3


class Block(nn.Module):
    """Two convolutions and a way around them."""

    def __init__(self, channels):
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU()),
            *(nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)),
        )

    def forward(self, x):
        """(n, c, h, w) -> the same."""
        return torch.relu(x + self.body(x))


def main():
    images, labels = map(torch.as_tensor, load_digits(return_X_y=True))
    images = (images.reshape(-1, 1, 8, 8) / 16).float()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, test = order[:1500], order[1500:]

    model = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), Block(16), nn.AvgPool2d(2), Block(16)),
        *(nn.AvgPool2d(2), nn.Flatten(), nn.Linear(64, 10)),
    )
    for finding in dpt.validate(model)[:1]:
        print("found:", finding)
    model = dpt.fix(model)
    print("left after fix:", len(dpt.validate(model)))

    engine = dpt.PrivacyEngine()
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=LEARNING_RATE),
        data_loader=torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(images[train], labels[train]), batch_size=BATCH_SIZE
        ),
        max_grad_norm=MAX_GRAD_NORM,
        target_epsilon=TARGET_EPSILON,
        target_delta=TARGET_DELTA,
        epochs=EPOCHS,
        max_physical_batch_size=PHYSICAL_BATCH_SIZE,
    )
    for _ in range(EPOCHS):
        for inputs, targets in loader:  # physical batches; the last of a logical one updates
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()

    with torch.no_grad():
        accuracy = (model(images[test]).argmax(1) == labels[test]).float().mean()
    epsilon = engine.get_epsilon(delta=TARGET_DELTA)
    print(f"accuracy {accuracy:.1%} at epsilon {epsilon:.2f}, delta {TARGET_DELTA}")


if __name__ == "__main__":
    main()
