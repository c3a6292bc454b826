# SPDX-License-Identifier: Apache-2.0
"""Text with `torch.nn.LSTM`, as it is: which of two toy languages wrote this line?"""

import sys

import numpy as np
import torch
from torch import nn

import dualdp.torch as dpt

EPOCHS = 1 if "--toy" in sys.argv else 8
TARGET_EPSILON, TARGET_DELTA = 4.0, 1e-4
BATCH_SIZE, MAX_GRAD_NORM, LEARNING_RATE = 128, 1.0, 1e-2
ALPHABET, LENGTH, LINES = "abcdefgh ", 20, 2000


def lines(count, seed):
    """Lines of two languages that differ in which letter follows which: (count, LENGTH), labels."""
    rng = np.random.default_rng(seed)
    labels, size = rng.integers(2, size=count), len(ALPHABET)
    text = np.zeros((count, LENGTH), dtype=np.int64)
    text[:, 0] = rng.integers(size, size=count)
    for t in range(1, LENGTH):
        follows = (text[:, t - 1] + np.where(labels == 0, 1, 2)) % size
        text[:, t] = np.where(rng.random(count) < 0.5, follows, rng.integers(size, size=count))
    return torch.from_numpy(text), torch.from_numpy(labels)


class Reader(nn.Module):
    """Embedding, LSTM, and a decision from its last state."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(len(ALPHABET), 16)
        self.lstm = nn.LSTM(16, 32, batch_first=True)
        self.decide = nn.Linear(32, 2)

    def forward(self, text):
        """(n, t) -> (n, 2) logits."""
        states, _ = self.lstm(self.embedding(text))
        return self.decide(states[:, -1])


def main():
    text, labels = lines(LINES, seed=0)
    print("one line:", "".join(ALPHABET[i] for i in text[0]))
    model = Reader()
    engine = dpt.PrivacyEngine()
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=LEARNING_RATE),
        data_loader=torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(text, labels), batch_size=BATCH_SIZE
        ),
        max_grad_norm=MAX_GRAD_NORM,
        target_epsilon=TARGET_EPSILON,
        target_delta=TARGET_DELTA,
        epochs=EPOCHS,
    )
    for _ in range(EPOCHS):
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()

    new_text, new_labels = lines(500, seed=1)
    with torch.no_grad():
        accuracy = (model(new_text).argmax(1) == new_labels).float().mean()
    epsilon = engine.get_epsilon(delta=TARGET_DELTA)
    print(f"accuracy {accuracy:.1%} at epsilon {epsilon:.2f}, delta {TARGET_DELTA}")


if __name__ == "__main__":
    main()
