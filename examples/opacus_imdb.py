# SPDX-License-Identifier: Apache-2.0
"""Opacus' IMDb example, on made-up reviews: an embedding, a mean over the words, two layers.

Reviews are padded to one length: with the longest of the batch, a review's mean would depend on
the others. Shuffled batches are accounted without amplification, so epsilon is larger here.
"""

import sys

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

# Opacus: from opacus import PrivacyEngine
from dualdp.torch import PrivacyEngine  # dualdp

EPOCHS = 1 if "--toy" in sys.argv else 4
BATCH_SIZE, RATE, SIGMA, BOUND, DELTA = 64, 0.05, 0.7, 1.0, 1e-4
VOCABULARY, LONGEST = 200, 40


class SampleNet(nn.Module):
    """Embedding, mean, two linear layers."""

    def __init__(self, vocab_size):
        super().__init__()
        self.emb = nn.Embedding(vocab_size, 16)
        self.pool = nn.AdaptiveAvgPool1d(1)
        self.fc1 = nn.Linear(16, 16)
        self.fc2 = nn.Linear(16, 2)

    def forward(self, x):
        """(n, t) -> (n, 2)."""
        x = self.emb(x)
        x = x.transpose(1, 2)
        # Opacus: x = self.pool(x).squeeze()
        x = self.pool(x).squeeze(-1)  # dualdp
        x = self.fc1(x)
        x = F.relu(x)
        return self.fc2(x)


def padded_collate(batch, padding_idx=0):
    # Opacus: longest = max(len(x) for x, _ in batch)
    longest = LONGEST  # dualdp
    x = [F.pad(x, (0, longest - len(x)), value=padding_idx) for x, _ in batch]
    return torch.stack(x), torch.stack([y for _, y in batch])


def reviews(count, rng):
    """Reviews as (words, label): every fourth word belongs to the label's own tenth of all."""
    found = []
    for _ in range(count):
        label = int(torch.randint(2, (), generator=rng))
        words = torch.randint(1, VOCABULARY, (int(torch.randint(10, LONGEST, (), generator=rng)),))
        words[::4] = torch.randint(1, 20, words[::4].shape, generator=rng) + 20 * label
        found.append((words, torch.tensor(label)))
    return found


def train(model, train_loader, optimizer):
    criterion = nn.CrossEntropyLoss()
    losses = []
    model.train()
    for data, label in train_loader:
        optimizer.zero_grad()
        predictions = model(data).squeeze(1)
        loss = criterion(predictions, label)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses) / len(losses)


def evaluate(model, test_loader):
    model.eval()
    with torch.no_grad():
        correct = sum(int((model(x).argmax(1) == y).sum()) for x, y in test_loader)
    return correct / len(test_loader.dataset)


def main(seed=0):
    torch.manual_seed(seed)
    rng = torch.Generator().manual_seed(seed)
    options = {"batch_size": BATCH_SIZE, "collate_fn": padded_collate}
    train_loader = DataLoader(reviews(2000, rng), shuffle=True, **options)
    test_loader = DataLoader(reviews(500, rng), shuffle=False, **options)

    model = SampleNet(vocab_size=VOCABULARY)
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    privacy_engine = PrivacyEngine(secure_mode=False)
    model, optimizer, train_loader = privacy_engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=train_loader,
        noise_multiplier=SIGMA,
        max_grad_norm=BOUND,
        poisson_sampling=False,
    )
    for epoch in range(1, EPOCHS + 1):
        loss = train(model, train_loader, optimizer)
        epsilon = privacy_engine.get_epsilon(DELTA)
        print(f"epoch {epoch}: loss {loss:.3f}, epsilon {epsilon:.2f}")
    print(f"accuracy {evaluate(model, test_loader):.3f}, epsilon {epsilon:.3f}")


if __name__ == "__main__":
    main()
