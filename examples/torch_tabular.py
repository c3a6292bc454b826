# SPDX-License-Identifier: Apache-2.0
"""A table: logistic regression on medical records, with bounds that are known without the data.

Standardising by the data's own mean and variance would be a release of its own; here each column is
scaled by a range that is taken to be public.
"""

import sys

import torch
from sklearn.datasets import load_breast_cancer
from torch import nn

import dualdp.torch as dpt
from dualdp.schedules import AdaptiveNorm

EPOCHS = 1 if "--toy" in sys.argv else 30
TARGET_EPSILON, TARGET_DELTA = 2.0, 1e-4
BATCH_SIZE, LEARNING_RATE = 64, 2.0


def main():
    table, labels = load_breast_cancer(return_X_y=True)
    public_ranges = 10.0 ** (1 + (table.max(0) > 10).astype(int) + (table.max(0) > 100))
    rows = torch.as_tensor(table / public_ranges).float()
    targets = torch.as_tensor(labels).float()
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    train, test = order[:450], order[450:]

    model = nn.Linear(rows.shape[1], 1)
    engine = dpt.PrivacyEngine()
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=LEARNING_RATE),
        data_loader=torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(rows[train], targets[train]), batch_size=BATCH_SIZE
        ),
        max_grad_norm=AdaptiveNorm(initial=1.0, quantile=0.5),  # finds its bound, and pays for it
        target_epsilon=TARGET_EPSILON,
        target_delta=TARGET_DELTA,
        epochs=EPOCHS,
    )
    for _ in range(EPOCHS):
        for inputs, truth in loader:
            optimizer.zero_grad()
            loss = nn.functional.binary_cross_entropy_with_logits(model(inputs)[:, 0], truth)
            loss.backward()
            optimizer.step()

    with torch.no_grad():
        accuracy = ((model(rows[test])[:, 0] > 0) == (targets[test] > 0)).float().mean()
    epsilon, bound = engine.get_epsilon(delta=TARGET_DELTA), engine.ledger.max_grad_norm
    print(f"the bound went from 1.00 to {bound:.2f}")
    print(f"accuracy {accuracy:.1%} at epsilon {epsilon:.2f}, delta {TARGET_DELTA}")


if __name__ == "__main__":
    main()
