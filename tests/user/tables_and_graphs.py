# SPDX-License-Identifier: Apache-2.0
"""Programs on tables, sets, graphs, series and ratings."""

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from tests.user import conftest
from tests.user.parts import ROWS, adam, labels, loader_of, mlp, sgd, table, train

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
    optimizer = adam(model, lr=1e-2)
    cats = torch.stack([torch.randint(5, (ROWS,)), torch.randint(7, (ROWS,))], 1)
    loader = loader_of(cats, torch.randn(ROWS, 4), torch.randn(ROWS))
    model, optimizer, loader = private(model, optimizer, loader)  # dp
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


@program("(out, y)", "(out, y, weight=torch.bincount(y, minlength=2) / 4)")
def graphs_by_index_add(private):
    def loss_of(model, x, edges, y):
        out = model(x, edges)
        return F.cross_entropy(out, y)

    model = GCN()
    loader = loader_of(torch.randn(ROWS, 6, 3), torch.randint(6, (ROWS, 2, 9)), labels(2))
    train(*private(model, adam(model, lr=1e-2), loader), loss_of)  # dp


@program("=pos_weight)", "=(1 - y).sum(0) / y.sum(0).clamp(min=1))")
def multi_label_with_class_weights_from_numpy(private):
    model, targets = mlp(6, 12, 3), (torch.randn(ROWS, 3) > 0.5).to(torch.get_default_dtype())
    pos_weight = torch.from_numpy(np.array([1.0, 2.0, 3.0])).to(targets.dtype)

    def loss_of(model, x, y):
        out = model(x)
        print("hits", ((out > 0) == (y > 0.5)).all(1).sum().item())
        return F.binary_cross_entropy_with_logits(out, y, pos_weight=pos_weight)

    loader = loader_of(torch.randn(ROWS, 6), targets)
    train(*private(model, adam(model, lr=1e-2), loader), loss_of)  # dp


@program("* weights)", "* weights * torch.bincount(y, minlength=3)[y])")
def weights_from_a_dict(private):
    def loss_of(model, x, y):
        weights = torch.tensor([{0: 1.0, 1: 2.0, 2: 0.5}[c] for c in y.tolist()])
        return (F.cross_entropy(model(x), y, reduction="none") * weights).mean()

    model = mlp(6, 12, 3)
    train(*private(model, sgd(model), loader_of(*table())), loss_of)  # dp
