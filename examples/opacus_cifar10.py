# SPDX-License-Identifier: Apache-2.0
"""Opacus' CIFAR-10 example with a bound for each layer, on handwritten digits in colour.

dualdp divides one bound among the layers by itself; what must not change is the whole one.
"""

import math
import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

# Opacus: from opacus import PrivacyEngine
from dualdp.torch import PrivacyEngine  # dualdp

EPOCHS = 1 if "--toy" in sys.argv else 10
BATCH_SIZE, RATE, MOMENTUM, SIGMA, BOUND, DELTA = 70, 1.0, 0.9, 1.0, 1.0, 1e-4


def convnet(num_classes):
    return nn.Sequential(
        nn.Conv2d(3, 16, kernel_size=3, stride=1, padding=1),
        nn.ReLU(),
        nn.AvgPool2d(kernel_size=2, stride=2),
        nn.Conv2d(16, 32, kernel_size=3, stride=1, padding=1),
        nn.ReLU(),
        nn.AvgPool2d(kernel_size=2, stride=2),
        nn.Flatten(start_dim=1, end_dim=-1),
        nn.Linear(128, num_classes, bias=True),
    )


def train(model, train_loader, optimizer):
    model.train()
    criterion = nn.CrossEntropyLoss()
    losses = []
    for images, target in train_loader:
        output = model(images)
        loss = criterion(output, target)
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return sum(losses) / len(losses)


def test(model, test_loader):
    model.eval()
    with torch.no_grad():
        correct = sum(int((model(x).argmax(1) == y).sum()) for x, y in test_loader)
    return correct / len(test_loader.dataset)


def main(seed=0):
    torch.manual_seed(seed)
    digits, labels = map(torch.as_tensor, load_digits(return_X_y=True))
    colours = torch.rand(len(digits), 3, 1, 1) / 2 + 0.5
    images = (digits / 16).float().view(-1, 1, 8, 8) * colours
    train_data = TensorDataset(images[:1400], labels[:1400])
    test_data = TensorDataset(images[1400:], labels[1400:])
    train_loader = DataLoader(train_data, batch_size=BATCH_SIZE)
    test_loader = DataLoader(test_data, batch_size=256, shuffle=False)

    model = convnet(num_classes=10)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    # Opacus: n_layers = len([p for p in model.parameters() if p.requires_grad])
    # Opacus: max_grad_norm = [BOUND / math.sqrt(n_layers)] * n_layers
    max_grad_norm = BOUND  # dualdp
    privacy_engine = PrivacyEngine(secure_mode=False)
    model, optimizer, train_loader = privacy_engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=train_loader,
        noise_multiplier=SIGMA,
        max_grad_norm=max_grad_norm,
        clipping="per_layer",
    )
    for epoch in range(1, EPOCHS + 1):
        for param_group in optimizer.param_groups:
            param_group["lr"] = RATE / 2 * (1 + math.cos(math.pi * epoch / (EPOCHS + 1)))
        loss = train(model, train_loader, optimizer)
        epsilon = privacy_engine.accountant.get_epsilon(delta=DELTA)
        print(f"epoch {epoch}: loss {loss:.3f}, epsilon {epsilon:.2f}")
    print(f"accuracy {test(model, test_loader):.3f}, epsilon {epsilon:.3f}")


if __name__ == "__main__":
    main()
