# SPDX-License-Identifier: Apache-2.0
"""Programs after one refusal: the mistake is what their authors wrote, the program what they were
told to write, in the lines marked `# dp`."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from tests.user import conftest
from tests.user.parts import ROWS, loader_of, mlp, sgd, table, train

PROGRAMS, program = conftest.programs()


def trained(model, optimizer, loader, forward):
    """The usual loop and its usual loss."""

    def loss_of(model, *batch):
        return F.cross_entropy(forward(model, *batch[:-1]), batch[-1])

    train(model, optimizer, loader, loss_of)


def ragged():
    return [(torch.randn(2 + k % 4, 6), k % 3) for k in range(ROWS)]


def side_by_side(batch):
    rows, targets = zip(*batch, strict=True)
    owners = torch.cat([torch.full((len(row),), k) for k, row in enumerate(rows)])
    return torch.cat(rows), owners, torch.tensor(targets)


def padded(batch):
    rows, targets = zip(*batch, strict=True)
    mask = pad_sequence([torch.ones(len(row)) for row in rows], batch_first=True)  # dp
    return pad_sequence(rows, batch_first=True), mask, torch.tensor(targets)  # dp


class Nodes(nn.Module):
    def __init__(self):
        super().__init__()
        self.phi, self.out = mlp(6, 8), nn.Linear(8, 3)

    def forward(self, x, mask):
        if x.dim() == 2:
            return self.out(torch.zeros(int(mask[-1]) + 1, 8).index_add(0, mask, self.phi(x)))
        return self.out((self.phi(x) * mask[..., None]).sum(1))  # dp


@program("collate_fn=padded", "collate_fn=side_by_side", "padded to one length and masked")
def graphs_are_padded(private):
    model = Nodes()
    loader = DataLoader(ragged(), batch_size=8, collate_fn=padded)
    trained(*private(model, sgd(model), loader), lambda model, *given: model(*given))  # dp


def bags(batch):
    words, targets = zip(*batch, strict=True)
    sizes = torch.tensor([0, *(len(row) for row in words[:-1])])
    return torch.cat(words), sizes.cumsum(0), torch.tensor(targets)


def padded_bags(batch):
    words, targets = zip(*batch, strict=True)
    return pad_sequence(words, batch_first=True), None, torch.tensor(targets)  # dp


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.EmbeddingBag(20, 8, padding_idx=0), nn.Linear(8, 3)

    def forward(self, words, offsets=None):
        return self.out(self.embed(words, offsets))


@program("collate_fn=padded_bags", "collate_fn=bags", "joined ones with offsets, are padded")
def bags_are_padded(private):
    model, rows = Bag(), [(torch.randint(1, 20, (2 + k % 4,)), k % 3) for k in range(ROWS)]
    loader = DataLoader(rows, batch_size=8, collate_fn=padded_bags)
    trained(*private(model, sgd(model), loader), lambda model, *given: model(*given))  # dp


class Pooled(nn.Linear):
    def forward(self, x):
        x = torch.nested.to_padded_tensor(x, 0.0) if x.is_nested else x
        return super().forward(x).sum(1)


def nested(batch):
    rows, targets = zip(*batch, strict=True)
    return torch.nested.nested_tensor(list(rows), layout=torch.jagged), torch.tensor(targets)


@program("model(to_padded_tensor(x, 0.0))", "model(x)", "nested tensor.*to_padded_tensor")
def nested_rows_are_padded(private):
    model = Pooled(6, 3, bias=False)
    loader = DataLoader(ragged(), batch_size=8, collate_fn=nested)
    made = private(model, sgd(model), loader)  # dp
    trained(*made, lambda model, x: model(to_padded_tensor(x, 0.0)))  # dp


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(6, 3) * 0.3)

    def forward(self, x):
        return x @ self.w


def sparse(batch):
    rows, targets = zip(*batch, strict=True)
    return torch.stack(rows).relu().to_sparse(), torch.stack(targets)


@program("model(x.to_dense())", "model(x)", "sparse tensor.*to_dense")
def sparse_rows_are_made_dense(private):
    model = Sparse()
    loader = DataLoader(loader_of(*table()).dataset, batch_size=8, collate_fn=sparse)
    made = private(model, sgd(model), loader)  # dp
    trained(*made, lambda model, x: model(x.to_dense()))  # dp


class Rows(nn.Linear):
    def forward(self, x):
        return super().forward(torch.stack(list(x)))


@program("model(torch.stack(x))", "model(x)", "torch.stack|examples on axis 0")
def lists_of_rows_are_stacked(private):
    model, rows = Rows(6, 3), list(zip(*table(), strict=True))
    loader = DataLoader(rows, batch_size=8, collate_fn=lambda batch: (*zip(*batch, strict=True),))

    def loss_of(model, x, y):
        return F.cross_entropy(model(torch.stack(x)), torch.stack(y))  # dp

    train(*private(model, sgd(model), loader), loss_of)  # dp


@program("model(x)", "functional_call(model, fast(model), (x,))", "functional_call with parameters")
def fast_weights_are_left_out(private):
    model = mlp(6, 8, 3)
    made = private(model, sgd(model), loader_of(*table()))  # dp
    trained(*made, lambda model, x: model(x))  # dp


def fast(model):
    return {name: p * 1.0 for name, p in model.named_parameters()}


functional_call, to_padded_tensor = torch.func.functional_call, torch.nested.to_padded_tensor


@program("pass  # the head stays", "model[2] = nn.Linear(8, 3)", r"\['2.bias', '2.weight'\] were")
def a_head_is_replaced_before(private):
    model = mlp(6, 8, 4)
    model[2] = nn.Linear(8, 3)  # dp
    model, optimizer, loader = private(model, sgd(model), loader_of(*table()))  # dp
    pass  # the head stays
    trained(model, optimizer, loader, lambda model, x: model(x))


class States(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.out = nn.GRU(2, 5, batch_first=True), nn.Linear(5, 3)
        self.start = torch.zeros(1, 8, 5)

    def forward(self, x):
        start = torch.zeros(1, len(x), 5)  # dp
        return self.out(self.rnn(x.unflatten(1, (3, 2)), start)[0][:, -1])


class StatesOfEight(States):
    def forward(self, x):
        return self.out(self.rnn(x.unflatten(1, (3, 2)), self.start)[0][:, -1])


@program("model = States()", "model = StatesOfEight()", r"one size only .*len\(x\)")
def states_are_made_for_the_batch(private):
    model = States()
    trained(*private(model, sgd(model), loader_of(*table())), lambda model, x: model(x))  # dp


class SAM(torch.optim.Optimizer):
    def __init__(self, params, rho):
        super().__init__(params, {"rho": rho})

    @torch.no_grad()
    def step(self, closure):
        for p in self.param_groups[0]["params"]:
            p.add_(p.grad, alpha=self.param_groups[0]["rho"])
        with torch.enable_grad():
            closure()


def closure_of(model, optimizer, x, y):
    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    return closure


@program("sgd(model)", "SAM(model.parameters(), 0.1)", "SAM evaluates its closure at other param")
def a_closure_at_the_same_parameters(private):
    model = mlp(6, 8, 3)
    optimizer = sgd(model)  # dp
    model, optimizer, loader = private(model, optimizer, loader_of(*table()))  # dp
    for _epoch in range(5):
        for x, y in loader:
            closure = closure_of(model, optimizer, x, y)
            closure()
            if isinstance(optimizer, SAM):
                optimizer.step(closure)
            else:
                optimizer.step()  # dp


@program("optimizer = sgd(model)", "optimizer = torch.optim.LBFGS(model.parameters())", "LBFGS")
def an_optimizer_of_one_gradient(private):
    model = mlp(6, 8, 3)
    optimizer = sgd(model)  # dp
    trained(*private(model, optimizer, loader_of(*table())), lambda model, x: model(x))  # dp


class Normed(nn.Linear):
    def forward(self, x):
        with torch.no_grad():
            self.weight.clamp_(-0.2, 0.2)
        return super().forward(x)


@program("nn.Linear(8, 3)", "Normed(8, 3)", "written in forward.*after optimizer.step")
def a_constraint_is_kept_after_the_step(private):
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))  # dp
    model, optimizer, loader = private(model, sgd(model), loader_of(*table()))  # dp
    for _epoch in range(5):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            with torch.no_grad():  # dp
                model[2].weight.clamp_(-0.2, 0.2)  # dp
