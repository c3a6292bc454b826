# SPDX-License-Identifier: Apache-2.0
"""Opacus' example and tutorial of an LSTM on the letters of names, with made-up languages.

`nn.LSTM` is trained as it is, as are `nn.GRU` and `nn.RNN`. Names are padded to one length, since
the last position of the longest of a batch would depend on the others.
"""

import sys

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

# Opacus: from opacus import PrivacyEngine
# Opacus: from opacus.layers import DPLSTM
from dualdp.torch import PrivacyEngine  # dualdp

EPOCHS = 1 if "--toy" in sys.argv else 8
BATCH_SIZE, RATE, SIGMA, BOUND, DELTA = 150, 2.0, 1.0, 1.5, 8e-5
VOCABULARY, LONGEST, LANGUAGES = 27, 10, 4


class CharNNClassifier(nn.Module):
    """Embedding, a recurrent layer, and a linear layer on its last position."""

    def __init__(self, rnn_type, embedding_size, hidden_size, output_size):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, embedding_size)
        self.rnn = rnn_type(embedding_size, hidden_size, num_layers=1, batch_first=True)
        self.out_layer = nn.Linear(hidden_size, output_size)

    def forward(self, x, hidden=None):
        """(n, t) -> (n, languages)."""
        x = self.embedding(x)
        x, _ = self.rnn(x, hidden)
        x = x[:, -1, :]
        return self.out_layer(x)


def padded_collate(batch, padding_idx=0):
    # Opacus: longest = max(len(x) for x, _ in batch)
    longest = LONGEST  # dualdp
    x = [F.pad(x, (longest - len(x), 0), value=padding_idx) for x, _ in batch]
    return torch.stack(x), torch.stack([y for _, y in batch])


def names(count, rng):
    """Names as (letters, language): each language has its own favourite letters."""
    likely = torch.rand(LANGUAGES, VOCABULARY - 1, generator=torch.Generator().manual_seed(0)) ** 4
    found = []
    for _ in range(count):
        language = int(torch.randint(LANGUAGES, (), generator=rng))
        length = int(torch.randint(4, LONGEST + 1, (), generator=rng))
        letters = torch.multinomial(likely[language], length, replacement=True, generator=rng)
        found.append((letters + 1, torch.tensor(language)))
    return found


def train(model, criterion, optimizer, train_loader):
    model.train()
    losses = []
    for x, y in train_loader:
        logits = model(x)
        loss = criterion(logits, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return sum(losses) / len(losses)


def test(model, test_loader):
    model.eval()
    with torch.no_grad():
        correct = sum(int(model(x).argmax(-1).eq(y).sum()) for x, y in test_loader)
    return correct / len(test_loader.dataset)


def main(seed=0):
    torch.manual_seed(seed)
    rng = torch.Generator().manual_seed(seed)
    train_loader = DataLoader(names(2000, rng), batch_size=BATCH_SIZE, collate_fn=padded_collate)
    test_loader = DataLoader(names(500, rng), batch_size=BATCH_SIZE, collate_fn=padded_collate)

    # Opacus: model = CharNNClassifier(DPLSTM, 16, 32, LANGUAGES)
    model = CharNNClassifier(nn.LSTM, 16, 32, LANGUAGES)  # dualdp
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    privacy_engine = PrivacyEngine(secure_mode=False)
    model, optimizer, train_loader = privacy_engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=train_loader,
        noise_multiplier=SIGMA,
        max_grad_norm=BOUND,
    )
    for epoch in range(EPOCHS):
        loss = train(model, criterion, optimizer, train_loader)
        epsilon = privacy_engine.get_epsilon(delta=DELTA)
        print(f"epoch {epoch}: loss {loss:.3f}, epsilon {epsilon:.2f}")
    print(f"accuracy {test(model, test_loader):.3f}, epsilon {epsilon:.3f}")


if __name__ == "__main__":
    main()
