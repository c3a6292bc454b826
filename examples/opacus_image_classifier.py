# SPDX-License-Identifier: Apache-2.0
"""Opacus' tutorial of an image classifier: a small ResNet repaired, then trained to a target."""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

# Opacus: from opacus import PrivacyEngine
# Opacus: from opacus.utils.batch_memory_manager import BatchMemoryManager
# Opacus: from opacus.validators import ModuleValidator
from dualdp.torch import BatchMemoryManager, ModuleValidator, PrivacyEngine  # dualdp

EPOCHS = 1 if "--toy" in sys.argv else 5
MAX_GRAD_NORM, EPSILON, DELTA, RATE = 1.2, 8.0, 1e-4, 5e-3
BATCH_SIZE, MAX_PHYSICAL_BATCH_SIZE = 140, 64


class Block(nn.Module):
    """Two convolutions with batch norm and a shortcut."""

    def __init__(self, channels):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU()

    def forward(self, x):
        """(n, c, h, w) -> (n, c, h, w)."""
        out = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(out)) + x)


def train(model, train_loader, optimizer, epoch, privacy_engine):
    model.train()
    criterion = nn.CrossEntropyLoss()
    losses = []
    with BatchMemoryManager(
        data_loader=train_loader,
        max_physical_batch_size=MAX_PHYSICAL_BATCH_SIZE,
        optimizer=optimizer,
    ) as memory_safe_data_loader:
        for images, target in memory_safe_data_loader:
            optimizer.zero_grad()
            output = model(images)
            loss = criterion(output, target)
            losses.append(loss.item())
            loss.backward()
            optimizer.step()
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
    test_loader = DataLoader(test_data, batch_size=BATCH_SIZE, shuffle=False)

    stem = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.AvgPool2d(2))
    model = nn.Sequential(stem, Block(16), Block(16), nn.Flatten(), nn.Linear(256, 10))
    errors = ModuleValidator.validate(model, strict=False)
    print(len(errors), "modules mix examples; the first:", errors[0])
    model = ModuleValidator.fix(model)
    assert not ModuleValidator.validate(model, strict=False)

    optimizer = torch.optim.RMSprop(model.parameters(), lr=RATE)
    privacy_engine = PrivacyEngine()
    model, optimizer, train_loader = privacy_engine.make_private_with_epsilon(
        module=model,
        optimizer=optimizer,
        data_loader=train_loader,
        epochs=EPOCHS,
        target_epsilon=EPSILON,
        target_delta=DELTA,
        max_grad_norm=MAX_GRAD_NORM,
    )
    print(f"sigma={optimizer.noise_multiplier} and C={MAX_GRAD_NORM}")
    for epoch in range(EPOCHS):
        train(model, train_loader, optimizer, epoch + 1, privacy_engine)
    accuracy, epsilon = test(model, test_loader), privacy_engine.get_epsilon(DELTA)
    print(f"accuracy {accuracy:.3f}, epsilon {epsilon:.3f}")


if __name__ == "__main__":
    main()
