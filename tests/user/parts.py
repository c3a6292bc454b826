# SPDX-License-Identifier: Apache-2.0
"""What the programs share: data of the right shapes, small models, the usual loop."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

ROWS, VOCABULARY, LENGTH = 48, 20, 7


def images(channels=1, size=8):
    return torch.randn(ROWS, channels, size, size)


def labels(classes=4):
    return torch.arange(ROWS) % classes


def table(classes=3):
    return torch.randn(ROWS, 6), labels(classes)


def words(low=1):
    return torch.randint(low, VOCABULARY, (ROWS, LENGTH))


def padded_words():
    lengths = 2 + torch.arange(ROWS) % (LENGTH - 1)
    return words() * (torch.arange(LENGTH) < lengths[:, None])


def loader_of(*tensors, **options):
    return DataLoader(TensorDataset(*tensors), batch_size=8, shuffle=True, **options)


def sgd(model, **options):
    return torch.optim.SGD(model.parameters(), lr=0.05, **options)


def adam(model, lr=1e-3):
    return torch.optim.Adam(model.parameters(), lr=lr)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def mlp(*sizes):
    pairs = list(zip(sizes, sizes[1:], strict=False))
    layers = [layer for i, o in pairs for layer in (nn.Linear(i, o), nn.Tanh())]
    return nn.Sequential(*layers[:-1])


def train(model, optimizer, loader, loss_of):
    """The usual loop, for programs that differ in model, data and loss alone."""
    for epoch in range(5):
        model.train()
        total = 0.0
        for batch in loader:
            optimizer.zero_grad()
            loss = loss_of(model, *batch)
            loss.backward()
            optimizer.step()
            total += loss.item()
        print(f"epoch {epoch} loss {total / len(loader):.4f}")
