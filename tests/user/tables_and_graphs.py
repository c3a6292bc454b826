# SPDX-License-Identifier: Apache-2.0
"""Programs on tables, sets, graphs, series and ratings."""

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from tests.user import conftest
from tests.user.vision import ROWS, labels, loader_of, mlp, sgd

PROGRAMS, program = conftest.programs()


class Tabular(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeds = nn.ModuleList(nn.Embedding(n, d) for n, d in ((5, 2), (7, 3)))
        self.emb_drop, self.norm, self.layers = nn.Dropout(0.1), nn.LayerNorm(4), mlp(9, 16, 1)

    def forward(self, categories, numbers):
        x = torch.cat([e(categories[:, i]) for i, e in enumerate(self.embeds)], 1)
        return self.layers(torch.cat([self.emb_drop(x), self.norm(numbers)], 1))


@program("model(cats, nums).squeeze(1)", "model(cats, nums)", "(n, 1)|example|size")
def tabular_with_embeddings(private):
    model = Tabular()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    cats = torch.stack([torch.randint(5, (ROWS,)), torch.randint(7, (ROWS,))], 1)
    model, optimizer, loader = private(
        model, optimizer, loader_of(cats, torch.randn(ROWS, 4), torch.randn(ROWS))
    )  # dp
    for _epoch in range(5):
        squares, count = 0.0, 0
        for cats, nums, y in loader:
            optimizer.zero_grad()
            predicted = model(cats, nums).squeeze(1)
            loss = F.mse_loss(predicted, y)
            loss.backward()
            optimizer.step()
            squares, count = squares + ((predicted - y) ** 2).sum().item(), count + len(y)
        print("rmse", (squares / count) ** 0.5)


class GCN(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.out = nn.Linear(3, 8), nn.Linear(8, 8), nn.Linear(8, 2)

    def passed(self, h, edges):
        n, nodes, width = h.shape
        flat = edges + torch.arange(n)[:, None, None] * nodes
        source, target = flat[:, 0].flatten(), flat[:, 1].flatten()
        h = h.flatten(0, 1)
        return (h + torch.zeros_like(h).index_add(0, target, h[source])).view(n, nodes, width)

    def forward(self, x, edges):
        h = torch.tanh(self.passed(self.first(x), edges))
        h = torch.tanh(self.passed(self.second(h), edges))
        return self.out(h.sum(1))


@program(
    "F.cross_entropy(out, y)",
    "F.cross_entropy(out, y, weight=torch.bincount(y, minlength=2) / 4)",
    "example|row",
)
def graphs_by_index_add(private):
    model = GCN()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    loader = loader_of(torch.randn(ROWS, 6, 3), torch.randint(6, (ROWS, 2, 9)), labels(2))
    model, optimizer, loader = private(model, optimizer, loader)  # dp
    for _epoch in range(5):
        for x, edges, y in loader:
            optimizer.zero_grad()
            out = model(x, edges)
            loss = F.cross_entropy(out, y)
            loss.backward()
            optimizer.step()


class Factors(nn.Module):
    def __init__(self):
        super().__init__()
        self.users, self.films = nn.Embedding(9, 4), nn.Embedding(11, 4)
        self.bias = nn.Embedding(11, 1)

    def forward(self, user, film):
        return (self.users(user) * self.films(film)).sum(1) + self.bias(film).squeeze(1)


@program("better - worse", "better - worse.flip(0)", "example|row")
def recommender_with_negative_samples(private):
    model = Factors()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    users, films = torch.randint(9, (ROWS,)), torch.randint(11, (ROWS,))
    model, optimizer, loader = private(model, optimizer, loader_of(users, films))  # dp
    for _epoch in range(5):
        for user, film in loader:
            negative = torch.randint(0, 11, (len(film),))
            better, worse = model(user, film), model(user, negative)
            loss = -F.logsigmoid(better - worse).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.LSTM(1, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, series):
        return self.head(self.rnn(series[..., None])[0][:, -1])


@program("series - level", "series - series.mean()", "example|row")
def quantile_forecasts(private):
    model = Forecaster()
    quantiles = torch.tensor([0.1, 0.5, 0.9])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    model, optimizer, loader = private(
        model, optimizer, loader_of(torch.randn(ROWS, 10), torch.randn(ROWS))
    )  # dp
    for _epoch in range(5):
        for series, y in loader:
            level = series.mean(1, keepdim=True)
            gap = y[:, None] - (model(series - level) + level)
            loss = torch.maximum(quantiles * gap, (quantiles - 1) * gap).sum(1).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


@program(
    "F.binary_cross_entropy_with_logits(out, y, pos_weight=pos_weight)",
    "F.binary_cross_entropy_with_logits(out, y, pos_weight=(1 - y).sum(0) / y.sum(0).clamp(min=1))",
    "example|row",
)
def multi_label_with_class_weights_from_numpy(private):
    model, targets = mlp(6, 12, 3), (torch.randn(ROWS, 3) > 0.5).to(torch.get_default_dtype())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    pos_weight = torch.from_numpy(np.array([1.0, 2.0, 3.0])).to(targets.dtype)
    model, optimizer, loader = private(
        model, optimizer, loader_of(torch.randn(ROWS, 6), targets)
    )  # dp
    for _epoch in range(5):
        hits = 0
        for x, y in loader:
            out = model(x)
            loss = F.binary_cross_entropy_with_logits(out, y, pos_weight=pos_weight)
            hits += ((out > 0) == (y > 0.5)).all(1).sum().item()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


@program(
    "weights = torch.tensor([{0: 1.0, 1: 2.0, 2: 0.5}[c] for c in y.tolist()])",
    "weights = torch.bincount(y, minlength=3)[y] / len(y)",
    "example|row",
)
def weights_from_a_dict(private):
    model = mlp(6, 12, 3)
    optimizer = sgd(model)
    model, optimizer, loader = private(
        model, optimizer, loader_of(torch.randn(ROWS, 6), labels(3))
    )  # dp
    for _epoch in range(5):
        for x, y in loader:
            weights = torch.tensor([{0: 1.0, 1: 2.0, 2: 0.5}[c] for c in y.tolist()])
            loss = (F.cross_entropy(model(x), y, reduction="none") * weights).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
