# SPDX-License-Identifier: Apache-2.0
"""Opacus' MNIST example, on handwritten digits.

In this and the other opacus_*.py, `# Opacus:` is a line of the same program for Opacus, and lines
that end in `# dualdp` stand in its place.
"""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

# Opacus: from opacus import PrivacyEngine
from dualdp.torch import PrivacyEngine  # dualdp

EPOCHS = 1 if "--toy" in sys.argv else 20
BATCH_SIZE, RATE, SIGMA, BOUND, DELTA = 64, 0.5, 1.0, 1.0, 1e-4


class SampleConvNet(nn.Module):
    """Two convolutions, each with a pooling, and two linear layers."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, 1, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, 1)
        self.fc1 = nn.Linear(32, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x):
        """(n, 1, 8, 8) -> (n, 10)."""
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


def train(model, train_loader, optimizer, privacy_engine, epoch):
    model.train()
    criterion = nn.CrossEntropyLoss()
    losses = []
    for data, target in train_loader:
        optimizer.zero_grad()
        output = model(data)
        loss = criterion(output, target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    epsilon = privacy_engine.get_epsilon(DELTA)
    print(f"epoch {epoch}: loss {sum(losses) / len(losses):.3f}, epsilon {epsilon:.2f}")


def test(model, test_loader):
    model.eval()
    with torch.no_grad():
        correct = sum(int((model(x).argmax(1) == y).sum()) for x, y in test_loader)
    return correct / len(test_loader.dataset)


def main(seed=0):
    torch.manual_seed(seed)
    images, labels = map(torch.as_tensor, load_digits(return_X_y=True))
    images = (images / 16).float().view(-1, 1, 8, 8)
    train_data = TensorDataset(images[:1400], labels[:1400])
    test_data = TensorDataset(images[1400:], labels[1400:])
    train_loader = DataLoader(train_data, batch_size=BATCH_SIZE)
    test_loader = DataLoader(test_data, batch_size=1024)

    model = SampleConvNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0)
    privacy_engine = PrivacyEngine(secure_mode=False)
    model, optimizer, train_loader = privacy_engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=train_loader,
        noise_multiplier=SIGMA,
        max_grad_norm=BOUND,
    )
    for epoch in range(EPOCHS):
        train(model, train_loader, optimizer, privacy_engine, epoch)
    accuracy, epsilon = test(model, test_loader), privacy_engine.get_epsilon(DELTA)
    print(f"accuracy {accuracy:.3f}, epsilon {epsilon:.3f}")


if __name__ == "__main__":
    main()
