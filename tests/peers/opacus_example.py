# SPDX-License-Identifier: Apache-2.0
"""Handwritten digits with Opacus, the way its MNIST example trains; its public names only."""

import numpy as np
import torch
from opacus import PrivacyEngine
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, BATCH_SIZE, RATE, SIGMA, BOUND, DELTA = 20, 64, 0.5, 1.0, 1.0, 1e-4


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


def train(model, train_loader, optimizer):
    """One epoch."""
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
    return float(np.mean(losses))


def test(model, test_loader):
    """Accuracy."""
    model.eval()
    correct = 0
    with torch.no_grad():
        for data, target in test_loader:
            correct += int((model(data).argmax(1) == target).sum())
    return correct / len(test_loader.dataset)


def main(seed):
    """(accuracy, epsilon)."""
    torch.manual_seed(seed)
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images / 16, dtype=torch.float32).view(-1, 1, 8, 8)
    y = torch.tensor(labels)
    train_loader = DataLoader(TensorDataset(x[:1400], y[:1400]), batch_size=BATCH_SIZE)
    test_loader = DataLoader(TensorDataset(x[1400:], y[1400:]), batch_size=1024)
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
    for _ in range(EPOCHS):
        train(model, train_loader, optimizer)
    return test(model, test_loader), privacy_engine.get_epsilon(delta=DELTA)
